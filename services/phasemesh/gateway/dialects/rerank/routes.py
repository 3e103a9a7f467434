"""The rerank dialect that Cohere's and Jina's clients share: `/rerank` and `/v1/rerank`.

One body serves both, since their fields don't clash. Choices where they differ: `return_documents` is false
unless asked for (Cohere's default; Jina's is true), long texts are cut rather than refused, and an error's
body carries `message` for Cohere's client and `detail` for Jina's. Scores of a cross-encoder lie in [0, 1];
those of an embedding model are cosines in [-1, 1], and of a late-interaction model sums of cosines, as they
come. An empty document is scored, not refused. Fields that both ignore here: `rank_fields`,
`max_chunks_per_doc`, `max_tokens_per_doc`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response

from phasemesh.config.settings import GatewaySettings
from phasemesh.errors import PhasemeshError
from phasemesh.gateway.bodies import parse_object, read_body
from phasemesh.gateway.cancel import unless_disconnected
from phasemesh.gateway.dialects.rerank.schema import RerankErrorResponse, RerankRequest, RerankResponse
from phasemesh.gateway.docs import body_of, errors_of
from phasemesh.gateway.exchange import exchange_of
from phasemesh.gateway.faults import Dialect
from phasemesh.gateway.fields import (
    invalid,
    json_type,
    optional_bool,
    optional_count,
    required,
    required_text,
)
from phasemesh.gateway.mesh import Mesh, Scored
from phasemesh.gateway.replies import json_reply, renamed_fields
from phasemesh.telemetry import names

_WIRE_PATH = re.compile(r"\b(query|documents\[\d+\])\.text\b")


@dataclass(frozen=True, slots=True)
class RerankCall:
    """A parsed body.

    Attributes:
        model: name or alias.
        query: at least one character.
        documents: 1 or more texts.
        top_n: results wanted, at most one per document.
        return_documents: whether results repeat their text.
    """

    model: str
    query: str
    documents: list[str]
    top_n: int
    return_documents: bool


def parse_rerank(body: dict[str, Any], *, max_documents: int) -> RerankCall:
    """Read a body of `/v1/rerank`.

    Raises:
        InvalidArgument: a field is missing or wrong; `field` is its path, e.g. "documents[3]".
    """
    model = required_text(body, "model", "the name of a model; GET /v1/models lists them")
    query = required_text(body, "query", "the text to rank by")
    documents = _documents(required(body, "documents", "a list of texts"), max_documents)
    return RerankCall(
        model=model,
        query=query,
        documents=documents,
        top_n=min(optional_count(body, "top_n") or len(documents), len(documents)),
        return_documents=optional_bool(body, "return_documents", default=False),
    )


def _documents(value: Any, max_documents: int) -> list[str]:
    if not isinstance(value, list):
        raise invalid("documents", f"has to be a list, not {json_type(value)}")
    if not value:
        raise invalid("documents", "is an empty list; give at least one document", reason="EMPTY_INPUT")
    if len(value) > max_documents:
        raise invalid(
            "documents",
            f"has {len(value)} documents; at most {max_documents} fit in one request, so split it",
            reason="TOO_MANY_INPUTS",
        )
    return [_text(item, index) for index, item in enumerate(value)]


def _text(item: Any, index: int) -> str:
    if isinstance(item, str):
        return item
    if not isinstance(item, dict):
        raise invalid(
            f"documents[{index}]", f'has to be a string or {{"text": string}}, not {json_type(item)}'
        )
    text = item.get("text")
    if not isinstance(text, str):
        raise invalid(f"documents[{index}].text", f"has to be a string, not {json_type(text)}")
    return text


def render_rerank(scored: Scored, call: RerankCall, request_id: str) -> bytes:
    """The body of a reply: best first, equal scores in the order of the request."""
    best = np.argsort(-scored.scores, kind="stable")[: call.top_n]
    results: list[dict[str, object]] = []
    for index in best.tolist():
        result: dict[str, object] = {"index": index, "relevance_score": scored.scores[index]}
        if call.return_documents:
            result["document"] = {"text": call.documents[index]}
        results.append(result)
    return orjson.dumps(
        {
            "id": request_id,
            "object": "list",
            "model": scored.model,
            "results": results,
            "usage": {"total_tokens": scored.tokens},
            "meta": {"api_version": {"version": "1"}, "billed_units": {"search_units": 1}},
        },
        option=orjson.OPT_SERIALIZE_NUMPY,
    )


def rename_paths(text: str) -> str:
    """Replace the wire's paths in `text` by those of the body: "documents[3].text" → "documents[3]"."""
    return _WIRE_PATH.sub(lambda match: match[1], text)


def error_body(error: PhasemeshError, status: int, request_id: str) -> dict[str, object]:
    """Cohere reads `message` and `id`, Jina's clients `detail`."""
    return {"id": request_id, "message": error.message, "detail": error.message, "code": error.reason}


DIALECT = Dialect("rerank", error_body)
#: Paths whose errors are this dialect's.
PATHS = frozenset({"/rerank", "/v1/rerank"})


def routes(mesh: Mesh, settings: GatewaySettings) -> APIRouter:
    """The dialect's routes."""
    router = APIRouter(tags=["Rerank"])

    async def rerank(request: Request) -> Response:
        """Order documents by how well they answer a query.

        Long texts are cut to what the model takes. Cross-encoders score in [0, 1]; embedding models give the
        cosine, late-interaction models the sum over query tokens, as they are.
        """
        exchange = exchange_of(request.scope)
        exchange.operation = "rerank"
        raw = await read_body(
            request, max_bytes=settings.max_body_bytes, timeout_s=settings.request_timeout_s
        )
        with exchange.clock.phase(names.PHASE_VALIDATE):
            call = parse_rerank(parse_object(raw), max_documents=settings.max_inputs)
        exchange.items = len(call.documents)
        exchange.attributes[names.GEN_AI_REQUEST_MODEL] = call.model[:256]
        with renamed_fields(rename_paths, rename_paths), exchange.clock.phase(names.PHASE_RPC):
            scored = await unless_disconnected(
                request.receive,
                mesh.score(exchange, model=call.model, query=call.query, documents=call.documents),
            )
        with exchange.clock.phase(names.PHASE_RENDER):
            content = render_rerank(scored, call, exchange.request_id)
        return json_reply(exchange, content, scored.phases)

    for path in sorted(PATHS):
        router.add_api_route(
            path,
            rerank,
            methods=["POST"],
            include_in_schema=path.startswith("/v1"),
            openapi_extra=body_of(RerankRequest),
            responses={
                200: {"model": RerankResponse},
                **errors_of(RerankErrorResponse, 400, 401, 404, 413, 429, 503),
            },
        )
    return router
