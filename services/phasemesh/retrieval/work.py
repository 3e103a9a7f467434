"""One request on its way through retrieval: its clock, its time left, and what its peers said of theirs.

Invariant: own phases are told to spans and metrics exactly once, phases of other processes never (they did it
themselves); the reply's timings hold both, in order, without overlap.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from opentelemetry import trace

from phasemesh.errors import Unavailable
from phasemesh.rpc.context import current_call_or_none
from phasemesh.telemetry import names
from phasemesh.telemetry.metrics import Metrics
from phasemesh.telemetry.phases import PhaseClock
from phasemesh.telemetry.tracing import tracer
from phasemesh.v1.common_pb2 import PhaseTiming, Timings

#: Deadline and tenant of a call that came past the interceptors.
_NO_CALL_S = 60.0
_NO_TENANT = "default"


class Requests:
    """The requests in progress, for the drain.

    Attributes:
        draining: refuse new requests.
    """

    def __init__(
        self,
        metrics: Metrics,
        *,
        now_s: Callable[[], float] = time.monotonic,
        now_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.draining = False
        self._metrics = metrics
        self._now_s = now_s
        self._now_ns = now_ns
        self._open = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def open(self) -> Iterator[Request]:
        """A request, from its arrival to its reply.

        Raises:
            Unavailable: the service is draining.
        """
        if self.draining:
            self._metrics.rejected.labels("DRAINING").inc()
            raise Unavailable("the service is shutting down; try another replica", reason="DRAINING")
        call = current_call_or_none()
        deadline_s = self._now_s() + _NO_CALL_S if call is None else call.deadline_s
        tenant = _NO_TENANT if call is None else call.caller.tenant
        request = Request(tenant, deadline_s, PhaseClock(now_ns=self._now_ns), self._now_s)
        self._open += 1
        self._idle.clear()
        try:
            yield request
        finally:
            request.close(self._metrics)
            self._open -= 1
            if not self._open:
                self._idle.set()

    async def idle(self) -> None:
        """Wait until no request is open."""
        await self._idle.wait()


class Request:
    """One request; made by `Requests.open`, for one task.

    Attributes:
        tenant: owner of what is read and made.
        clock: notes this process's phases.
    """

    def __init__(self, tenant: str, deadline_s: float, clock: PhaseClock, now_s: Callable[[], float]) -> None:
        self.tenant = tenant
        self.clock = clock
        self._deadline_s = deadline_s
        self._now_s = now_s
        self._span = trace.get_current_span()
        self._model = ""
        self._others: list[_Stretch] = []

    def serve(self, model: str) -> None:
        """Note the collection's model, for metrics and spans; empty where it has none."""
        self._model = model
        if model:
            self._span.set_attribute(names.MODEL, model)

    def remaining_s(self) -> float:
        """Seconds left, never below zero."""
        return max(0.0, self._deadline_s - self._now_s())

    def note_reply(self, timings: Timings, start_ns: int, end_ns: int) -> None:
        """Put another process's phases on this clock.

        The two clocks share no zero. The time that the call took beyond what the callee accounts for is taken
        as spent half on the way there and half on the way back, as NTP does it.

        Args:
            timings: of its reply.
            start_ns: when the call was begun, on this clock.
            end_ns: when its reply was there.
        """
        base_ns = start_ns + max(0, end_ns - start_ns - timings.total_ns) // 2
        for phase in timings.phases:
            begin_ns = min(base_ns + phase.start_offset_ns, end_ns)
            self._others.append(_Stretch(phase.phase, begin_ns, min(begin_ns + phase.duration_ns, end_ns)))

    def timings(self) -> Timings:
        """The reply's timings as they stand. Where calls ran side by side, the later one's phases are cut."""
        own = [_Stretch(phase.name, phase.start_ns, phase.end_ns) for phase in self.clock.phases]
        phases: list[PhaseTiming] = []
        free_ns = self.clock.start_ns
        for stretch in sorted([*own, *self._others], key=lambda stretch: stretch.start_ns):
            begin_ns = max(stretch.start_ns, free_ns)
            free_ns = max(stretch.end_ns, begin_ns)
            phases.append(
                PhaseTiming(
                    phase=stretch.name,
                    start_offset_ns=begin_ns - self.clock.start_ns,
                    duration_ns=free_ns - begin_ns,
                )
            )
        return Timings(total_ns=self.clock.total_ns(), phases=phases)

    def close(self, metrics: Metrics) -> None:
        """Tell the phases to spans and metrics."""
        self.clock.observe(metrics, self._model)
        self.clock.emit_spans(tracer(), self._span)


@dataclass(frozen=True, slots=True)
class _Stretch:
    name: str
    start_ns: int
    end_ns: int
