"""Every row of the error tables over the wire, and what spans, metrics and logs say of it."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from phasemesh import errors
from phasemesh.config.settings import RpcSettings
from phasemesh.errors import InvalidArgument, NotFound, PhasemeshError, ResourceExhausted
from phasemesh.rpc.context import current_call
from phasemesh.rpc.status import to_error
from phasemesh.telemetry import tracing
from phasemesh.v1.encoder_pb2 import EmbedRequest, EmbedResponse, ScoreRequest
from phasemesh.v1.encoder_pb2_grpc import EncoderServiceStub
from tests.unit.rpc.harness import EMBED, Servicer, mesh

# error, gRPC code, HTTP status, span status; written out here, not read from the tables under test.
ROWS = [
    (errors.InvalidArgument, "INVALID_ARGUMENT", 400, StatusCode.UNSET),
    (errors.PayloadTooLarge, "INVALID_ARGUMENT", 413, StatusCode.UNSET),
    (errors.Unauthenticated, "UNAUTHENTICATED", 401, StatusCode.UNSET),
    (errors.PermissionDenied, "PERMISSION_DENIED", 403, StatusCode.UNSET),
    (errors.NotFound, "NOT_FOUND", 404, StatusCode.UNSET),
    (errors.AlreadyExists, "ALREADY_EXISTS", 409, StatusCode.UNSET),
    (errors.FailedPrecondition, "FAILED_PRECONDITION", 400, StatusCode.UNSET),
    (errors.Aborted, "ABORTED", 409, StatusCode.UNSET),
    (errors.ResourceExhausted, "RESOURCE_EXHAUSTED", 429, StatusCode.UNSET),
    (errors.Unavailable, "UNAVAILABLE", 503, StatusCode.ERROR),
    (errors.DeadlineExceeded, "DEADLINE_EXCEEDED", 504, StatusCode.ERROR),
    (errors.Cancelled, "CANCELLED", 499, StatusCode.UNSET),
    (errors.Unimplemented, "UNIMPLEMENTED", 501, StatusCode.ERROR),
    (errors.Internal, "INTERNAL", 500, StatusCode.ERROR),
    # Not a leaf, so what arrives is a bug of the server's.
    (errors.PhasemeshError, "UNKNOWN", 500, StatusCode.ERROR),
]


def server_span(spans: InMemorySpanExporter) -> ReadableSpan:
    (span,) = [span for span in spans.get_finished_spans() if span.kind is SpanKind.SERVER]
    return span


def status_of(call: grpc.aio.AioRpcError) -> Any:
    """google.rpc.Status of the trailers; raises if its code or message isn't the call's own."""
    as_stubs_have_it: Any = call
    return rpc_status.from_call(as_stubs_have_it)


def trailers_of(call: grpc.aio.AioRpcError) -> dict[str, str | bytes]:
    pairs: Any = call.trailing_metadata()
    return dict(pairs)


def raising(error: BaseException) -> Any:
    async def embed(request: EmbedRequest) -> EmbedResponse:
        raise error

    return embed


def test_rows_are_the_whole_tree() -> None:
    def below(kind: type[PhasemeshError]) -> set[type[PhasemeshError]]:
        return {kind}.union(*(below(child) for child in kind.__subclasses__()))

    ours = {kind for kind in below(PhasemeshError) if kind.__module__.startswith("phasemesh.errors")}
    assert {row[0] for row in ROWS} == ours == set(errors.GRPC_CODE) == set(errors.HTTP_STATUS)


@pytest.mark.parametrize(("kind", "code", "http", "span_status"), ROWS, ids=lambda value: str(value))
async def test_row(
    kind: type[PhasemeshError],
    code: str,
    http: int,
    span_status: StatusCode,
    spans: InMemorySpanExporter,
    caplog: pytest.LogCaptureFixture,
) -> None:
    error = kind("what is wrong")
    caplog.set_level(logging.INFO, "phasemesh.access")
    async with mesh(raising(error)) as m:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await m.raw().Embed(EmbedRequest(), timeout=5, metadata=[("x-request-id", "row-1")])
        call = raised.value
        rebuilt = to_error(call)
        counts = m.samples("phasemesh_rpc_server_duration_seconds_count")

    assert call.code().name == code
    status = status_of(call)
    assert status is not None
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    assert (info.domain, info.reason) == ("phasemesh", error.reason)
    assert trailers_of(call)["x-request-id"] == "row-1"
    if kind is not PhasemeshError:
        assert type(rebuilt) is kind
        assert rebuilt.reason == error.reason
    assert rebuilt.http_status == http
    if kind not in (errors.Internal, PhasemeshError):
        assert rebuilt.message == "what is wrong"

    attempts = 3 if code == "UNAVAILABLE" else 1
    assert counts == {(EMBED, code): attempts}
    served = [span for span in spans.get_finished_spans() if span.kind is SpanKind.SERVER]
    assert len(served) == attempts
    for span in served:
        assert span.name == EMBED
        assert span.status.status_code is span_status
        assert span.attributes is not None
        assert span.attributes["rpc.grpc.status_code"] == call.code().value[0]
        assert span.attributes["rpc.response.status_code"] == code
        assert span.attributes["rpc.method"] == EMBED
        assert span.attributes["phasemesh.request_id"] == "row-1"
        assert not span.events
    lines = [record for record in caplog.records if record.name == "phasemesh.access"]
    assert len(lines) == attempts
    line = vars(lines[0])
    assert (line["method"], line["code"], line["caller"], line["request_id"]) == (
        EMBED,
        code,
        "anonymous",
        "row-1",
    )
    assert line["ms"] >= 0


async def test_field_and_retry_travel() -> None:
    async with mesh(raising(InvalidArgument("bad", reason="TOO_LONG", field="inputs[3].text"))) as m:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await m.raw().Embed(EmbedRequest(), timeout=5)
        status = status_of(raised.value)
        assert status is not None
        bad = error_details_pb2.BadRequest()
        assert status.details[1].Unpack(bad)
        assert bad.field_violations[0].field == "inputs[3].text"
        with pytest.raises(InvalidArgument) as ours:
            await m.embed()
        assert (ours.value.field, ours.value.reason, ours.value.message) == (
            "inputs[3].text",
            "TOO_LONG",
            "bad",
        )

    async with mesh(raising(ResourceExhausted("later", retry_after_s=2.25))) as m:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await m.raw().Embed(EmbedRequest(), timeout=5)
        status = status_of(raised.value)
        assert status is not None
        retry = error_details_pb2.RetryInfo()
        assert status.details[1].Unpack(retry)
        assert retry.retry_delay.ToMilliseconds() == 2250
        with pytest.raises(ResourceExhausted) as later:
            await m.embed()
        assert later.value.retry_after_s == 2.25


async def test_bug_leaks_nothing(spans: InMemorySpanExporter, caplog: pytest.LogCaptureFixture) -> None:
    async with mesh(raising(ValueError("secret text of a customer"))) as m:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await m.raw().Embed(EmbedRequest(), timeout=5)
        with pytest.raises(errors.Internal) as ours:
            await m.embed()
    call = raised.value
    assert call.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in repr(call) + repr(call.trailing_metadata())
    assert "secret" not in repr([span.to_json() for span in spans.get_finished_spans()])
    for span in spans.get_finished_spans():
        if span.kind is SpanKind.SERVER:
            assert span.status.status_code is StatusCode.ERROR
            assert span.attributes is not None
            assert span.attributes["rpc.grpc.status_code"] == 13
    # The id that the caller has finds the cause in the log.
    ids = {vars(record).get("error_id"): record for record in caplog.records}
    assert ours.value.error_id in ids
    assert ours.value.error_id in ours.value.message
    assert "secret" in str(ids[ours.value.error_id].exc_info)


async def test_internal_of_our_own_keeps_its_words_for_the_log(caplog: pytest.LogCaptureFixture) -> None:
    error = errors.Internal("the password is swordfish", error_id="0123456789abcdef")
    async with mesh(raising(error)) as m:
        with pytest.raises(errors.Internal) as ours:
            await m.embed()
    assert "swordfish" not in ours.value.message
    assert ours.value.error_id == "0123456789abcdef"
    assert any(getattr(record, "detail", "") == "the password is swordfish" for record in caplog.records)


@pytest.mark.parametrize(
    "message",
    [
        "x" * 200_000,
        "é" * 200_000,
        "\udc80 lone surrogate",
        "NUL \x00 and\nnew line",
        "",
        "\U0001f600" * 9000,
    ],
    ids=["long", "long, two bytes", "surrogate", "control", "empty", "long, four bytes"],
)
async def test_any_message_can_be_sent(message: str) -> None:
    error = InvalidArgument(message, field="f" * 100_000, reason="R" * 1000)
    async with mesh(raising(error)) as m:
        with pytest.raises(InvalidArgument) as ours:
            await m.embed()
    assert len(ours.value.message.encode()) <= 1000
    assert len(ours.value.field.encode()) <= 300


async def test_subclass_of_a_leaf_has_its_row() -> None:
    class Special(NotFound):
        pass

    async with mesh(raising(Special("gone"))) as m:
        with pytest.raises(NotFound):
            await m.embed()


async def test_method_that_a_servicer_lacks_is_unimplemented() -> None:
    async with mesh() as m:
        with pytest.raises(errors.Unimplemented, match="Score isn't implemented"):
            await m.client.call(m.target, EncoderServiceStub, "Score", ScoreRequest(), timeout_s=5)
    # A handler's own NotImplementedError is a bug, not an answer.
    async with mesh(raising(NotImplementedError("branch"))) as m:
        with pytest.raises(errors.Internal):
            await m.embed()


async def test_deadline_and_cancel_are_told_apart(spans: InMemorySpanExporter) -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def embed(request: EmbedRequest) -> EmbedResponse:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError

    async with mesh(embed) as m:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await m.raw().Embed(EmbedRequest(), timeout=0.1)
        assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await asyncio.wait_for(ended.wait(), 5)
        started.clear()
        ended.clear()
        call = m.raw().Embed(EmbedRequest(), timeout=20)
        await asyncio.wait_for(started.wait(), 5)
        call.cancel()
        await asyncio.wait_for(ended.wait(), 5)
        # The span ends just after the handler does.
        while len(spans.get_finished_spans()) < 2:
            await asyncio.sleep(0)
        counts = m.samples("phasemesh_rpc_server_duration_seconds_count")
        assert m.samples("phasemesh_inflight_requests") == {(): 0}
    assert counts == {(EMBED, "DEADLINE_EXCEEDED"): 1, (EMBED, "CANCELLED"): 1}
    late, left = spans.get_finished_spans()
    assert late.attributes is not None
    assert left.attributes is not None
    assert late.attributes["rpc.grpc.status_code"] == 4
    assert late.status.status_code is StatusCode.ERROR
    assert left.attributes["rpc.grpc.status_code"] == 1
    assert not late.events
    assert not left.events


async def test_span_is_ours_and_parent_of_handler_spans(spans: InMemorySpanExporter) -> None:
    async def embed(request: EmbedRequest) -> EmbedResponse:
        with tracing.tracer().start_as_current_span("inside"):
            return EmbedResponse(model="x")

    async with mesh(embed) as m:
        await m.embed()
    by_name = {(span.name, span.kind): span for span in spans.get_finished_spans()}
    inside, server, client = (
        by_name["inside", SpanKind.INTERNAL],
        by_name[EMBED, SpanKind.SERVER],
        by_name[EMBED, SpanKind.CLIENT],
    )
    assert len(by_name) == 3
    assert server.resource.attributes["service.name"] == "phasemesh-test"
    assert inside.parent is not None
    assert server.parent is not None
    assert server.context is not None
    assert client.context is not None
    assert inside.parent.span_id == server.context.span_id
    assert server.parent.span_id == client.context.span_id
    assert server.context.trace_id == client.context.trace_id
    assert server.attributes is not None
    assert server.attributes["rpc.response.status_code"] == "OK"


async def test_request_id_is_taken_or_made() -> None:
    seen: list[str] = []

    async def embed(request: EmbedRequest) -> EmbedResponse:
        seen.append(current_call().request_id)
        return EmbedResponse()

    async with mesh(embed) as m:
        stub = m.raw()
        for given in ("a" * 128, "a" * 129, "with space", "", "ok-1"):
            call = stub.Embed(EmbedRequest(), timeout=5, metadata=[("x-request-id", given)])
            await call
            assert dict(await call.trailing_metadata())["x-request-id"] == seen[-1]
    assert seen[0] == "a" * 128
    assert seen[4] == "ok-1"
    assert all(len(made) == 32 for made in seen[1:4])


async def test_unknown_methods_make_no_label_values() -> None:
    async with mesh() as m:
        with pytest.raises(grpc.aio.AioRpcError, match="has no method MadeUpByACaller"):
            await m.bare("/phasemesh.v1.EncoderService/MadeUpByACaller")
        assert m.samples("phasemesh_rpc_server_duration_seconds_count") == {("other", "UNIMPLEMENTED"): 1}


async def test_a_peer_that_speaks_no_phasemesh() -> None:
    """Statuses without our details: gRPC's own, and a foreign server's."""

    def bare(code: grpc.StatusCode, details: str) -> PhasemeshError:
        return to_error(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details, None))

    for code in grpc.StatusCode:
        rebuilt = bare(code, "ipv4:10.0.0.7:5000 said no")
        if code.name in ("UNAVAILABLE", "UNKNOWN", "INTERNAL", "DATA_LOSS", "DEADLINE_EXCEEDED"):
            assert "10.0.0.7" not in rebuilt.message
    too_large = bare(grpc.StatusCode.RESOURCE_EXHAUSTED, "Received message larger than max (9 vs. 4)")
    assert isinstance(too_large, errors.PayloadTooLarge)
    full = bare(grpc.StatusCode.RESOURCE_EXHAUSTED, "Concurrent RPC limit exceeded!")
    assert isinstance(full, ResourceExhausted)
    assert full.retry_after_s == 1.0
    garbage = grpc.aio.Metadata(("grpc-status-details-bin", b"\xff\xff"))
    call = grpc.aio.AioRpcError(grpc.StatusCode.NOT_FOUND, grpc.aio.Metadata(), garbage, "gone", None)
    assert isinstance(to_error(call), NotFound)


async def test_success_says_ok(spans: InMemorySpanExporter) -> None:
    async def embed(request: EmbedRequest) -> EmbedResponse:
        return EmbedResponse(model=request.model)

    async with mesh(servicer=Servicer(embed), rpc=RpcSettings(drain_s=0)) as m:
        assert (await m.embed(EmbedRequest(model="abc"))).model == "abc"
        assert m.samples("phasemesh_rpc_server_duration_seconds_count") == {(EMBED, "OK"): 1}
    assert server_span(spans).status.status_code is StatusCode.UNSET
