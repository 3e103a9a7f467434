"""The queue in front of the scoring threads: scan work that may wait, what is refused, and who is next.

Invariants: `queued_work` equals the work of all claims less what of them has begun, at every moment; no more
units run than there are threads; a claim that ends, for whatever reason, leaves nothing in the queue, and
what of it runs ends at its next checkpoint.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from phasemesh.errors import Cancelled, ResourceExhausted, Unavailable
from phasemesh.telemetry.metrics import Metrics

T = TypeVar("T")

#: Query vectors whose similarities a kernel computes at a time; the work of fewer is the same.
QUERY_BLOCK = 32
#: Most units that are done together: more would share no more of the reading, and wait longer for each other.
MAX_SHARED = 8
#: What is said before anything was measured.
_UNMEASURED_RETRY_S = 1.0
_SHORTEST_RETRY_S = 0.05
#: Busy seconds after which a measurement counts for 1/e.
_MEMORY_S = 10.0


def scan_work(tokens: int, query_tokens: int) -> int:
    """Work of scoring `tokens` document vectors against `query_tokens` query vectors."""
    return tokens * math.ceil(query_tokens / QUERY_BLOCK)


@dataclass(frozen=True, slots=True, eq=False)
class Shared(Generic[T]):
    """How a unit may be done together with others that wait.

    Attributes:
        key: units with equal keys may be done together.
        item: what this unit adds.
        run: does several, given their items: what each returns or raises, in their order.
    """

    key: Hashable
    item: Any
    run: Callable[[Sequence[Any], Callable[[], None]], Sequence[T | Exception]]


@dataclass(slots=True, eq=False)
class Unit(Generic[T]):
    """What one thread does without a break.

    Attributes:
        work: scan work.
        run: does it, on a scoring thread; calls what it is given now and then, and lets that raise.
        shared: how it may be done together with others; None if it may not.
        result: set when it has ended; None for a unit that was dropped.
        begun: whether a thread has taken it.
        abandoned: nobody waits for it any more; read by its thread.
        claim: that it belongs to.
    """

    work: int
    run: Callable[[Callable[[], None]], T]
    shared: Shared[T] | None = None
    result: T | Exception | None = None
    begun: bool = False
    abandoned: bool = False
    claim: Claim[T] | None = field(default=None, repr=False)

    def checkpoint(self) -> None:
        """Raise if nobody waits any more."""
        if self.abandoned:
            raise Cancelled("the search was cancelled")


class Claim(Generic[T]):
    """Room for one request in the queue; made by `ScanQueue.admit`, used as a context manager.

    Attributes:
        began_ns: when its first unit began; 0 before.
    """

    def __init__(self, queue: ScanQueue, work: int) -> None:
        self.began_ns = 0
        self._queue = queue
        self._reserved = work
        self._left: set[Unit[T]] = set()
        self._over = asyncio.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._queue.drop(self, self._left)
        self._reserve(0)

    async def run(self, units: Sequence[Unit[T]]) -> list[T | Exception]:
        """What the units return or raise, in their order. Cancelled, it drops those that haven't begun.

        Raises:
            Unavailable: the queue was closed before all had begun.
        """
        # The estimate at admission gives way to what is really there: segments may have failed to load.
        self._reserve(sum(unit.work for unit in units))
        self._left = set(units)
        self._over.clear()
        for unit in units:
            unit.claim = self
        if units:
            self._queue.put(units)
            await self._over.wait()
        results = []
        for unit in units:
            if unit.result is None and not unit.begun:
                raise _stopped()
            results.append(unit.result)
        return results  # type: ignore[return-value]  # T may include None

    def begin(self, unit: Unit[T], now_ns: int) -> None:
        """A thread takes `unit`; for the queue."""
        unit.begun = True
        self.began_ns = self.began_ns or now_ns
        self._reserve(self._reserved - unit.work)

    def end(self, unit: Unit[T]) -> None:
        """`unit` has ended or was dropped; for the queue."""
        self._left.discard(unit)
        if not self._left:
            self._over.set()

    def _reserve(self, work: int) -> None:
        self._queue.count(work - self._reserved)
        self._reserved = work


class ScanQueue:
    """First in, first out, over a pool of threads of its own. For one event loop, no locks.

    Args:
        max_work: scan work that may wait. A search of more than that by itself is taken when nothing waits,
            so that a collection of any size can be searched.
        threads: units that run at a time.
        metrics: of the process.
        now_s: monotonic seconds, the clock of deadlines.
        now_ns: monotonic nanoseconds, the clock of phases.
    """

    def __init__(
        self,
        max_work: int,
        threads: int,
        metrics: Metrics,
        *,
        now_s: Callable[[], float],
        now_ns: Callable[[], int],
    ) -> None:
        self._max_work = max_work
        self.threads = threads
        self._metrics = metrics
        self._now_s = now_s
        self._now_ns = now_ns
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="phasemesh-score")
        self._waiting: deque[Unit[Any]] = deque()
        self._running: dict[asyncio.Future[Any], list[Unit[Any]]] = {}
        self._rate = _Rate()
        self._closed = False
        self.queued_work = 0
        #: Requests of which a unit runs now.
        self.running_claims = 0

    def admit(self, work: int, *, deadline_s: float = math.inf) -> Claim[Any]:
        """Reserve `work`: it counts as waiting until its units begin or the claim is left.

        Args:
            work: scan work of the whole request.
            deadline_s: monotonic time after which nobody waits for it.

        Raises:
            ResourceExhausted: it doesn't fit now (QUEUE_FULL), or couldn't begin before its deadline
                (WAIT_TOO_LONG); says when to come back.
            Unavailable: the queue is closed.
        """
        if self._closed:
            raise _stopped()
        excess = self.queued_work + work - self._max_work
        if self.queued_work and excess > 0:
            raise self._refusal(
                "QUEUE_FULL",
                f"scan work of {self.queued_work} waits, this is {work} more, and {self._max_work} may wait"
                " (scorer.max_queued_scan_work)",
                min(excess, self.queued_work) / max(self._capacity(), 1e-9),
            )
        wait_s, left_s = self.estimated_wait_s(), deadline_s - self._now_s()
        if wait_s > left_s:
            raise self._refusal(
                "WAIT_TOO_LONG",
                f"the estimated wait of {wait_s:.1f} s is beyond the call's deadline of {left_s:.1f} s",
                wait_s - left_s,
            )
        self.count(work)
        return Claim(self, work)

    def estimated_wait_s(self) -> float:
        """Seconds until what comes now could begin; 0 while a thread is free or nothing was measured."""
        capacity = self._capacity()
        if not capacity or len(self._running) < self.threads:
            return 0.0
        running = sum(unit.work for units in self._running.values() for unit in units)
        return (self.queued_work + running) / capacity

    async def close(self) -> None:
        """Fail what waits as unavailable, wait for what runs."""
        self._closed = True
        for unit in tuple(self._waiting):
            self._waiting.remove(unit)
            self._end(unit)
        if self._running:
            await asyncio.wait(self._running)
        await asyncio.to_thread(self._pool.shutdown)

    def put(self, units: Sequence[Unit[Any]]) -> None:
        """Queue a claim's units; for `Claim`."""
        if self._closed:
            raise _stopped()
        self._waiting.extend(units)
        self._dispatch()

    def drop(self, claim: Claim[Any], units: set[Unit[Any]]) -> None:
        """Take what waits of `units` out of the queue, abandon what runs; for `Claim`."""
        for unit in units:
            unit.abandoned = True
        waiting = {unit for unit in units if not unit.begun}
        if waiting:
            self._waiting = deque(unit for unit in self._waiting if unit not in waiting)
            self._metrics.cancelled_items.inc(len(waiting))

    def count(self, work: int) -> None:
        """Count `work` more, or less, as waiting; for `Claim`."""
        self.queued_work += work
        self._metrics.queued_scan_work.set(self.queued_work)

    def _dispatch(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting and len(self._running) < self.threads:
            units = self._next_units()
            for unit in units:
                assert unit.claim is not None
                unit.claim.begin(unit, self._now_ns())
            future = loop.run_in_executor(self._pool, self._timed, units)
            self._running[future] = units
            future.add_done_callback(self._finished)
        self.running_claims = len({unit.claim for units in self._running.values() for unit in units})
        self._metrics.running_searches.set(self.running_claims)

    def _next_units(self) -> list[Unit[Any]]:
        """The unit whose turn it is, and those that can be done along with it.

        No timer: while threads are free a search never waits for another, and once none is, those that came
        for the same rows in the meantime go together.
        """
        units = [self._waiting.popleft()]
        shared = units[0].shared
        if shared is not None and self._waiting:
            for unit in self._waiting:
                if unit.shared is not None and unit.shared.key == shared.key:
                    units.append(unit)
                    if len(units) == MAX_SHARED:
                        break
            if len(units) > 1:
                together = set(units)
                self._waiting = deque(unit for unit in self._waiting if unit not in together)
                self._metrics.shared_searches.inc(len(units))
        return units

    def _timed(self, units: Sequence[Unit[Any]]) -> tuple[Sequence[Any], float]:
        start_s = self._now_s()
        results: Sequence[Any]
        try:
            if len(units) == 1:
                results = [units[0].run(units[0].checkpoint)]
            else:
                shared = [unit.shared for unit in units if unit.shared is not None]
                results = shared[0].run([one.item for one in shared], partial(_any_waits, units))
        except Exception as error:
            results = [error] * len(units)
        return results, self._now_s() - start_s

    def _finished(self, future: asyncio.Future[tuple[Sequence[Any], float]]) -> None:
        units = self._running.pop(future)
        results, seconds = future.result()
        for unit, result in zip(units, results, strict=True):
            unit.result = result
        if not any(isinstance(result, Exception) for result in results):
            self._rate.add(sum(unit.work for unit in units), seconds)
        for unit in units:
            self._end(unit)
        self._dispatch()

    def _end(self, unit: Unit[Any]) -> None:
        assert unit.claim is not None
        unit.claim.end(unit)

    def _capacity(self) -> float:
        """Scan work per second of all threads; 0 before anything was measured."""
        return self._rate.work_per_second * self.threads

    def _refusal(self, reason: str, words: str, seconds: float) -> ResourceExhausted:
        self._metrics.rejected.labels(reason).inc()
        retry_s = max(_SHORTEST_RETRY_S, seconds) if self._capacity() else _UNMEASURED_RETRY_S
        return ResourceExhausted(
            f"{words}; try again in {retry_s:.2f} s", reason=reason, retry_after_s=retry_s
        )


class _Rate:
    """Scan work per second of one busy thread: an exponentially weighted average over busy time."""

    def __init__(self) -> None:
        self._work = 0.0
        self._busy_s = 0.0

    def add(self, work: int, seconds: float) -> None:
        decay = math.exp(-max(seconds, 0.0) / _MEMORY_S)
        self._work = self._work * decay + work
        self._busy_s = self._busy_s * decay + seconds

    @property
    def work_per_second(self) -> float:
        return self._work / self._busy_s if self._busy_s > 0 else 0.0


def _any_waits(units: Sequence[Unit[Any]]) -> None:
    """Raise if nobody waits for any of the units any more."""
    if all(unit.abandoned for unit in units):
        raise Cancelled("the searches were cancelled")


def _stopped() -> Unavailable:
    return Unavailable("the scorer is shutting down; try another replica", reason="DRAINING")
