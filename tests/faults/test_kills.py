"""kill -9 of each process under load: nothing is lost beyond its retry, and readiness tells the truth."""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import grpc
import httpx
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from phasemesh.config.settings import RpcSettings
from phasemesh.errors import PhasemeshError
from phasemesh.rpc.client import RpcClient
from phasemesh.rpc.codec import decode_tensor
from phasemesh.v1 import common_pb2 as common
from phasemesh.v1 import encoder_pb2 as pb
from phasemesh.v1.encoder_pb2_grpc import EncoderServiceStub
from tests.mesh import Mesh, running_mesh

pytestmark = [pytest.mark.ray, pytest.mark.slow]

MODEL = "all-MiniLM-L6-v2"
TEXTS = [f"Text number {number} of the load, with some more words." for number in range(24)]


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    with running_mesh("--replicas", "2", "--set", "gateway.directory_refresh_s=0.3") as mesh:
        yield mesh


def readiness(mesh: Mesh) -> tuple[int, dict[str, object]]:
    status, body = mesh.admin("encoder", "/readyz")
    return status, json.loads(body)


async def serving(mesh: Mesh) -> dict[str, bool]:
    """What the encoder's gRPC health says of the server as a whole and of the service."""
    async with grpc.aio.insecure_channel(mesh.grpc) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        replies = {
            name: await check(health_pb2.HealthCheckRequest(service=name), timeout=10)
            for name in ("", "phasemesh.v1.EncoderService")
        }
    return {name: reply.status == health_pb2.HealthCheckResponse.SERVING for name, reply in replies.items()}


async def until_serving(mesh: Mesh, wanted: bool) -> None:
    async with asyncio.timeout(60):
        while set((await serving(mesh)).values()) != {wanted}:
            await asyncio.sleep(0.02)


def replicas(mesh: Mesh) -> list[dict[str, object]]:
    detail = readiness(mesh)[1]
    found = detail.get("replicas") or detail["detail"]["replicas"]  # type: ignore[index]  # JSON
    assert isinstance(found, list)
    return found


def alive(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


@dataclass
class Load:
    """Callers that keep asking over gRPC until told to stop; every answer is checked."""

    mesh: Mesh
    answered: int = 0
    wrong: list[float] = field(default_factory=list)
    refused: list[PhasemeshError] = field(default_factory=list)
    stopping: bool = False

    async def caller(self, client: RpcClient, want: np.ndarray, number: int) -> None:
        while not self.stopping:
            text = (number + self.answered) % len(TEXTS)
            try:
                got = (await embed(client, self.mesh, [TEXTS[text]]))[0]
            except PhasemeshError as error:
                self.refused.append(error)
                await asyncio.sleep(0.05)
                continue
            if float(got @ want[text]) < 0.999:
                self.wrong.append(float(got @ want[text]))
            self.answered += 1

    async def until(self, answered: int) -> None:
        async with asyncio.timeout(60):
            while self.answered < answered:
                await asyncio.sleep(0.02)


async def embed(client: RpcClient, mesh: Mesh, texts: list[str]) -> np.ndarray:
    request = pb.EmbedRequest(
        model=MODEL,
        inputs=[common.Input(text=text) for text in texts],
        encoding=common.VECTOR_ENCODING_FLOAT32,
    )
    reply = await client.call(mesh.grpc, EncoderServiceStub, "Embed", request, timeout_s=60)
    return decode_tensor(reply.dense, field="dense")


@contextlib.asynccontextmanager
async def under_load(mesh: Mesh, callers: int = 8):
    # Without the channel's retries, so that it is the pool's that is seen.
    client = RpcClient(rpc=RpcSettings(), key=None, retries=False)
    want = await embed(client, mesh, TEXTS)
    load = Load(mesh)
    async with asyncio.TaskGroup() as group:
        for number in range(callers):
            group.create_task(load.caller(client, want, number))
        try:
            await load.until(50)
            yield load
        finally:
            load.stopping = True
    await client.close()


async def test_kill_an_actor(mesh: Mesh) -> None:
    before = {str(replica["id"]): replica for replica in replicas(mesh)}
    victim = next(iter(before.values()))
    statuses: set[int] = set()
    ready: set[object] = set()
    health: set[bool] = set()
    async with under_load(mesh) as load:
        os.kill(int(str(victim["pid"])), signal.SIGKILL)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            status, _ = await asyncio.to_thread(readiness, mesh)
            now = {str(replica["id"]): replica for replica in await asyncio.to_thread(replicas, mesh)}
            statuses.add(status)
            health.update((await serving(mesh)).values())
            ready.add(sum(replica["state"] == "ready" for replica in now.values()))
            if now[str(victim["id"])]["restarts"] == 1 and now[str(victim["id"])]["state"] == "ready":
                break
            await asyncio.sleep(0.02)
        else:
            pytest.fail("the actor did not come back")
        await load.until(load.answered + 50)
    assert load.refused == []
    assert load.wrong == []
    assert statuses == {200}  # the other replica answered all the time
    assert health == {True}
    assert ready == {1, 2}
    after = {str(replica["id"]): replica for replica in replicas(mesh)}
    assert after[str(victim["id"])]["pid"] != victim["pid"]
    others = [key for key in before if key != victim["id"]]
    assert [after[key]["pid"] for key in others] == [before[key]["pid"] for key in others]


async def test_kill_both_actors_at_once(mesh: Mesh) -> None:
    """No worker is left: readiness says so, requests wait for the restart, none is lost."""
    pids = [int(str(replica["pid"])) for replica in replicas(mesh)]
    statuses: list[int] = []
    async with under_load(mesh) as load:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(60):
            while not statuses or statuses[-1] != 503:
                statuses.append((await asyncio.to_thread(readiness, mesh))[0])
            await until_serving(mesh, False)
            live = await asyncio.to_thread(mesh.admin, "encoder", "/livez")
            assert live[0] == 200  # restarting the service would help nobody
            while statuses[-1] != 200:
                statuses.append((await asyncio.to_thread(readiness, mesh))[0])
                await asyncio.sleep(0.02)
            await until_serving(mesh, True)
        await load.until(load.answered + 50)
    assert load.wrong == []
    # What was running when both died may have met two deaths; it is then tried alone, and found innocent.
    assert load.refused == []


def test_kill_the_gateway(mesh: Mesh) -> None:
    before = mesh.report("gateway")
    os.kill(before.pid, signal.SIGKILL)
    mesh.wait_until(lambda: mesh.report("gateway").pid != before.pid, 30, "the gateway to be restarted")
    after = mesh.report("gateway")
    assert (after.port, after.admin_port) == (before.port, before.admin_port)
    reply = httpx.post(f"{mesh.rest}/v1/embeddings", json={"model": MODEL, "input": "back"}, timeout=30)
    assert reply.status_code == 200


def test_kill_the_encoder(mesh: Mesh) -> None:
    before = mesh.report("encoder")
    workers = [int(str(replica["pid"])) for replica in replicas(mesh)]
    os.kill(before.pid, signal.SIGKILL)
    body = {"model": MODEL, "input": "while it is away"}
    away = httpx.post(f"{mesh.rest}/v1/embeddings", json=body, timeout=30)
    assert away.status_code == 503, away.text
    assert int(away.headers["retry-after"]) >= 1
    mesh.wait_until(
        lambda: mesh.admin("gateway", "/readyz")[0] == 503, 30, "the gateway to say that it can't serve"
    )
    mesh.wait_until(lambda: mesh.report("encoder").pid != before.pid, 60, "the encoder to be restarted")
    assert mesh.report("encoder").port == before.port
    mesh.wait_until(lambda: mesh.admin("gateway", "/readyz")[0] == 200, 60, "the gateway to find it again")
    assert httpx.post(f"{mesh.rest}/v1/embeddings", json=body, timeout=30).status_code == 200
    mesh.wait_until(lambda: not any(map(alive, workers)), 30, "the old workers to be gone")


async def test_a_disconnect_empties_the_queue(mesh: Mesh) -> None:
    """Long batches run; a client whose input waits disconnects; the input is gone within 100 ms."""
    client = RpcClient(rpc=RpcSettings(), key=None)
    bulk = pb.EmbedRequest(
        model=MODEL,
        inputs=[common.Input(text=f"{number} " + "word " * 240) for number in range(200)],
        encoding=common.VECTOR_ENCODING_FLOAT32,
    )

    def waiting() -> int:
        text = mesh.admin("encoder", "/metrics")[1]
        line = next(line for line in text.splitlines() if line.startswith("phasemesh_cancelled_items_total"))
        return int(float(line.split()[1]))

    took = []
    for _ in range(3):
        running = asyncio.create_task(
            client.call(mesh.grpc, EncoderServiceStub, "Embed", bulk, timeout_s=120)
        )
        await asyncio.sleep(0.5)  # the bulk request is in the queue and its first batches run
        before = await asyncio.to_thread(waiting)
        port = mesh.report("gateway").port
        body = json.dumps({"model": MODEL, "input": ["short"] * 7}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        head = f"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        await asyncio.sleep(0.3)  # it waits behind the bulk request by now
        assert not running.done()
        assert not reader._buffer, bytes(reader._buffer)  # type: ignore[attr-defined]  # no answer yet
        writer.transport.abort()
        began = time.perf_counter()
        while await asyncio.to_thread(waiting) < before + 7:
            assert time.perf_counter() - began < 10, "the queued inputs were never dropped"
        took.append(time.perf_counter() - began)
        running.cancel()
        await asyncio.wait([running])
        # The bulk request's own waiting inputs go the same way, so the next round starts from an empty queue.
        await asyncio.to_thread(
            mesh.wait_until,
            lambda: (
                'phasemesh_queue_items{model="all-MiniLM-L6-v2"} 0.0' in mesh.admin("encoder", "/metrics")[1]
            ),
            10,
            "an empty queue",
        )
    await client.close()
    assert max(took) < 0.1, took
