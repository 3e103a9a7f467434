"""A query's token vectors, wherever they come from: a text, a matrix, or a document that is stored.

Invariant: what comes out has at least one vector, of the collection's dimension, finite and none zero, in the
condition that its `normalize` asks for; a stored document's are those of the version that is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phasemesh.errors import FailedPrecondition, InvalidArgument, NotFound
from phasemesh.index.checks import MAX_ID_BYTES
from phasemesh.index.schema import Part
from phasemesh.index.spec import CollectionSpec, Version
from phasemesh.retrieval.encoding import TextEncoder
from phasemesh.retrieval.handles import Collections, Opened, version_to_wire
from phasemesh.retrieval.leaves import VECTORS_FIELD
from phasemesh.retrieval.specs import CODEC_TO_WIRE, REDUCTION_TO_WIRE
from phasemesh.retrieval.vectors import conditioned, matrix_from_wire
from phasemesh.retrieval.work import Request
from phasemesh.rpc.codec import encode_tensor
from phasemesh.v1 import retrieval_pb2 as pb
from phasemesh.v1 import scorer_pb2
from phasemesh.v1.common_pb2 import (
    VECTOR_ENCODING_FLOAT16,
    VECTOR_ENCODING_FLOAT32,
    Tensor,
    Truncation,
    Usage,
)


@dataclass(frozen=True, slots=True, eq=False)
class CheckedQuery:
    """A query that could be answered, as far as that can be told without reading or encoding anything.

    Attributes:
        wire: as the caller gave it.
        given: its matrix, [q, d]; None where it is a text or a stored document.
    """

    wire: pb.Query
    given: NDArray[Any] | None

    @property
    def stored_id(self) -> str | None:
        """Id of the document that is the query; None where it is something else."""
        return self.wire.id if self.wire.WhichOneof("content") == "id" else None


@dataclass(frozen=True, slots=True, eq=False)
class QueryVectors:
    """A query's token vectors.

    Attributes:
        vectors: [q, d], float16 or float32.
        field: the query's path in the caller's request.
        usage: tokens computed.
        spans: characters of each vector's token in the query's text, int32 [q, 2]; None unless asked for, and
            where the query is no text.
    """

    vectors: NDArray[Any]
    field: str
    usage: Usage
    spans: NDArray[np.int32] | None = None

    def tensor(self) -> Tensor:
        """As scorers are sent it."""
        half = self.vectors.dtype == np.float16
        return encode_tensor(self.vectors, VECTOR_ENCODING_FLOAT16 if half else VECTOR_ENCODING_FLOAT32)


class Queries:
    """Reads queries.

    Args:
        collections: of stored documents.
        encoder: of texts.
    """

    def __init__(self, collections: Collections, encoder: TextEncoder) -> None:
        self._collections = collections
        self._encoder = encoder

    async def vectors(
        self,
        request: Request,
        opened: Opened,
        version: Version,
        query: CheckedQuery,
        truncation: Truncation,
        *,
        spans: bool = False,
    ) -> QueryVectors:
        """The query's vectors.

        Args:
            request: whose time and clock.
            opened: the collection.
            version: that is read; exact.
            query: from `check_query`.
            truncation: what to do with a long text.
            spans: also tell which characters of a text each vector stands for.

        Raises:
            PhasemeshError: the text can't be encoded, or the stored document isn't there or has no vectors.
        """
        if query.given is not None:
            return QueryVectors(query.given, VECTORS_FIELD, Usage())
        if query.stored_id is not None:
            return QueryVectors(await self._stored(opened, version, query.stored_id), "query.id", Usage())
        spec = opened.spec
        encoded = await self._encoder.query(request, spec, query.wire.text, truncation, spans=spans)
        vectors = conditioned(encoded.vectors, spec.normalize, "query.text", scale=False)
        if not len(vectors):
            raise _empty("query.text", "the model gives no token vectors for this text; give another")
        return QueryVectors(vectors, "query.text", encoded.usage, encoded.spans)

    async def _stored(self, opened: Opened, version: Version, name: str) -> NDArray[np.float16]:
        documents, _ = await self._collections.run(
            lambda: opened.store.get([name], version, frozenset({Part.TOKENS}))
        )
        if not documents:
            raise NotFound(
                f"there is no document {name[:64]!r} in version {version.number}; give the id of one that is "
                "stored",
                reason="DOCUMENT_NOT_FOUND",
                field="query.id",
            )
        # Stored vectors were conditioned on their way in; scaling them again would move their last bits.
        tokens: NDArray[np.float16] = documents[0].tokens
        if not len(tokens):
            raise FailedPrecondition(
                f"the document {name[:64]!r} has no token vectors, so it can't be a query; give another",
                reason="EMPTY_DOCUMENT",
                field="query.id",
            )
        return tokens


def check_query(wire: pb.Query, spec: CollectionSpec) -> CheckedQuery:
    """Check what can be checked at once, so that a wrong query costs nothing.

    Raises:
        InvalidArgument: it is empty, or its vectors or its id can't be what they should be.
        FailedPrecondition: it is a text and the collection has no model.
    """
    kind = wire.WhichOneof("content")
    if kind == "vectors":
        shape = list(wire.vectors.shape)
        if len(shape) == 2 and shape[0] == 0:
            raise _empty(VECTORS_FIELD, "the query has no vectors; give at least one")
        matrix = matrix_from_wire(wire.vectors, spec, VECTORS_FIELD)
        return CheckedQuery(wire, conditioned(matrix, spec.normalize, VECTORS_FIELD))
    if kind == "id":
        check_id(wire.id, "query.id")
        return CheckedQuery(wire, None)
    if kind is None or not wire.text.strip():
        raise _empty("query", "the query is empty; give a text, vectors or the id of a stored document")
    if not spec.model:
        raise FailedPrecondition(
            "the collection has no model to encode a text with; give query.vectors",
            reason="NO_MODEL",
            field="query.text",
        )
    return CheckedQuery(wire, None)


def check_id(name: str, field: str) -> None:
    """Refuse what no document can be called.

    Raises:
        InvalidArgument: it is empty or too long.
    """
    size = len(name.encode())
    if not 1 <= size <= MAX_ID_BYTES:
        raise InvalidArgument(
            f"{field}: the id has {size} bytes; give 1 to {MAX_ID_BYTES}", reason="INVALID_ID", field=field
        )


def index_ref(tenant: str, opened: Opened, version: Version) -> scorer_pb2.IndexRef:
    """A version of a collection, as scorers need to know it."""
    spec = opened.spec
    return scorer_pb2.IndexRef(
        tenant=tenant,
        version=version_to_wire(version),
        codec=CODEC_TO_WIRE[spec.codec],
        token_dimension=spec.token_dim,
        reduction=REDUCTION_TO_WIRE[spec.reduction],
    )


def _empty(field: str, words: str) -> InvalidArgument:
    return InvalidArgument(words, reason="EMPTY_QUERY", field=field)
