"""One trace from the HTTP request to the Ray actor's process, with every phase, and the linked batch trace."""

import os
import re

import httpx
import pytest

from phasemesh.telemetry import names
from tests.fakes.collector import Collector, SeenSpan
from tests.mesh import Mesh

pytestmark = [pytest.mark.ray, pytest.mark.slow]

CLIENT, SERVER = 3, 2  # opentelemetry.proto.trace.v1.Span.SpanKind


def traceparent() -> tuple[str, str]:
    trace_id = os.urandom(16).hex()
    return trace_id, f"00-{trace_id}-{os.urandom(8).hex()}-01"


def ask(mesh: Mesh, header: str) -> httpx.Response:
    body = {"model": "minilm", "input": ["one text", "and another one, which is longer"]}
    reply = httpx.post(f"{mesh.rest}/v1/embeddings", json=body, headers={"traceparent": header}, timeout=30)
    assert reply.status_code == 200, reply.text
    return reply


@pytest.fixture(scope="module")
def seen(mesh: Mesh, collector: Collector) -> tuple[str, httpx.Response, list[SeenSpan]]:
    trace_id, header = traceparent()
    reply = ask(mesh, header)

    def complete(spans: list[SeenSpan]) -> bool:
        ours = {span.span_id for span in spans if span.trace_id == trace_id}
        batches = [span for span in spans if span.name == names.SPAN_BATCH and span.links & ours]
        done = {span.trace_id for span in spans if span.name == names.SPAN_WORKER}
        http = [span for span in spans if span.trace_id == trace_id and span.service == "phasemesh-gateway"]
        return len(http) >= 5 and bool(batches) and all(batch.trace_id in done for batch in batches)

    return trace_id, reply, collector.wait_for(complete)


def test_one_trace_holds_every_phase(seen: tuple[str, httpx.Response, list[SeenSpan]]) -> None:
    trace_id, _, spans = seen
    ours = [span for span in spans if span.trace_id == trace_id]
    found = sorted(span.name for span in ours if span.name in (*names.ENCODE_PHASES, *names.GATEWAY_PHASES))
    assert found == sorted([*names.ENCODE_PHASES, *names.GATEWAY_PHASES])
    servers = sorted((span.service, span.name) for span in ours if span.kind == SERVER)
    assert servers == [
        ("phasemesh-encoder", "phasemesh.v1.EncoderService/Embed"),
        ("phasemesh-gateway", "POST /v1/embeddings"),
    ]
    assert [span.service for span in ours if span.kind == CLIENT] == ["phasemesh-gateway"]


def test_children_lie_inside_their_parents(seen: tuple[str, httpx.Response, list[SeenSpan]]) -> None:
    trace_id, _, spans = seen
    by_id = {span.span_id: span for span in spans}
    children = [span for span in spans if span.trace_id == trace_id and span.parent_id in by_id]
    assert len(children) >= 9  # all but the HTTP server span, whose parent is the caller's
    for child in children:
        parent = by_id[child.parent_id]
        assert parent.trace_id == trace_id
        assert parent.start_ns <= child.start_ns <= child.end_ns <= parent.end_ns, (parent, child)


def test_batch_trace_is_linked_both_ways(seen: tuple[str, httpx.Response, list[SeenSpan]]) -> None:
    trace_id, _, spans = seen
    (server,) = [
        s for s in spans if s.trace_id == trace_id and s.kind == SERVER and s.service == "phasemesh-encoder"
    ]
    (forward,) = [s for s in spans if s.trace_id == trace_id and s.name == names.PHASE_FORWARD]
    batches = [s for s in spans if s.name == names.SPAN_BATCH and s.span_id in forward.links]
    assert batches
    assert forward.links == {batch.span_id for batch in batches}
    for batch in batches:
        assert batch.trace_id != trace_id
        assert batch.parent_id == ""
        assert server.span_id in batch.links
    assert sum(int(str(batch.attributes[names.BATCH_ITEMS])) for batch in batches) == 2


def test_worker_spans_come_from_the_actor_s_process(
    mesh: Mesh, seen: tuple[str, httpx.Response, list[SeenSpan]]
) -> None:
    trace_id, _, spans = seen
    (forward,) = [s for s in spans if s.trace_id == trace_id and s.name == names.PHASE_FORWARD]
    batches = {s.trace_id: s for s in spans if s.span_id in forward.links}
    workers = [s for s in spans if s.trace_id in batches and s.name == names.SPAN_WORKER]
    assert workers
    pids = {mesh.report("gateway").pid, mesh.report("encoder").pid}
    for worker in workers:
        assert worker.parent_id == batches[worker.trace_id].span_id
        assert worker.pid not in pids
        parts = sorted(s.name for s in spans if s.parent_id == worker.span_id)
        assert parts == sorted(
            [names.SPAN_WORKER_TRANSFER, names.SPAN_WORKER_COMPUTE, names.SPAN_WORKER_POOL]
        )


def test_header_and_spans_tell_the_same_times(seen: tuple[str, httpx.Response, list[SeenSpan]]) -> None:
    trace_id, reply, spans = seen
    header = dict(re.findall(r"([a-z._]+);dur=([0-9.]+)", reply.headers["server-timing"]))
    for name in (*names.ENCODE_PHASES, *names.GATEWAY_PHASES):
        (span,) = [s for s in spans if s.trace_id == trace_id and s.name == name]
        assert float(header[name]) == pytest.approx((span.end_ns - span.start_ns) / 1e6, abs=0.002)
    assert sum(float(header[name]) for name in names.ENCODE_PHASES) <= float(header[names.PHASE_RPC])
    assert sum(float(header[name]) for name in names.GATEWAY_PHASES) <= float(header["total"])


def test_nothing_is_traced_that_the_caller_did_not_sample(mesh: Mesh, collector: Collector) -> None:
    trace_id, header = traceparent()
    ask(mesh, header[:-2] + "00")
    later, sampled = traceparent()
    ask(mesh, sampled)
    spans = collector.wait_for(lambda spans: any(span.trace_id == later for span in spans))
    assert not [span for span in spans if span.trace_id == trace_id]


def test_texts_stay_out_of_spans(seen: tuple[str, httpx.Response, list[SeenSpan]]) -> None:
    _, _, spans = seen
    assert not [span for span in spans if "and another one" in repr(span.attributes)]


def test_metrics_and_health_on_the_admin_ports(mesh: Mesh) -> None:
    for role in ("gateway", "encoder"):
        assert mesh.admin(role, "/livez")[0] == 200
        assert mesh.admin(role, "/readyz")[0] == 200
        assert mesh.admin(role, "/nowhere")[0] == 404
    status, text = mesh.admin("encoder", "/metrics")
    assert status == 200
    assert 'phasemesh_phase_duration_seconds_count{model="cross",phase="encode.forward"}' in text
    assert re.search(r'phasemesh_queue_tokens\{model="minilm"\} 0\.0', text)
    assert re.search(r'phasemesh_replicas\{state="ready"\} 2\.0', text)
    assert re.search(r'phase="encode.forward"\} [0-9.]+ # \{trace_id="[0-9a-f]{32}"\}', text)
    assert httpx.get(f"{mesh.rest}/metrics").status_code == 404
