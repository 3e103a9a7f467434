"""The native dialect: collections under `/v1/collections`, one route per call of the RetrievalService.

Names are the contract's. An upsert answers document by document: one that is wrong has an `error` in its
place and the others are stored; only if every one is wrong does the request fail. `GET` and `DELETE` act on
collections; everything about documents is a `POST`, because ids and vectors don't fit into addresses.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from google.protobuf.message import Message
from pydantic import BaseModel
from starlette.responses import Response

from phasemesh.config.settings import GatewaySettings
from phasemesh.errors import PhasemeshError
from phasemesh.gateway.bodies import parse_object, read_body
from phasemesh.gateway.cancel import unless_disconnected
from phasemesh.gateway.dialects.native import read, render, schema
from phasemesh.gateway.docs import body_of, errors_of
from phasemesh.gateway.exchange import exchange_of
from phasemesh.gateway.faults import Dialect
from phasemesh.gateway.replies import json_reply, renamed_fields
from phasemesh.gateway.retrieval import Retrieval
from phasemesh.telemetry import names
from phasemesh.v1 import retrieval_pb2 as pb

PREFIX = "/v1/collections"
_SPEC_PATH = re.compile(r"\bspec\.")
_DOCUMENT_PATH = re.compile(r"\bdocuments\[(\d+)\]")


@dataclass(frozen=True, slots=True)
class Call:
    """A request that was read.

    Attributes:
        request: what goes to the retrieval service.
        render: its reply → the body.
        rename: the wire's paths in a text → the body's.
        items: documents or ids of the request.
    """

    request: Message
    render: Callable[[Any], bytes]
    rename: Callable[[str], str] = str
    items: int = 0


@dataclass(frozen=True, slots=True)
class Route:
    """One route.

    Attributes:
        verb: HTTP method.
        path: below `PREFIX`.
        method: of the RetrievalService.
        reply: type of its reply.
        read: (body, collection, query) → call.
        answer: the documented reply.
        about: for the API page: a summary, then what there is to know.
        body: the documented body; None for routes without one.
        optional_body: an absent body is an empty object.
    """

    verb: str
    path: str
    method: str
    reply: type[Message]
    read: Callable[[Mapping[str, Any], str, Mapping[str, str]], Call]
    answer: type[BaseModel]
    about: tuple[str, str]
    body: type[BaseModel] | None = None
    optional_body: bool = False


def error_body(error: PhasemeshError, status: int, request_id: str) -> dict[str, object]:
    """The native error: code of gRPC, stable reason, words, path of the field."""
    return {"error": render.error_object(error)}


DIALECT = Dialect("native", error_body)


def owns(path: str) -> bool:
    """Whether a path's errors are this dialect's."""
    return path == PREFIX or path.startswith(f"{PREFIX}/")


def upsert_call(body: Mapping[str, Any], collection: str, *, max_documents: int) -> Call:
    """Read a body of an upsert; see `read.read_upsert`."""
    call = read.read_upsert(body, collection, max_documents=max_documents)
    sent = call.sent

    def rename(text: str) -> str:
        def renamed(match: re.Match[str]) -> str:
            position = int(match[1])
            return f"documents[{sent[position] if position < len(sent) else position}]"

        return _DOCUMENT_PATH.sub(renamed, text)

    return Call(call.request, lambda reply: render.upsert_body(reply, call, rename), rename, len(call.ids))


def _without_spec(text: str) -> str:
    return _SPEC_PATH.sub("", text)


def _table(settings: GatewaySettings) -> tuple[Route, ...]:
    most = settings.max_inputs

    def get(body: Mapping[str, Any], name: str, query: Mapping[str, str]) -> Call:
        request = read.read_get(body, name, max_ids=most)
        packed = read.wants_packed(body)
        return Call(request, lambda reply: render.get_body(reply, packed=packed), items=len(request.ids))

    def documents(body: Mapping[str, Any], name: str, query: Mapping[str, str]) -> Call:
        request = read.read_documents(body, name)
        packed = read.wants_packed(body)
        return Call(request, lambda reply: render.documents_body(reply, packed=packed))

    def search(body: Mapping[str, Any], name: str, query: Mapping[str, str]) -> Call:
        request = read.read_search(body, name)
        packed = read.wants_packed(body)
        return Call(request, lambda reply: render.search_body(reply, packed=packed), items=1)

    def rerank(body: Mapping[str, Any], name: str, query: Mapping[str, str]) -> Call:
        request = read.read_rerank(body, name)
        packed = read.wants_packed(body)
        return Call(request, lambda reply: render.rerank_body(reply, packed=packed), items=len(request.ids))

    def delete(body: Mapping[str, Any], name: str, query: Mapping[str, str]) -> Call:
        request = read.read_delete(body, name, max_ids=most)
        return Call(request, render.delete_body, items=len(request.ids))

    return (
        Route(
            "POST", "", "CreateCollection", pb.CreateCollectionResponse,
            lambda body, name, query: Call(read.read_create(body), render.collection_body, _without_spec),
            schema.CollectionReply,
            ("Create a collection", "With `model`, texts are encoded by it; without, give `token_dimension` "
             "and the vectors of every document. What is said here can't be changed later."),
            body=schema.CollectionSpec,
        ),
        Route(
            "GET", "", "ListCollections", pb.ListCollectionsResponse,
            lambda body, name, query: Call(read.read_list(query), render.list_body),
            schema.CollectionsReply, ("List collections", "The caller's own, by name, page by page."),
        ),
        Route(
            "GET", "/{name}", "GetCollection", pb.GetCollectionResponse,
            lambda body, name, query: Call(pb.GetCollectionRequest(collection=name), render.collection_body),
            schema.CollectionReply, ("Describe a collection", "As it stands now."),
        ),
        Route(
            "DELETE", "/{name}", "DeleteCollection", pb.DeleteCollectionResponse,
            lambda body, name, query: Call(
                pb.DeleteCollectionRequest(collection=name), render.deleted_collection_body
            ),
            schema.Empty,
            ("Delete a collection", "At once for every caller; its data goes after a grace period."),
        ),
        Route(
            "POST", "/{name}/documents", "UpsertDocuments", pb.UpsertDocumentsResponse,
            lambda body, name, query: upsert_call(body, name, max_documents=most),
            schema.UpsertReply,
            ("Store documents", "Inserts, or replaces those with the same id, in one commit that is durable "
             "when the reply comes. A document that is wrong has an `error`; the others are stored."),
            body=schema.UpsertRequest,
        ),
        Route(
            "POST", "/{name}/documents/delete", "DeleteDocuments", pb.DeleteDocumentsResponse, delete,
            schema.DeleteReply, ("Delete documents", "By id, in one commit."), body=schema.DeleteRequest,
        ),
        Route(
            "POST", "/{name}/documents/get", "GetDocuments", pb.GetDocumentsResponse, get,
            schema.GetReply, ("Fetch documents", "By id, in the order of the request."),
            body=schema.GetRequest,
        ),
        Route(
            "POST", "/{name}/documents/count", "CountDocuments", pb.CountDocumentsResponse,
            lambda body, name, query: Call(read.read_count(body, name), render.count_body),
            schema.CountReply, ("Count documents", "All, or those that meet a filter."),
            body=schema.CountRequest, optional_body=True,
        ),
        Route(
            "POST", "/{name}/documents/list", "ListDocuments", pb.ListDocumentsResponse, documents,
            schema.ListReply,
            ("List documents", "Page by page, in the order in which they are stored, of one version whatever "
             "is written meanwhile."),
            body=schema.ListRequest, optional_body=True,
        ),
        Route(
            "POST", "/{name}/tag", "TagVersion", pb.TagVersionResponse,
            lambda body, name, query: Call(read.read_tag(body, name), render.tagged_body),
            schema.Empty,
            ("Name a version", "It is kept until the name is taken away; others go some time after they were "
             "replaced."),
            body=schema.TagRequest,
        ),
        Route(
            "POST", "/{name}/restore", "RestoreVersion", pb.RestoreVersionResponse,
            lambda body, name, query: Call(read.read_restore(body, name), render.restored_body),
            schema.RestoreReply,
            ("Go back to a version", "Its documents become the newest version, under a new number."),
            body=schema.RestoreRequest,
        ),
        Route(
            "POST", "/{name}/compact", "CompactCollection", pb.CompactCollectionResponse,
            lambda body, name, query: Call(read.read_compact(body, name), render.compacted_body),
            schema.CompactReply,
            ("Compact a collection", "Merges small fragments and drops deleted rows; no document changes."),
            body=schema.CompactRequest, optional_body=True,
        ),
        Route(
            "POST", "/{name}/search", "Search", pb.SearchResponse, search,
            schema.SearchReply,
            ("Search", "Late interaction: for every query token the best similarity with a document's "
             "tokens, added up. `query` is a text, `{\"vectors\": …}` or `{\"id\": …}`."),
            body=schema.SearchRequest,
        ),
        Route(
            "POST", "/{name}/rerank", "Rerank", pb.RerankResponse, rerank, schema.RerankStoredReply,
            ("Rerank stored documents", "Scores of documents that are named by id, equal to those of a "
             "search; ids that are missing or have nothing to score are named, never dropped."),
            body=schema.RerankStoredRequest,
        ),
        Route(
            "POST", "/{name}/explain", "Explain", pb.ExplainResponse,
            lambda body, name, query: Call(read.read_explain(body, name), render.explain_body, items=1),
            schema.ExplainReply,
            ("Explain a score", "For every query token the document token that it matched best, their "
             "similarity, and where both stand in their texts."),
            body=schema.ExplainRequest,
        ),
    )  # fmt: skip


def routes(retrieval: Retrieval, settings: GatewaySettings) -> APIRouter:
    """The dialect's routes."""
    router = APIRouter(tags=["Collections"])
    for route in _table(settings):
        parameters = _parameters(route)
        router.add_api_route(
            f"{PREFIX}{route.path}",
            _handler(route, retrieval, settings),
            methods=[route.verb],
            name=route.method,
            summary=route.about[0],
            description=route.about[1],
            openapi_extra={
                **({} if route.body is None else body_of(route.body, required=not route.optional_body)),
                **({"parameters": parameters} if parameters else {}),
            },
            responses={
                200: {"model": route.answer},
                **errors_of(schema.ErrorReply, 400, 401, 404, 409, 413, 429, 503),
            },
        )
    return router


#: Documented bodies.
BODIES = (
    schema.CollectionSpec, schema.UpsertRequest, schema.DeleteRequest, schema.GetRequest,
    schema.CountRequest, schema.SearchRequest, schema.RerankStoredRequest, schema.ExplainRequest,
    schema.ListRequest, schema.TagRequest, schema.RestoreRequest, schema.CompactRequest,
)  # fmt: skip


def _parameters(route: Route) -> list[dict[str, object]]:
    if route.method == "ListCollections":
        return [
            {"name": "page_size", "in": "query", "schema": {"type": "integer", "minimum": 0}},
            {"name": "page_token", "in": "query", "schema": {"type": "string"}},
        ]
    if "{name}" in route.path:
        return [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    return []


def _handler(
    route: Route, retrieval: Retrieval, settings: GatewaySettings
) -> Callable[[Request], Awaitable[Response]]:
    async def handle(request: Request) -> Response:
        exchange = exchange_of(request.scope)
        raw = b""
        if route.verb == "POST":
            raw = await read_body(
                request, max_bytes=settings.max_body_bytes, timeout_s=settings.request_timeout_s
            )
        with exchange.clock.phase(names.PHASE_VALIDATE):
            has_body = route.body is not None and (raw or not route.optional_body)
            body = parse_object(raw) if has_body else {}
            call = route.read(body, request.path_params.get("name", ""), request.query_params)
        exchange.items = call.items
        with renamed_fields(call.rename, call.rename), exchange.clock.phase(names.PHASE_RPC):
            reply: Any = await unless_disconnected(
                request.receive, retrieval.call(exchange, route.method, call.request, route.reply)
            )
        with exchange.clock.phase(names.PHASE_RENDER):
            content = call.render(reply)
        phases = getattr(reply, "timings", None)
        if hasattr(reply, "usage"):
            exchange.tokens = reply.usage.tokens
        return json_reply(
            exchange,
            content,
            [] if phases is None else [(phase.phase, phase.duration_ns) for phase in phases.phases],
        )

    return handle
