"""Admission and batcher against a pool whose answers the test releases: nothing is lost, doubled or left."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry import trace
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from phasemesh.encoder.admission import Admission, QueueLimits
from phasemesh.encoder.batcher import Batcher, BatchLimits
from phasemesh.encoder.items import Encoded, Lane, Ticket
from phasemesh.encoder.rows import Row
from phasemesh.encoder.selection import choose
from phasemesh.encoder.throughput import BusyMeter
from phasemesh.errors import (
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    PhasemeshError,
    ResourceExhausted,
    Unavailable,
)
from phasemesh.pool.protocol import Batch, BatchResult, Output, ReplicaLost, ReplicaState
from phasemesh.telemetry import names
from phasemesh.telemetry.metrics import Metrics
from phasemesh.telemetry.tracing import TracingSettings, configure_tracing, shutdown_tracing, tracer
from tests.fakes.pool import FakePool, dense_of

LANE = Lane("m", frozenset({Output.DENSE}))


class Clock:
    def __init__(self) -> None:
        self.s = 100.0

    def now_s(self) -> float:
        return self.s

    def now_ns(self) -> int:
        self.s += 1e-6
        return int(self.s * 1e9)


class Bench:
    """A batcher over a fake pool."""

    def __init__(
        self, pool: FakePool, *, tokens: int = 64, items: int = 8, queue: int = 10_000, wait_s: float = 30.0,
        queue_items: int = 65_536,
    ) -> None:  # fmt: skip
        self.clock, self.pool, self.metrics = Clock(), pool, Metrics()
        self.meter = BusyMeter(self.clock.now_s)
        self.admission = Admission(
            QueueLimits(queue, wait_s, queue_items), self.meter, self.metrics, now_s=self.clock.now_s
        )
        self.batcher = Batcher(
            pool, self.admission, self.meter, BatchLimits(tokens, items), self.metrics,
            now_s=self.clock.now_s, now_ns=self.clock.now_ns,
        )  # fmt: skip

    def admit(self, *rows: list[int], lane: Lane = LANE, within_s: float = 1000.0) -> Ticket:
        ticket = self.admission.admit(
            lane,
            [row_of(ids) for ids in rows],
            deadline_s=self.clock.s + within_s,
            span_context=trace.get_current_span().get_span_context(),
        )
        self.batcher.wake()
        return ticket

    def value(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


def row_of(ids: list[int]) -> Row:
    return Row(np.array(ids, np.int32))


@asynccontextmanager
async def running(pool: FakePool | None = None, **options: object) -> AsyncIterator[Bench]:
    bench = Bench(pool or FakePool(), **options)  # type: ignore[arg-type]  # a test's free options
    bench.batcher.start()
    try:
        yield bench
    finally:
        bench.pool.release()
        await bench.batcher.close()


async def turns() -> None:
    """Let everything run that can run without news from outside."""
    for _ in range(20):
        await asyncio.sleep(0)


async def settled(ticket: Ticket) -> list[Encoded | PhasemeshError]:
    return await asyncio.wait_for(ticket.wait(), 10)


def assert_dense(results: list[Encoded | PhasemeshError], rows: list[list[int]]) -> None:
    assert len(results) == len(rows)
    for result, ids in zip(results, rows, strict=True):
        assert isinstance(result, Encoded), result
        np.testing.assert_array_equal(result.dense, dense_of(np.array(ids)))


def assert_empty(bench: Bench) -> None:
    assert (bench.admission.queued_tokens, bench.admission.queued_items) == (0, 0)
    assert bench.admission.outstanding_tokens == 0
    assert bench.value("phasemesh_queue_tokens", model="m") == 0
    assert bench.value("phasemesh_queue_items", model="m") == 0
    assert bench.admission.oldest_s() == 0


requests = st.lists(
    st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=40), min_size=1, max_size=6),
    min_size=1,
    max_size=8,
)


@settings(max_examples=60, deadline=None)
@given(
    given_requests=requests,
    cancelled=st.sets(st.integers(0, 7)),
    poison=st.sets(st.integers(1, 50), max_size=3),
    nan=st.sets(st.integers(1, 50), max_size=3),
    memory=st.one_of(st.none(), st.integers(64, 200)),
    replicas=st.integers(1, 3),
)
def test_nothing_is_lost_or_doubled(
    given_requests: list[list[list[int]]],
    cancelled: set[int],
    poison: set[int],
    nan: set[int],
    memory: int | None,
    replicas: int,
) -> None:
    async def scenario() -> None:
        pool = FakePool(replicas=replicas, held=True, max_tokens=memory)
        pool.poison, pool.nan = poison, nan - poison
        async with running(pool, tokens=64, items=5) as bench:
            lanes = [LANE, Lane("n", frozenset({Output.DENSE}))]
            tickets = [bench.admit(*rows, lane=lanes[i % 2]) for i, rows in enumerate(given_requests)]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            dispatched = [ids for batch in pool.batches for ids in batch.sequences.input_ids.tolist()]
            waiting = sum(len(r) for rows in given_requests for r in rows)
            assert bench.admission.queued_tokens <= waiting
            assert len(dispatched) <= waiting
            gone = {i for i in cancelled if i < len(tickets)}
            for i in gone:
                bench.admission.drop(tickets[i])
            before = len(pool.batches)
            pool.release()
            for i, (ticket, rows) in enumerate(zip(tickets, given_requests, strict=True)):
                if i in gone:
                    continue
                results = await settled(ticket)
                assert len(results) == len(rows)
                for result, ids in zip(results, rows, strict=True):
                    if poison & set(ids):
                        assert isinstance(result, Internal)
                        assert "secret" not in result.message
                    elif pool.nan & set(ids):
                        assert isinstance(result, Internal)
                        assert result.reason == "NON_FINITE_RESULT"
                    else:
                        assert_dense([result], [ids])
            for batch in pool.batches:
                lengths = np.diff(batch.sequences.cu_seqlens)
                assert len(lengths) == 1 or lengths.max() * len(lengths) <= 64
                assert len(lengths) <= 5
            # What was queued when its caller left is in no later batch.
            kept = {tuple(ids) for i, rows in enumerate(given_requests) if i not in gone for ids in rows}
            for batch in pool.batches[before:]:
                bounds = batch.sequences.cu_seqlens
                for a, b in itertools.pairwise(bounds):
                    assert tuple(batch.sequences.input_ids[a:b].tolist()) in kept
            assert pool.most_in_flight <= 2 * replicas
            while bench.admission.outstanding_tokens:
                await asyncio.sleep(0)
            assert_empty(bench)

    asyncio.run(scenario())


async def test_a_cancelled_request_is_out_of_the_queue_at_once() -> None:
    pool = FakePool(held=True)
    async with running(pool, tokens=8) as bench:
        first, second = bench.admit([1] * 8), bench.admit([2] * 8)
        await pool.wait_for(2)
        waiting = bench.admit([3] * 8, [4] * 8)
        task = asyncio.create_task(waiting.wait())
        await asyncio.sleep(0)
        assert bench.admission.queued_tokens == 16
        started = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert bench.admission.drop(waiting) == 2
        assert time.monotonic() - started < 0.1
        assert bench.admission.queued_tokens == 0
        assert bench.value("phasemesh_cancelled_items_total") == 2
        pool.release()
        assert_dense(await settled(first), [[1] * 8])
        assert_dense(await settled(second), [[2] * 8])
        assert len(pool.batches) == 2


async def test_a_dispatched_result_of_a_caller_who_left_is_discarded() -> None:
    pool = FakePool(held=True)
    async with running(pool) as bench:
        ticket, other = bench.admit([1, 2]), bench.admit([3, 4])
        await pool.wait_for(1)
        assert bench.admission.drop(ticket) == 0
        pool.release()
        assert_dense(await settled(other), [[3, 4]])
        assert ticket.results == [None]


async def test_a_poison_item_fails_alone_and_its_cause_stays_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = FakePool()
    pool.poison = {13}
    async with running(pool) as bench:
        rows = [[1, 2], [3, 13], [5, 6], [7, 8, 9]]
        results = await settled(bench.admit(*rows))
        error = results.pop(1)
        assert isinstance(error, Internal)
        assert "secret" not in error.message
        logged = [record for record in caplog.records if getattr(record, "error_id", None) == error.error_id]
        assert len(logged) == 1
        assert "secret" in str(logged[0].exc_info)
        assert_dense(results, [rows[0], rows[2], rows[3]])
        assert bench.value("phasemesh_failed_items_total", model="m", reason="INTERNAL") == 1
        assert bench.value("phasemesh_batch_bisections_total") > 0


async def test_out_of_memory_halves_the_budget_and_tries_again() -> None:
    pool = FakePool(max_tokens=100)
    async with running(pool, tokens=256, items=64) as bench:
        rows = [[i] * 16 for i in range(1, 17)]
        assert_dense(await settled(bench.admit(*rows)), rows)
        assert bench.batcher.budget("m") <= 128
        count = len(pool.batches)
        assert_dense(await settled(bench.admit(*rows)), rows)
        for batch in pool.batches[count + 2 :]:
            assert len(batch.sequences) * 16 <= bench.batcher.budget("m")
        error = (await settled(bench.admit([1] * 101)))[0]
        assert isinstance(error, ResourceExhausted)
        assert error.reason == "OUT_OF_MEMORY"


async def test_lost_replicas_are_unavailable_and_retryable() -> None:
    pool = FakePool()
    pool.lost = True
    async with running(pool) as bench:
        error = (await settled(bench.admit([1])))[0]
        assert isinstance(error, Unavailable)
        assert error.retry_after_s


class CrashPool(FakePool):
    """Ids in `killers` kill the replica; so does the test, as often as `accidents` says."""

    def __init__(self, *killers: int, accidents: int = 0, replicas: int = 1) -> None:
        super().__init__(replicas=replicas)
        self.killers = set(killers)
        self.accidents = accidents
        self.deaths = 0
        self.suspects: list[list[int]] = []
        self.beside_suspects = 0

    async def submit(self, batch: Batch, *, suspect: bool = False) -> BatchResult:
        if suspect:
            self.suspects.append(batch.sequences.input_ids.tolist())
        self.beside_suspects += suspect and self.in_flight > 0
        result = await super().submit(batch)
        self.beside_suspects += suspect and self.in_flight > 0
        if self.killers & set(batch.sequences.input_ids.tolist()) or self.accidents:
            self.accidents = max(0, self.accidents - 1)
            tries = 1 if suspect else 2
            self.deaths += tries
            raise ReplicaLost("dead", deaths=tries)
        return result


async def test_an_item_that_kills_workers_fails_alone_and_for_good(caplog: pytest.LogCaptureFixture) -> None:
    pool = CrashPool(13, replicas=2)
    async with running(pool, tokens=64, items=8) as bench:
        ids = [[i, i] for i in range(1, 25)]
        tickets = [bench.admit(*ids[:16]), bench.admit(*ids[16:])]
        results = [*await settled(tickets[0]), *await settled(tickets[1])]
        error = results.pop(12)
        assert isinstance(error, Internal)
        assert error.reason == "WORKER_CRASHED"
        assert not error.retryable
        assert_dense(results, [row for row in ids if 13 not in row])
        assert pool.deaths == 4, "two with its neighbours, two alone"
        assert pool.suspects.count([13, 13]) == 2
        assert all(len(set(ids)) == 1 for ids in pool.suspects)
        assert pool.beside_suspects == 0
        assert bench.value("phasemesh_failed_items_total", model="m", reason="WORKER_CRASHED") == 1
        logged = [record for record in caplog.records if getattr(record, "error_id", None) == error.error_id]
        assert len(logged) == 1
        assert_dense(await settled(bench.admit([5])), [[5]])
    assert_empty(bench)


@pytest.mark.parametrize("accidents", [1, 2])
async def test_a_batch_that_dies_of_something_else_is_blamed_for_nothing(accidents: int) -> None:
    pool = CrashPool(accidents=accidents)
    async with running(pool) as bench:
        assert_dense(await settled(bench.admit([1], [2])), [[1], [2]])


async def test_a_suspect_that_nobody_waits_for_is_not_tried() -> None:
    pool = CrashPool(13)
    pool.held = True
    async with running(pool) as bench:
        gone, late, stays = bench.admit([13]), bench.admit([14]), bench.admit([1])
        await pool.wait_for(1)
        bench.admission.drop(gone)
        late.deadline_s = bench.clock.s
        pool.release()
        assert_dense(await settled(stays), [[1]])
        with pytest.raises(DeadlineExceeded):
            await settled(late)
        assert pool.suspects == [[1]]


async def test_a_batcher_that_stops_says_so_and_fails_what_waits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(FakePool())
    stopped = asyncio.Event()
    batcher = Batcher(
        bench.pool, bench.admission, bench.meter, BatchLimits(64, 8), bench.metrics,
        now_s=bench.clock.now_s, now_ns=bench.clock.now_ns, on_stopped=stopped.set,
    )  # fmt: skip

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("secret bug")

    monkeypatch.setattr("phasemesh.encoder.batcher.choose", broken)
    batcher.start()
    ticket = bench.admit([1])
    batcher.wake()
    assert isinstance((await settled(ticket))[0], Internal)
    assert stopped.is_set()
    assert "secret bug" in caplog.text
    await batcher.close()
    assert_empty(bench)


def test_a_scrape_reads_no_queue() -> None:
    """It comes from another thread, while the loop changes the queue."""
    bench = Bench(FakePool())
    tickets = [bench.admission.admit(
        Lane(f"m{i}", LANE.outputs), [row_of([1])], deadline_s=1e9, span_context=trace.INVALID_SPAN_CONTEXT
    ) for i in range(3)]  # fmt: skip
    bench.clock.s += 7
    bench.admission._lanes = None  # type: ignore[assignment]  # whatever touches it fails
    assert bench.value("phasemesh_queue_oldest_seconds") == pytest.approx(7)
    assert len(tickets) == 3


async def test_the_oldest_is_the_oldest_of_those_that_still_wait() -> None:
    bench = Bench(FakePool())
    tickets = []
    for lane in (LANE, Lane("n", LANE.outputs)):
        tickets.append(bench.admission.admit(
            lane, [row_of([1])], deadline_s=1e9, span_context=trace.INVALID_SPAN_CONTEXT
        ))  # fmt: skip
        bench.clock.s += 5
    assert bench.admission.oldest_s() == pytest.approx(10)
    bench.admission.drop(tickets[0])
    assert bench.admission.oldest_s() == pytest.approx(5)
    bench.admission.drop(tickets[1])
    assert bench.admission.oldest_s() == 0


async def test_places_follow_the_replicas() -> None:
    pool = FakePool(replicas=2, held=True)
    pool.set_states(ReplicaState.RESTARTING, ReplicaState.RESTARTING)
    async with running(pool, tokens=4) as bench:
        pool.add_listener(bench.batcher.wake)
        tickets = [bench.admit([i] * 4) for i in range(1, 8)]
        await turns()
        assert pool.batches == [], "without a replica work stays where it can be dropped"
        bench.admission.drop(tickets.pop(0))
        tickets[0].deadline_s = bench.clock.s
        pool.set_states(ReplicaState.READY, ReplicaState.RESTARTING)
        await pool.wait_for(2)
        await turns()
        assert [batch.sequences.input_ids[0] for batch in pool.batches] == [3, 4]
        with pytest.raises(DeadlineExceeded):
            await settled(tickets.pop(0))
        pool.set_states(ReplicaState.READY, ReplicaState.READY)
        await pool.wait_for(4)
        await turns()
        assert len(pool.batches) == 4
        pool.release()
        for ticket in tickets:
            await settled(ticket)


async def test_an_expired_item_is_never_dispatched() -> None:
    pool = FakePool(held=True)
    async with running(pool, tokens=4) as bench:
        running_now = [bench.admit([1] * 4), bench.admit([2] * 4)]
        await pool.wait_for(2)
        late, fine = bench.admit([3] * 4, within_s=5), bench.admit([4] * 4)
        bench.clock.s += 6
        pool.release()
        with pytest.raises(DeadlineExceeded):
            await settled(late)
        assert_dense(await settled(fine), [[4] * 4])
        for ticket in running_now:
            await settled(ticket)
        assert all(3 not in batch.sequences.input_ids for batch in pool.batches)
        assert_empty(bench)


async def test_the_same_text_is_computed_once_for_all_who_wait() -> None:
    pool = FakePool(held=True)
    async with running(pool) as bench:
        blockers = [bench.admit([9])]
        await pool.wait_for(1)
        pool.set_states(ReplicaState.READY)
        same = [bench.admit([1, 2, 3]) for _ in range(3)]
        pool.release()
        for ticket in same:
            assert_dense(await settled(ticket), [[1, 2, 3]])
        await settled(blockers[0])
        assert len(pool.batches[1].sequences) == 1
        assert len(pool.batches) == 2


async def test_the_queue_is_bounded_and_says_when_to_come_back() -> None:
    pool = FakePool(held=True)
    async with running(pool, tokens=10, queue=50, queue_items=6) as bench:
        blockers = [bench.admit([1] * 10), bench.admit([2] * 10)]
        await pool.wait_for(2)
        with pytest.raises(InvalidArgument) as too_large:
            bench.admit([1] * 51)
        assert too_large.value.reason == "REQUEST_TOO_LARGE"
        assert "50" in too_large.value.message
        waiting = bench.admit([3] * 10, [4] * 10, [5] * 10)
        with pytest.raises(ResourceExhausted) as unmeasured:
            bench.admit([6] * 21)
        assert unmeasured.value.retry_after_s == 1.0
        with pytest.raises(ResourceExhausted):
            bench.admit([1], [1], [1], [1])
        assert bench.admission.queued_tokens == 30
        # 20 tokens in two busy seconds.
        bench.clock.s += 2
        pool.release(0)
        pool.release(1)
        for ticket in blockers:
            await settled(ticket)
        assert bench.meter.tokens_per_second == pytest.approx(10, rel=0.15)
        await pool.wait_for(4)
        assert bench.admission.queued_tokens == 10
        with pytest.raises(ResourceExhausted) as full:
            bench.admit([6] * 50)
        assert full.value.reason == "QUEUE_FULL"
        assert full.value.retry_after_s == pytest.approx(10 / bench.meter.tokens_per_second)
        # 30 tokens are ahead, so about 3 s.
        with pytest.raises(ResourceExhausted) as slow:
            bench.admit([6], within_s=1)
        assert slow.value.reason == "WAIT_TOO_LONG"
        assert slow.value.retry_after_s == pytest.approx(2, rel=0.3)
        assert bench.value("phasemesh_rejected_total", reason="QUEUE_FULL") == 3
        assert bench.value("phasemesh_rejected_total", reason="WAIT_TOO_LONG") == 1
        pool.release()
        await settled(waiting)


async def test_idle_time_is_no_throughput() -> None:
    async with running(FakePool(held=True), tokens=10) as bench:
        for i in range(2):
            ticket = bench.admit([1] * 10)
            await bench.pool.wait_for(i + 1)
            bench.clock.s += 2
            bench.pool.release(i)
            await settled(ticket)
            assert bench.meter.tokens_per_second == pytest.approx(5, rel=0.01)
            bench.clock.s += 1000


async def test_small_batches_say_nothing_of_capacity() -> None:
    """One short text takes as long as ten; a rate learned from it would refuse the next large request."""
    pool = FakePool(held=True)
    async with running(pool, tokens=10, wait_s=30) as bench:
        small = bench.admit([1] * 2)
        await pool.wait_for(1)
        bench.clock.s += 2
        pool.release(0)
        await settled(small)
        assert bench.meter.tokens_per_second == 0
        large = bench.admit(*([2] * 10 for _ in range(50)))
        after = bench.admit([3])  # at one token a second, 500 tokens ahead would be far beyond 30 s
        pool.release()
        await settled(large)
        await settled(after)


async def test_oldest_first_between_lanes_and_never_mixed() -> None:
    pool = FakePool(held=True)
    async with running(pool) as bench:
        blockers = [bench.admit([9]), bench.admit([8], lane=Lane("z", LANE.outputs))]
        await pool.wait_for(2)
        order = [
            Lane("b", LANE.outputs),
            LANE,
            Lane("m", frozenset({Output.TOKENS})),
            Lane("b", LANE.outputs),
        ]
        tickets = []
        for lane in order:
            bench.clock.s += 1
            tickets.append(bench.admit([1, 2], lane=lane))
        pool.release()
        for ticket in [*blockers, *tickets]:
            await settled(ticket)
        assert [(b.model, b.outputs) for b in pool.batches[2:]] == [
            ("b", LANE.outputs), ("m", LANE.outputs), ("m", frozenset({Output.TOKENS})),
        ]  # fmt: skip


@given(lengths=st.lists(st.integers(1, 100), min_size=1, max_size=60))
def test_a_batch_holds_the_oldest_and_keeps_the_budget(lengths: list[int]) -> None:
    bench = Bench(FakePool())
    ticket = bench.admission.admit(
        LANE, [row_of([1] * n) for n in lengths], deadline_s=1e9, span_context=trace.INVALID_SPAN_CONTEXT
    )
    chosen = choose(ticket.items, max_tokens=128, max_items=10)
    assert chosen[0] is ticket.items[0]
    assert len(set(map(id, chosen))) == len(chosen) <= 10
    longest = max(item.tokens for item in chosen)
    assert len(chosen) == 1 or longest * len(chosen) <= 128
    left = [item for item in ticket.items if item not in chosen]
    if len(chosen) < 10:
        assert all(max(longest, item.tokens) * (len(chosen) + 1) > 128 for item in left)


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    configure_tracing(TracingSettings(), role="test", span_exporter=exporter)
    yield exporter
    shutdown_tracing()


async def test_batch_spans_are_linked_both_ways_and_belong_to_no_request(
    exporter: InMemorySpanExporter,
) -> None:
    pool = FakePool(held=True)
    async with running(pool) as bench:
        blockers = [bench.admit([9] * 60), bench.admit([8] * 60)]
        await pool.wait_for(2)
        members = []
        for i in range(3):
            with tracer().start_as_current_span(f"request {i}") as span:
                members.append((span.get_span_context(), bench.admit([i + 1], [i + 1, 2])))
        pool.release()
        for ticket in [*blockers, *(ticket for _, ticket in members)]:
            await settled(ticket)
        while bench.admission.outstanding_tokens:
            await asyncio.sleep(0)
    spans = [span for span in exporter.get_finished_spans() if span.name == names.SPAN_BATCH]
    batch = next(span for span in spans if span.attributes and span.attributes[names.BATCH_ITEMS] == 6)
    assert batch.parent is None
    assert {link.context.span_id for link in batch.links} == {context.span_id for context, _ in members}
    assert len(batch.links) == 3
    assert batch.context is not None
    assert batch.context.trace_id not in {context.trace_id for context, _ in members}
    for _, ticket in members:
        assert [context.span_id for context in ticket.batches] == [batch.context.span_id]
    carried = pool.batches[2].carrier["traceparent"]
    assert f"{batch.context.trace_id:032x}-{batch.context.span_id:016x}" in carried
    # Batches without a sampled member aren't recorded.
    assert len(spans) == 1


async def test_waiting_behind_a_running_batch_isn_t_forward_time() -> None:
    pool = FakePool(held=True)
    async with running(pool, tokens=4) as bench:
        first, second = bench.admit([1] * 4), bench.admit([2] * 4)
        await pool.wait_for(2)
        bench.clock.s += 5
        pool.release(0)
        await settled(first)
        bench.clock.s += 3
        pool.release(1)
        await settled(second)
        assert (first.last_end_ns - first.first_start_ns) / 1e9 == pytest.approx(5, abs=0.01)
        assert (second.last_end_ns - second.first_start_ns) / 1e9 == pytest.approx(3, abs=0.01)


async def test_batches_carry_no_request_s_context() -> None:
    request: contextvars.ContextVar[str] = contextvars.ContextVar("request", default="none")
    seen = []

    class Spy(FakePool):
        async def submit(self, batch, *, suspect=False):  # type: ignore[no-untyped-def]  # as its base
            seen.append(request.get())
            return await super().submit(batch)

    request.set("the first")
    async with running(Spy()) as bench:
        await settled(bench.admit([1]))
    assert seen == ["none"]


async def test_closing_fails_what_waits_and_what_runs() -> None:
    pool = FakePool(held=True)
    bench = Bench(pool, tokens=4)
    bench.batcher.start()
    tickets = [bench.admit([i] * 4) for i in range(1, 5)]
    await pool.wait_for(2)
    await bench.batcher.close()
    for ticket in tickets:
        assert isinstance((await settled(ticket))[0], Unavailable)
    assert_empty(bench)
