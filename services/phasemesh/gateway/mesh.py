"""The gateway's calls to encoders: plain Python in, one gRPC call, numpy out.

Invariants: protobuf stays in here; a result is whole or an error, since none of the REST dialects has a place
for an input's own error; and a fault between gateway and encoder never looks like the caller's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from phasemesh.config.settings import Settings
from phasemesh.errors import Unavailable, from_code
from phasemesh.gateway.exchange import Exchange
from phasemesh.gateway.peer_faults import broken_reply, not_the_callers
from phasemesh.rpc.client import RpcClient
from phasemesh.rpc.codec import decode_tensor
from phasemesh.rpc.directory import ModelDirectory
from phasemesh.v1.common_pb2 import Input, Timings, TokenIds, Truncation, VectorEncoding
from phasemesh.v1.encoder_pb2 import (
    EmbedRequest,
    EmbedResponse,
    EncodedItem,
    ModelInfo,
    ScoreActivation,
    ScoreRequest,
    ScoreResponse,
    VectorKind,
)
from phasemesh.v1.encoder_pb2_grpc import EncoderServiceStub

#: One input: text, or token ids of the model's own vocabulary.
MeshInput = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class Embedded:
    """Vectors of one request.

    Attributes:
        model: name of the model that answered.
        vectors: [inputs, dimension] float32, finite.
        tokens: real tokens computed, special tokens included, padding excluded.
        phases: (name, nanoseconds) of the encoder's phases, in order.
    """

    model: str
    vectors: NDArray[np.float32]
    tokens: int
    phases: Sequence[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Scored:
    """Scores of one request.

    Attributes:
        model: name of the model that answered.
        scores: [documents] float32, finite, in the order of the request.
        tokens: as in `Embedded`.
        phases: as in `Embedded`.
    """

    model: str
    scores: NDArray[np.float32]
    tokens: int
    phases: Sequence[tuple[str, int]]


class Mesh:
    """Calls encoder services by model name."""

    def __init__(self, settings: Settings, client: RpcClient, directory: ModelDirectory) -> None:
        self._timeout_s = settings.gateway.request_timeout_s
        self._client = client
        self._directory = directory

    def models(self) -> Sequence[ModelInfo]:
        """Models that are served, as their services describe them."""
        return self._directory.models()

    async def embed(
        self, exchange: Exchange, *, model: str, inputs: Sequence[MeshInput], dimensions: int | None
    ) -> Embedded:
        """Dense vectors of `inputs`; those that are too long are refused.

        Raises:
            PhasemeshError: the call failed, or an input did; `field` is a path of `EmbedRequest`.
        """
        request = EmbedRequest(
            model=model,
            inputs=[_input(item) for item in inputs],
            kinds=[VectorKind.VECTOR_KIND_DENSE],
            encoding=VectorEncoding.VECTOR_ENCODING_FLOAT32,
            dimensions=dimensions,
        )
        reply = await self._call(exchange, model, "Embed", request)
        assert isinstance(reply, EmbedResponse)
        _raise_first_fault(reply.items, len(inputs))
        vectors = decode_tensor(reply.dense, field="dense")
        if vectors.ndim != 2 or len(vectors) != len(inputs):
            raise broken_reply(
                "the encoder", "dense has the wrong shape", shape=list(vectors.shape), inputs=len(inputs)
            )
        tokens = _note_answer(exchange, reply)
        return Embedded(reply.model, _finite(vectors), tokens, _phases(reply.timings))

    async def score(self, exchange: Exchange, *, model: str, query: str, documents: Sequence[str]) -> Scored:
        """Scores of `documents` by the model's default score type; long texts are cut.

        A cross-encoder's logit goes through the logistic function, because rerank clients expect [0, 1];
        cosine and MaxSim scores come as they are.

        Raises:
            PhasemeshError: the call failed, or a document did; `field` is a path of `ScoreRequest`.
        """
        request = ScoreRequest(
            model=model,
            query=Input(text=query),
            documents=[Input(text=document) for document in documents],
            activation=ScoreActivation.SCORE_ACTIVATION_SIGMOID,
            truncation=Truncation(enabled=True),
        )
        reply = await self._call(exchange, model, "Score", request)
        assert isinstance(reply, ScoreResponse)
        _raise_first_fault(reply.items, len(documents))
        scores = np.fromiter(reply.scores, np.float32)
        if len(scores) != len(documents):
            raise broken_reply(
                "the encoder", "scores have the wrong length", scores=len(scores), documents=len(documents)
            )
        tokens = _note_answer(exchange, reply)
        return Scored(reply.model, _finite(scores), tokens, _phases(reply.timings))

    async def _call(
        self, exchange: Exchange, model: str, method: str, request: EmbedRequest | ScoreRequest
    ) -> object:
        route = self._directory.route(model)
        elapsed_s = exchange.clock.total_ns() / 1e9
        with self._own_faults(route.target):
            return await self._client.call(
                route.target,
                EncoderServiceStub,
                method,
                request,
                timeout_s=max(self._timeout_s - elapsed_s, 0.001),
                request_id=exchange.request_id,
                caller=exchange.caller,
            )

    @contextmanager
    def _own_faults(self, target: str) -> Iterator[None]:
        """Translate faults that aren't the caller's, and tell the directory of a target that can't answer."""
        try:
            with not_the_callers("the encoder"):
                yield
        except Unavailable as error:
            if error.reason != "CALL_DROPPED":
                self._directory.suspect(target)
            raise


def _input(item: MeshInput) -> Input:
    return Input(text=item) if isinstance(item, str) else Input(token_ids=TokenIds(ids=item))


def _raise_first_fault(items: Sequence[EncodedItem], expected: int) -> None:
    if len(items) != expected:
        raise broken_reply("the encoder", "items have the wrong length", items=len(items), expected=expected)
    for item in items:
        if item.HasField("error"):
            fault = item.error
            raise from_code(fault.code, fault.message, reason=fault.reason or None, field=fault.field)


def _finite(array: NDArray[np.float32]) -> NDArray[np.float32]:
    # JSON has no NaN: it would become null and break clients far from the cause.
    if not np.isfinite(array).all():
        raise broken_reply("the encoder", "the model's output is not finite")
    return np.ascontiguousarray(array, dtype="<f4")


def _note_answer(exchange: Exchange, reply: EmbedResponse | ScoreResponse) -> int:
    exchange.model, exchange.answered = reply.model, True
    exchange.tokens = reply.usage.tokens
    return exchange.tokens


def _phases(timings: Timings) -> Sequence[tuple[str, int]]:
    return tuple((phase.phase, phase.duration_ns) for phase in timings.phases)
