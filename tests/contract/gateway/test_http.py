"""What every route shares: ids, keys, limits, unknown routes, documents, timings, metrics."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, format_span_id, format_trace_id

from phasemesh.errors import Cancelled, Unauthenticated
from phasemesh.gateway.dialects.openai.schema import EmbeddingsResponse, ErrorResponse, ModelList
from phasemesh.gateway.dialects.rerank.schema import RerankErrorResponse, RerankResponse
from phasemesh.telemetry.tracing import TracingSettings, configure_tracing, shutdown_tracing
from tests.contract.gateway.conftest import CALLER_KEY
from tests.fakes.encoder_service import PHASES_NS
from tests.fakes.gateway_stack import Stack

EMBED = {"model": "bag", "input": "some text"}
RERANK = {"model": "cross", "query": "some", "documents": ["some text"]}


async def test_request_ids(stack: Stack) -> None:
    echoed = await stack.http.post("/v1/embeddings", json=EMBED, headers={"x-request-id": "abc-1"})
    assert echoed.headers["x-request-id"] == "abc-1"
    assert stack.encoder.calls[-1][0].request_id == "abc-1"
    for insane in (b"has space", b"x" * 129, b"caf\xe9"):
        made = await stack.http.post("/v1/embeddings", json=EMBED, headers={b"x-request-id": insane})
        assert re.fullmatch("[0-9a-f]{32}", made.headers["x-request-id"])
    assert (await stack.http.get("/nowhere")).headers["x-request-id"]


async def test_unknown_routes_and_methods(stack: Stack) -> None:
    missing = await stack.http.get("/v1/nothing")
    assert missing.status_code == 404
    assert missing.json() == {
        "error": {
            "message": "there is no route GET /v1/nothing",
            "type": "not_found_error",
            "param": None,
            "code": "route_not_found",
        }
    }
    wrong = await stack.http.get("/v1/embeddings")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert wrong.json()["error"]["message"] == "GET /v1/embeddings: use POST"
    rerank = await stack.http.get("/rerank")
    assert (rerank.status_code, rerank.json()["detail"]) == (405, "GET /rerank: use POST")


@pytest.mark.parametrize(("path", "key"), [("/v1/embeddings", "error"), ("/rerank", "detail")])
async def test_bodies_over_the_limit(stack: Stack, path: str, key: str) -> None:
    declared = await stack.http.post(path, content=b"x" * 200_001)
    assert (declared.status_code, key in declared.json()) == (413, True)

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(201):
            yield b" " * 1000

    chunked = await stack.http.post(path, content=chunks())
    assert (chunked.status_code, key in chunked.json()) == (413, True)
    assert "200000 bytes" in chunked.text
    assert not stack.encoder.calls


async def test_a_large_body_below_the_limit(stack: Stack) -> None:
    reply = await stack.http.post("/v1/rerank", json={**RERANK, "documents": ["word " * 39_000]})
    assert reply.status_code == 200


async def test_compressed_bodies_are_refused(stack: Stack) -> None:
    reply = await stack.http.post("/v1/embeddings", content=b"x", headers={"content-encoding": "gzip"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (415, "unsupported_encoding")


ROUTES = [
    ("POST", "/v1/embeddings"),
    ("POST", "/embeddings"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/bag"),
    ("POST", "/rerank"),
    ("GET", "/v1/collections"),
    ("POST", "/v1/collections/c/search"),
    ("GET", "/health"),
    ("GET", "/"),
    ("GET", "/docs"),
    ("GET", "/docs/swagger-ui.css"),
    ("GET", "/openapi.json"),
    ("GET", "/nowhere"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
async def test_every_route_needs_a_key_where_keys_are_set(keyed: Stack, method: str, path: str) -> None:
    none = await keyed.http.request(method, path)
    assert none.status_code == 401
    wrong = await keyed.http.request(method, path, headers={"authorization": "Bearer caller-key-1235"})
    assert wrong.status_code == 401
    if path == "/rerank":
        assert wrong.json()["message"] == wrong.json()["detail"] == "the API key is not known here"
    elif "collections" in path:
        assert (wrong.json()["error"]["code"], wrong.json()["error"]["reason"]) == (
            "UNAUTHENTICATED",
            "KEY_UNKNOWN",
        )
    else:
        assert wrong.json()["error"]["type"] == "authentication_error"
        assert wrong.json()["error"]["code"] == "invalid_api_key"
    assert CALLER_KEY not in none.text + wrong.text


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": f"Bearer {CALLER_KEY}"},
        {"authorization": f"bearer {CALLER_KEY}"},
        {"api-key": CALLER_KEY},
        {"x-api-key": CALLER_KEY},
    ],
)
async def test_the_encoder_learns_the_caller_from_the_key_alone(
    keyed: Stack, headers: dict[str, str]
) -> None:
    forged = {"x-phasemesh-tenant": "tenant-b", "x-phasemesh-caller": "root"}
    reply = await keyed.http.post("/v1/embeddings", json=EMBED, headers={**headers, **forged})
    assert reply.status_code == 200
    caller = keyed.encoder.calls[-1][0].caller
    assert (caller.name, caller.tenant) == ("team-a", "tenant-a")


async def test_health(stack: Stack) -> None:
    well = await stack.http.get("/health")
    assert (well.status_code, well.json()["status"], well.json()["retrieval"]) == (200, "ok", "ok")
    stack.readiness.draining = True
    try:
        draining = await stack.http.get("/health")
    finally:
        stack.readiness.draining = False
    assert (draining.status_code, draining.json()["status"]) == (503, "draining")


async def test_faults_inside_the_mesh_are_not_the_callers(stack: Stack) -> None:
    stack.encoder.failures.append(Unauthenticated("the key isn't known here"))
    refused = await stack.http.post("/v1/embeddings", json=EMBED)
    assert (refused.status_code, "key" in refused.text) == (500, False)
    stack.encoder.failures.append(Cancelled("draining"))
    dropped = await stack.http.post("/v1/embeddings", json=EMBED)
    assert (dropped.status_code, dropped.json()["error"]["code"]) == (503, "call_dropped")
    assert dropped.headers["retry-after"] == "1"


async def test_unknown_exceptions_show_an_id_and_no_internals(
    stack: Stack, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("secret internals")

    monkeypatch.setattr("phasemesh.gateway.dialects.openai.routes.parse_embeddings", broken)
    reply = await stack.http.post("/v1/embeddings", json=EMBED)
    assert reply.status_code == 500
    assert "secret" not in reply.text
    match = re.search("internal error ([0-9a-f]{16})", reply.json()["error"]["message"])
    assert match
    logged = [record for record in caplog.records if getattr(record, "error_id", "") == match[1]]
    assert logged
    assert logged[0].exc_info


async def test_docs_work_without_the_internet(stack: Stack) -> None:
    page = await stack.http.get("/docs")
    assert page.status_code == 200
    links = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(links) == 3
    for link in links:
        assert "//" not in link
        asset = await stack.http.get(f"/{link}")
        assert asset.status_code == 200
        assert len(asset.content) > 500
    assert "url: 'openapi.json'" in page.text


async def test_the_openapi_document(stack: Stack) -> None:
    document = (await stack.http.get("/openapi.json")).json()
    assert set(document["paths"]) == {
        "/v1/embeddings",
        "/v1/models",
        "/v1/models/{model}",
        "/v1/rerank",
        "/v1/collections",
        "/v1/collections/{name}",
        "/v1/collections/{name}/documents",
        "/v1/collections/{name}/documents/delete",
        "/v1/collections/{name}/documents/get",
        "/v1/collections/{name}/documents/count",
        "/v1/collections/{name}/documents/list",
        "/v1/collections/{name}/tag",
        "/v1/collections/{name}/restore",
        "/v1/collections/{name}/compact",
        "/v1/collections/{name}/search",
        "/v1/collections/{name}/rerank",
        "/v1/collections/{name}/explain",
        "/health",
    }
    schemas = document["components"]["schemas"]
    refs = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document)))
    assert refs <= set(schemas)
    post = document["paths"]["/v1/embeddings"]["post"]
    assert post["requestBody"]["content"]["application/json"]["schema"]["$ref"].endswith("EmbeddingsRequest")
    assert {"200", "400", "401", "404", "413", "429", "503"} == set(post["responses"])
    assert len(schemas["EmbeddingsRequest"]["properties"]["input"]["anyOf"]) == 4
    assert set(schemas["Filter"]["properties"]) == {
        "equals", "in", "range", "exists", "prefix", "all", "any", "not", "id_in",
    }  # fmt: skip


async def test_replies_are_what_the_document_says(stack: Stack) -> None:
    http = stack.http
    for encoding in ("float", "base64"):
        reply = await http.post("/v1/embeddings", json={**EMBED, "encoding_format": encoding})
        EmbeddingsResponse.model_validate_json(reply.content, strict=True, extra="forbid")
    rerank = await http.post("/v1/rerank", json={**RERANK, "return_documents": True})
    RerankResponse.model_validate_json(rerank.content, strict=True, extra="forbid")
    models = await http.get("/v1/models")
    ModelList.model_validate_json(models.content, strict=True, extra="forbid")
    error = await http.post("/v1/embeddings", json={})
    ErrorResponse.model_validate_json(error.content, strict=True, extra="forbid")
    error = await http.post("/v1/rerank", json={})
    RerankErrorResponse.model_validate_json(error.content, strict=True, extra="forbid")


@pytest.mark.parametrize(("path", "body"), [("/v1/embeddings", EMBED), ("/v1/rerank", RERANK)])
async def test_server_timing(stack: Stack, path: str, body: dict[str, Any]) -> None:
    reply = await stack.http.post(path, json=body)
    entries = dict(entry.split(";dur=") for entry in reply.headers["server-timing"].split(", "))
    assert list(entries) == ["gateway.validate", "gateway.rpc", *PHASES_NS, "gateway.render", "total"]
    for phase, duration_ns in PHASES_NS.items():
        assert float(entries[phase]) == duration_ns / 1e6
    own = sum(float(entries[name]) for name in ("gateway.validate", "gateway.rpc", "gateway.render"))
    assert own <= float(entries["total"]) + 0.002


async def test_metrics_by_route_template(stack: Stack) -> None:
    def count(route: str, status: str) -> float:
        labels = {"route": route, "status": status}
        name = "phasemesh_http_server_duration_seconds_count"
        return stack.metrics.registry.get_sample_value(name, labels) or 0.0

    def phases(phase: str) -> float:
        labels = {"phase": phase, "model": "bag"}
        return stack.metrics.registry.get_sample_value("phasemesh_phase_duration_seconds_count", labels) or 0

    before = count("/v1/models/{model:path}", "404"), count("unmatched", "404"), phases("gateway.rpc")
    await stack.http.get("/v1/models/no/such")
    await stack.http.get("/some/unknown/path")
    await stack.http.post("/v1/embeddings", json={"model": "bag-alias", "input": "x"})
    after = count("/v1/models/{model:path}", "404"), count("unmatched", "404"), phases("gateway.rpc")
    assert [new - old for old, new in zip(before, after, strict=True)] == [1, 1, 1]
    assert stack.metrics.registry.get_sample_value("phasemesh_inflight_requests") == 0


async def test_access_line(stack: Stack, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "phasemesh.access"):
        await stack.http.post("/v1/embeddings", json=EMBED, headers={"x-request-id": "line-1"})
    # The line is written after the reply has left.
    (record,) = [record for record in caplog.records if getattr(record, "request_id", "") == "line-1"
                 and record.name == "phasemesh.access" and hasattr(record, "route")]  # fmt: skip
    fields = vars(record)
    assert (fields["route"], fields["status"], fields["model"]) == ("/v1/embeddings", 200, "bag")
    assert (fields["items"], fields["tokens"], fields["caller"]) == (1, 4, "anonymous")
    assert "some text" not in str(fields)


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    configure_tracing(TracingSettings(), role="gateway", span_exporter=exporter)
    yield exporter
    shutdown_tracing()


async def test_spans(stack: Stack, spans: InMemorySpanExporter) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    await stack.http.post("/v1/embeddings", json=EMBED, headers={"traceparent": parent})
    (server,) = [span for span in spans.get_finished_spans() if span.kind is SpanKind.SERVER]
    assert server.name == "POST /v1/embeddings"
    assert server.context is not None
    assert server.parent is not None
    assert format_trace_id(server.context.trace_id) == "0af7651916cd43dd8448eb211c80319c"
    assert format_span_id(server.parent.span_id) == "b7ad6b7169203331"
    attributes = dict(server.attributes or {})
    wanted = {
        "http.request.method": "POST",
        "http.route": "/v1/embeddings",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "embeddings",
        "gen_ai.request.model": "bag",
        "gen_ai.response.model": "bag",
        "gen_ai.usage.input_tokens": 4,
        "gen_ai.embeddings.dimension.count": 16,
        "phasemesh.dialect": "openai",
    }
    assert {key: attributes.get(key) for key in wanted} == wanted
    assert "some text" not in str(attributes)
    children = [span for span in spans.get_finished_spans() if span is not server]
    assert {span.name for span in children} == {
        "gateway.validate",
        "gateway.rpc",
        "gateway.render",
        "phasemesh.v1.EncoderService/Embed",
    }
    assert server.start_time is not None
    assert server.end_time is not None
    for child in children:
        assert child.parent is not None
        assert child.parent.span_id == server.context.span_id
        assert child.start_time is not None
        assert child.end_time is not None
        assert server.start_time <= child.start_time <= child.end_time <= server.end_time


async def test_a_bad_request_is_no_error_of_the_server_span(
    stack: Stack, spans: InMemorySpanExporter
) -> None:
    await stack.http.post("/v1/embeddings", json={**EMBED, "model": "nobody"})
    (server,) = [span for span in spans.get_finished_spans() if span.kind is SpanKind.SERVER]
    assert server.status.is_unset
    assert (server.attributes or {})["error.type"] == "MODEL_NOT_FOUND"
