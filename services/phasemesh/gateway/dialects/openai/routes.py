"""OpenAI's dialect: `/v1/embeddings` and `/v1/models`, each also without `/v1`.

Differences that a caller may notice: `input` as token ids means ids of the served model's own vocabulary,
passed on as they stand, so special tokens must be among them (OpenAI's are ids of its cl100k encoding; turn
that off in LangChain by `check_embedding_ctx_length=False`). Base64 is sent only when asked for; OpenAI's own
client asks. If any input fails, the request fails with that input's error, since the dialect has no other
place for it.
"""

from __future__ import annotations

import base64
import re
import time
from dataclasses import dataclass
from enum import Enum
from typing import Any

import orjson
from fastapi import APIRouter, Request
from numpy.typing import NDArray
from starlette.responses import Response

from phasemesh.config.settings import GatewaySettings
from phasemesh.errors import NotFound, PhasemeshError
from phasemesh.gateway.bodies import parse_object, read_body
from phasemesh.gateway.cancel import unless_disconnected
from phasemesh.gateway.dialects.openai.schema import (
    EmbeddingsRequest,
    EmbeddingsResponse,
    ErrorResponse,
    Model,
    ModelList,
)
from phasemesh.gateway.docs import body_of, errors_of
from phasemesh.gateway.exchange import exchange_of
from phasemesh.gateway.faults import Dialect
from phasemesh.gateway.fields import (
    MAX_UINT32,
    invalid,
    json_type,
    optional_choice,
    optional_count,
    required,
    required_text,
)
from phasemesh.gateway.mesh import Embedded, Mesh, MeshInput
from phasemesh.gateway.replies import json_reply, renamed_fields
from phasemesh.telemetry import names
from phasemesh.v1.encoder_pb2 import ModelInfo

#: Reasons of the error tree that OpenAI has a code of its own for.
_CODES = {
    "MODEL_NOT_FOUND": "model_not_found",
    "INPUT_TOO_LONG": "context_length_exceeded",
    "KEY_MISSING": "invalid_api_key",
    "KEY_UNKNOWN": "invalid_api_key",
    "OVERLOADED": "rate_limit_exceeded",
    "QUEUE_FULL": "rate_limit_exceeded",
    "WAIT_TOO_LONG": "rate_limit_exceeded",
}
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_WIRE_PATH = re.compile(r"\binputs\[(\d+)\](?:\.text|\.token_ids(?:\.ids\[(\d+)\])?)?")


class InputShape(Enum):
    """How `input` was written, which decides what its parts are called."""

    TEXT = "one string"
    TOKENS = "token ids of one input"
    LIST = "a list of inputs"


@dataclass(frozen=True, slots=True)
class EmbeddingsCall:
    """A parsed body.

    Attributes:
        model: name or alias.
        inputs: 1 or more texts or id lists.
        shape: how they were written.
        as_base64: little-endian float32 in base64 instead of numbers.
        dimensions: size to cut vectors to.
    """

    model: str
    inputs: list[MeshInput]
    shape: InputShape
    as_base64: bool
    dimensions: int | None


def parse_embeddings(body: dict[str, Any], *, max_inputs: int) -> EmbeddingsCall:
    """Read a body of `/v1/embeddings`.

    Raises:
        InvalidArgument: a field is missing or wrong; `field` is its path, e.g. "input[3]".
    """
    model = required_text(body, "model", "the name of a model; GET /v1/models lists them")
    inputs, shape = _inputs(required(body, "input", "a string, a list of strings, or token ids"), max_inputs)
    return EmbeddingsCall(
        model=model,
        inputs=inputs,
        shape=shape,
        as_base64=optional_choice(body, "encoding_format", ("float", "base64"), "float") == "base64",
        dimensions=optional_count(body, "dimensions"),
    )


def _inputs(value: Any, max_inputs: int) -> tuple[list[MeshInput], InputShape]:
    if isinstance(value, str):
        if not value:
            raise invalid("input", "is an empty string; give some text", reason="EMPTY_INPUT")
        return [value], InputShape.TEXT
    if not isinstance(value, list):
        raise invalid("input", f"has to be a string or a list, not {json_type(value)}")
    if not value:
        raise invalid("input", "is an empty list; give at least one input", reason="EMPTY_INPUT")
    first = value[0]
    if type(first) is int:
        return [_token_ids(value, "input")], InputShape.TOKENS
    if len(value) > max_inputs:
        raise invalid(
            "input",
            f"has {len(value)} inputs; at most {max_inputs} fit in one request, so split it",
            reason="TOO_MANY_INPUTS",
        )
    if isinstance(first, str):
        _check_texts(value)
        return value, InputShape.LIST
    if isinstance(first, list):
        return [_token_list(item, f"input[{index}]") for index, item in enumerate(value)], InputShape.LIST
    raise invalid("input[0]", f"has to be a string, a token id or a list of these, not {json_type(first)}")


def _check_texts(value: list[Any]) -> None:
    for index, item in enumerate(value):
        if not isinstance(item, str):
            raise invalid(f"input[{index}]", f"has to be a string as input[0] is, not {json_type(item)}")
        if not item:
            raise invalid(
                f"input[{index}]", "is an empty string; give some text or leave it out", reason="EMPTY_INPUT"
            )


def _token_list(item: Any, field: str) -> list[int]:
    if not isinstance(item, list):
        raise invalid(field, f"has to be a list of token ids as input[0] is, not {json_type(item)}")
    if not item:
        raise invalid(field, "is an empty list; give token ids or leave it out", reason="EMPTY_INPUT")
    return _token_ids(item, field)


def _token_ids(ids: list[Any], field: str) -> list[int]:
    for index, token in enumerate(ids):
        if type(token) is not int:
            raise invalid(f"{field}[{index}]", f"has to be a token id, not {json_type(token)}")
        if not 0 <= token <= MAX_UINT32:
            raise invalid(
                f"{field}[{index}]", f"{token} is not a token id of any model", reason="TOKEN_OUT_OF_RANGE"
            )
    return ids


def render_embeddings(embedded: Embedded, *, as_base64: bool) -> bytes:
    """The body of a reply."""

    def shown(row: NDArray[Any]) -> object:
        # orjson writes a float32 row by its shortest digits; base64 is the row's bytes as they came.
        return base64.b64encode(row.data).decode("ascii") if as_base64 else row

    return orjson.dumps(
        {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": shown(row)}
                for index, row in enumerate(embedded.vectors)
            ],
            "model": embedded.model,
            "usage": {"prompt_tokens": embedded.tokens, "total_tokens": embedded.tokens},
        },
        option=orjson.OPT_SERIALIZE_NUMPY,
    )


def rename_paths(text: str, shape: InputShape) -> str:
    """Replace the wire's paths in `text` by those of the body: "inputs[3].text" → "input[3]"."""

    def rename(match: re.Match[str]) -> str:
        token = f"[{match[2]}]" if match[2] else ""
        return f"input{token}" if shape is not InputShape.LIST else f"input[{match[1]}]{token}"

    return _WIRE_PATH.sub(rename, text)


def rename_field(field: str, shape: InputShape) -> str:
    """Path in the body of a path of `EmbedRequest`."""
    if field.startswith("kinds"):
        return "model"  # It is the route that asks for dense vectors; the caller's choice was the model.
    return "input" if field == "inputs" else rename_paths(field, shape)


def error_body(error: PhasemeshError, status: int, request_id: str) -> dict[str, object]:
    """OpenAI's error object; all four keys are always there."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {
        "error": {
            "message": error.message,
            "type": kind,
            "param": error.field or None,
            "code": _CODES.get(error.reason, error.reason.lower()),
        }
    }


DIALECT = Dialect("openai", error_body)


def routes(mesh: Mesh, settings: GatewaySettings) -> APIRouter:
    """The dialect's routes."""
    router = APIRouter(tags=["OpenAI"])
    created = int(time.time())

    async def embeddings(request: Request) -> Response:
        """Embed texts or token ids.

        Token ids are of the model's own vocabulary and taken as they stand. Inputs longer than the model
        takes are refused with `context_length_exceeded`.
        """
        exchange = exchange_of(request.scope)
        exchange.operation = "embeddings"
        raw = await read_body(
            request, max_bytes=settings.max_body_bytes, timeout_s=settings.request_timeout_s
        )
        with exchange.clock.phase(names.PHASE_VALIDATE):
            call = parse_embeddings(parse_object(raw), max_inputs=settings.max_inputs)
        exchange.items = len(call.inputs)
        exchange.attributes[names.GEN_AI_REQUEST_MODEL] = call.model[:256]
        exchange.attributes[names.GEN_AI_ENCODING_FORMATS] = ["base64" if call.as_base64 else "float"]
        with (
            renamed_fields(
                lambda text: rename_paths(text, call.shape), lambda field: rename_field(field, call.shape)
            ),
            exchange.clock.phase(names.PHASE_RPC),
        ):
            embedded = await unless_disconnected(
                request.receive,
                mesh.embed(exchange, model=call.model, inputs=call.inputs, dimensions=call.dimensions),
            )
        exchange.attributes[names.GEN_AI_DIMENSIONS] = embedded.vectors.shape[1]
        with exchange.clock.phase(names.PHASE_RENDER):
            content = render_embeddings(embedded, as_base64=call.as_base64)
        return json_reply(exchange, content, embedded.phases)

    async def list_models() -> Response:
        """List the models that are served."""
        models = [_model(info, info.name, created) for info in mesh.models()]
        return Response(orjson.dumps({"object": "list", "data": models}), media_type="application/json")

    async def get_model(request: Request) -> Response:
        """Describe one model by its name or alias; names may hold slashes."""
        name = request.path_params["model"]
        for info in mesh.models():
            if name == info.name or name in info.aliases:
                return Response(orjson.dumps(_model(info, name, created)), media_type="application/json")
        served = ", ".join(sorted(info.name for info in mesh.models())) or "none"
        raise NotFound(
            f"there is no model {name!r}; served are: {served}", reason="MODEL_NOT_FOUND", field="model"
        )

    for prefix, documented in (("/v1", True), ("", False)):
        router.add_api_route(
            f"{prefix}/embeddings",
            embeddings,
            methods=["POST"],
            include_in_schema=documented,
            openapi_extra=body_of(EmbeddingsRequest),
            responses={
                200: {"model": EmbeddingsResponse},
                **errors_of(ErrorResponse, 400, 401, 404, 413, 429, 503),
            },
        )
        router.add_api_route(
            f"{prefix}/models",
            list_models,
            methods=["GET"],
            include_in_schema=documented,
            responses={200: {"model": ModelList}, **errors_of(ErrorResponse, 401)},
        )
        router.add_api_route(
            f"{prefix}/models/{{model:path}}",
            get_model,
            methods=["GET"],
            include_in_schema=documented,
            openapi_extra={
                "parameters": [
                    {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
                ]
            },
            responses={200: {"model": Model}, **errors_of(ErrorResponse, 401, 404)},
        )
    return router


def _model(info: ModelInfo, name: str, created: int) -> dict[str, object]:
    return {"id": name, "object": "model", "created": created, "owned_by": "phasemesh"}
