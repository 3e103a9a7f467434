"""The queue of scan work: bounds, order, counters, and what becomes of cancelled work. Threads are gated by events."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
import pytest_asyncio

from phasemesh.errors import ResourceExhausted, Unavailable
from phasemesh.scorer.admission import MAX_SHARED, Claim, ScanQueue, Shared, Unit, scan_work
from phasemesh.telemetry.metrics import Metrics


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def seconds(self) -> float:
        return self.now_s

    def ns(self) -> int:
        return round(self.now_s * 1e9)


class Gate:
    """Work that stays on its thread until it is let go; `begun` is set from there."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.begun = asyncio.Event()
        self.go = threading.Event()
        self.stopped = threading.Event()

    def __call__(self, checkpoint: Callable[[], None]) -> str:
        self.loop.call_soon_threadsafe(self.begun.set)
        assert self.go.wait(10)
        try:
            checkpoint()
        except Exception:
            self.stopped.set()
            raise
        return "done"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest_asyncio.fixture(loop_scope="session")
async def queue(clock: Clock, metrics: Metrics) -> AsyncIterator[ScanQueue]:
    queue = ScanQueue(1000, 1, metrics, now_s=clock.seconds, now_ns=clock.ns)
    yield queue
    await queue.close()


def run(
    queue: ScanQueue, work: int, *runs: Callable[[Callable[[], None]], object]
) -> asyncio.Task[list[object]]:
    async def claimed() -> list[object]:
        with queue.admit(work * len(runs)) as claim:
            return await claim.run([Unit(work, one) for one in runs])

    return asyncio.create_task(claimed())


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("tokens", "query_tokens", "work"),
    [(100, 1, 100), (100, 32, 100), (100, 33, 200), (0, 5, 0), (7, 300, 70)],
)
def test_scan_work_is_tokens_times_query_tokens_over_32_rounded_up(
    tokens: int, query_tokens: int, work: int
) -> None:
    assert scan_work(tokens, query_tokens) == work


async def test_results_come_in_order_and_an_error_stays_with_its_unit(queue: ScanQueue) -> None:
    def fail(checkpoint: Callable[[], None]) -> None:
        raise ValueError("bad")

    first, second, third = await run(queue, 10, lambda _: 1, fail, lambda _: None)
    assert (first, third) == (1, None)
    assert isinstance(second, ValueError)
    assert queue.queued_work == 0


async def test_work_counts_as_waiting_until_it_begins(queue: ScanQueue, metrics: Metrics) -> None:
    gate = Gate()
    running = run(queue, 300, gate)
    await gate.begun.wait()
    assert (queue.queued_work, queue.running_claims) == (0, 1)
    waiting = run(queue, 400, lambda _: "second")
    await settle()
    assert queue.queued_work == 400
    assert metrics.registry.get_sample_value("phasemesh_scorer_queued_scan_work") == 400
    assert metrics.registry.get_sample_value("phasemesh_scorer_running_searches") == 1
    gate.go.set()
    assert await running == ["done"]
    assert await waiting == ["second"]
    assert (queue.queued_work, queue.running_claims) == (0, 0)
    assert metrics.registry.get_sample_value("phasemesh_scorer_running_searches") == 0


async def test_what_is_admitted_counts_before_its_segments_are_there(queue: ScanQueue) -> None:
    with queue.admit(700):
        assert queue.queued_work == 700
        with pytest.raises(ResourceExhausted):
            queue.admit(301)
        with queue.admit(300):
            assert queue.queued_work == 1000
    assert queue.queued_work == 0


async def test_a_full_queue_refuses_with_a_time_to_come_back(
    queue: ScanQueue, clock: Clock, metrics: Metrics
) -> None:
    def slow(checkpoint: Callable[[], None]) -> None:
        clock.now_s += 2.0

    with queue.admit(600):
        with pytest.raises(ResourceExhausted) as refused:
            queue.admit(600)
        assert refused.value.retry_after_s == 1.0  # nothing measured yet
        assert "scorer.max_queued_scan_work" in refused.value.message
    await run(queue, 400, slow)  # 200 units of work per second
    with queue.admit(900):
        with pytest.raises(ResourceExhausted) as refused:
            queue.admit(300)
        assert refused.value.reason == "QUEUE_FULL"
        assert refused.value.retry_after_s == pytest.approx(1.0)  # 200 too many, at 200 per second
    assert metrics.registry.get_sample_value("phasemesh_rejected_total", {"reason": "QUEUE_FULL"}) == 2


async def test_a_search_beyond_the_limit_runs_when_nothing_waits(queue: ScanQueue) -> None:
    assert await run(queue, 5000, lambda _: "big") == ["big"]


async def test_what_could_not_begin_before_its_deadline_is_refused(queue: ScanQueue, clock: Clock) -> None:
    def slow(checkpoint: Callable[[], None]) -> None:
        clock.now_s += 1.0

    await run(queue, 100, slow)
    gate = Gate()
    running = run(queue, 100, gate)
    await gate.begun.wait()
    waiting = run(queue, 400, lambda _: None)
    await settle()
    # 100 run and 400 wait, at 100 per second.
    assert queue.estimated_wait_s() == pytest.approx(5.0)
    with pytest.raises(ResourceExhausted) as refused:
        queue.admit(1, deadline_s=clock.now_s + 3.0)
    assert refused.value.reason == "WAIT_TOO_LONG"
    assert refused.value.retry_after_s == pytest.approx(2.0)
    with queue.admit(1, deadline_s=clock.now_s + 6.0):
        pass
    gate.go.set()
    await asyncio.gather(running, waiting)


async def test_cancelled_work_never_begins(queue: ScanQueue, metrics: Metrics) -> None:
    gate = Gate()
    running = run(queue, 100, gate)
    await gate.begun.wait()
    ran: list[str] = []
    dropped = run(queue, 100, lambda _: ran.append("a"), lambda _: ran.append("b"))
    kept = run(queue, 100, lambda _: ran.append("kept"))
    await settle()
    dropped.cancel()
    with pytest.raises(asyncio.CancelledError):
        await dropped
    assert queue.queued_work == 100
    gate.go.set()
    await asyncio.gather(running, kept)
    assert ran == ["kept"]
    assert metrics.registry.get_sample_value("phasemesh_cancelled_items_total") == 2


async def test_cancelled_work_that_runs_ends_at_its_next_checkpoint(queue: ScanQueue) -> None:
    gate = Gate()
    running = run(queue, 100, gate)
    await gate.begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    gate.go.set()
    assert await run(queue, 1, lambda _: "next") == ["next"]
    assert gate.stopped.is_set()


async def test_no_more_units_run_than_there_are_threads(clock: Clock) -> None:
    queue = ScanQueue(1000, 2, Metrics(), now_s=clock.seconds, now_ns=clock.ns)
    gates = [Gate() for _ in range(3)]
    running = run(queue, 10, *gates)
    await asyncio.gather(gates[0].begun.wait(), gates[1].begun.wait())
    await settle()
    assert not gates[2].begun.is_set()
    assert (queue.queued_work, queue.running_claims) == (10, 1)
    for gate in gates:
        gate.go.set()
    assert await running == ["done"] * 3
    await queue.close()


async def test_closing_fails_what_waits_and_waits_for_what_runs(clock: Clock) -> None:
    queue = ScanQueue(1000, 1, Metrics(), now_s=clock.seconds, now_ns=clock.ns)
    gate = Gate()
    running = run(queue, 10, gate)
    await gate.begun.wait()
    waiting = run(queue, 10, lambda _: "never")
    await settle()
    closing = asyncio.create_task(queue.close())
    with pytest.raises(Unavailable):
        await waiting
    assert not closing.done()
    gate.go.set()
    assert await running == ["done"]
    await closing
    with pytest.raises(Unavailable):
        queue.admit(1)
    assert queue.queued_work == 0


async def test_a_claim_can_run_twice_and_notes_when_it_first_began(queue: ScanQueue, clock: Clock) -> None:
    with queue.admit(10) as claim:
        assert isinstance(claim, Claim)
        assert claim.began_ns == 0
        assert await claim.run([]) == []
        await claim.run([Unit(10, lambda _: 1)])
        began_ns = claim.began_ns
        assert began_ns == clock.ns()
        clock.now_s += 1
        assert await claim.run([Unit(5, lambda _: 2), Unit(5, lambda _: 3)]) == [2, 3]
        assert claim.began_ns == began_ns
    assert queue.queued_work == 0


class Together:
    """Work of one kind that is done in company: notes who was done with whom."""

    def __init__(self, faulty: set[str] = frozenset()) -> None:  # type: ignore[assignment]
        self.groups: list[list[str]] = []
        self.gate = Gate()
        self._faulty = faulty

    def unit(self, name: str, key: str = "same") -> Unit[str]:
        def alone(checkpoint: Callable[[], None]) -> str:
            self.groups.append([name])
            return name

        return Unit(10, alone, Shared(key, name, self._all))

    def _all(self, names: Sequence[str], checkpoint: Callable[[], None]) -> list[str | Exception]:
        self.groups.append(list(names))
        self.gate.go.set()
        checkpoint()
        return [ValueError(name) if name in self._faulty else name for name in names]


def claimed(queue: ScanQueue, unit: Unit[str]) -> asyncio.Task[list[str | Exception]]:
    async def wait() -> list[str | Exception]:
        with queue.admit(unit.work) as claim:
            return await claim.run([unit])

    return asyncio.create_task(wait())


async def test_searches_of_the_same_rows_that_wait_are_done_together(
    queue: ScanQueue, metrics: Metrics
) -> None:
    blocker, work = Gate(), Together(faulty={"b"})
    first = run(queue, 1, blocker)
    await blocker.begun.wait()
    names = ["a", "x", "b", "c"]
    tasks = {name: claimed(queue, work.unit(name, "other" if name == "x" else "same")) for name in names}
    await settle()
    blocker.go.set()
    await first
    results = {name: (await task)[0] for name, task in tasks.items()}
    assert work.groups == [["a", "b", "c"], ["x"]]
    assert isinstance(results.pop("b"), ValueError)
    assert results == {"a": "a", "x": "x", "c": "c"}
    assert queue.queued_work == 0
    assert metrics.registry.get_sample_value("phasemesh_shared_searches_total") == 3


async def test_at_most_so_many_searches_are_done_together(queue: ScanQueue) -> None:
    blocker, work = Gate(), Together()
    first = run(queue, 1, blocker)
    await blocker.begun.wait()
    tasks = [claimed(queue, work.unit(str(number))) for number in range(MAX_SHARED + 2)]
    await settle()
    blocker.go.set()
    await first
    assert [(await task)[0] for task in tasks] == [str(number) for number in range(MAX_SHARED + 2)]
    assert [len(group) for group in work.groups] == [MAX_SHARED, 2]


async def test_a_free_thread_takes_a_search_at_once_and_alone(queue: ScanQueue) -> None:
    work = Together()
    assert await claimed(queue, work.unit("a")) == ["a"]
    assert work.groups == [["a"]]


async def test_who_leaves_a_shared_scan_does_not_stop_it_for_the_others(queue: ScanQueue) -> None:
    blocker = Gate()
    scanning, leave = threading.Event(), threading.Event()

    def scan(names: Sequence[str], checkpoint: Callable[[], None]) -> list[str | Exception]:
        scanning.set()
        assert leave.wait(10)
        checkpoint()
        return list(names)

    first = run(queue, 1, blocker)
    await blocker.begun.wait()
    tasks = [claimed(queue, Unit(10, lambda _: "alone", Shared("same", name, scan))) for name in "ab"]
    await settle()
    blocker.go.set()
    await first
    await asyncio.to_thread(scanning.wait, 10)
    tasks[0].cancel()
    await asyncio.wait([tasks[0]])
    leave.set()
    assert await tasks[1] == ["b"]


async def test_a_shared_scan_that_nobody_waits_for_ends_at_its_checkpoint(queue: ScanQueue) -> None:
    blocker = Gate()
    scanning, leave, ended = threading.Event(), threading.Event(), threading.Event()

    def scan(names: Sequence[str], checkpoint: Callable[[], None]) -> list[str | Exception]:
        scanning.set()
        assert leave.wait(10)
        try:
            checkpoint()
        finally:
            ended.set()
        raise AssertionError("the checkpoint let it go on")

    first = run(queue, 1, blocker)
    await blocker.begun.wait()
    tasks = [claimed(queue, Unit(10, lambda _: "alone", Shared("same", name, scan))) for name in "ab"]
    await settle()
    blocker.go.set()
    await first
    await asyncio.to_thread(scanning.wait, 10)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    leave.set()
    assert await asyncio.to_thread(ended.wait, 10)
