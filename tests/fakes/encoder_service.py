"""A small honest encoder behind a real gRPC server: bag-of-words vectors, the wire's own rules.

It follows the contract (per-item errors, whole-request errors, truncation, Matryoshka) with word vectors in
place of a model, so that a gateway can be tested without one. A test may hold its calls, make them fail, and
ask what it saw.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phasemesh.errors import FailedPrecondition, InvalidArgument, NotFound, PhasemeshError, Unimplemented
from phasemesh.rpc.codec import encode_tensor
from phasemesh.rpc.context import Call, current_call
from phasemesh.v1.common_pb2 import Input, ItemError, PhaseTiming, ScoreType, Timings, Usage
from phasemesh.v1.encoder_pb2 import (
    EmbedRequest,
    EmbedResponse,
    EncodedItem,
    GetModelRequest,
    GetModelResponse,
    ListModelsRequest,
    ListModelsResponse,
    ModelInfo,
    ModelState,
    ScoreActivation,
    ScoreRequest,
    ScoreResponse,
    Task,
    VectorKind,
)
from phasemesh.v1.encoder_pb2_grpc import EncoderServiceServicer

#: What every reply says about its time, nanoseconds.
PHASES_NS = {
    "encode.tokenize": 1_000_000,
    "encode.queue": 2_000_000,
    "encode.forward": 3_500_000,
    "encode.pool": 250_000,
}
VOCABULARY = 1000
SPECIAL_TOKENS = 2


@dataclass(frozen=True)
class FakeModel:
    name: str
    dimension: int = 16
    aliases: tuple[str, ...] = ()
    matryoshka: tuple[int, ...] = ()
    cross_encoder: bool = False
    max_tokens: int = 32

    def info(self) -> ModelInfo:
        tasks = [Task.TASK_SCORE] if self.cross_encoder else [Task.TASK_EMBED, Task.TASK_SCORE]
        score = ScoreType.SCORE_TYPE_CROSS_ENCODER if self.cross_encoder else ScoreType.SCORE_TYPE_BI_ENCODER
        return ModelInfo(
            name=self.name,
            aliases=self.aliases,
            recipe_hash=hashlib.sha256(self.name.encode()).hexdigest(),
            tasks=tasks,
            vector_kinds=[] if self.cross_encoder else [VectorKind.VECTOR_KIND_DENSE],
            score_types=[score],
            dense_dimension=0 if self.cross_encoder else self.dimension,
            matryoshka_dimensions=self.matryoshka,
            max_tokens=self.max_tokens,
            normalizes=True,
            state=ModelState.MODEL_STATE_READY,
            ready_replicas=1,
            replicas=1,
            max_inputs=2048,
            vocabulary_size=VOCABULARY,
        )


MODELS = (
    FakeModel("bag", aliases=("bag-alias",)),
    FakeModel("org/nested", dimension=16, matryoshka=(4, 8)),
    FakeModel("cross", cross_encoder=True),
)


def word_vector(word: str, dimension: int) -> NDArray[np.float32]:
    seed = int.from_bytes(hashlib.sha256(word.encode()).digest()[:8], "little")
    return np.random.default_rng(seed).standard_normal(dimension).astype(np.float32)


def text_vector(words: Sequence[str], dimension: int) -> NDArray[np.float32]:
    """[dimension] float32 of unit length: the normalised sum of word vectors and of a begin mark."""
    total = np.sum([word_vector(word, dimension) for word in ("<s>", *words)], axis=0, dtype=np.float32)
    return np.asarray(total / np.linalg.norm(total), np.float32)


def logit(query: str, document: str) -> float:
    """A cross-encoder's stand-in: shared words against the query's."""
    asked = set(query.lower().split())
    return 8.0 * len(asked & set(document.lower().split())) / len(asked) - 4.0


class FakeEncoder(EncoderServiceServicer):
    """See the module.

    Attributes:
        failures: raised by the next calls, one each, before anything else.
        hold: while set, calls wait for it.
        entered: a held call is waiting.
        cancelled: a held call was cancelled.
        calls: what each call of Embed or Score saw.
        spoil: makes the first vector of replies NaN.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.failures: deque[PhasemeshError] = deque()
        self.hold: asyncio.Event | None = None
        self.entered = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.calls: list[tuple[Call, Any]] = []
        self.spoil = False

    async def ListModels(self, request: ListModelsRequest, context: Any) -> ListModelsResponse:
        return ListModelsResponse(models=[model.info() for model in MODELS])

    async def GetModel(self, request: GetModelRequest, context: Any) -> GetModelResponse:
        return GetModelResponse(model=_find(request.model).info())

    async def Classify(self, request: Any, context: Any) -> Any:
        raise Unimplemented("Classify comes later")

    async def Tokenize(self, request: Any, context: Any) -> Any:
        raise Unimplemented("a bag of words has no tokens")

    async def Detokenize(self, request: Any, context: Any) -> Any:
        raise Unimplemented("a bag of words has no tokens")

    async def Embed(self, request: EmbedRequest, context: Any) -> EmbedResponse:
        await self._gate(request)
        model = _find(request.model)
        if model.cross_encoder:
            raise FailedPrecondition(
                f"model: {model.name} has no Embed; it offers Score",
                reason="TASK_NOT_SUPPORTED",
                field="model",
            )
        dimension = _dimension(model, request)
        words = [_words(item, index, "inputs") for index, item in enumerate(request.inputs)]
        items = [_item(entry, model, request.truncation.enabled, index) for index, entry in enumerate(words)]
        _raise_if_all_failed(items)
        rows = np.zeros((len(items), dimension), np.float32)
        for row, entry, item in zip(rows, words, items, strict=True):
            if not item.HasField("error"):
                assert isinstance(entry, list)
                vector = text_vector(entry[: model.max_tokens - SPECIAL_TOKENS], model.dimension)
                cut = vector[:dimension]
                row[:] = cut / np.linalg.norm(cut) if len(cut) < len(vector) else vector
        if self.spoil:
            rows[0, 0] = math.nan
        return EmbedResponse(
            model=model.name,
            items=items,
            dense=encode_tensor(rows, request.encoding),
            usage=Usage(tokens=sum(item.tokens for item in items)),
            timings=_timings(),
        )

    async def Score(self, request: ScoreRequest, context: Any) -> ScoreResponse:
        await self._gate(request)
        model = _find(request.model)
        query, documents = request.query.text, [document.text for document in request.documents]
        items = [
            _item(text.split(), model, request.truncation.enabled, index, "documents")
            for index, text in enumerate(documents)
        ]
        _raise_if_all_failed(items)
        if model.cross_encoder:
            scores = [logit(query, document) for document in documents]
            if request.activation == ScoreActivation.SCORE_ACTIVATION_SIGMOID:
                scores = [1 / (1 + math.exp(-score)) for score in scores]
        else:
            wanted = text_vector(query.split(), model.dimension)
            scores = [float(wanted @ text_vector(text.split(), model.dimension)) for text in documents]
        return ScoreResponse(
            model=model.name,
            score_type=model.info().score_types[0],
            scores=scores,
            items=items,
            usage=Usage(tokens=sum(item.tokens for item in items)),
            timings=_timings(),
        )

    async def _gate(self, request: Any) -> None:
        self.calls.append((current_call(), request))
        if self.failures:
            raise self.failures.popleft()
        if self.hold is not None:
            self.entered.set()
            try:
                await self.hold.wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise


def _find(name: str) -> FakeModel:
    for model in MODELS:
        if name == model.name or name in model.aliases:
            return model
    raise NotFound(f"model: there is no model {name!r}", reason="MODEL_NOT_FOUND", field="model")


def _dimension(model: FakeModel, request: EmbedRequest) -> int:
    if not request.HasField("dimensions") or request.dimensions == model.dimension:
        return model.dimension
    if not model.matryoshka:
        raise InvalidArgument(
            f"dimensions: {model.name} was not trained for shorter vectors; leave it out",
            reason="NOT_MATRYOSHKA",
            field="dimensions",
        )
    if request.dimensions not in model.matryoshka:
        raise InvalidArgument(
            f"dimensions: {model.name} offers {list(model.matryoshka)}, not {request.dimensions}",
            reason="DIMENSIONS_OUT_OF_RANGE",
            field="dimensions",
        )
    return request.dimensions


def _words(item: Input, index: int, name: str) -> list[str] | ItemError:
    if item.WhichOneof("content") == "text":
        return item.text.split()
    for position, token in enumerate(item.token_ids.ids):
        if token >= VOCABULARY:
            field = f"{name}[{index}].token_ids.ids[{position}]"
            return ItemError(
                code=3,
                reason="TOKEN_OUT_OF_RANGE",
                message=f"{field}: {token} is not in the vocabulary of {VOCABULARY}",
                field=field,
            )
    return [f"#{token}" for token in item.token_ids.ids]


def _item(
    words: list[str] | ItemError, model: FakeModel, truncate: bool, index: int, name: str = "inputs"
) -> EncodedItem:
    if isinstance(words, ItemError):
        return EncodedItem(error=words)
    tokens = len(words) + SPECIAL_TOKENS
    if tokens > model.max_tokens and not truncate:
        field = f"{name}[{index}].text"
        message = f"{field}: {tokens} tokens, and {model.name} takes {model.max_tokens}; shorten it"
        return EncodedItem(error=ItemError(code=3, reason="INPUT_TOO_LONG", message=message, field=field))
    return EncodedItem(tokens=min(tokens, model.max_tokens), truncated=tokens > model.max_tokens)


def _raise_if_all_failed(items: Sequence[EncodedItem]) -> None:
    if all(item.HasField("error") for item in items):
        first = items[0].error
        raise InvalidArgument(first.message, reason=first.reason, field=first.field)


def _timings() -> Timings:
    offset, phases = 0, []
    for phase, duration_ns in PHASES_NS.items():
        phases.append(PhaseTiming(phase=phase, start_offset_ns=offset, duration_ns=duration_ns))
        offset += duration_ns
    return Timings(total_ns=offset, phases=phases)
