"""The admin port: answers whatever the loop does, whoever dawdles."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from phasemesh.rpc.admin import AdminServer, Health
from phasemesh.rpc.bind import BindError
from phasemesh.rpc.heartbeat import LoopHeartbeat
from phasemesh.telemetry.metrics import Metrics


class Admin:
    """A running admin server whose health a test sets."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        self.metrics.start_at_zero(["encode.queue"], ["m"])
        self.health = {"live": Health(True, {"loop_age_s": 0.1}), "ready": Health(False, {"why": "loading"})}
        self.server = AdminServer(
            host="127.0.0.1",
            port=0,
            metrics=self.metrics,
            live=lambda: self.health["live"],
            ready=lambda: self.health["ready"],
            client_timeout_s=0.3,
        )
        self.port = self.server.start()

    def get(self, path: str, method: str = "GET") -> tuple[int, str, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request(method, path)
            response = connection.getresponse()
            return response.status, response.headers.get("content-type", ""), response.read()
        finally:
            connection.close()


@pytest.fixture
def admin() -> Iterator[Admin]:
    made = Admin()
    yield made
    made.server.close()


def test_probes(admin: Admin) -> None:
    status, kind, body = admin.get("/livez")
    assert (status, kind, json.loads(body)) == (
        200,
        "application/json",
        {"ok": True, "detail": {"loop_age_s": 0.1}},
    )
    status, _, body = admin.get("/readyz?verbose=1")
    assert (status, json.loads(body)) == (503, {"ok": False, "detail": {"why": "loading"}})
    admin.health["ready"] = Health(True, {})
    assert admin.get("/readyz")[0] == 200
    assert admin.get("/readyz", "HEAD")[::2] == (200, b"")


def test_other_paths(admin: Admin) -> None:
    status, _, body = admin.get("/version")
    assert status == 200
    assert set(json.loads(body)) == {"version"}
    status, _, body = admin.get("/etc/passwd")
    assert status == 404
    assert "/metrics" in json.loads(body)["error"]
    assert admin.get("/metrics", "POST")[0] == 501


def test_metrics_are_openmetrics_with_exemplars(admin: Admin) -> None:

    admin.metrics.phase_duration.labels("encode.queue", "m").observe(0.1, exemplar={"trace_id": "abc"})
    status, kind, body = admin.get("/metrics")
    assert status == 200
    assert kind.startswith("application/openmetrics-text; version=1.0.0")
    parse: Any = text_string_to_metric_families
    families = {family.name: family for family in parse(body.decode())}
    exemplars = [s.exemplar for s in families["phasemesh_phase_duration_seconds"].samples if s.exemplar]
    assert [exemplar.labels for exemplar in exemplars] == [{"trace_id": "abc"}]


def test_a_check_that_fails_is_a_500_without_words(admin: Admin, caplog: pytest.LogCaptureFixture) -> None:
    admin.health.clear()
    status, _, body = admin.get("/livez")
    assert status == 500
    assert b"KeyError" not in body
    assert "KeyError" in caplog.text


async def test_answers_while_the_loop_is_blocked(admin: Admin) -> None:
    beat = LoopHeartbeat(stuck_after_s=0.2, interval_s=0.01)
    beat.start()
    admin.server.close()
    server = AdminServer(host="127.0.0.1", port=0, metrics=Metrics(), live=beat.health, ready=beat.health)
    admin.port = server.start()
    try:
        assert (await asyncio.to_thread(admin.get, "/livez"))[0] == 200
        # Blocks this loop for as long as a probe in another thread takes to see it.
        statuses: list[int] = []

        def probe() -> None:
            end_s = time.monotonic() + 5
            while not statuses or (statuses[-1] != 503 and time.monotonic() < end_s):
                statuses.append(admin.get("/livez")[0])

        thread = threading.Thread(target=probe)
        thread.start()
        thread.join()
        assert statuses[0] == 200
        assert statuses[-1] == 503
        await asyncio.sleep(0.02)
        assert (await asyncio.to_thread(admin.get, "/livez"))[0] == 200
    finally:
        beat.stop()
        server.close()


def test_heartbeat_by_its_clock() -> None:
    now = 100.0
    beat = LoopHeartbeat(stuck_after_s=30, now_s=lambda: now)
    assert beat.health() == Health(True, {"loop_age_s": 0.0})
    now = 129.9
    assert beat.health().ok
    now = 130.0
    assert not beat.health().ok


def test_slow_clients_hold_nobody_up_and_are_let_go(admin: Admin) -> None:
    slow = [socket.create_connection(("127.0.0.1", admin.port)) for _ in range(50)]
    try:
        for client in slow:
            client.sendall(b"GET /livez HTT")
        start_s = time.monotonic()
        assert admin.get("/livez")[0] == 200
        assert time.monotonic() - start_s < 2
        for client in slow:
            client.settimeout(5)
            assert client.recv(100) == b""  # the server hung up
    finally:
        for client in slow:
            client.close()


def test_a_port_that_is_taken_is_named(admin: Admin) -> None:
    second = AdminServer(
        host="127.0.0.1",
        port=admin.port,
        metrics=admin.metrics,
        live=lambda: Health(True, {}),
        ready=lambda: Health(True, {}),
    )
    with pytest.raises(BindError, match=re.escape(f"127.0.0.1:{admin.port}")):
        second.start()
    second.close()


_PROGRAM = """
import asyncio, os, signal
from phasemesh.rpc.lifecycle import wait_for_signal

async def main():
    task = asyncio.ensure_future(wait_for_signal())
    await asyncio.sleep(0)
    print("ready", flush=True)
    number = await task
    # A second and a third signal in the drain change nothing.
    os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.sleep(0.05)
    print("drained after", number.name, flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_the_first_signal_begins_the_drain_and_no_other_ends_it(name: str) -> None:

    process = subprocess.Popen([sys.executable, "-c", _PROGRAM], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(getattr(signal, name))
        output, _ = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
    assert output == f"drained after {name}\n"
    assert process.returncode == 0
