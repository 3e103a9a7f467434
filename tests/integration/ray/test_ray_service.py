"""The whole encoder service on real actors, with inputs that break the worker."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from phasemesh.config.settings import AccessSettings, EncoderSettings, RpcSettings, ServerSettings
from phasemesh.encoder.service import EncoderRuntime
from phasemesh.errors import Internal, Unavailable
from phasemesh.pool.protocol import ReplicaState
from phasemesh.rpc.client import RpcClient
from phasemesh.rpc.codec import decode_tensor
from phasemesh.rpc.server import RpcServer
from phasemesh.telemetry.metrics import Metrics
from phasemesh.v1 import common_pb2 as common
from phasemesh.v1 import encoder_pb2 as pb
from phasemesh.v1.encoder_pb2_grpc import EncoderServiceStub, add_EncoderServiceServicer_to_server
from tests.fakes import engine as fake

pytestmark = pytest.mark.ray

Call = Callable[..., Any]


@asynccontextmanager
async def serving(pool: Any) -> AsyncIterator[tuple[EncoderRuntime, Call]]:
    metrics, rpc = Metrics(), RpcSettings()
    runtime = EncoderRuntime(EncoderSettings(), pool.models, {}, pool, metrics)
    server = RpcServer(
        role="encoder",
        server=ServerSettings(port=0, admin_port=0),
        rpc=rpc,
        access=AccessSettings(),
        metrics=metrics,
    )
    server.add("phasemesh.v1.EncoderService", add_EncoderServiceServicer_to_server, runtime.servicer)
    await runtime.start()
    port = await server.start()
    client = RpcClient(rpc=rpc, key=None)

    async def embed(*rows: list[int]) -> pb.EmbedResponse:
        request = pb.EmbedRequest(
            inputs=[common.Input(token_ids={"ids": row}) for row in rows],
            encoding=common.VECTOR_ENCODING_FLOAT32,
            normalize=False,
        )
        reply = await client.call(f"127.0.0.1:{port}", EncoderServiceStub, "Embed", request, timeout_s=60)
        assert isinstance(reply, pb.EmbedResponse)
        return reply

    try:
        yield runtime, embed
    finally:
        await client.close()
        await server.drain()
        await runtime.drain()
        await runtime.close()


ENGINE = {"engine_factory": "tests.integration.ray.spelling_engine:SpellingEngine"}


@pytest.mark.parametrize("replicas", [1, 2])
async def test_an_input_that_kills_workers_fails_alone(start_pool: Call, replicas: int) -> None:
    """Default crash limit: the replicas must outlive it."""
    pool = await start_pool(replicas=replicas, **ENGINE)
    async with serving(pool) as (runtime, embed):
        rows = [[1], [1, 2], [3, fake.CRASH], [4, 4], *([n] for n in range(5, 20))]
        reply = await embed(*rows)
        assert [i for i, item in enumerate(reply.items) if item.HasField("error")] == [2]
        error = reply.items[2].error
        assert (error.code, error.reason, error.field) == (13, "WORKER_CRASHED", "inputs[2]")
        vectors = decode_tensor(reply.dense, field="dense")
        good = [i for i in range(len(rows)) if i != 2]
        np.testing.assert_array_equal(vectors[good], fake.expected_dense([rows[i] for i in good]))
        # Alone it is refused for good, so that no channel and no client sends it again by itself.
        with pytest.raises(Internal) as caught:
            await embed([fake.CRASH])
        assert caught.value.reason == "WORKER_CRASHED"
        assert not (await embed([7])).items[0].HasField("error")
        assert all(replica.state is not ReplicaState.FAILED for replica in pool.stats().replicas)
        assert not runtime.health().detail["lost"]


async def test_the_log_has_the_cause_of_a_bug_in_the_worker(
    start_pool: Call, caplog: pytest.LogCaptureFixture
) -> None:
    pool = await start_pool(**ENGINE)
    async with serving(pool) as (_, embed):
        reply = await embed([1], [fake.BUG])
        message = reply.items[1].error.message
        assert "IndexError" not in message
    (record,) = [record for record in caplog.records if getattr(record, "worker_traceback", "")]
    assert record.error_id in message  # type: ignore[attr-defined]  # a field of ours
    trace = record.worker_traceback  # type: ignore[attr-defined]  # a field of ours
    assert "IndexError: a bug" in trace
    assert "in _misbehave" in trace


async def test_a_service_whose_replicas_have_all_failed_says_so(start_pool: Call) -> None:
    pool = await start_pool(crash_limit=1, **ENGINE)
    async with serving(pool) as (runtime, embed):
        with pytest.raises(Unavailable):
            await embed([fake.CRASH])
        assert "every replica" in await runtime.wait_lost()
        assert not runtime.health().ok
