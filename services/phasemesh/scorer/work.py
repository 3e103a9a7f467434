"""One request on its way through the scorer: what requests share, and the clock of each.

Invariant: while a drain waits, it waits for every request that was begun; a request's phases are told to
spans and metrics exactly once, however it ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import TypeVar

from opentelemetry import trace

from phasemesh.errors import Unavailable
from phasemesh.index.scanner import CPU, Scanner
from phasemesh.scorer.admission import ScanQueue
from phasemesh.telemetry import names
from phasemesh.telemetry.metrics import Metrics
from phasemesh.telemetry.phases import PhaseClock
from phasemesh.telemetry.tracing import tracer
from phasemesh.v1.common_pb2 import PhaseTiming, Timings

T = TypeVar("T")

#: Value of the model label: a scorer holds vectors of any model, and knows of none.
_NO_MODEL = ""


def start_at_zero(metrics: Metrics) -> None:
    """Create the series of a scorer's phases, so that a scrape before the first request has them."""
    metrics.start_at_zero(())
    for phase in names.SCORE_PHASES:
        metrics.phase_duration.labels(phase, _NO_MODEL)


class Workshop:
    """What requests share.

    Attributes:
        queue: scan work and the threads that do it.
        metrics: of the process.
        max_message_bytes: largest reply.
        scanner: has the first look at all vectors.
        draining: no more requests are taken.
    """

    def __init__(
        self,
        *,
        queue: ScanQueue,
        checkers: Executor,
        max_message_bytes: int,
        metrics: Metrics,
        now_ns: Callable[[], int],
        unix_ns: Callable[[], int] = time.time_ns,
        scanner: Scanner = CPU,
    ) -> None:
        self.queue = queue
        self.scanner = scanner
        self.metrics = metrics
        self.max_message_bytes = max_message_bytes
        self.draining = False
        self._checkers = checkers
        self._now_ns = now_ns
        self._unix_ns = unix_ns
        self._jobs = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def job(self, deadline_s: float) -> Iterator[Job]:
        """A request's job, from the request's arrival to its reply; `deadline_s` is monotonic.

        Raises:
            Unavailable: the scorer is draining.
        """
        if self.draining:
            self.metrics.rejected.labels("DRAINING").inc()
            raise Unavailable("the scorer is shutting down; try another replica", reason="DRAINING")
        self._jobs += 1
        self._idle.clear()
        job = Job(PhaseClock(now_ns=self._now_ns, unix_ns=self._unix_ns), deadline_s)
        try:
            yield job
        finally:
            job.clock.observe(self.metrics, _NO_MODEL)
            job.clock.emit_spans(tracer(), job.span)
            self._jobs -= 1
            if not self._jobs:
                self._idle.set()

    async def check(self, work: Callable[[], T]) -> T:
        """Run `work`, which reads a large message, beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._checkers, work)

    async def idle(self) -> None:
        """Wait until no job is open."""
        await self._idle.wait()


class Job:
    """One request; made by `Workshop.job`, for one task.

    Attributes:
        clock: of its phases.
        deadline_s: monotonic time after which nobody waits for it.
        span: of the RPC.
    """

    def __init__(self, clock: PhaseClock, deadline_s: float) -> None:
        self.clock = clock
        self.deadline_s = deadline_s
        self.span = trace.get_current_span()

    def timings(self) -> Timings:
        """The phases as they stand; the reply must be assembled."""
        clock = self.clock
        return Timings(
            total_ns=clock.total_ns(),
            phases=[
                PhaseTiming(
                    phase=phase.name,
                    start_offset_ns=phase.start_ns - clock.start_ns,
                    duration_ns=phase.duration_ns,
                )
                for phase in clock.phases
            ],
        )
