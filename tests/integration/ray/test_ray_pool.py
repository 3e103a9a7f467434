"""The Ray pool with real actors, on a cluster of this machine."""

import asyncio
import contextvars
import os
import signal
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ray.exceptions import PendingCallsLimitExceeded

from phasemesh.pool.actor import EncoderActor
from phasemesh.pool.protocol import ComputeFailed, Output, PoolStats, ReplicaLost, ReplicaState
from phasemesh.pool.ray_pool import RayPool
from phasemesh.pool.replica import Replica
from phasemesh.pool.settings import PoolStartError
from phasemesh.pool.worker import WorkerReport
from tests.fakes import engine as fake

pytestmark = pytest.mark.ray

StartPool = Callable[..., Any]


async def until(pool: RayPool, condition: Callable[[PoolStats], bool], timeout_s: float = 20) -> PoolStats:
    """Wait on the pool's own news until `condition` holds."""
    changed = asyncio.Event()
    remove = pool.add_listener(changed.set)
    try:
        async with asyncio.timeout(timeout_s):
            while not condition(pool.stats()):
                await changed.wait()
                changed.clear()
    finally:
        remove()
    return pool.stats()


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def test_each_replica_is_pinned_to_its_own_accelerator(start_pool: StartPool):
    pool = await start_pool(replicas=2, device="auto", engine_device="cpu")
    stats = pool.stats().replicas
    assert sorted(r.accelerator_ids for r in stats) == [("0",), ("1",)]
    seen = [await _visible_devices(pool, r.replica_id) for r in stats]
    assert sorted(seen) == ["0", "1"]


async def test_a_cpu_replica_sees_no_accelerator(start_pool: StartPool):
    pool = await start_pool(device="cpu")
    assert pool.stats().replicas[0].accelerator_ids == ()
    assert await _visible_devices(pool, "replica-0") == ""


async def test_what_does_not_fit_is_refused_at_once_naming_need_and_have(start_pool: StartPool):
    started = time.monotonic()
    with pytest.raises(PoolStartError, match=r"1 replica\(s\) need 64 CPU and 0 GPU each.*4 CPU and 2 GPU"):
        await start_pool(cpus_per_replica=64)
    with pytest.raises(PoolStartError, match=r"3 replica\(s\) need 1 CPU and 1 GPU each.*holds 2"):
        await start_pool(replicas=3, device="cuda")
    assert time.monotonic() - started < 1


async def test_what_is_taken_by_others_is_refused_after_the_timeout(start_pool: StartPool):
    await start_pool(cpus_per_replica=3)
    with pytest.raises(PoolStartError, match=r"not up within 2 s. Each needs 2 CPU.*has 1 CPU"):
        await start_pool(cpus_per_replica=2, start_timeout_s=2.0)


async def test_a_model_that_cannot_load_is_a_start_up_error(start_pool: StartPool):
    with pytest.raises(PoolStartError, match="model 'hash': source is 'nonsense'"):
        await start_pool(source="nonsense")


async def test_replicas_that_disagree_on_a_recipe_are_refused(start_pool: StartPool):
    with pytest.raises(PoolStartError, match="different recipes of 'hash'"):
        await start_pool(replicas=2, source="hash-differs")


async def test_killed_under_load_loses_no_batch(start_pool: StartPool):
    pool = await start_pool(replicas=2, source="hash?seconds=0.01")
    history: list[tuple[str, ReplicaState, int]] = []

    def note() -> None:
        history.extend((r.replica_id, r.state, r.pid) for r in pool.stats().replicas)

    pool.add_listener(note)
    victim = pool.stats().replicas[0]
    stop = asyncio.Event()
    answered = 0

    async def load(worker: int) -> None:
        nonlocal answered
        n = 0
        while not stop.is_set():
            rows = [[worker, n, n % 7], [n + 1]]
            result = await pool.submit(fake.batch_of(rows, batch_id=f"{worker}-{n}"))
            np.testing.assert_array_equal(result.dense, fake.expected_dense(rows))
            answered, n = answered + 1, n + 1

    async with asyncio.TaskGroup() as tasks:
        for worker in range(8):
            tasks.create_task(load(worker))
        await asyncio.sleep(0.3)
        before = answered
        os.kill(victim.pid, signal.SIGKILL)
        stats = await until(pool, lambda s: s.replicas[0].restarts == 1)
        await asyncio.sleep(0.3)
        stop.set()
    assert before > 10
    assert answered > before + 20
    back, other = pool.stats().replicas
    assert stats.replicas[0].state is ReplicaState.READY
    assert (back.restarts, other.restarts) == (1, 0)
    assert back.pid != victim.pid
    assert (back.in_flight, other.in_flight) == (0, 0)
    states = [state for replica_id, state, _ in history if replica_id == victim.replica_id]
    assert [s for i, s in enumerate(states) if i == 0 or s is not states[i - 1]] == [
        ReplicaState.READY,
        ReplicaState.RESTARTING,
        ReplicaState.READY,
    ]
    # Models came back by themselves, on this very replica.
    results = await asyncio.gather(*(pool.submit(fake.batch_of([[1]])) for _ in range(4)))
    assert {r.pid for r in results} == {back.pid, other.pid}


async def test_an_only_replica_gets_its_batch_again_after_its_restart(start_pool: StartPool):
    pool = await start_pool()
    victim = pool.stats().replicas[0].pid
    task = asyncio.create_task(pool.submit(fake.batch_of([[fake.SLEEP]])))
    await asyncio.sleep(0.2)
    os.kill(victim, signal.SIGKILL)
    result = await task
    np.testing.assert_array_equal(result.dense, fake.expected_dense([[fake.SLEEP]]))
    assert result.pid != victim


async def test_death_is_noticed_while_idle(start_pool: StartPool):
    pool = await start_pool()
    os.kill(pool.stats().replicas[0].pid, signal.SIGKILL)
    stats = await until(pool, lambda s: s.ready == 0)
    assert stats.replicas[0].state is ReplicaState.RESTARTING
    assert stats.capacity == 0
    stats = await until(pool, lambda s: s.ready == 1)
    assert stats.replicas[0].restarts == 1


async def test_a_lost_device_restarts_the_process_and_a_second_loss_is_reported(start_pool: StartPool):
    pool = await start_pool(crash_limit=10)
    with pytest.raises(ReplicaLost, match="two dead replicas"):
        await pool.submit(fake.batch_of([[fake.DEVICE_LOST]]))
    stats = await until(pool, lambda s: s.ready == 1 and s.replicas[0].restarts == 2)
    assert (await pool.submit(fake.batch_of([[1]]))).pid == stats.replicas[0].pid


async def test_a_crash_loop_ends_in_failed_and_waiting_batches_hear_of_it(start_pool: StartPool):
    pool = await start_pool(crash_limit=2)
    poison = [asyncio.create_task(pool.submit(fake.batch_of([[fake.CRASH]]))) for _ in range(5)]
    outcomes = await asyncio.gather(*poison, return_exceptions=True)
    assert all(isinstance(outcome, ReplicaLost) for outcome in outcomes), outcomes
    stats = await until(pool, lambda s: s.replicas[0].state is ReplicaState.FAILED)
    assert stats.replicas[0].restarts == 2
    started = time.monotonic()
    with pytest.raises(ReplicaLost, match="every replica has failed"):
        await pool.submit(fake.batch_of([[1]]))
    assert time.monotonic() - started < 0.1


async def test_a_supervisor_that_fails_gives_its_replica_up(
    start_pool: StartPool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Otherwise a replica that nobody watches would be called ready for ever."""
    pool = await start_pool()

    async def broken(self: RayPool, replica: Replica) -> WorkerReport:
        raise LookupError("a bug")

    monkeypatch.setattr(RayPool, "_ping", broken)
    stats = await until(pool, lambda s: s.lost)
    assert stats.replicas[0].state is ReplicaState.FAILED
    assert "LookupError: a bug" in caplog.text


async def test_failed_batches_cross_with_their_type(start_pool: StartPool):
    pool = await start_pool()
    with pytest.raises(ComputeFailed, match=r"^poison$") as caught:
        await pool.submit(fake.batch_of([[fake.FAIL]]))
    assert type(caught.value) is ComputeFailed
    with pytest.raises(ComputeFailed) as caught:
        await pool.submit(fake.batch_of([[fake.OUT_OF_MEMORY]]))
    assert caught.value.out_of_memory
    with pytest.raises(ComputeFailed, match="IndexError"):
        await pool.submit(fake.batch_of([[fake.BUG]]))
    (stats,) = pool.stats().replicas
    assert (stats.state, stats.restarts, stats.in_flight) == (ReplicaState.READY, 0, 0)


async def test_pings_are_answered_while_a_forward_runs(start_pool: StartPool):
    pool = await start_pool(ping_interval_s=60)
    task = asyncio.create_task(pool.submit(fake.batch_of([[fake.SLEEP]])))
    await asyncio.sleep(0.2)
    replica = pool._replicas["replica-0"]
    started = time.monotonic()
    report = await pool._ping(replica)
    assert time.monotonic() - started < fake.SLEEP_S / 2
    assert not task.done()
    assert (await task).pid == report.pid


async def test_a_frozen_process_is_quarantined_until_it_answers(start_pool: StartPool):
    pool = await start_pool(ping_timeout_s=0.5)
    pid = pool.stats().replicas[0].pid
    os.kill(pid, signal.SIGSTOP)
    await until(pool, lambda s: s.ready == 0)
    os.kill(pid, signal.SIGCONT)
    stats = await until(pool, lambda s: s.ready == 1)
    assert (stats.replicas[0].restarts, stats.replicas[0].pid) == (0, pid)


async def test_two_batches_are_out_at_most_and_ray_asserts_it(start_pool: StartPool):
    pool = await start_pool(source="hash?seconds=0.2", ping_interval_s=60)
    tasks = [asyncio.create_task(pool.submit(fake.batch_of([[i]]))) for i in range(5)]
    most = 0

    def note() -> None:
        nonlocal most
        most = max(most, pool.stats().replicas[0].in_flight)

    pool.add_listener(note)
    await asyncio.gather(*tasks)
    assert most == 2
    handle = pool._replicas["replica-0"].handle
    batch = fake.batch_of([[1]])
    refs = [handle.run.remote(batch) for _ in range(4)]
    with pytest.raises(PendingCallsLimitExceeded):
        handle.run.remote(batch)
    for ref in refs:
        await asyncio.wrap_future(ref.future())


async def test_large_batches_and_results_cross(start_pool: StartPool):
    pool = await start_pool()
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 30_000, 512).tolist() for _ in range(128)]  # 256 KiB of ids, 16 MiB of tokens
    batch = fake.batch_of(rows, outputs=frozenset({Output.DENSE, Output.TOKENS}))
    assert batch.sequences.input_ids.nbytes > 200 * 1024
    result = await pool.submit(batch)
    np.testing.assert_array_equal(result.dense, fake.expected_dense(rows))
    assert result.tokens.shape == (128 * 512, fake.DIM)
    assert result.tokens.nbytes == 16 * 2**20
    sums = np.add.reduceat(result.tokens, result.token_offsets[:-1])
    np.testing.assert_array_equal(sums, result.dense)


async def test_cancelled_submit_leaves_the_accounting_right(start_pool: StartPool):
    pool = await start_pool(source="hash?seconds=0.3")
    tasks = [asyncio.create_task(pool.submit(fake.batch_of([[i]]))) for i in range(4)]
    await asyncio.sleep(0.1)
    for task in (tasks[0], tasks[1], tasks[2]):  # running, queued, waiting
        task.cancel()
    np.testing.assert_array_equal((await tasks[3]).dense, fake.expected_dense([[3]]))
    stats = await until(pool, lambda s: s.replicas[0].in_flight == 0)
    assert stats.replicas[0].restarts == 0
    assert all(task.cancelled() for task in tasks[:3])


async def test_drain_finishes_what_was_submitted_and_close_ends_the_processes(start_pool: StartPool):
    pool = await start_pool(replicas=2, source="hash?seconds=0.1")
    pids = [r.pid for r in pool.stats().replicas]
    tasks = [asyncio.create_task(pool.submit(fake.batch_of([[i]]))) for i in range(8)]
    await asyncio.sleep(0)
    draining = asyncio.create_task(pool.drain(10))
    await asyncio.sleep(0)
    assert {r.state for r in pool.stats().replicas} == {ReplicaState.DRAINING}
    with pytest.raises(ReplicaLost, match="draining"):
        await pool.submit(fake.batch_of([[1]]))
    assert await draining
    for i, task in enumerate(tasks):
        np.testing.assert_array_equal(task.result().dense, fake.expected_dense([[i]]))
    await pool.close()
    await pool.close()
    async with asyncio.timeout(5):
        while not all(gone(pid) for pid in pids):
            await asyncio.sleep(0.05)


async def test_supervisors_start_in_an_empty_context(start_pool: StartPool, monkeypatch: pytest.MonkeyPatch):
    request = contextvars.ContextVar("request", default="none")
    seen: list[str] = []
    pinged = asyncio.Event()
    ping = RayPool._ping

    async def noting(self: RayPool, replica: Replica) -> WorkerReport:
        seen.append(request.get())
        pinged.set()
        return await ping(self, replica)

    monkeypatch.setattr(RayPool, "_ping", noting)
    token = request.set("first request")
    try:
        await start_pool()
    finally:
        request.reset(token)
    await pinged.wait()
    assert set(seen) == {"none"}


async def test_the_hop_costs_little(start_pool: StartPool, record_property: Callable[[str, object], None]):
    """128 KiB in, 16 KiB out; the bound is loose, the figures are the point."""
    pool = await start_pool()
    rows = [list(range(512)) for _ in range(64)]  # 128 KiB of ids
    payload = fake.batch_of(rows)
    hops: list[float] = []
    trips: list[float] = []
    small = fake.batch_of([[1]])
    for _ in range(30):
        submitted = time.time_ns()
        result = await pool.submit(payload)
        done = time.time_ns()
        timings = result.timings
        busy = timings.compute_ns
        hops.append((timings.started_unix_ns - submitted) / 1e6)
        trips.append((done - submitted - busy) / 1e6)
    tiny: list[float] = []
    for _ in range(30):
        submitted = time.perf_counter_ns()
        await pool.submit(small)
        tiny.append((time.perf_counter_ns() - submitted) / 1e6)
    record_property("submit_to_start_ms", statistics.median(hops))
    record_property("round_trip_ms", statistics.median(trips))
    print(
        f"submit→start {statistics.median(hops):.2f} ms, round trip less forward "
        f"{statistics.median(trips):.2f} ms, tiny round trip {statistics.median(tiny):.2f} ms"
    )
    assert statistics.median(trips) < 50


async def _visible_devices(pool: RayPool, replica_id: str) -> str | None:
    """`CUDA_VISIBLE_DEVICES` as the actor's process sees it, by Ray's own way into an actor."""
    handle = pool._replicas[replica_id].handle
    ref = handle.__ray_call__.remote(lambda _: os.environ.get("CUDA_VISIBLE_DEVICES"))
    return await asyncio.wrap_future(ref.future())


def test_concurrency_groups_are_declared_on_the_class():
    methods = EncoderActor.__ray_metadata__.method_meta.concurrency_group_for_methods
    assert methods["run"] == methods["models"] == "compute"
    assert methods["ping"] == methods["drain"] == "control"
