"""The gateway as a process of its own: ports, probes, drain."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx
import pytest

from phasemesh.config.settings import load_settings
from phasemesh.gateway.serve import listen
from phasemesh.rpc.bind import BindError
from tests.fakes.encoder_service import FakeEncoder
from tests.fakes.gateway_stack import running_encoder

PATIENCE_S = 20.0
EMBED = {"model": "bag", "input": "some text"}
# The settings come as an argument; the ports go out as a line of JSON.
PROGRAM = """
import json, sys
from phasemesh.config.settings import load_settings
from phasemesh.gateway.serve import run_gateway
run_gateway(
    load_settings(flags=json.loads(sys.argv[1])),
    on_started=lambda ports: print(json.dumps([ports.http, ports.admin]), flush=True),
)
"""


@dataclass(frozen=True)
class Gateway:
    process: asyncio.subprocess.Process
    http: httpx.AsyncClient
    admin: httpx.AsyncClient


@asynccontextmanager
async def gateway_process(target: str) -> AsyncIterator[Gateway]:
    flags = {
        "gateway.port": 0,
        "gateway.admin_port": 0,
        "gateway.encoders": [target],
        "gateway.directory_refresh_s": 0.05,
        "rpc.drain_s": 10,
        "rpc.drain_delay_s": 0.3,
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, json.dumps(flags), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), PATIENCE_S)
        http_port, admin_port = json.loads(line)
        async with (
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{http_port}", timeout=PATIENCE_S) as http,
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{admin_port}") as admin,
        ):
            yield Gateway(process, http, admin)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def status(client: httpx.AsyncClient, path: str) -> int:
    return (await client.get(path)).status_code


async def test_drain_finishes_what_is_in_flight_and_exits_0() -> None:
    encoder = FakeEncoder()
    async with (
        running_encoder(encoder, load_settings(flags={"rpc.drain_s": 1})) as target,
        gateway_process(target) as gateway,
    ):
        assert await status(gateway.admin, "/readyz") == 200
        assert await status(gateway.admin, "/livez") == 200
        encoder.hold = asyncio.Event()
        held = asyncio.create_task(gateway.http.post("/v1/embeddings", json=EMBED))
        await asyncio.wait_for(encoder.entered.wait(), PATIENCE_S)

        gateway.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S):
            while await status(gateway.admin, "/readyz") != 503:
                await asyncio.sleep(0.01)
        assert await status(gateway.admin, "/livez") == 200
        # Still served: balancers need a moment to notice.
        assert await status(gateway.http, "/v1/models") == 200
        async with asyncio.timeout(PATIENCE_S):
            while await _accepts(gateway.http):
                await asyncio.sleep(0.02)
        assert not held.done()
        encoder.hold.set()
        assert (await held).status_code == 200
        assert await asyncio.wait_for(gateway.process.wait(), PATIENCE_S) == 0


async def _accepts(client: httpx.AsyncClient) -> bool:
    try:
        _, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    except ConnectionRefusedError:
        return False
    writer.close()
    return True


async def test_starts_before_its_encoder_and_follows_it() -> None:
    settings = load_settings(flags={"rpc.drain_s": 0})
    with listen("127.0.0.1", 0) as free:
        target = f"127.0.0.1:{free.getsockname()[1]}"
    async with gateway_process(target) as gateway:
        assert await status(gateway.admin, "/readyz") == 503
        assert await status(gateway.http, "/health") == 503
        early = await gateway.http.post("/v1/embeddings", json=EMBED)
        assert (early.status_code, early.headers["retry-after"]) == (503, "1")
        async with running_encoder(FakeEncoder(), settings, port=int(target.split(":")[1])):
            async with asyncio.timeout(PATIENCE_S):
                while await status(gateway.admin, "/readyz") != 200:
                    await asyncio.sleep(0.02)
            assert (await gateway.http.post("/v1/embeddings", json=EMBED)).status_code == 200
            exposition = (await gateway.admin.get("/metrics")).text
            assert 'phase="gateway.rpc"' in exposition
        gateway.process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(gateway.process.wait(), PATIENCE_S) == 0


def test_a_taken_port_is_named() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BindError, match=f"127.0.0.1:{port}"):
            listen("127.0.0.1", port)
