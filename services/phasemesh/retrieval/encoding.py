"""Texts to token vectors, by the encoder services that serve the collection's model.

Invariants: vectors of another recipe than the collection's are never taken; every text has a result or an
error of its own, whatever its neighbours did; a fault between here and an encoder never looks like the
caller's.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phasemesh.errors import (
    Cancelled,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    PermissionDenied,
    PhasemeshError,
    Unauthenticated,
    Unavailable,
    from_code,
)
from phasemesh.index.spec import CollectionSpec, Normalize
from phasemesh.retrieval.work import Request
from phasemesh.rpc.client import RpcClient
from phasemesh.rpc.codec import decode_tensor
from phasemesh.rpc.directory import ModelDirectory
from phasemesh.v1.common_pb2 import (
    INPUT_ROLE_DOCUMENT,
    INPUT_ROLE_QUERY,
    VECTOR_ENCODING_FLOAT16,
    Input,
    InputRole,
    Priority,
    Truncation,
    Usage,
)
from phasemesh.v1.encoder_pb2 import VECTOR_KIND_TOKEN, EmbedRequest, EmbedResponse, ModelInfo
from phasemesh.v1.encoder_pb2_grpc import EncoderServiceStub

#: Calls of one upsert that are in flight together: one is computed while the next one is tokenized.
CALLS_IN_FLIGHT = 2
#: Calls before a batch's failure as unavailable is believed.
_ATTEMPTS = 2
#: Bytes per vector beside its numbers: an id and a span; per text: its entry.
_DETAIL_BYTES = 15
_ITEM_BYTES = 64
#: Vectors of a text beyond its bytes: special tokens, markers, a prompt.
_EXTRA_TOKENS = 64
#: Share of a message that a predicted reply may fill.
_FILL = 0.9

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class EncodedText:
    """Token vectors of one text.

    Attributes:
        vectors: [tokens, d] float16, as the model gives them.
        spans: [tokens, 2] int32, character offsets; None where they weren't asked for.
        usage: tokens computed, and whether the text was cut.
    """

    vectors: NDArray[np.float16]
    spans: NDArray[np.int32] | None
    usage: Usage


@dataclass(frozen=True, slots=True)
class _Options:
    role: InputRole.ValueType
    truncation: Truncation
    priority: Priority.ValueType
    spans: bool


class TextEncoder:
    """Encodes by model name and recipe.

    Args:
        client: for the calls.
        directory: who serves which model; None where no encoder is configured.
        max_batch: most texts in one call.
        max_message_bytes: largest reply.
    """

    def __init__(
        self, client: RpcClient, directory: ModelDirectory | None, *, max_batch: int, max_message_bytes: int
    ) -> None:
        self._client = client
        self._directory = directory
        self._max_batch = max_batch
        self._max_message_bytes = max_message_bytes

    def find(self, model: str, recipe_hash: str | None = None) -> ModelInfo:
        """What is served as `model` now.

        Raises:
            FailedPrecondition: no encoders are configured here, or the recipe is another one.
            NotFound: there is no such model.
            Unavailable: it isn't ready.
        """
        return self._known().route(model, recipe_hash=recipe_hash).info

    async def query(
        self,
        request: Request,
        spec: CollectionSpec,
        text: str,
        truncation: Truncation,
        *,
        spans: bool = False,
    ) -> EncodedText:
        """Token vectors of a query, and if asked for the characters that each stands for.

        Raises:
            PhasemeshError: the encoder failed, or the text can't be encoded (field "query.text").
        """
        options = _Options(INPUT_ROLE_QUERY, truncation, Priority.PRIORITY_UNSPECIFIED, spans)
        (result,) = await self._encode(request, spec, [text], ["query.text"], options)
        if isinstance(result, PhasemeshError):
            raise result
        return result

    async def documents(
        self,
        request: Request,
        spec: CollectionSpec,
        texts: Sequence[str],
        fields: Sequence[str],
        truncation: Truncation,
        priority: Priority.ValueType,
    ) -> list[EncodedText | PhasemeshError]:
        """Token vectors and spans of documents, in their order; a text that can't be encoded has its error.

        Args:
            request: whose time and clock.
            spec: the collection's.
            texts: what to encode.
            fields: path of each text in the request.
            truncation: what to do with long texts.
            priority: how urgent.

        Raises:
            PhasemeshError: the request as a whole failed; none of it may be stored.
        """
        options = _Options(INPUT_ROLE_DOCUMENT, truncation, priority, spans=True)
        if not texts:
            return []
        info = self.find(spec.model, spec.recipe_hash)
        gate = asyncio.Semaphore(CALLS_IN_FLIGHT)

        async def encode(begin: int, end: int) -> list[EncodedText | PhasemeshError]:
            async with gate:
                return await self._encode(request, spec, texts[begin:end], fields[begin:end], options)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_settled(encode(*cut))) for cut in self._cuts(texts, info)]
        results: list[EncodedText | PhasemeshError] = []
        for task in tasks:
            outcome = task.result()
            if isinstance(outcome, PhasemeshError):
                raise outcome
            results += outcome
        return results

    def _cuts(self, texts: Sequence[str], info: ModelInfo) -> list[tuple[int, int]]:
        most = min(self._max_batch, info.max_inputs or self._max_batch)
        row_bytes = 2 * info.token_dimension + _DETAIL_BYTES
        cuts: list[tuple[int, int]] = []
        begin, size = 0, 0
        for position, text in enumerate(texts):
            # No tokenizer makes more tokens than there are bytes.
            tokens = len(text.encode()) + _EXTRA_TOKENS
            predicted = _ITEM_BYTES + row_bytes * (
                min(tokens, info.max_tokens) if info.max_tokens else tokens
            )
            full = position - begin == most or size + predicted > self._max_message_bytes * _FILL
            if position > begin and full:
                cuts.append((begin, position))
                begin, size = position, 0
            size += predicted
        cuts.append((begin, len(texts)))
        return cuts

    async def _encode(
        self,
        request: Request,
        spec: CollectionSpec,
        texts: Sequence[str],
        fields: Sequence[str],
        options: _Options,
    ) -> list[EncodedText | PhasemeshError]:
        try:
            reply = await self._call(request, spec, texts, options)
        except InvalidArgument as error:
            # A call fails as a whole where all of its texts did, or where its reply would be too large.
            if not error.field.startswith("inputs"):
                raise
            if len(texts) == 1:
                return [_relocated(error, 0, fields[0])]
            half = len(texts) // 2
            return [
                *await self._encode(request, spec, texts[:half], fields[:half], options),
                *await self._encode(request, spec, texts[half:], fields[half:], options),
            ]
        return _results(reply, spec, fields, spans=options.spans)

    async def _call(
        self, request: Request, spec: CollectionSpec, texts: Sequence[str], options: _Options
    ) -> EmbedResponse:
        directory = self._known()
        for attempt in range(_ATTEMPTS):
            route = directory.route(spec.model, recipe_hash=spec.recipe_hash)
            message = EmbedRequest(
                model=spec.model,
                inputs=[Input(text=text) for text in texts],
                kinds=[VECTOR_KIND_TOKEN],
                encoding=VECTOR_ENCODING_FLOAT16,
                role=options.role,
                truncation=options.truncation,
                priority=options.priority,
                include_token_details=options.spans,
                # AUTO scales to unit length; vectors of a late-interaction model are so already.
                normalize=True if spec.normalize is Normalize.AUTO else None,
            )
            start_ns = request.clock.now_ns()
            try:
                reply: EmbedResponse = await self._client.call(
                    route.target, EncoderServiceStub, "Embed", message, timeout_s=request.remaining_s()
                )
            except (Unauthenticated, PermissionDenied) as error:
                raise _own_fault(
                    "an encoder refused this service's key; set the same access.keys on both", error
                ) from error
            except Cancelled as error:
                raise Unavailable("the encoder dropped the call; try again", reason="CALL_DROPPED") from error
            except Unavailable:
                directory.suspect(route.target)
                if attempt + 1 == _ATTEMPTS:
                    raise
                continue
            request.note_reply(reply.timings, start_ns, request.clock.now_ns())
            return reply
        raise AssertionError("the loop returns or raises")

    def _known(self) -> ModelDirectory:
        if self._directory is None:
            raise FailedPrecondition(
                "this service has no encoders; give vectors, or set retrieval.encoders",
                reason="NO_ENCODER",
                field="model",
            )
        return self._directory


async def _settled(
    work: Awaitable[list[EncodedText | PhasemeshError]],
) -> list[EncodedText | PhasemeshError] | PhasemeshError:
    # As a value, since a task group would wrap it.
    try:
        return await work
    except PhasemeshError as error:
        return error


def _results(
    reply: EmbedResponse, spec: CollectionSpec, fields: Sequence[str], *, spans: bool
) -> list[EncodedText | PhasemeshError]:
    if reply.recipe_hash != spec.recipe_hash:
        # It was reloaded between the directory's last look and this call.
        raise FailedPrecondition(
            f"model {spec.model} answered with the recipe {reply.recipe_hash}; the collection's is "
            f"{spec.recipe_hash}",
            reason="RECIPE_MISMATCH",
            field="model",
        )
    vectors = decode_tensor(reply.token.vectors, field="token.vectors")
    offsets = list(reply.token.row_offsets)
    rows = len(vectors)
    sound = (
        vectors.dtype == np.float16
        and vectors.ndim == 2
        and vectors.shape[1] == spec.token_dim
        and len(reply.items) == len(fields)
        and len(offsets) == len(fields) + 1
        and offsets[0] == 0
        and offsets[-1] == rows
        and all(a <= b for a, b in itertools.pairwise(offsets))
        and (not spans or len(reply.token.span_starts) == len(reply.token.span_ends) == rows)
    )
    if not sound:
        raise _own_fault("an encoder's reply contradicts itself", None)
    ends = (
        np.array([reply.token.span_starts, reply.token.span_ends], np.int64).T.astype(np.int32)
        if spans
        else None
    )
    results: list[EncodedText | PhasemeshError] = []
    for position, item in enumerate(reply.items):
        if item.HasField("error"):
            fault = item.error
            error = from_code(fault.code, fault.message, reason=fault.reason or None, field=fault.field)
            results.append(_relocated(error, position, fields[position]))
            continue
        own = slice(offsets[position], offsets[position + 1])
        usage = Usage(tokens=item.tokens, truncated_inputs=int(item.truncated))
        results.append(EncodedText(vectors[own], None if ends is None else ends[own], usage))
    return results


def _relocated(error: PhasemeshError, position: int, field: str) -> PhasemeshError:
    """`error` of the encoder's input, with the path that our own caller knows."""
    theirs = f"inputs[{position}].text"
    return from_code(
        error.code,
        error.message.replace(theirs, field),
        reason=error.reason,
        field=field,
        retry_after_s=error.retry_after_s,
    )


def _own_fault(what: str, cause: PhasemeshError | None) -> Internal:
    internal = Internal()
    _log.error(what, extra={"error_id": internal.error_id, "reason": cause.reason if cause else None})
    return internal
