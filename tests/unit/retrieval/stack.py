"""Retrieval over real gRPC: the real store, real scorers, and an encoder of words small enough to recompute."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phasemesh.config.settings import ScorerSettings, ServerSettings, Settings, load_settings
from phasemesh.errors import InvalidArgument, PhasemeshError
from phasemesh.retrieval.service import RetrievalRuntime
from phasemesh.rpc.client import RpcClient
from phasemesh.rpc.codec import encode_tensor
from phasemesh.rpc.directory import ModelDirectory
from phasemesh.rpc.server import RpcServer
from phasemesh.scorer.service import ScorerRuntime
from phasemesh.telemetry.metrics import Metrics
from phasemesh.v1 import encoder_pb2 as encoder_pb
from phasemesh.v1 import retrieval_pb2 as pb
from phasemesh.v1.common_pb2 import (
    INPUT_ROLE_QUERY,
    VECTOR_ENCODING_FLOAT16,
    VECTOR_ENCODING_FLOAT32,
    ItemError,
    PhaseTiming,
    Timings,
    Usage,
)
from phasemesh.v1.encoder_pb2_grpc import EncoderServiceServicer, add_EncoderServiceServicer_to_server
from phasemesh.v1.retrieval_pb2_grpc import RetrievalServiceStub, add_RetrievalServiceServicer_to_server
from phasemesh.v1.scorer_pb2_grpc import add_ScorerServiceServicer_to_server

DIM = 16
MODEL = "words"
HASH = "0123456789abcdef0123456789abcdef"
#: What every reply of the encoder says about its time, nanoseconds.
ENCODE_NS = {"encode.tokenize": 1_000, "encode.queue": 2_000, "encode.forward": 3_000, "encode.pool": 500}


def word_vector(word: str) -> NDArray[np.float16]:
    """[DIM] of unit length, as float16."""
    seed = int.from_bytes(hashlib.sha256(word.encode()).digest()[:8], "little")
    vector = np.random.default_rng(seed).standard_normal(DIM)
    return (vector / np.linalg.norm(vector)).astype(np.float16)


def text_matrix(text: str, role: str) -> NDArray[np.float16]:
    """[1 + words, DIM]: a marker of the role, then the words."""
    return np.stack([word_vector(f"[{role}]"), *(word_vector(word) for word in text.split())])


_Partial: Any = EncoderServiceServicer


class WordEncoder(_Partial):  # type: ignore[misc]  # the rest of the service is left out
    """Token vectors by word, with the contract's rules for faults.

    Attributes:
        failures: raised by the next calls of Embed, one each.
        calls: requests of Embed.
        recipe_hash: what replies and `ListModels` say; `listed_hash` alone what `ListModels` says.
        max_tokens: longest text, its marker included.
        reply_limit: bytes beyond which a reply is refused; None for none.
        factors: of words whose vectors aren't of unit length.
    """

    def __init__(self) -> None:
        self.failures: deque[PhasemeshError] = deque()
        self.calls: list[encoder_pb.EmbedRequest] = []
        self.recipe_hash = self.listed_hash = HASH
        self.max_tokens = 12
        self.reply_limit: int | None = None
        self.factors: dict[str, float] = {}

    async def ListModels(self, request: Any, context: Any) -> encoder_pb.ListModelsResponse:
        shared: Any = {
            "state": encoder_pb.MODEL_STATE_READY, "max_inputs": 2048, "tasks": [encoder_pb.TASK_EMBED],
        }  # fmt: skip
        return encoder_pb.ListModelsResponse(
            models=[
                encoder_pb.ModelInfo(
                    name=MODEL, aliases=["alias"], recipe_hash=self.listed_hash, token_dimension=DIM,
                    vector_kinds=[encoder_pb.VECTOR_KIND_TOKEN], max_tokens=self.max_tokens, **shared,
                ),
                encoder_pb.ModelInfo(
                    name="dense", recipe_hash="d" * 32, dense_dimension=DIM,
                    vector_kinds=[encoder_pb.VECTOR_KIND_DENSE], **shared,
                ),
            ]
        )  # fmt: skip

    async def Embed(self, request: encoder_pb.EmbedRequest, context: Any) -> encoder_pb.EmbedResponse:
        self.calls.append(request)
        if self.failures:
            raise self.failures.popleft()
        role = "Q" if request.role == INPUT_ROLE_QUERY else "D"
        items, matrices, starts, ends = [], [], [], []
        for position, wire in enumerate(request.inputs):
            matrix = text_matrix(wire.text, role)
            for row, word in enumerate(wire.text.split(), start=1):
                matrix[row] *= np.float16(self.factors.get(word, 1.0))
            tokens = len(matrix)
            if tokens > self.max_tokens and not request.truncation.enabled:
                path = f"inputs[{position}].text"
                fault = ItemError(
                    code=3, reason="INPUT_TOO_LONG", message=f"{path}: has {tokens} tokens", field=path
                )
                items.append(encoder_pb.EncodedItem(error=fault))
                matrix = matrix[:0]
            else:
                matrix = matrix[: self.max_tokens]
                items.append(encoder_pb.EncodedItem(tokens=len(matrix), truncated=tokens > len(matrix)))
                words = [match.span() for match in re.finditer(r"\S+", wire.text)][: len(matrix) - 1]
                starts += [0, *(begin for begin, _ in words)]
                ends += [0, *(end for _, end in words)]
            matrices.append(matrix)
        if all(item.HasField("error") for item in items):
            first = items[0].error
            raise InvalidArgument(first.message, reason=first.reason, field=first.field)
        rows = np.concatenate(matrices)
        if self.reply_limit is not None and rows.nbytes > self.reply_limit:
            raise InvalidArgument("the reply is too large", reason="REPLY_TOO_LARGE", field="inputs")
        offsets = np.cumsum([0, *map(len, matrices)]).tolist()
        details = request.include_token_details
        return encoder_pb.EmbedResponse(
            model=MODEL,
            recipe_hash=self.recipe_hash,
            items=items,
            token=encoder_pb.TokenVectors(
                vectors=encode_tensor(rows, request.encoding),
                row_offsets=offsets,
                span_starts=starts if details else [],
                span_ends=ends if details else [],
            ),
            usage=Usage(tokens=len(rows)),
            timings=encode_timings(),
        )


def encode_timings() -> Timings:
    offset, phases = 0, []
    for name, duration in ENCODE_NS.items():
        phases.append(PhaseTiming(phase=name, start_offset_ns=offset, duration_ns=duration))
        offset += duration
    return Timings(total_ns=offset, phases=phases)


class GatedScorer:
    """A real scorer's servicer behind a gate: while it is shut, what is asked waits and nothing is computed."""

    def __init__(self, servicer: Any) -> None:
        self._servicer = servicer
        self.gate = asyncio.Event()
        self.gate.set()
        self.entered = asyncio.Event()
        self.searches: list[Any] = []
        self.scorings: list[Any] = []

    async def LeafSearch(self, request: Any, context: Any) -> Any:
        self.searches.append(request)
        self.entered.set()
        await self.gate.wait()
        return await self._servicer.LeafSearch(request, context)

    async def LeafScore(self, request: Any, context: Any) -> Any:
        self.scorings.append(request)
        self.entered.set()
        await self.gate.wait()
        return await self._servicer.LeafScore(request, context)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._servicer, name)


@dataclass
class Scorer:
    target: str
    gated: GatedScorer
    server: RpcServer
    metrics: Metrics

    async def kill(self) -> None:
        """End it, calls in flight included."""
        await self.server.drain()

    def value(self, name: str) -> float:
        return self.metrics.registry.get_sample_value(name) or 0.0


@dataclass
class Stack:
    settings: Settings
    runtime: RetrievalRuntime
    client: RpcClient
    target: str
    metrics: Metrics
    encoder: WordEncoder
    directory: ModelDirectory
    scorers: list[Scorer] = field(default_factory=list)

    async def __call__(self, method: str, request: object, timeout_s: float = 30.0, **options: Any) -> Any:
        return await self.client.call(
            self.target, RetrievalServiceStub, method, request, timeout_s=timeout_s, **options
        )

    async def create(self, name: str = "c", **spec: Any) -> pb.Collection:
        spec.setdefault("token_dimension", 0 if spec.get("model") else DIM)
        reply = await self("CreateCollection", create_request(name, **spec))
        collection: pb.Collection = reply.collection
        return collection

    async def upsert(self, *documents: pb.Document, name: str = "c", **options: Any) -> Any:
        return await self(
            "UpsertDocuments", pb.UpsertDocumentsRequest(collection=name, documents=documents, **options)
        )

    async def search(
        self,
        query: str | NDArray[Any],
        k: int = 10,
        *,
        name: str = "c",
        timeout_s: float = 30.0,
        **options: Any,
    ) -> pb.SearchResponse:
        wire = pb.Query(text=query) if isinstance(query, str) else pb.Query(vectors=tensor(query))
        request = pb.SearchRequest(collection=name, query=wire, k=k, **options)
        reply: pb.SearchResponse = await self("Search", request, timeout_s)
        return reply


def create_request(name: str, **spec: Any) -> pb.CreateCollectionRequest:
    return pb.CreateCollectionRequest(spec=pb.CollectionSpec(name=name, **spec))


def tensor(matrix: NDArray[Any]) -> Any:
    half = matrix.dtype == np.float16
    return encode_tensor(matrix, VECTOR_ENCODING_FLOAT16 if half else VECTOR_ENCODING_FLOAT32)


def given(document_id: str, matrix: NDArray[Any], **parts: Any) -> pb.Document:
    """A document of given vectors."""
    return pb.Document(id=document_id, token_vectors=pb.TokenMatrix(vectors=tensor(matrix)), **parts)


def maxsim(query: NDArray[Any], tokens: NDArray[np.float16]) -> float:
    """Float64 MaxSim, the plain way."""
    similarities = query.astype(np.float64) @ tokens.astype(np.float64).T
    return float(similarities.max(axis=1).sum())


def ranking(query: NDArray[Any], stored: dict[str, NDArray[np.float16]], k: int) -> list[tuple[str, float]]:
    """Best k of all documents that have vectors, by score, then id."""
    scored = [(name, maxsim(query, tokens)) for name, tokens in stored.items() if len(tokens)]
    return sorted(scored, key=lambda hit: (-hit[1], hit[0]))[:k]


@asynccontextmanager
async def serving(
    role: str, service: str, add: Any, servicer: object, settings: Settings, metrics: Metrics
) -> AsyncIterator[tuple[RpcServer, str]]:
    server = RpcServer(
        role=role, server=ServerSettings(port=0, admin_port=0), rpc=settings.rpc, access=settings.access,
        metrics=metrics,
    )  # fmt: skip
    server.add(service, add, servicer)
    port = await server.start()
    server.set_serving(service, True)
    try:
        yield server, f"127.0.0.1:{port}"
    finally:
        await server.drain()


@asynccontextmanager
async def scorer(settings: Settings, cache_dir: Path) -> AsyncIterator[Scorer]:
    metrics = Metrics()
    runtime = ScorerRuntime(
        ScorerSettings(port=0, admin_port=0, threads=1), settings.data_dir, cache_dir, metrics
    )
    await runtime.start()
    gated = GatedScorer(runtime.servicer)
    try:
        async with serving(
            "scorer",
            "phasemesh.v1.ScorerService",
            add_ScorerServiceServicer_to_server,
            gated,
            settings,
            metrics,
        ) as (server, target):
            yield Scorer(target, gated, server, metrics)
    finally:
        await runtime.close()


@asynccontextmanager
async def stack(
    root: Path,
    *,
    scorers: int = 2,
    targets: Sequence[str] = (),
    encoders: bool = True,
    directory: ModelDirectory | None = None,
    **flags: Any,
) -> AsyncIterator[Stack]:
    """Retrieval over `root` with scorers of its own, or those of `targets`; flags are dotted settings.

    Texts go to the encoder of words unless there is another `directory`.
    """
    base = {"data_dir": str(root / "data"), "rpc.drain_s": 0, "retrieval.fragment_tokens": 60}
    named = {key.replace("__", "."): value for key, value in flags.items()}
    settings = load_settings(flags={**base, **named})
    encoder, metrics = WordEncoder(), Metrics()
    async with AsyncExitStack() as exits:
        own = [
            await exits.enter_async_context(scorer(settings, root / f"cache{index}"))
            for index in range(0 if targets else scorers)
        ]
        names = tuple(targets) or tuple(one.target for one in own)
        settings = settings.model_copy(
            update={"retrieval": settings.retrieval.model_copy(update={"scorers": names})}
        )
        _, encoder_target = await exits.enter_async_context(
            serving(
                "encoder", "phasemesh.v1.EncoderService", add_EncoderServiceServicer_to_server, encoder, settings,
                Metrics(),
            )
        )  # fmt: skip
        client = RpcClient(rpc=settings.rpc, key=settings.access.mesh_key())
        exits.push_async_callback(client.close)
        if directory is None:
            directory = ModelDirectory(client, (encoder_target,), refresh_s=3600)
            await directory.start()
            exits.push_async_callback(directory.close)
        runtime = RetrievalRuntime(settings, client, directory if encoders else None, metrics)
        await runtime.start()
        exits.push_async_callback(runtime.close)
        _, target = await exits.enter_async_context(
            serving(
                "retrieval", "phasemesh.v1.RetrievalService", add_RetrievalServiceServicer_to_server,
                runtime.servicer, settings, metrics,
            )
        )  # fmt: skip
        yield Stack(settings, runtime, client, target, metrics, encoder, directory, own)
