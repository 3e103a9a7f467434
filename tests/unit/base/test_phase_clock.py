"""The phase clock: spans, histograms and headers tell the same times."""

from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from phasemesh.telemetry import names, tracing
from phasemesh.telemetry.metrics import Metrics
from phasemesh.telemetry.phases import PhaseClock, server_timing


class Ticker:
    """A clock that is set by hand, nanoseconds."""

    def __init__(self) -> None:
        self.now = 1_000

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    memory = InMemorySpanExporter()
    tracing.configure_tracing(tracing.TracingSettings(), role="test", span_exporter=memory)
    yield memory
    tracing.shutdown_tracing()


def clock_with_two_phases(ticker: Ticker) -> PhaseClock:
    clock = PhaseClock(now_ns=ticker, unix_ns=lambda: 5_000_000)
    ticker.now = 2_000
    with clock.phase(names.PHASE_TOKENIZE):
        ticker.now = 5_000
    clock.note(names.PHASE_QUEUE, 5_000, 9_000)
    ticker.now = 10_000
    return clock


def test_phases_and_total() -> None:
    clock = clock_with_two_phases(Ticker())
    assert [(p.name, p.start_ns, p.duration_ns) for p in clock.phases] == [
        ("encode.tokenize", 2_000, 3_000),
        ("encode.queue", 5_000, 4_000),
    ]
    assert clock.total_ns() == 9_000


def test_a_phase_is_noted_when_its_body_raises() -> None:
    ticker = Ticker()
    clock = PhaseClock(now_ns=ticker, unix_ns=lambda: 0)

    def fail_in_a_phase() -> None:
        with clock.phase("x"):
            ticker.now += 7
            raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        fail_in_a_phase()
    assert [p.duration_ns for p in clock.phases] == [7]


def test_spans_have_the_clock_s_times_and_links(exporter: InMemorySpanExporter) -> None:
    clock = clock_with_two_phases(Ticker())
    with tracing.tracer().start_as_current_span("batch") as batch:
        link = batch.get_span_context()
    clock.note(names.PHASE_FORWARD, 9_000, 9_500, {"k": 1}, [link])
    with tracing.tracer().start_as_current_span("server") as server:
        clock.emit_spans(tracing.tracer())
    spans = {span.name: span for span in exporter.get_finished_spans()}
    tokenize = spans["encode.tokenize"]
    assert (tokenize.start_time, tokenize.end_time) == (5_001_000, 5_004_000)
    assert tokenize.parent is not None
    assert tokenize.parent.span_id == server.get_span_context().span_id
    forward = spans["encode.forward"]
    assert [got.context.span_id for got in forward.links] == [link.span_id]
    assert forward.attributes == {"k": 1}


def test_no_spans_for_a_trace_that_is_not_recorded(exporter: InMemorySpanExporter) -> None:
    clock_with_two_phases(Ticker()).emit_spans(tracing.tracer())
    assert exporter.get_finished_spans() == ()


def test_header_is_the_w3c_form() -> None:
    clock = clock_with_two_phases(Ticker())
    header = server_timing([(p.name, p.duration_ns * 1000) for p in clock.phases], 9_000_000)
    assert header == "encode.tokenize;dur=3.000, encode.queue;dur=4.000, total;dur=9.000"


def test_histogram_has_the_phase_and_an_exemplar(exporter: InMemorySpanExporter) -> None:
    metrics = Metrics()
    clock = clock_with_two_phases(Ticker())
    with tracing.tracer().start_as_current_span("server") as server:
        clock.observe(metrics, "m")
    value = metrics.registry.get_sample_value
    labels = {"phase": "encode.queue", "model": "m"}
    assert value("phasemesh_phase_duration_seconds_sum", labels) == pytest.approx(4e-6)
    assert value("phasemesh_phase_duration_seconds_count", labels) == 1
    trace_id = format(server.get_span_context().trace_id, "032x")
    assert f'# {{trace_id="{trace_id}"}}' in metrics.exposition().decode()


def test_series_exist_at_zero() -> None:
    metrics = Metrics()
    metrics.start_at_zero(names.ENCODE_PHASES, ["a", "b"])
    value = metrics.registry.get_sample_value
    for model in ("a", "b"):
        assert value("phasemesh_queue_tokens", {"model": model}) == 0
        for phase in names.ENCODE_PHASES:
            assert value("phasemesh_phase_duration_seconds_count", {"phase": phase, "model": model}) == 0
    assert value("phasemesh_rejected_total", {"reason": "QUEUE_FULL"}) == 0
    text = metrics.exposition().decode()
    assert text.endswith("# EOF\n")
    assert len(list(text_string_to_metric_families(text.replace("# EOF\n", "")))) > 10


def test_more_links_than_the_sdk_s_default_are_kept(exporter: InMemorySpanExporter) -> None:
    contexts = []
    for _ in range(200):
        with tracing.tracer().start_as_current_span("member") as span:
            contexts.append(span.get_span_context())
    clock = PhaseClock()
    clock.note("batch", clock.start_ns, clock.start_ns, links=contexts)
    with tracing.tracer().start_as_current_span("server"):
        clock.emit_spans(tracing.tracer())
    assert len(next(s for s in exporter.get_finished_spans() if s.name == "batch").links) == 200


@pytest.mark.parametrize("sampled", [True, False])
def test_a_batch_is_sampled_if_a_member_is(sampled: bool) -> None:
    memory = InMemorySpanExporter()
    ratio = 0.0 if sampled else 1.0  # the opposite of what the attribute asks for
    tracing.configure_tracing(tracing.TracingSettings(sample_ratio=ratio), role="test", span_exporter=memory)
    tracing.tracer().start_span(names.SPAN_BATCH, attributes={names.BATCH_SAMPLED: sampled}).end()
    tracing.shutdown_tracing()
    assert len(memory.get_finished_spans()) == sampled


def test_trace_context_round_trips(exporter: InMemorySpanExporter) -> None:
    with tracing.tracer().start_as_current_span("a") as span:
        carrier = tracing.inject()
    with tracing.tracer().start_as_current_span("b", context=tracing.extract(carrier)) as child:
        assert child.get_span_context().trace_id == span.get_span_context().trace_id
    assert tracing.inject() == {}
