"""Messages of the contract to JSON bodies of the native dialect, as bytes.

Invariant: what a reply shows of a collection or a document can be sent back as it stands, and no number in
it is anything but finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import orjson
from google.protobuf.struct_pb2 import Struct, Value

from phasemesh.errors import PhasemeshError, from_code
from phasemesh.gateway.dialects.native.objects import enum_name
from phasemesh.gateway.dialects.native.read import UpsertCall
from phasemesh.gateway.dialects.native.vectors import shown
from phasemesh.gateway.peer_faults import broken_reply
from phasemesh.v1 import common_pb2 as common
from phasemesh.v1 import retrieval_pb2 as pb

_MAX_EXACT_INTEGER = 2**53


def collection_body(reply: pb.CreateCollectionResponse | pb.GetCollectionResponse) -> bytes:
    """One collection."""
    return _dumps({"collection": _collection(reply.collection)})


def list_body(reply: pb.ListCollectionsResponse) -> bytes:
    """A page of collections."""
    return _dumps(
        {
            "collections": [_collection(item) for item in reply.collections],
            "next_page_token": reply.next_page_token,
        }
    )


def deleted_collection_body(reply: pb.DeleteCollectionResponse) -> bytes:
    """Nothing."""
    return b"{}"


def upsert_body(reply: pb.UpsertDocumentsResponse, call: UpsertCall, rename: Callable[[str], str]) -> bytes:
    """One entry per document of the body, those that couldn't be read included."""
    sent = call.sent
    if len(reply.documents) != len(sent):
        raise broken_reply(
            "the retrieval service", "documents of a reply", got=len(reply.documents), sent=len(sent)
        )
    statuses = dict(zip(sent, reply.documents, strict=True))
    documents: list[dict[str, object]] = []
    for index, given_id in enumerate(call.ids):
        if (fault := call.faults.get(index)) is not None:
            documents.append({"id": given_id, "error": error_object(fault)})
        else:
            documents.append(_status(statuses[index], rename))
    return _dumps(
        {
            "version": _version(reply.version),
            "documents": documents,
            "stored": reply.stored,
            "superseded": reply.superseded,
            "usage": _usage(reply.usage),
            "timings": _timings(reply.timings),
        }
    )


def _status(status: pb.DocumentStatus, rename: Callable[[str], str]) -> dict[str, object]:
    if status.HasField("error"):
        fault = status.error
        error = from_code(
            fault.code, rename(fault.message), reason=fault.reason or None, field=rename(fault.field)
        )
        return {"id": status.id, "error": error_object(error)}
    return {
        "id": status.id,
        "tokens": status.tokens,
        "truncated": status.truncated,
        "superseded": status.superseded,
    }


def delete_body(reply: pb.DeleteDocumentsResponse) -> bytes:
    """What was deleted."""
    return _dumps(
        {
            "version": _version(reply.version),
            "deleted": reply.deleted,
            "missing_ids": list(reply.missing_ids),
        }
    )


def get_body(reply: pb.GetDocumentsResponse, *, packed: bool) -> bytes:
    """Documents."""
    return _dumps(
        {
            "documents": [_document(item, packed=packed) for item in reply.documents],
            "missing_ids": list(reply.missing_ids),
            "version": _version(reply.version),
        }
    )


def documents_body(reply: pb.ListDocumentsResponse, *, packed: bool) -> bytes:
    """A page of documents."""
    return _dumps(
        {
            "documents": [_document(item, packed=packed) for item in reply.documents],
            "next_page_token": reply.next_page_token,
            "version": _version(reply.version),
        }
    )


def tagged_body(reply: pb.TagVersionResponse) -> bytes:
    """Nothing."""
    return b"{}"


def restored_body(reply: pb.RestoreVersionResponse) -> bytes:
    """The version that holds the restored state."""
    return _dumps({"version": _version(reply.version)})


def compacted_body(reply: pb.CompactCollectionResponse) -> bytes:
    """What compaction did."""
    return _dumps(
        {
            "version": _version(reply.version),
            "fragments_before": reply.fragments_before,
            "fragments_after": reply.fragments_after,
        }
    )


def count_body(reply: pb.CountDocumentsResponse) -> bytes:
    """A count."""
    return _dumps({"documents": reply.documents, "version": _version(reply.version)})


def search_body(reply: pb.SearchResponse, *, packed: bool) -> bytes:
    """Hits, best first."""
    hits = [_hit(hit, packed=packed) for hit in reply.hits]
    covered = reply.coverage
    return _dumps(
        {
            "hits": hits,
            "version": _version(reply.version),
            "coverage": {
                "fragments": covered.fragments,
                "searched_fragments": covered.searched_fragments,
                "documents": covered.documents,
                "tokens": covered.tokens,
                "candidates": enum_name(pb.CandidateSource, "CANDIDATE_SOURCE_", covered.candidates),
                "exact": covered.exact,
            },
            "usage": _usage(reply.usage),
            "timings": _timings(reply.timings),
        }
    )


def rerank_body(reply: pb.RerankResponse, *, packed: bool) -> bytes:
    """Hits, best first, and what has no score."""
    return _dumps(
        {
            "hits": [_hit(hit, packed=packed) for hit in reply.hits],
            "missing_ids": list(reply.missing_ids),
            "empty_ids": list(reply.empty_ids),
            "version": _version(reply.version),
            "usage": _usage(reply.usage),
            "timings": _timings(reply.timings),
        }
    )


def explain_body(reply: pb.ExplainResponse) -> bytes:
    """A score, and what each of the query's tokens matched; spans only where there are some."""
    alignments = []
    for one in reply.alignments:
        shown: dict[str, object] = {"query_token": one.query_token, "document_token": one.document_token}
        if one.HasField("query_span_start"):
            shown |= {"query_span_start": one.query_span_start, "query_span_end": one.query_span_end}
        if one.HasField("document_span_start"):
            shown |= {
                "document_span_start": one.document_span_start,
                "document_span_end": one.document_span_end,
            }
        alignments.append({**shown, "similarity": _finite(one.similarity)})
    return _dumps(
        {
            "score": _finite(reply.score),
            "reduction": enum_name(pb.MaxSimReduction, "MAX_SIM_REDUCTION_", reply.reduction),
            "alignments": alignments,
            "version": _version(reply.version),
            "usage": _usage(reply.usage),
            "timings": _timings(reply.timings),
        }
    )


def _hit(hit: pb.Hit, *, packed: bool) -> dict[str, object]:
    found: dict[str, object] = {"id": hit.id, "score": _finite(hit.score)}
    if hit.HasField("document"):
        found["document"] = _document(hit.document, packed=packed)
    return found


def _finite(score: float) -> np.float32:
    if not math.isfinite(score):
        # JSON has no NaN: it would become null and break clients far from the cause.
        raise broken_reply("the retrieval service", "a score is not finite")
    return np.float32(score)


def error_object(error: PhasemeshError) -> dict[str, object]:
    """An error, of a request or of one document."""
    return {
        "code": error.code.name,
        "reason": error.reason,
        "message": error.message,
        "field": error.field or None,
    }


def _collection(collection: pb.Collection) -> dict[str, object]:
    spec = collection.spec
    return {
        "spec": {
            "name": spec.name,
            "model": spec.model,
            "recipe_hash": spec.recipe_hash,
            "token_dimension": spec.token_dimension,
            "codec": enum_name(pb.Codec, "CODEC_", spec.codec),
            "fields": [
                {"name": field.name, "type": enum_name(pb.FieldType, "FIELD_TYPE_", field.type)}
                for field in spec.fields
            ],
            "normalize": enum_name(pb.NormalizePolicy, "NORMALIZE_POLICY_", spec.normalize),
            "reduction": enum_name(pb.MaxSimReduction, "MAX_SIM_REDUCTION_", spec.reduction),
            "dense_dimension": spec.dense_dimension,
        },
        "version": _version(collection.version),
        "documents": collection.documents,
        "tokens": collection.tokens,
        "create_time": collection.create_time.ToJsonString(),
        "fragments": collection.fragments,
    }


def _document(document: pb.Document, *, packed: bool) -> dict[str, object]:
    made: dict[str, object] = {"id": document.id}
    if document.HasField("text"):
        made["text"] = document.text
    if document.HasField("fields"):
        made["fields"] = _fields(document.fields)
    if document.HasField("token_vectors"):
        matrix = document.token_vectors
        vectors = matrix.vectors
        # A document without tokens has a matrix without rows.
        empty = not vectors.shape or vectors.shape[0] == 0
        made["token_vectors"] = {
            "vectors": [] if empty else shown(vectors, "token_vectors.vectors", packed=packed),
            "chunk_offsets": list(matrix.chunk_offsets),
            "span_starts": list(matrix.span_starts),
            "span_ends": list(matrix.span_ends),
        }
    if document.HasField("dense_vector"):
        made["dense_vector"] = shown(document.dense_vector, "dense_vector", packed=packed)
    return made


def _fields(fields: Struct) -> dict[str, object]:
    return {name: _value(value) for name, value in fields.fields.items()}


def _value(value: Value) -> object:
    kind = value.WhichOneof("kind")
    if kind == "number_value":
        number = value.number_value
        # A Value has no integers; whole numbers are written as such, as protobuf's own JSON does.
        return int(number) if number.is_integer() and abs(number) <= _MAX_EXACT_INTEGER else number
    if kind == "list_value":
        return [_value(item) for item in value.list_value.values]
    return None if kind in (None, "null_value") else getattr(value, kind)


def _version(version: pb.Version) -> dict[str, object]:
    return {"incarnation": version.incarnation, "number": version.number}


def _usage(usage: common.Usage) -> dict[str, object]:
    return {"tokens": usage.tokens, "truncated_inputs": usage.truncated_inputs}


def _timings(timings: common.Timings) -> dict[str, object]:
    return {
        "total_ns": timings.total_ns,
        "phases": [
            {
                "phase": phase.phase,
                "start_offset_ns": phase.start_offset_ns,
                "duration_ns": phase.duration_ns,
            }
            for phase in timings.phases
        ],
    }


def _dumps(body: dict[str, Any]) -> bytes:
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)
