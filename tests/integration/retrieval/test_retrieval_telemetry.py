"""Times of a request: in the reply, in spans and in metrics alike."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from phasemesh.telemetry import names
from phasemesh.telemetry.tracing import TracingSettings, configure_tracing, shutdown_tracing, tracer
from phasemesh.v1 import retrieval_pb2 as pb
from tests.unit.retrieval.stack import (
    ENCODE_NS,
    MODEL,
    Stack,
    encode_timings,
    stack,
)


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    configure_tracing(TracingSettings(), role="test", span_exporter=exporter)
    yield exporter
    shutdown_tracing()


async def test_timings_hold_every_phase_once_in_order_without_overlap(served: Stack, name: str) -> None:
    await served.create(name, model=MODEL)
    written = await served.upsert(pb.Document(id="a", text="some words"), name=name)
    assert [phase.phase for phase in written.timings.phases] == [*ENCODE_NS, "retrieval.commit"]
    found = await served.search("some words", name=name, projection=pb.Projection(text=True))
    phases = list(found.timings.phases)
    assert [phase.phase for phase in phases] == [
        "search.plan", *ENCODE_NS, *names.SCORE_PHASES, "search.merge",
    ]  # fmt: skip
    told = {phase.phase: phase.duration_ns for phase in encode_timings().phases}
    assert {phase.phase: phase.duration_ns for phase in phases if phase.phase in told} == told
    ends = 0
    for phase in phases:
        assert phase.start_offset_ns >= ends
        ends = phase.start_offset_ns + phase.duration_ns
    assert ends <= found.timings.total_ns

    def count(phase: str) -> float:
        labels = {"phase": phase, "model": MODEL}
        return served.metrics.registry.get_sample_value("phasemesh_phase_duration_seconds_count", labels) or 0

    before = {phase: count(phase) for phase in ("search.plan", "search.merge")}
    await served.search("some words", name=name)
    assert {phase: count(phase) for phase in before} == {phase: was + 1 for phase, was in before.items()}
    # Others' phases are in others' metrics.
    assert count("encode.forward") == 0


async def test_spans_agree_with_the_timings_in_one_trace(tmp_path: Path, spans: InMemorySpanExporter) -> None:
    async with stack(tmp_path) as served:
        await served.create(model=MODEL)
        await served.upsert(*(pb.Document(id=f"{i}", text=f"word{i} " * 9) for i in range(20)))
        spans.clear()
        with tracer().start_as_current_span("caller"):
            found = await served.search("word1", 5)
    finished = spans.get_finished_spans()
    by_name: dict[str, list[ReadableSpan]] = {}
    for span in finished:
        by_name.setdefault(span.name, []).append(span)
    assert len({span.context.trace_id for span in finished if span.context}) == 1
    (served_span,) = (
        span for span in by_name["phasemesh.v1.RetrievalService/Search"] if span.kind.name == "SERVER"
    )
    told = {phase.phase: phase.duration_ns for phase in found.timings.phases}
    for phase in ("search.plan", "search.merge"):
        (span,) = by_name[phase]
        assert duration_ns(span) == told[phase]
        assert span.parent is not None
        assert served_span.context is not None
        assert span.parent.span_id == served_span.context.span_id
        (begin, end), (first, last) = times_ns(span), times_ns(served_span)
        assert first <= begin <= end <= last
    # Each scorer tells of its own; the reply has those of the one that was waited for.
    assert len(by_name["score.maxsim"]) == 2
    assert told["score.maxsim"] in [duration_ns(span) for span in by_name["score.maxsim"]]


def times_ns(span: ReadableSpan) -> tuple[int, int]:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time, span.end_time


def duration_ns(span: ReadableSpan) -> int:
    start, end = times_ns(span)
    return end - start
