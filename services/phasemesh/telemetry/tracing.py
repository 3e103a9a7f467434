"""One tracer provider per process, set up in that process's start-up and flushed in its drain.

Nothing else of OpenTelemetry's global state is touched, so that a test may set up as many as it likes.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    ConsoleSpanExporter,
    SimpleSpanProcessor,
    SpanExporter,
)
from opentelemetry.sdk.trace.sampling import Decision, ParentBased, Sampler, SamplingResult, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import Attributes

from phasemesh.telemetry import names

#: Most requests in one batch, and so most links of its span; the SDK silently keeps 128 by default.
MAX_LINKS = 4096
#: Longest time that the end of a process waits for its last spans to be taken, seconds.
FLUSH_S = 3.0

logger = logging.getLogger(__name__)

_PROPAGATOR = TraceContextTextMapPropagator()


@dataclass(frozen=True, slots=True)
class TracingSettings:
    """Where spans go; crosses to worker processes.

    Attributes:
        exporter: "otlp" (OTLP over HTTP/protobuf), "console" (stderr) or "none".
        endpoint: base URL of the collector, e.g. "http://localhost:4318"; None leaves it to the standard
            `OTEL_EXPORTER_OTLP_*` variables.
        sample_ratio: share of traces begun here that are recorded; a caller's own decision is kept.
        schedule_delay_ms: longest time a finished span waits before it is exported.
    """

    exporter: Literal["otlp", "console", "none"] = "none"
    endpoint: str | None = None
    sample_ratio: float = 1.0
    schedule_delay_ms: int = 2000


class _BatchSampler(Sampler):
    """Samples a batch's trace if any member's is, and leaves everything else to `ParentBased`."""

    def __init__(self, ratio: float) -> None:
        self._requests = ParentBased(TraceIdRatioBased(ratio))

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: trace.SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[trace.Link] | None = None,
        trace_state: trace.TraceState | None = None,
    ) -> SamplingResult:
        member_sampled = (attributes or {}).get(names.BATCH_SAMPLED)
        if member_sampled is not None:
            decision = Decision.RECORD_AND_SAMPLE if member_sampled else Decision.DROP
            return SamplingResult(decision, attributes, trace_state)
        return self._requests.should_sample(
            parent_context, trace_id, name, kind, attributes, links, trace_state
        )

    def get_description(self) -> str:
        return "BatchSampler"


class _State:
    """The process's provider; a holder, so that no module rebinds a global."""

    provider: trace.TracerProvider = trace.NoOpTracerProvider()


def configure_tracing(
    settings: TracingSettings,
    *,
    role: str,
    instance: str | None = None,
    span_exporter: SpanExporter | None = None,
) -> None:
    """Set up this process's provider, replacing (and flushing) an earlier one.

    Args:
        settings: where spans go.
        role: "gateway", "encoder", "encoder-worker", ...; becomes `service.name` phasemesh-<role>.
        instance: `service.instance.id`; host and process id by default.
        span_exporter: a test's exporter; spans reach it at once.
    """
    shutdown_tracing()
    if span_exporter is None and settings.exporter == "none":
        return
    resource = Resource.create(
        {
            "service.name": f"phasemesh-{role}",
            "service.instance.id": instance or f"{socket.gethostname()}-{os.getpid()}",
            names.PROCESS_PID: os.getpid(),
        }
    )
    provider = TracerProvider(
        sampler=_BatchSampler(settings.sample_ratio),
        resource=resource,
        span_limits=SpanLimits(max_links=MAX_LINKS),
        shutdown_on_exit=False,
    )
    if span_exporter is not None:
        provider.add_span_processor(SimpleSpanProcessor(span_exporter))
    elif settings.exporter == "console":
        provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter(formatter=_one_line)))
    else:
        provider.add_span_processor(
            BatchSpanProcessor(
                _otlp_exporter(settings.endpoint), schedule_delay_millis=settings.schedule_delay_ms
            )
        )
    _State.provider = provider


def shutdown_tracing() -> None:
    """Flush and drop this process's provider, within `FLUSH_S`; spans are no-ops afterwards."""
    provider, _State.provider = _State.provider, trace.NoOpTracerProvider()
    if not isinstance(provider, TracerProvider):
        return
    # In a thread of its own, because a collector that is away must not hold up the end of a process.
    flushing = threading.Thread(target=provider.shutdown, name="flush-spans", daemon=True)
    flushing.start()
    flushing.join(FLUSH_S)
    if flushing.is_alive():
        logger.warning("spans are lost: the collector did not take them in time", extra={"seconds": FLUSH_S})


def tracer_provider() -> trace.TracerProvider:
    """The process's provider, for libraries that take one."""
    return _State.provider


def tracer() -> trace.Tracer:
    """The process's tracer."""
    return _State.provider.get_tracer("phasemesh")


def inject(span: trace.Span | None = None) -> dict[str, str]:
    """W3C trace context of `span` (default: the current one) as a carrier; empty if there is none."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, None if span is None else trace.set_span_in_context(span))
    return carrier


def extract(carrier: Mapping[str, str]) -> Context:
    """Context to be the parent of spans made for `carrier`; empty if that holds no trace context."""
    return _PROPAGATOR.extract(carrier, Context())


def _otlp_exporter(endpoint: str | None) -> SpanExporter:
    # Imported here: it pulls in requests, which only exporting processes should pay for.
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces" if endpoint else None)


def _one_line(span: ReadableSpan) -> str:
    return str(span.to_json(indent=None)) + os.linesep
