"""The clock of one request: phases noted as integers, told to spans, metrics, replies and headers alike.

Invariant: everything that reports a phase reports it from here, so the figures can't disagree. Noting a
phase costs two clock reads; spans are made once, at the end, and only if the trace is recorded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from opentelemetry import trace
from opentelemetry.util.types import AttributeValue

from phasemesh.telemetry.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Phase:
    """One stretch of a request.

    Attributes:
        name: as in `telemetry.names`.
        start_ns: monotonic start.
        end_ns: monotonic end, at or after the start.
        attributes: of the phase's span.
        links: span contexts that the phase's span links to.
    """

    name: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, AttributeValue]
    links: Sequence[trace.SpanContext]

    @property
    def duration_ns(self) -> int:
        """Nanoseconds from start to end."""
        return self.end_ns - self.start_ns


class PhaseClock:
    """Notes the phases of one request.

    Times are of a monotonic clock, anchored once to the wall clock so that spans made from them line up with
    other processes' spans.
    """

    def __init__(
        self,
        *,
        now_ns: Callable[[], int] = time.perf_counter_ns,
        unix_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._now_ns = now_ns
        # The wall clock is read first: an anchor that is early by the time between the two reads keeps
        # every phase inside a parent span that was started before.
        anchor_unix_ns = unix_ns()
        self.start_ns = now_ns()
        self._unix_offset_ns = anchor_unix_ns - self.start_ns
        self._phases: list[Phase] = []

    def now_ns(self) -> int:
        """The monotonic clock."""
        return self._now_ns()

    def unix_ns(self, monotonic_ns: int) -> int:
        """Wall-clock time of a monotonic time of this clock."""
        return monotonic_ns + self._unix_offset_ns

    @contextmanager
    def phase(self, name: str, **attributes: AttributeValue) -> Iterator[None]:
        """Note the body as a phase, also when it raises."""
        start_ns = self._now_ns()
        try:
            yield
        finally:
            self.note(name, start_ns, self._now_ns(), attributes)

    def note(
        self,
        name: str,
        start_ns: int,
        end_ns: int,
        attributes: Mapping[str, AttributeValue] | None = None,
        links: Sequence[trace.SpanContext] = (),
    ) -> None:
        """Note a phase between two monotonic times; one that would end before it starts is empty."""
        self._phases.append(Phase(name, start_ns, max(start_ns, end_ns), attributes or {}, links))

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Phases noted so far, by start."""
        return tuple(sorted(self._phases, key=lambda phase: phase.start_ns))

    def total_ns(self) -> int:
        """Nanoseconds since the request arrived."""
        return self._now_ns() - self.start_ns

    def emit_spans(self, tracer: trace.Tracer, parent: trace.Span | None = None) -> None:
        """Make a span of each phase under `parent` (default: the current span), if that is recording."""
        parent = parent or trace.get_current_span()
        if not parent.is_recording():
            return
        context = trace.set_span_in_context(parent)
        for phase in self.phases:
            span = tracer.start_span(
                phase.name,
                context=context,
                attributes=dict(phase.attributes),
                links=[trace.Link(link) for link in phase.links],
                start_time=self.unix_ns(phase.start_ns),
            )
            span.end(self.unix_ns(phase.end_ns))

    def observe(self, metrics: Metrics, model: str) -> None:
        """Put each phase into its histogram, with the current trace as exemplar."""
        for phase in self.phases:
            metrics.observe_phase(phase.name, model, phase.duration_ns / 1e9)


def server_timing(phases: Sequence[tuple[str, int]], total_ns: int) -> str:
    """Value of a `Server-Timing` header (W3C): `name;dur=milliseconds`, the total last.

    Args:
        phases: (name, nanoseconds) in order.
        total_ns: nanoseconds of the whole request.
    """
    entries = [f"{name};dur={duration_ns / 1e6:.3f}" for name, duration_ns in phases]
    return ", ".join([*entries, f"total;dur={total_ns / 1e6:.3f}"])
