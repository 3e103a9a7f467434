"""A small honest retrieval service behind a real gRPC server: dicts for collections, float64 brute force.

It follows the contract (versions, per-document errors, superseded ids, filters that restrict or fail) with
word vectors in place of a model, so that a gateway or a command can be tested without index and scorers. A
test may hold its calls, make them fail, and ask what it saw.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import uuid
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from google.protobuf.struct_pb2 import Struct, Value
from google.protobuf.timestamp_pb2 import Timestamp
from numpy.typing import NDArray

from phasemesh.errors import (
    Aborted,
    AlreadyExists,
    InvalidArgument,
    NotFound,
    PhasemeshError,
    Unimplemented,
)
from phasemesh.rpc.codec import decode_tensor, encode_tensor
from phasemesh.rpc.context import Call, current_call
from phasemesh.v1 import retrieval_pb2 as pb
from phasemesh.v1.common_pb2 import ItemError, PhaseTiming, Timings, Usage
from phasemesh.v1.retrieval_pb2_grpc import RetrievalServiceServicer

#: What every search says about its time, nanoseconds.
SEARCH_PHASES_NS = {
    "encode.tokenize": 1_000_000,
    "encode.forward": 3_500_000,
    "search.plan": 250_000,
    "score.load": 125_000,
    "score.maxsim": 2_000_000,
    "search.merge": 500_000,
}
UPSERT_PHASES_NS = {"encode.forward": 3_000_000, "retrieval.commit": 1_500_000}
MODEL = "words"
DIMENSION = 8
MAX_K = 1000
MAX_WORDS = 32


def word_matrix(text: str, dimension: int = DIMENSION) -> NDArray[np.float16]:
    """[words, dimension] float16 of unit length: one row per word."""
    rows = []
    for word in text.split():
        seed = int.from_bytes(hashlib.sha256(word.lower().encode()).digest()[:8], "little")
        row = np.random.default_rng(seed).standard_normal(dimension)
        rows.append(row / np.linalg.norm(row))
    return np.array(rows, np.float16).reshape(len(rows), dimension)


def maxsim(query: NDArray[Any], document: NDArray[Any]) -> float:
    """Sum over query rows of the best inner product with a document row, in float64."""
    return float((query.astype(np.float64) @ document.astype(np.float64).T).max(axis=1).sum())


@dataclass
class Stored:
    id: str
    text: str | None
    tokens: NDArray[np.float16]
    fields: Struct
    dense: NDArray[np.float32] | None


@dataclass
class Kept:
    """One collection: its spec and the documents of every version so far."""

    spec: pb.CollectionSpec
    incarnation: str = field(default_factory=lambda: uuid.uuid4().hex)
    versions: list[dict[str, Stored]] = field(default_factory=lambda: [{}])
    tags: dict[str, int] = field(default_factory=dict)

    def version(self, number: int | None = None) -> pb.Version:
        number = len(self.versions) if number is None else number
        return pb.Version(incarnation=self.incarnation, number=number)

    def commit(self, documents: dict[str, Stored]) -> pb.Version:
        self.versions.append(documents)
        return self.version()

    def described(self) -> pb.Collection:
        documents = self.versions[-1]
        return pb.Collection(
            spec=self.spec,
            version=self.version(),
            documents=len(documents),
            tokens=sum(len(document.tokens) for document in documents.values()),
            create_time=Timestamp(seconds=1_750_000_000),
            fragments=int(bool(documents)),
        )


class FakeRetrieval(RetrievalServiceServicer):
    """See the module.

    Attributes:
        kept: collections by tenant and name.
        failures: raised by the next calls, one each, before anything else.
        hold: while set, calls wait for it.
        entered: a held call is waiting.
        cancelled: a held call was cancelled.
        calls: what each call saw.
        spoil: makes the first score of searches NaN.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.kept: dict[tuple[str, str], Kept] = {}
        self.failures: deque[PhasemeshError] = deque()
        self.hold: asyncio.Event | None = None
        self.entered = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.calls: list[tuple[Call, Any]] = []
        self.spoil = False

    async def CreateCollection(self, request: pb.CreateCollectionRequest, context: Any) -> Any:
        await self._gate(request)
        spec = pb.CollectionSpec()
        spec.CopyFrom(request.spec)
        if not spec.name or not all(char.isalnum() or char in "._-" for char in spec.name):
            raise InvalidArgument(
                f"spec.name: {spec.name!r} is no name", reason="INVALID_NAME", field="spec.name"
            )
        if spec.model not in ("", MODEL):
            raise NotFound(f"there is no model {spec.model!r}", reason="MODEL_NOT_FOUND", field="spec.model")
        spec.token_dimension = spec.token_dimension or (DIMENSION if spec.model else 0)
        if not spec.token_dimension:
            raise InvalidArgument(
                "token_dimension is 0; give one, or a model",
                reason="DIMENSION_OUT_OF_RANGE",
                field="spec.token_dimension",
            )
        spec.codec = spec.codec or pb.CODEC_INT8
        spec.normalize = spec.normalize or pb.NORMALIZE_POLICY_AUTO
        spec.reduction = spec.reduction or pb.MAX_SIM_REDUCTION_SUM
        key = (current_call().caller.tenant, spec.name)
        if key in self.kept:
            raise AlreadyExists(f"{spec.name!r} exists", reason="COLLECTION_EXISTS", field="spec.name")
        self.kept[key] = Kept(spec)
        return pb.CreateCollectionResponse(collection=self.kept[key].described())

    async def GetCollection(self, request: pb.GetCollectionRequest, context: Any) -> Any:
        await self._gate(request)
        return pb.GetCollectionResponse(collection=self._find(request.collection).described())

    async def ListCollections(self, request: pb.ListCollectionsRequest, context: Any) -> Any:
        await self._gate(request)
        tenant = current_call().caller.tenant
        names = sorted(name for owner, name in self.kept if owner == tenant and name > request.page_token)
        page = names[: request.page_size or 1000]
        return pb.ListCollectionsResponse(
            collections=[self.kept[tenant, name].described() for name in page],
            next_page_token=page[-1] if len(page) < len(names) else "",
        )

    async def DeleteCollection(self, request: pb.DeleteCollectionRequest, context: Any) -> Any:
        await self._gate(request)
        self._find(request.collection)
        del self.kept[current_call().caller.tenant, request.collection]
        return pb.DeleteCollectionResponse()

    async def UpsertDocuments(self, request: pb.UpsertDocumentsRequest, context: Any) -> Any:
        await self._gate(request)
        kept = self._find(request.collection)
        documents = dict(kept.versions[-1])
        statuses: list[pb.DocumentStatus] = []
        last = {wire.id: index for index, wire in enumerate(request.documents)}
        tokens = cut = superseded = 0
        for index, wire in enumerate(request.documents):
            status = pb.DocumentStatus(id=wire.id)
            try:
                stored, truncated = _stored(wire, f"documents[{index}]", kept.spec, request)
            except PhasemeshError as fault:
                status.error.CopyFrom(
                    ItemError(code=fault.code, reason=fault.reason, message=fault.message, field=fault.field)
                )
            else:
                status.superseded = last[wire.id] != index
                superseded += status.superseded
                status.tokens, status.truncated = len(stored.tokens), truncated
                tokens, cut = tokens + len(stored.tokens), cut + truncated
                documents[wire.id] = stored
            statuses.append(status)
        failed = sum(status.HasField("error") for status in statuses)
        return pb.UpsertDocumentsResponse(
            version=kept.commit(documents),
            documents=statuses,
            stored=len(statuses) - failed - superseded,
            superseded=superseded,
            usage=Usage(tokens=tokens, truncated_inputs=cut),
            timings=_timings(UPSERT_PHASES_NS),
        )

    async def DeleteDocuments(self, request: pb.DeleteDocumentsRequest, context: Any) -> Any:
        await self._gate(request)
        kept = self._find(request.collection)
        if request.HasField("filter"):
            raise Unimplemented("deleting by filter comes later; give ids", field="filter")
        documents = dict(kept.versions[-1])
        missing = [wanted for wanted in request.ids if wanted not in documents]
        gone = [documents.pop(wanted) for wanted in request.ids if wanted in documents]
        return pb.DeleteDocumentsResponse(
            version=kept.commit(documents), deleted=len(gone), missing_ids=missing
        )

    async def GetDocuments(self, request: pb.GetDocumentsRequest, context: Any) -> Any:
        await self._gate(request)
        kept = self._find(request.collection)
        documents, version = _read(kept, request.version)
        projection = request.projection if request.HasField("projection") else _DEFAULT
        return pb.GetDocumentsResponse(
            documents=[
                _shown(documents[wanted], projection) for wanted in request.ids if wanted in documents
            ],
            missing_ids=[wanted for wanted in request.ids if wanted not in documents],
            version=version,
        )

    async def ListDocuments(self, request: pb.ListDocumentsRequest, context: Any) -> Any:
        await self._gate(request)
        kept = self._find(request.collection)
        documents, version = _read(kept, request.version)
        found = _filtered(documents, request, kept.spec)
        begin = int(request.page_token or 0)
        end = begin + (request.page_size or 100)
        projection = request.projection if request.HasField("projection") else _DEFAULT
        return pb.ListDocumentsResponse(
            documents=[_shown(item, projection) for item in found[begin:end]],
            next_page_token=str(end) if end < len(found) else "",
            version=version,
        )

    async def TagVersion(self, request: pb.TagVersionRequest, context: Any) -> Any:
        await self._gate(request)
        tags = self._find(request.collection).tags
        if request.tag in tags and not request.overwrite:
            raise AlreadyExists("tag: is there", reason="TAG_EXISTS", field="tag")
        if request.HasField("version"):
            tags[request.tag] = request.version.number
        else:
            del tags[request.tag]
        return pb.TagVersionResponse()

    async def RestoreVersion(self, request: pb.RestoreVersionRequest, context: Any) -> Any:
        await self._gate(request)
        kept = self._find(request.collection)
        if request.expected_version != kept.version():
            raise Aborted("expected_version: moved", reason="VERSION_MOVED", field="expected_version")
        by_tag = request.WhichOneof("target") == "tag"
        number = kept.tags[request.tag] if by_tag else request.version.number
        return pb.RestoreVersionResponse(version=kept.commit(kept.versions[number - 1]))

    async def CompactCollection(self, request: pb.CompactCollectionRequest, context: Any) -> Any:
        await self._gate(request)
        version = self._find(request.collection).version()
        return pb.CompactCollectionResponse(version=version, fragments_before=3, fragments_after=1)

    async def CountDocuments(self, request: pb.CountDocumentsRequest, context: Any) -> Any:
        await self._gate(request)
        kept = self._find(request.collection)
        documents, version = _read(kept, request.version)
        found = _filtered(documents, request, kept.spec)
        return pb.CountDocumentsResponse(documents=len(found), version=version)

    async def Search(self, request: pb.SearchRequest, context: Any) -> Any:
        await self._gate(request)
        kept = self._find(request.collection)
        if not 1 <= request.k <= MAX_K:
            raise InvalidArgument(f"k is {request.k}; give 1 to {MAX_K}", reason="K_OUT_OF_RANGE", field="k")
        if request.candidates > pb.CANDIDATE_SOURCE_EXHAUSTIVE:
            raise Unimplemented("only exhaustive search is here", field="candidates")
        documents, version = _read(kept, request.version)
        candidates = [
            item
            for item in _filtered(documents, request, kept.spec)
            if len(item.tokens) and item.id != request.query.id
        ]
        query = _query(request.query, kept.spec, documents)
        scored = sorted((-maxsim(query, item.tokens), item.id, item) for item in candidates)[: request.k]
        hits = [
            pb.Hit(
                id=item.id,
                score=-negative,
                document=_shown(item, request.projection) if request.HasField("projection") else None,
            )
            for negative, _, item in scored
        ]
        if self.spoil:
            hits[0].score = float("nan")
        return pb.SearchResponse(
            hits=hits,
            version=version,
            coverage=pb.Coverage(
                fragments=1,
                searched_fragments=1,
                documents=len(candidates),
                tokens=sum(len(item.tokens) for item in candidates),
                candidates=pb.CANDIDATE_SOURCE_EXHAUSTIVE,
                exact=True,
            ),
            usage=Usage(tokens=len(query)),
            timings=_timings(SEARCH_PHASES_NS),
        )

    async def Rerank(self, request: pb.RerankRequest, context: Any) -> Any:
        await self._gate(request)
        kept = self._find(request.collection)
        documents, version = _read(kept, request.version)
        query = _query(request.query, kept.spec, documents)
        there = [documents[wanted] for wanted in request.ids if wanted in documents]
        scored = sorted((-maxsim(query, item.tokens), item.id) for item in there if len(item.tokens))
        return pb.RerankResponse(
            hits=[
                pb.Hit(
                    id=name,
                    score=-negative,
                    document=_shown(documents[name], request.projection)
                    if request.HasField("projection")
                    else None,
                )
                for negative, name in scored[: request.top_k or None]
            ],
            missing_ids=[wanted for wanted in request.ids if wanted not in documents],
            empty_ids=[item.id for item in there if not len(item.tokens)],
            version=version,
            usage=Usage(tokens=len(query)),
            timings=_timings(SEARCH_PHASES_NS),
        )

    async def Explain(self, request: pb.ExplainRequest, context: Any) -> Any:
        await self._gate(request)
        kept = self._find(request.collection)
        documents, version = _read(kept, request.version)
        if request.id not in documents:
            raise NotFound(f"id: there is no {request.id!r}", reason="DOCUMENT_NOT_FOUND", field="id")
        query, document = _query(request.query, kept.spec, documents), documents[request.id]
        similarities = query.astype(np.float64) @ document.tokens.astype(np.float64).T
        asked = _word_spans(request.query.text) if request.query.text else None
        stored = _word_spans(document.text) if document.text else None
        alignments = []
        for row, best in enumerate(similarities.argmax(axis=1).tolist()):
            one = pb.TokenAlignment(query_token=row, document_token=best, similarity=similarities[row, best])
            if asked is not None:
                one.query_span_start, one.query_span_end = asked[row]
            if stored is not None:
                one.document_span_start, one.document_span_end = stored[best]
            alignments.append(one)
        return pb.ExplainResponse(
            score=float("nan") if self.spoil else maxsim(query, document.tokens),
            alignments=alignments,
            version=version,
            reduction=kept.spec.reduction,
            usage=Usage(tokens=len(query)),
            timings=_timings(SEARCH_PHASES_NS),
        )

    def _find(self, name: str) -> Kept:
        kept = self.kept.get((current_call().caller.tenant, name))
        if kept is None:
            raise NotFound(
                f"collection: there is no {name!r}", reason="COLLECTION_NOT_FOUND", field="collection"
            )
        return kept

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


_DEFAULT = pb.Projection(text=True, fields=["*"])


def _stored(
    wire: pb.Document, path: str, spec: pb.CollectionSpec, request: pb.UpsertDocumentsRequest
) -> tuple[Stored, bool]:
    if not wire.id:
        raise InvalidArgument(f"{path}.id: is empty", reason="INVALID_ID", field=f"{path}.id")
    _check_declared(wire.fields, spec, path)
    dense = decode_tensor(wire.dense_vector, field=path) if wire.HasField("dense_vector") else None
    truncated = False
    if wire.HasField("token_vectors"):
        tokens = _matrix(wire.token_vectors.vectors, spec, f"{path}.token_vectors.vectors")
    else:
        words = wire.text.split()
        truncated = len(words) > MAX_WORDS
        if truncated and not request.truncation.enabled:
            raise InvalidArgument(
                f"{path}.text: has {len(words)} words, and {MAX_WORDS} fit",
                reason="INPUT_TOO_LONG",
                field=f"{path}.text",
            )
        tokens = word_matrix(" ".join(words[:MAX_WORDS]), spec.token_dimension)
    text = wire.text if wire.HasField("text") else None
    return Stored(wire.id, text, tokens, wire.fields, dense), truncated


def _matrix(tensor: Any, spec: pb.CollectionSpec, path: str) -> NDArray[np.float16]:
    matrix = decode_tensor(tensor, field=path)
    if matrix.ndim != 2 or matrix.shape[1] != spec.token_dimension:
        raise InvalidArgument(
            f"{path}: is of {matrix.shape[-1]}, not {spec.token_dimension}", reason="DIM", field=path
        )
    if not np.isfinite(matrix).all():
        raise InvalidArgument(f"{path}: holds NaN or infinity", reason="NOT_FINITE", field=path)
    return matrix.astype(np.float16)


def _query(wire: pb.Query, spec: pb.CollectionSpec, documents: dict[str, Stored]) -> NDArray[np.float16]:
    kind = wire.WhichOneof("content")
    if kind == "vectors":
        return _matrix(wire.vectors, spec, "query.vectors")
    if kind == "id":
        if wire.id not in documents:
            raise NotFound("query.id isn't there", reason="DOCUMENT_NOT_FOUND", field="query.id")
        return documents[wire.id].tokens
    query = word_matrix(wire.text)
    if not len(query):
        raise InvalidArgument("query.text has no words", reason="EMPTY_INPUT", field="query.text")
    return query


def _word_spans(text: str) -> list[tuple[int, int]]:
    return [match.span() for match in re.finditer(r"\S+", text)]


def _check_declared(fields: Struct, spec: pb.CollectionSpec, path: str) -> None:
    declared = {field.name for field in spec.fields}
    for name in fields.fields:
        if name not in declared:
            raise InvalidArgument(
                f"{path}.fields: {name!r} isn't declared", reason="INVALID_FIELD", field=f"{path}.fields"
            )


def _read(kept: Kept, wanted: pb.ReadVersion) -> tuple[dict[str, Stored], pb.Version]:
    kind = wanted.WhichOneof("read")
    if kind is None:
        return kept.versions[-1], kept.version()
    version: pb.Version = getattr(wanted, kind)
    if version.incarnation != kept.incarnation or not 1 <= version.number <= len(kept.versions):
        raise NotFound("there is no such version", reason="VERSION_NOT_FOUND", field=f"version.{kind}")
    number = version.number if kind == "at_version" else len(kept.versions)
    return kept.versions[number - 1], kept.version(number)


def _filtered(documents: dict[str, Stored], request: Any, spec: pb.CollectionSpec) -> list[Stored]:
    if not request.HasField("filter"):
        return list(documents.values())
    equals = request.filter.equals
    if equals.field not in {field.name for field in spec.fields}:
        raise InvalidArgument(
            f"filter.equals.field: {equals.field!r} isn't declared",
            reason="INVALID_FILTER",
            field="filter.equals.field",
        )
    nothing = Value()
    return [
        item for item in documents.values() if item.fields.fields.get(equals.field, nothing) == equals.value
    ]


def _shown(stored: Stored, projection: pb.Projection) -> pb.Document:
    wire = pb.Document(id=stored.id)
    if projection.text and stored.text is not None:
        wire.text = stored.text
    for name, value in stored.fields.fields.items():
        if name in projection.fields or "*" in projection.fields:
            wire.fields.fields[name].CopyFrom(value)
    if projection.token_vectors:
        wire.token_vectors.vectors.CopyFrom(encode_tensor(stored.tokens, projection.encoding))
    if projection.dense_vector and stored.dense is not None:
        wire.dense_vector.CopyFrom(encode_tensor(stored.dense, projection.encoding))
    return wire


def _timings(phases_ns: dict[str, int]) -> Timings:
    offset, phases = 0, []
    for phase, duration_ns in phases_ns.items():
        phases.append(PhaseTiming(phase=phase, start_offset_ns=offset, duration_ns=duration_ns))
        offset += duration_ns
    return Timings(total_ns=offset, phases=phases)
