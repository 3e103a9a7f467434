"""JSON bodies of the native dialect to messages of the contract.

Names are the contract's in snake_case; enumerations are their short names in lower case ("int8"). A document
of an upsert that can't be read fails alone: `read_upsert` returns its fault beside the message, which holds
the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.struct_pb2 import Struct

from phasemesh.errors import InvalidArgument
from phasemesh.gateway.dialects.native.filters import read_filter
from phasemesh.gateway.dialects.native.objects import JsonObject
from phasemesh.gateway.dialects.native.values import read_value
from phasemesh.gateway.dialects.native.vectors import read_matrix, read_vector
from phasemesh.gateway.fields import invalid, json_type
from phasemesh.v1 import common_pb2 as common
from phasemesh.v1 import retrieval_pb2 as pb

#: Hits of a search that doesn't say how many it wants.
DEFAULT_K = 10
#: Most ids of one rerank; the contract's limit.
MAX_RERANK_IDS = 10_000
_MAX_UINT64 = 2**64 - 1

_SPEC = (
    "name", "model", "recipe_hash", "token_dimension", "codec", "fields", "normalize", "reduction",
    "dense_dimension",
)  # fmt: skip
_DOCUMENT = ("id", "text", "token_vectors", "fields", "dense_vector")
_MATRIX = ("vectors", "chunk_offsets", "span_starts", "span_ends")
_PROJECTION = ("text", "fields", "token_vectors", "dense_vector", "encoding")
_SEARCH = (
    "query", "k", "filter", "projection", "version", "candidates", "candidate_limit", "allow_partial",
    "truncation", "dense_vector",
)  # fmt: skip

_QUERY_FORMS = "a text, token vectors, or the id of a stored document"


@dataclass(frozen=True, slots=True)
class UpsertCall:
    """A parsed body of an upsert.

    Attributes:
        request: holds the documents that could be read.
        ids: of all documents of the body; "" for one whose id can't be read.
        faults: what is wrong with the others, by position in the body.
    """

    request: pb.UpsertDocumentsRequest
    ids: list[str]
    faults: Mapping[int, InvalidArgument]

    @property
    def sent(self) -> list[int]:
        """Position in the body of each document of `request`."""
        return [index for index in range(len(self.ids)) if index not in self.faults]


def read_create(body: Mapping[str, Any]) -> pb.CreateCollectionRequest:
    """A body of `POST /v1/collections`.

    Raises:
        InvalidArgument: a field is missing, unknown or wrong; as everywhere here, `field` is its path.
    """
    given = JsonObject.of(body, "", *_SPEC)
    spec = pb.CollectionSpec(
        name=given.required_text("name", "a name for the collection"),
        model=given.text("model"),
        recipe_hash=given.text("recipe_hash"),
        token_dimension=given.integer("token_dimension", least=0) or 0,
        codec=given.enum("codec", pb.Codec, "CODEC_"),
        normalize=given.enum("normalize", pb.NormalizePolicy, "NORMALIZE_POLICY_"),
        reduction=given.enum("reduction", pb.MaxSimReduction, "MAX_SIM_REDUCTION_"),
        dense_dimension=given.integer("dense_dimension", least=0) or 0,
    )
    for index, item in enumerate(given.items("fields")):
        declared = JsonObject.of(item, f"fields[{index}]", "name", "type")
        declared.required("type", "the field's type")
        spec.fields.add(
            name=declared.required_text("name", "the field's name"),
            type=declared.enum("type", pb.FieldType, "FIELD_TYPE_"),
        )
    return pb.CreateCollectionRequest(spec=spec)


def read_list(query: Mapping[str, str]) -> pb.ListCollectionsRequest:
    """The query of `GET /v1/collections`."""
    size = query.get("page_size", "")
    if size and not (size.isascii() and size.isdecimal() and len(size) <= 9):
        raise invalid("page_size", f"has to be a number of collections, not {size[:40]!r}")
    return pb.ListCollectionsRequest(page_size=int(size or 0), page_token=query.get("page_token", ""))


def read_upsert(body: Mapping[str, Any], collection: str, *, max_documents: int) -> UpsertCall:
    """A body of `POST /v1/collections/{name}/documents`.

    Raises:
        InvalidArgument: the body as a whole is wrong, or every document is.
    """
    given = JsonObject.of(body, "", "documents", "truncation", "priority")
    given.required("documents", "a list of documents")
    documents = _limited(given.items("documents"), "documents", "document", max_documents)
    request = pb.UpsertDocumentsRequest(
        collection=collection,
        truncation=_truncation(given),
        priority=given.enum("priority", common.Priority, "PRIORITY_"),
    )
    ids: list[str] = []
    faults: dict[int, InvalidArgument] = {}
    for index, item in enumerate(documents):
        given_id = item.get("id") if isinstance(item, dict) else None
        ids.append(given_id if isinstance(given_id, str) else "")
        try:
            request.documents.append(_document(item, f"documents[{index}]"))
        except InvalidArgument as fault:
            faults[index] = fault
    if not request.documents:
        raise next(iter(faults.values()))
    return UpsertCall(request, ids, faults)


def _document(item: Any, path: str) -> pb.Document:
    given = JsonObject.of(item, path, *_DOCUMENT)
    document = pb.Document(id=given.required_text("id", "the document's id"))
    if given.get("text") is not None:
        document.text = given.text("text")
    if (matrix := given.get("token_vectors")) is not None:
        document.token_vectors.CopyFrom(_matrix(matrix, given.at("token_vectors")))
    if (fields := given.get("fields")) is not None:
        document.fields.CopyFrom(_fields(fields, given.at("fields")))
    if (dense := given.get("dense_vector")) is not None:
        document.dense_vector.CopyFrom(read_vector(dense, given.at("dense_vector")))
    return document


def _matrix(value: Any, path: str) -> pb.TokenMatrix:
    if not isinstance(value, dict) or "data" in value:
        return pb.TokenMatrix(vectors=read_matrix(value, path))
    given = JsonObject.of(value, path, *_MATRIX)
    return pb.TokenMatrix(
        vectors=read_matrix(given.required("vectors", "the token vectors"), given.at("vectors")),
        chunk_offsets=given.integers("chunk_offsets"),
        span_starts=given.integers("span_starts"),
        span_ends=given.integers("span_ends"),
    )


def _fields(value: Any, path: str) -> Struct:
    if not isinstance(value, dict):
        raise invalid(path, f"has to be an object of declared fields, not {json_type(value)}")
    struct = Struct()
    for name, content in value.items():
        struct.fields[name].CopyFrom(read_value(content, f"{path}.{name[:128]}"))
    return struct


def read_delete(body: Mapping[str, Any], collection: str, *, max_ids: int) -> pb.DeleteDocumentsRequest:
    """A body of `POST /v1/collections/{name}/documents/delete`."""
    given = JsonObject.of(body, "", "ids", "filter")
    if given.get("filter") is None:
        given.required("ids", "ids of documents, or a `filter`")
        ids = _limited(given.texts("ids"), "ids", "id", max_ids)
        return pb.DeleteDocumentsRequest(collection=collection, ids=ids)
    if given.get("ids") is not None:
        raise invalid("filter", "was given along with `ids`; give one of them")
    return pb.DeleteDocumentsRequest(collection=collection, filter=_filter(given))


def read_get(body: Mapping[str, Any], collection: str, *, max_ids: int) -> pb.GetDocumentsRequest:
    """A body of `POST /v1/collections/{name}/documents/get`."""
    given = JsonObject.of(body, "", "ids", "projection", "version")
    given.required("ids", "ids of documents")
    return pb.GetDocumentsRequest(
        collection=collection,
        ids=_limited(given.texts("ids"), "ids", "id", max_ids),
        projection=_projection(given),
        version=_read_version(given),
    )


def read_documents(body: Mapping[str, Any], collection: str) -> pb.ListDocumentsRequest:
    """A body of `POST /v1/collections/{name}/documents/list`."""
    given = JsonObject.of(body, "", "filter", "projection", "page_size", "page_token", "version")
    return pb.ListDocumentsRequest(
        collection=collection,
        filter=_filter(given),
        projection=_projection(given),
        page_size=given.integer("page_size", least=0) or 0,
        page_token=given.text("page_token"),
        version=_read_version(given),
    )


def read_tag(body: Mapping[str, Any], collection: str) -> pb.TagVersionRequest:
    """A body of `POST /v1/collections/{name}/tag`."""
    given = JsonObject.of(body, "", "tag", "version", "overwrite")
    version = given.get("version")
    return pb.TagVersionRequest(
        collection=collection,
        tag=given.required_text("tag", "a name for the version"),
        version=None if version is None else _version(version, "version"),
        overwrite=given.flag("overwrite"),
    )


def read_restore(body: Mapping[str, Any], collection: str) -> pb.RestoreVersionRequest:
    """A body of `POST /v1/collections/{name}/restore`."""
    given = JsonObject.of(body, "", "version", "tag", "expected_version")
    version, tag = given.get("version"), given.get("tag")
    if (version is None) == (tag is None):
        raise invalid("version", "has to be given, or else `tag`; give one of them")
    expected = given.required("expected_version", "the newest version that you know")
    request = pb.RestoreVersionRequest(
        collection=collection, expected_version=_version(expected, "expected_version")
    )
    if version is None:
        request.tag = given.text("tag")
    else:
        request.version.CopyFrom(_version(version, "version"))
    return request


def read_compact(body: Mapping[str, Any], collection: str) -> pb.CompactCollectionRequest:
    """A body of `POST /v1/collections/{name}/compact`, in which there is nothing to say."""
    JsonObject.of(body, "")
    return pb.CompactCollectionRequest(collection=collection)


def read_count(body: Mapping[str, Any], collection: str) -> pb.CountDocumentsRequest:
    """A body of `POST /v1/collections/{name}/documents/count`."""
    given = JsonObject.of(body, "", "filter", "version")
    return pb.CountDocumentsRequest(
        collection=collection, filter=_filter(given), version=_read_version(given)
    )


def read_search(body: Mapping[str, Any], collection: str) -> pb.SearchRequest:
    """A body of `POST /v1/collections/{name}/search`."""
    given = JsonObject.of(body, "", *_SEARCH)
    query = _query(given.required("query", _QUERY_FORMS))
    k = given.integer("k", least=1)
    dense = given.get("dense_vector")
    return pb.SearchRequest(
        collection=collection,
        query=query,
        k=DEFAULT_K if k is None else k,
        filter=_filter(given),
        projection=_projection(given),
        version=_read_version(given),
        candidates=given.enum("candidates", pb.CandidateSource, "CANDIDATE_SOURCE_"),
        candidate_limit=given.integer("candidate_limit", least=1),
        allow_partial=given.flag("allow_partial"),
        truncation=_truncation(given),
        dense_vector=None if dense is None else read_vector(dense, "dense_vector"),
    )


def read_rerank(body: Mapping[str, Any], collection: str) -> pb.RerankRequest:
    """A body of `POST /v1/collections/{name}/rerank`."""
    given = JsonObject.of(body, "", "query", "ids", "top_k", "projection", "version", "truncation")
    query = _query(given.required("query", _QUERY_FORMS))
    given.required("ids", "ids of documents")
    return pb.RerankRequest(
        collection=collection,
        query=query,
        ids=_limited(given.texts("ids"), "ids", "id", MAX_RERANK_IDS),
        top_k=given.integer("top_k", least=1),
        projection=_projection(given),
        version=_read_version(given),
        truncation=_truncation(given),
    )


def read_explain(body: Mapping[str, Any], collection: str) -> pb.ExplainRequest:
    """A body of `POST /v1/collections/{name}/explain`."""
    given = JsonObject.of(body, "", "query", "id", "version", "truncation")
    return pb.ExplainRequest(
        collection=collection,
        query=_query(given.required("query", _QUERY_FORMS)),
        id=given.required_text("id", "the id of a document"),
        version=_read_version(given),
        truncation=_truncation(given),
    )


def _query(value: Any) -> pb.Query:
    if isinstance(value, str):
        return pb.Query(text=value)
    given = JsonObject.of(value, "query", "text", "vectors", "id")
    if sum(given.get(key) is not None for key in ("text", "vectors", "id")) != 1:
        raise invalid("query", "has to have one of `text`, `vectors` and `id`")
    if (vectors := given.get("vectors")) is not None:
        return pb.Query(vectors=read_matrix(vectors, "query.vectors"))
    if given.get("id") is not None:
        return pb.Query(id=given.text("id"))
    return pb.Query(text=given.text("text"))


def _filter(parent: JsonObject) -> pb.Filter | None:
    value = parent.get("filter")
    return None if value is None else read_filter(value)


def _projection(parent: JsonObject) -> pb.Projection | None:
    value = parent.get("projection")
    if value is None:
        return None
    given = JsonObject.of(value, "projection", *_PROJECTION)
    encoding = given.enum("encoding", common.VectorEncoding, "VECTOR_ENCODING_")
    return pb.Projection(
        text=given.flag("text"),
        fields=given.texts("fields"),
        token_vectors=given.flag("token_vectors"),
        dense_vector=given.flag("dense_vector"),
        # Packed on the wire in any case; `render` makes numbers of it if none was asked for.
        encoding=encoding or common.VECTOR_ENCODING_FLOAT32,
    )


def wants_packed(body: Mapping[str, Any]) -> bool:
    """Whether a body that was read asks for vectors in base64."""
    projection = body.get("projection")
    return projection is not None and projection.get("encoding") is not None


def _read_version(parent: JsonObject) -> pb.ReadVersion | None:
    value = parent.get("version")
    if value is None:
        return None
    given = JsonObject.of(value, "version", "min_version", "at_version")
    least, exact = given.get("min_version"), given.get("at_version")
    if least is not None and exact is not None:
        raise invalid("version", "has both `min_version` and `at_version`; give one of them")
    if exact is not None:
        return pb.ReadVersion(at_version=_version(exact, "version.at_version"))
    return pb.ReadVersion(min_version=None if least is None else _version(least, "version.min_version"))


def _version(value: Any, path: str) -> pb.Version:
    given = JsonObject.of(value, path, "incarnation", "number")
    given.required("number", "the version's number")
    return pb.Version(
        incarnation=given.required_text("incarnation", "the version as a reply had it"),
        number=given.integer("number", least=0, most=_MAX_UINT64) or 0,
    )


def _truncation(parent: JsonObject) -> common.Truncation | None:
    value = parent.get("truncation")
    if value is None:
        return None
    given = JsonObject.of(value, "truncation", "enabled", "side", "max_tokens")
    return common.Truncation(
        enabled=given.flag("enabled"),
        side=given.enum("side", common.TruncationSide, "TRUNCATION_SIDE_"),
        max_tokens=given.integer("max_tokens", least=1),
    )


def _limited(values: list[Any], field: str, what: str, most: int) -> list[Any]:
    if not values:
        raise invalid(field, f"is an empty list; give at least one {what}", reason="EMPTY_INPUT")
    if len(values) > most:
        raise invalid(
            field,
            f"has {len(values)} {what}s; at most {most} fit in one request, so split it",
            reason="TOO_MANY_INPUTS",
        )
    return values
