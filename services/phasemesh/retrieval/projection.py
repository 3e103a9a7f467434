"""What a reply holds of stored documents: the projection, and documents from the index to the wire."""

from __future__ import annotations

from dataclasses import dataclass

from phasemesh.errors import InvalidArgument
from phasemesh.index.schema import Part
from phasemesh.index.spec import CollectionSpec, StoredDocument
from phasemesh.retrieval.values import fields_to_wire
from phasemesh.rpc.codec import encode_tensor
from phasemesh.v1 import retrieval_pb2 as pb
from phasemesh.v1.common_pb2 import VECTOR_ENCODING_UNSPECIFIED, VectorEncoding

#: In `Projection.fields`: all of them.
ALL_FIELDS = "*"
TEXT_AND_ALL_FIELDS = pb.Projection(text=True, fields=[ALL_FIELDS])


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a reply holds of each document.

    Attributes:
        parts: read from the store.
        fields: names of declared fields.
        encoding: how vectors are sent.
    """

    parts: frozenset[Part]
    fields: frozenset[str]
    encoding: VectorEncoding.ValueType = VECTOR_ENCODING_UNSPECIFIED


def wanted_parts(projection: pb.Projection, spec: CollectionSpec) -> Wanted:
    """What `projection` asks for.

    Raises:
        InvalidArgument: it names an undeclared field or an unknown encoding, or a dense vector where the
            collection has none.
    """
    declared = [declared.name for declared in spec.fields]
    fields: set[str] = set()
    for position, name in enumerate(projection.fields):
        if name == ALL_FIELDS:
            fields.update(declared)
        elif name in declared:
            fields.add(name)
        else:
            raise InvalidArgument(
                f"{name[:64]!r} isn't a declared field; declared are {', '.join(declared) or 'none'}",
                reason="UNKNOWN_FIELD",
                field=f"projection.fields[{position}]",
            )
    if projection.encoding not in VectorEncoding.values():
        raise InvalidArgument(
            f"there is no vector encoding {projection.encoding}; use one of "
            f"{', '.join(VectorEncoding.keys())}",
            reason="UNKNOWN_ENCODING",
            field="projection.encoding",
        )
    if projection.dense_vector and not spec.dense_dim:
        raise InvalidArgument(
            "the collection has no dense vectors; leave it out",
            reason="NO_DENSE_VECTORS",
            field="projection.dense_vector",
        )
    parts: set[Part] = set()
    if projection.text:
        parts.add(Part.TEXT)
    if fields:
        parts.add(Part.FIELDS)
    if projection.token_vectors:
        parts.update((Part.TOKENS, Part.TOKEN_SPANS, Part.CHUNK_OFFSETS))
    if projection.dense_vector:
        parts.add(Part.DENSE)
    return Wanted(frozenset(parts), frozenset(fields), projection.encoding)


def document_to_wire(document: StoredDocument, wanted: Wanted) -> pb.Document:
    """A stored document, of which `wanted.parts` were read."""
    wire = pb.Document(id=document.id)
    if Part.TEXT in wanted.parts and document.text is not None:
        wire.text = document.text
    if wanted.fields:
        values = {name: value for name, value in document.fields.items() if name in wanted.fields}
        wire.fields.CopyFrom(fields_to_wire(values))
    if Part.TOKENS in wanted.parts:
        matrix = wire.token_vectors
        matrix.vectors.CopyFrom(encode_tensor(document.tokens, wanted.encoding))
        matrix.chunk_offsets.extend(document.chunk_offsets.tolist())
        if document.token_spans is not None:
            matrix.span_starts.extend(document.token_spans[:, 0].tolist())
            matrix.span_ends.extend(document.token_spans[:, 1].tolist())
    if Part.DENSE in wanted.parts and document.dense is not None:
        wire.dense_vector.CopyFrom(encode_tensor(document.dense, wanted.encoding))
    return wire
