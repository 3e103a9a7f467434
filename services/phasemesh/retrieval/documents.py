"""One document from the wire to the index, checked by itself, so that a wrong one fails alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from phasemesh.errors import FailedPrecondition, InvalidArgument
from phasemesh.index.checks import MAX_ID_BYTES
from phasemesh.index.spec import CollectionSpec, FieldValue, StoredDocument
from phasemesh.retrieval.values import ValueFault, fields_from_wire
from phasemesh.retrieval.vectors import as_float16, conditioned, matrix_from_wire
from phasemesh.rpc.codec import decode_tensor
from phasemesh.v1 import retrieval_pb2 as pb
from phasemesh.v1.common_pb2 import Tensor

_MAX_INT32 = 2**31 - 1


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """A document of a request that passed every check but its text's encoding.

    Attributes:
        path: its path in the request.
        document: as it will be stored; without token vectors while the text is to be encoded.
        to_encode: the text is to be encoded by the collection's model.
        truncated: the text was cut to fit the model.
    """

    path: str
    document: StoredDocument
    to_encode: bool
    truncated: bool = False

    def encoded(
        self, tokens: NDArray[np.float16], spans: NDArray[np.int32] | None, *, truncated: bool
    ) -> Draft:
        """The draft with the vectors of its text."""
        document = replace(self.document, tokens=tokens, token_spans=spans)
        return Draft(self.path, document, to_encode=False, truncated=truncated)


def draft_from_wire(wire: pb.Document, path: str, spec: CollectionSpec) -> Draft:
    """The document that `wire` describes.

    A text without characters other than blanks has nothing to encode: such a document is stored, and never a
    hit.

    Args:
        wire: as the caller gave it.
        path: its path in the request, e.g. "documents[3]".
        spec: the collection's.

    Raises:
        InvalidArgument: a part of it is wrong; the field says which.
        FailedPrecondition: it has a text but no vectors, and the collection has no model.
    """
    id_bytes = len(wire.id.encode())
    if not 1 <= id_bytes <= MAX_ID_BYTES:
        raise _fault(f"the id has {id_bytes} bytes; give 1 to {MAX_ID_BYTES}", "INVALID_ID", f"{path}.id")
    fields = _fields(wire, path, spec)
    dense = _dense(wire.dense_vector, path, spec) if wire.HasField("dense_vector") else None
    text = wire.text if wire.HasField("text") else None
    if wire.HasField("token_vectors"):
        tokens, spans, chunks = _given(wire.token_vectors, f"{path}.token_vectors", spec)
        return Draft(
            path, StoredDocument(wire.id, text, fields, tokens, spans, chunks, dense), to_encode=False
        )
    to_encode = bool(text and text.strip())
    if to_encode and not spec.model:
        raise FailedPrecondition(
            "the collection has no model to encode texts with; give token_vectors",
            reason="NO_MODEL",
            field=f"{path}.text",
        )
    nothing = np.zeros((0, spec.token_dim), np.float16)
    return Draft(path, StoredDocument(wire.id, text, fields, nothing, dense=dense), to_encode)


def _fields(wire: pb.Document, path: str, spec: CollectionSpec) -> dict[str, FieldValue]:
    try:
        return fields_from_wire(wire.fields, spec)
    except ValueFault as fault:
        raise _fault(f"fields: {fault}", "INVALID_FIELD", f"{path}.fields") from None


def _dense(wire: Tensor, path: str, spec: CollectionSpec) -> NDArray[np.float32]:
    field = f"{path}.dense_vector"
    if not spec.dense_dim:
        raise _fault("the collection has no dense vectors; leave it out", "NO_DENSE_VECTORS", field)
    dense = decode_tensor(wire, field=field)
    if dense.shape != (spec.dense_dim,):
        words = f"{field}: has the shape {list(dense.shape)}; the collection takes [{spec.dense_dim}]"
        raise _fault(words, "DIMENSION_MISMATCH", f"{field}.shape")
    if not np.isfinite(dense).all():
        raise _fault(f"{field}: holds NaN or infinity; give finite numbers", "NOT_FINITE", field)
    return dense.astype(np.float32)


def _given(
    wire: pb.TokenMatrix, path: str, spec: CollectionSpec
) -> tuple[NDArray[np.float16], NDArray[np.int32] | None, NDArray[np.int32]]:
    field = f"{path}.vectors"
    matrix = matrix_from_wire(wire.vectors, spec, field)
    tokens = as_float16(conditioned(matrix, spec.normalize, field), field)
    return tokens, _spans(wire, path, len(tokens)), _chunks(wire, path, len(tokens))


def _spans(wire: pb.TokenMatrix, path: str, rows: int) -> NDArray[np.int32] | None:
    if not wire.span_starts and not wire.span_ends:
        return None
    for name, side in (("span_starts", wire.span_starts), ("span_ends", wire.span_ends)):
        if len(side) != rows:
            words = f"{path}: there are {rows} vectors and {len(side)} {name}; give one for each, or none"
            raise _fault(words, "INVALID_SPANS", f"{path}.{name}")
    spans = np.array([wire.span_starts, wire.span_ends], np.int64).T
    wrong = (spans[:, 0] > spans[:, 1]) | (spans[:, 1] > _MAX_INT32)
    if wrong.any():
        row = int(np.argmax(wrong))
        begin, end = spans[row]
        words = f"{path}: span {row} runs from {begin} to {end}; a span ends at or after its start"
        raise _fault(words, "INVALID_SPANS", f"{path}.span_ends")
    return spans.astype(np.int32)


def _chunks(wire: pb.TokenMatrix, path: str, rows: int) -> NDArray[np.int32]:
    offsets = np.array(wire.chunk_offsets, np.int64)
    edges = np.concatenate([[0], offsets, [rows]])
    if len(offsets) and not (np.diff(edges) > 0).all():
        words = f"{path}: chunk_offsets have to rise strictly between 0 and the {rows} vectors"
        raise _fault(words, "INVALID_CHUNKS", f"{path}.chunk_offsets")
    return offsets.astype(np.int32)


def _fault(message: str, reason: str, field: str) -> InvalidArgument:
    return InvalidArgument(message, reason=reason, field=field)
