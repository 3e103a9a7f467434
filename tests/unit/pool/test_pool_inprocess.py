import asyncio
import os
import pickle
import threading
from collections.abc import AsyncIterator

import numpy as np
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from phasemesh.pool.inprocess import InProcessPool
from phasemesh.pool.protocol import ComputeFailed, ModelSpec, ReplicaLost, ReplicaState
from phasemesh.pool.settings import PoolConfig, PoolStartError
from phasemesh.pool.worker import Worker
from phasemesh.telemetry import names, tracing
from tests.fakes import engine as fake

CONFIG = PoolConfig(engine_factory="tests.fakes.engine:HashEngine", threads=2)
SPECS = (ModelSpec("hash", "hash"), ModelSpec("other", "hash"))


class GatedEngine(fake.HashEngine):
    """Forwards only while `gate` is set; `entered` says that a batch has begun."""

    gate = threading.Event()
    entered = threading.Event()

    def forward(self, batch):
        self.entered.set()
        assert self.gate.wait(10)
        return super().forward(batch)


DeviceLost = fake.DeviceLost


@pytest.fixture
async def pool() -> AsyncIterator[InProcessPool]:
    pool = await InProcessPool.start(CONFIG, SPECS)
    yield pool
    await pool.close()


@pytest.fixture
async def gated() -> AsyncIterator[InProcessPool]:
    GatedEngine.gate.clear()
    GatedEngine.entered.clear()
    pool = await InProcessPool.start(PoolConfig(engine_factory=f"{__name__}:GatedEngine"), SPECS)
    yield pool
    GatedEngine.gate.set()
    await pool.close()


async def test_answers_what_was_asked(pool: InProcessPool):
    rows = [[1, 2, 3], [4], [5, 5]]
    result = await pool.submit(fake.batch_of(rows))
    np.testing.assert_array_equal(result.dense, fake.expected_dense(rows))
    assert (result.pid, result.replica_id) == (os.getpid(), "in-process")
    (stats,) = pool.stats().replicas
    assert stats.state is ReplicaState.READY
    assert (stats.in_flight, stats.threads, stats.device) == (0, 2, "cpu")
    assert stats.last_ok_unix_ns >= result.timings.started_unix_ns
    assert [m.name for m in pool.models] == ["hash", "other"]


@pytest.mark.parametrize(
    ("token", "message", "out_of_memory"),
    [
        (fake.FAIL, "poison", False),
        (fake.OUT_OF_MEMORY, "out of memory", True),
        (fake.BUG, "IndexError in the engine", False),
    ],
)
async def test_a_failed_batch_leaves_the_replica_well(
    pool: InProcessPool, token: int, message: str, out_of_memory: bool
):
    with pytest.raises(ComputeFailed, match=message) as caught:
        await pool.submit(fake.batch_of([[token]]))
    assert caught.value.out_of_memory is out_of_memory
    assert (await pool.submit(fake.batch_of([[1]]))).dense is not None
    assert pool.stats().ready == 1


async def test_a_lost_device_is_the_end_here(pool: InProcessPool):
    with pytest.raises(ReplicaLost, match="illegal memory access"):
        await pool.submit(fake.batch_of([[fake.DEVICE_LOST]]))
    assert pool.stats().replicas[0].state is ReplicaState.FAILED
    with pytest.raises(ReplicaLost):
        await pool.submit(fake.batch_of([[1]]))


async def test_nonfinite_only_batch_does_not_count_as_a_good_forward(pool: InProcessPool):
    result = await pool.submit(fake.batch_of([[fake.NAN]]))
    assert result.nonfinite == (0,)
    assert pool.stats().replicas[0].last_ok_unix_ns == 0
    assert (await pool.submit(fake.batch_of([[1], [fake.NAN]]))).nonfinite == (1,)
    assert pool.stats().replicas[0].last_ok_unix_ns > 0


async def test_two_are_taken_and_a_third_waits(gated: InProcessPool):
    tasks = [asyncio.create_task(gated.submit(fake.batch_of([[i]]))) for i in range(3)]
    for _ in range(5):
        await asyncio.sleep(0)
    assert gated.stats().replicas[0].in_flight == 2
    GatedEngine.gate.set()
    results = await asyncio.gather(*tasks)
    for i, result in enumerate(results):
        np.testing.assert_array_equal(result.dense, fake.expected_dense([[i]]))
    assert gated.stats().replicas[0].in_flight == 0


async def test_cancelling_keeps_the_slot_until_the_forward_is_over(gated: InProcessPool):
    changed = asyncio.Event()
    remove = gated.add_listener(changed.set)
    task = asyncio.create_task(gated.submit(fake.batch_of([[1]])))
    await changed.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert gated.stats().replicas[0].in_flight == 1
    GatedEngine.gate.set()
    while gated.stats().replicas[0].in_flight:
        changed.clear()
        await changed.wait()
    assert (await gated.submit(fake.batch_of([[2]]))).dense is not None
    remove()
    changed.clear()
    await gated.submit(fake.batch_of([[2]]))
    assert not changed.is_set()


async def test_drain_refuses_new_and_finishes_old(gated: InProcessPool):
    tasks = [asyncio.create_task(gated.submit(fake.batch_of([[i]]))) for i in range(3)]
    await asyncio.sleep(0)
    assert not await gated.drain(0)
    assert gated.stats().replicas[0].state is ReplicaState.DRAINING
    with pytest.raises(ReplicaLost, match="draining"):
        await gated.submit(fake.batch_of([[9]]))
    GatedEngine.gate.set()
    assert await gated.drain(10)
    assert all(task.done() and task.result() for task in tasks)


async def test_close_drops_what_is_queued(gated: InProcessPool):
    tasks = [asyncio.create_task(gated.submit(fake.batch_of([[i]]))) for i in range(3)]
    assert await asyncio.to_thread(GatedEngine.entered.wait, 10)
    closing = asyncio.create_task(gated.close())
    await asyncio.sleep(0)
    GatedEngine.gate.set()
    await closing
    await gated.close()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert outcomes[0].dense is not None
    assert all(isinstance(outcome, ReplicaLost) for outcome in outcomes[1:])
    assert not [t for t in threading.enumerate() if t.name.startswith("phasemesh-engine")]


@pytest.mark.parametrize(
    ("config", "specs", "message"),
    [
        (PoolConfig(replicas=2), SPECS, "without Ray there is exactly one"),
        (CONFIG, (ModelSpec("m", "nonsense"),), "model 'm': source is 'nonsense'"),
        (PoolConfig(engine_factory="tests.fakes.engine"), SPECS, "write it as 'package.module:Class'"),
        (PoolConfig(engine_factory="tests.fakes.engine:Nope"), SPECS, "no attribute 'Nope'"),
    ],
)
async def test_start_says_what_is_wrong(config: PoolConfig, specs: tuple[ModelSpec, ...], message: str):
    with pytest.raises(PoolStartError, match=message):
        await InProcessPool.start(config, specs)


async def test_spans_of_a_sampled_batch_only(pool: InProcessPool):
    exporter = InMemorySpanExporter()
    tracing.configure_tracing(tracing.TracingSettings(), role="test", span_exporter=exporter)
    try:
        parent = tracing.tracer().start_span("encode.batch")
        sampled = tracing.inject(parent)
        unsampled = {"traceparent": sampled["traceparent"][:-2] + "00"}
        for carrier in ({}, unsampled, {"traceparent": "nonsense"}):
            await pool.submit(fake.batch_of([[1]], carrier=carrier))
        assert exporter.get_finished_spans() == ()
        result = await pool.submit(fake.batch_of([[1, 2], [3]], batch_id="b7", carrier=sampled))
    finally:
        tracing.shutdown_tracing()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {"batch.run", "batch.transfer", "batch.compute", "batch.pool"}
    run, timings = spans["batch.run"], result.timings
    assert run.parent.span_id == parent.get_span_context().span_id
    assert run.attributes[names.BATCH_ID] == "b7"
    assert (run.attributes[names.BATCH_ITEMS], run.attributes[names.BATCH_TOKENS]) == (2, 3)
    at = timings.started_unix_ns
    for name, duration in (
        ("batch.transfer", timings.transfer_ns),
        ("batch.compute", timings.compute_ns),
        ("batch.pool", timings.pool_ns),
    ):
        span = spans[name]
        assert span.parent.span_id == run.context.span_id
        assert (span.start_time, span.end_time) == (at, at + duration)
        at += duration
    assert (run.start_time, run.end_time) == (timings.started_unix_ns, at)
    assert {span.context.trace_id for span in spans.values()} == {parent.get_span_context().trace_id}
    assert run.resource.attributes[names.PROCESS_PID] == os.getpid()
    assert not trace.get_current_span().get_span_context().is_valid


def test_compute_failed_survives_pickling():
    back = pickle.loads(pickle.dumps(ComputeFailed("m", out_of_memory=True, worker_traceback="t")))
    assert (str(back), back.out_of_memory, back.worker_traceback) == ("m", True, "t")


class CrowdedEngine(fake.HashEngine):
    """Sees two devices."""

    device_count = 2


def test_a_worker_that_holds_one_device_and_sees_two_is_refused():
    path = f"{__name__}:CrowdedEngine"
    with pytest.raises(RuntimeError, match=r"replica-0 holds the accelerators \('0',\).*its engine sees 2"):
        Worker("replica-0", path, device="cuda", threads=1, accelerator_ids=("0",))
    Worker("replica-0", path, device="cpu", threads=1)
