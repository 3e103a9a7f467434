"""Bodies of the native dialect as the OpenAPI page shows them.

They document; `native.read` reads. A test holds the two together.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Uint32 = Annotated[int, Field(ge=0, le=2**32 - 1)]
Positive = Annotated[int, Field(ge=1, le=2**32 - 1)]
Number = int | float
Row = Annotated[list[Number], Field(min_length=1)]
FieldValue = str | bool | int | float | list[str] | None


class _Body(BaseModel):
    # Unlike in the other dialects: a misspelt `filter` must not be a search without one.
    model_config = ConfigDict(extra="forbid")


class PackedTensor(_Body):
    """Numbers in base64: little-endian, row by row."""

    dtype: Literal["float32", "float16", "bfloat16"]
    shape: list[Positive] = Field(examples=[[12, 128]])
    data: str


class TokenMatrix(_Body):
    """Token vectors with what belongs to them."""

    vectors: Annotated[list[Row], Field(min_length=1)] | PackedTensor
    chunk_offsets: list[Uint32] | None = Field(
        None, description="First rows of the second and later chunks; the best chunk counts."
    )
    span_starts: list[Uint32] | None = Field(None, description="First character of each row's token.")
    span_ends: list[Uint32] | None = Field(None, description="One past the last.")


class FieldDeclaration(_Body):
    """A metadata field that documents may carry and filters may name."""

    name: str
    type: Literal["string", "int64", "double", "bool", "timestamp", "string_list"]


class CollectionSpec(_Body):
    """What a collection is; fixed once it exists. Null is as good as absent."""

    name: str = Field(
        description="1 to 128 of a-z, A-Z, 0-9, dot, underscore and hyphen.", examples=["articles"]
    )
    model: str | None = Field(
        None, description="Model that encodes texts; leave it out to give vectors.",
        examples=["all-MiniLM-L6-v2"],
    )  # fmt: skip
    recipe_hash: str | None = Field(None, description="Of the model; checked if it is given.")
    token_dimension: Uint32 | None = Field(
        None, description="Of token vectors; filled in from the model, needed without one."
    )
    codec: Literal["bf16", "int8", "int4"] | None = Field(
        None, description="What scorers hold; default `int8`, whose best candidates are scored exactly."
    )
    fields: list[FieldDeclaration] | None = None
    normalize: Literal["auto", "never", "require"] | None = Field(
        None, description="`auto`: vectors are scaled to unit length, unless the model says otherwise."
    )
    reduction: Literal["sum", "mean"] | None = None
    dense_dimension: Uint32 | None = Field(None, description="Of an optional dense vector per document.")


class Version(_Body):
    """A point in a collection's history, as replies give it."""

    incarnation: str
    number: Annotated[int, Field(ge=0, le=2**64 - 1)]


class ReadVersion(_Body):
    """Which version is read: at most one of the two."""

    min_version: Version | None = Field(None, description="This one or a newer one.")
    at_version: Version | None = Field(None, description="Exactly this one.")


class Truncation(_Body):
    """What to do with texts that are longer than the model takes; absent refuses them."""

    enabled: bool | None = None
    side: Literal["right", "left"] | None = None
    max_tokens: Positive | None = None


class Document(_Body):
    """A document: a text, or token vectors, or both."""

    id: str = Field(description="Unique in the collection: 1 to 512 bytes.")
    text: str | None = None
    token_vectors: Annotated[list[Row], Field(min_length=1)] | PackedTensor | TokenMatrix | None = None
    fields: dict[str, FieldValue] | None = None
    dense_vector: Row | PackedTensor | None = None


class UpsertRequest(_Body):
    """Documents to store; of two with one id the later counts."""

    documents: list[Document] = Field(min_length=1, max_length=2048)
    truncation: Truncation | None = None
    priority: Literal["interactive", "bulk"] | None = None


class FieldEquals(_Body):
    """The field has this value; for a list, one of its elements has it."""

    field: str
    value: FieldValue


class FieldIn(_Body):
    """The field has one of these values; for a list, one of its elements has."""

    field: str
    values: list[FieldValue]


class FieldRange(_Body):
    """The field lies between these ends, of which there is at least one."""

    field: str
    at_least: FieldValue = None
    at_most: FieldValue = None
    above: FieldValue = None
    below: FieldValue = None


class FieldExists(_Body):
    """The field has a value."""

    field: str


class FieldPrefix(_Body):
    """The text begins with this; for a list, one of its elements does."""

    field: str
    prefix: str


class Filter(_Body):
    """Exactly one condition. One on a field that has no value doesn't hold, so `not` of it does."""

    equals: FieldEquals | None = None
    in_: Annotated[FieldIn | None, Field(alias="in")] = None
    range: FieldRange | None = None
    exists: FieldExists | None = None
    prefix: FieldPrefix | None = None
    all: list[Filter] | None = None
    any: list[Filter] | None = None
    not_: Annotated[Filter | None, Field(alias="not")] = None
    id_in: list[str] | None = None


class DeleteRequest(_Body):
    """Exactly one of `ids` and `filter`."""

    ids: Annotated[list[str], Field(min_length=1)] | None = None
    filter: Filter | None = None


class Projection(_Body):
    """What is returned of each document."""

    text: bool | None = None
    fields: list[str] | None = Field(None, description='By name; `["*"]` for all.')
    token_vectors: bool | None = None
    dense_vector: bool | None = None
    encoding: Literal["float32", "float16", "bfloat16"] | None = Field(
        None, description="Base64 of this type; default: numbers."
    )


class GetRequest(_Body):
    """Documents by id."""

    ids: list[str] = Field(min_length=1)
    projection: Projection | None = Field(None, description="Default: the text and all fields.")
    version: ReadVersion | None = None


class ListRequest(_Body):
    """Which documents are listed, page by page."""

    filter: Filter | None = None
    projection: Projection | None = Field(None, description="Default: the text and all fields.")
    page_size: Uint32 | None = Field(None, description="Most documents in the reply; default 100.")
    page_token: str | None = Field(
        None,
        description="From the reply before, with the same filter. All pages are of one version.",
    )
    version: ReadVersion | None = Field(None, description="On the first page.")


class TagRequest(_Body):
    """A name for a version."""

    tag: str = Field(
        description="1 to 128 of a-z, A-Z, 0-9, dot, underscore and hyphen.", examples=["2026-12-01"]
    )
    version: Version | None = Field(
        None, description="The version; null, together with `overwrite`, takes the name away."
    )
    overwrite: bool | None = Field(None, description="Move the tag if there is one.")


class RestoreRequest(_Body):
    """Where to go back to: exactly one of `version` and `tag`."""

    version: Version | None = None
    tag: str | None = None
    expected_version: Version = Field(
        description="The newest version that you know; if there is a newer one, nothing is changed (409)."
    )


class CompactRequest(_Body):
    """Nothing."""


class CountRequest(_Body):
    """What to count."""

    filter: Filter | None = None
    version: ReadVersion | None = None


class Query(_Body):
    """A query as an object: exactly one of the three."""

    text: str | None = None
    vectors: Annotated[list[Row], Field(min_length=1)] | PackedTensor | None = None
    id: str | None = Field(
        None, description="A stored document whose token vectors are the query; a search leaves it out."
    )


class SearchRequest(_Body):
    """What to look for."""

    query: str | Query = Field(examples=["When does water boil?"])
    k: Positive | None = Field(None, description="Hits wanted; default 10.")
    filter: Filter | None = None
    projection: Projection | None = Field(None, description="Default: the id alone.")
    version: ReadVersion | None = None
    candidates: Literal["exhaustive", "pruned", "full_text", "dense", "hybrid"] | None = None
    candidate_limit: Positive | None = None
    allow_partial: bool | None = Field(
        None, description="Accept an answer that not all scorers took part in."
    )
    truncation: Truncation | None = None
    dense_vector: Row | PackedTensor | None = None


class RerankStoredRequest(_Body):
    """Documents to score, by id."""

    query: str | Query = Field(examples=["When does water boil?"])
    ids: list[str] = Field(min_length=1, max_length=10_000)
    top_k: Positive | None = Field(None, description="Hits wanted; default all.")
    projection: Projection | None = Field(None, description="Default: the id alone.")
    version: ReadVersion | None = None
    truncation: Truncation | None = None


class ExplainRequest(_Body):
    """What to explain."""

    query: str | Query = Field(examples=["When does water boil?"])
    id: str = Field(description="Of the document.")
    version: ReadVersion | None = None
    truncation: Truncation | None = None


class Empty(_Body):
    """Nothing."""


class CollectionState(_Body):
    """A collection as it stands."""

    spec: CollectionSpec
    version: Version
    documents: int
    tokens: int = Field(description="Stored token vectors.")
    create_time: str = Field(description="RFC 3339.")
    fragments: int


class CollectionReply(_Body):
    """One collection."""

    collection: CollectionState


class CollectionsReply(_Body):
    """A page of collections."""

    collections: list[CollectionState]
    next_page_token: str = Field(description="Where to go on; empty at the end.")


class ErrorDetail(_Body):
    """What went wrong."""

    code: str = Field(description="gRPC status, e.g. INVALID_ARGUMENT.")
    reason: str = Field(description="Stable reason.")
    message: str
    field: str | None = Field(description="Path of the field at fault.")


class ErrorReply(_Body):
    """An error."""

    error: ErrorDetail


class DocumentStored(_Body):
    """A document that was stored."""

    id: str
    tokens: int
    truncated: bool
    superseded: bool = Field(description="A later document of the batch has the same id.")


class DocumentFailed(_Body):
    """A document that was not."""

    id: str
    error: ErrorDetail


class Usage(_Body):
    """Tokens computed."""

    tokens: int
    truncated_inputs: int


class Phase(_Body):
    """Time of one phase."""

    phase: str
    start_offset_ns: int
    duration_ns: int


class Timings(_Body):
    """Where the time went inside the retrieval service and behind it."""

    total_ns: int
    phases: list[Phase]


class UpsertReply(_Body):
    """What became of the documents, in the order of the request."""

    version: Version = Field(description="First version that holds them.")
    documents: list[DocumentStored | DocumentFailed]
    stored: int
    superseded: int
    usage: Usage
    timings: Timings


class DeleteReply(_Body):
    """What was deleted."""

    version: Version
    deleted: int
    missing_ids: list[str]


class ShownMatrix(_Body):
    """Token vectors of a reply; no rows for a document without tokens."""

    vectors: list[list[float]] | PackedTensor
    chunk_offsets: list[int]
    span_starts: list[int]
    span_ends: list[int]


class ShownDocument(_Body):
    """A document of a reply, as far as it was asked for."""

    id: str
    text: str | None = None
    token_vectors: ShownMatrix | None = None
    fields: dict[str, FieldValue] | None = None
    dense_vector: list[float] | PackedTensor | None = None


class GetReply(_Body):
    """Documents found, in the order of the request."""

    documents: list[ShownDocument]
    missing_ids: list[str]
    version: Version


class ListReply(_Body):
    """A page of documents, in the order in which they are stored."""

    documents: list[ShownDocument]
    next_page_token: str = Field(description="Where to go on; empty at the end.")
    version: Version = Field(description="The version of all pages.")


class RestoreReply(_Body):
    """The restored state."""

    version: Version = Field(description="A new version; the newest.")


class CompactReply(_Body):
    """What compaction did; documents are as they were."""

    version: Version
    fragments_before: int
    fragments_after: int


class CountReply(_Body):
    """A count."""

    documents: int
    version: Version


class Hit(_Body):
    """A document found."""

    id: str
    score: float
    document: ShownDocument | None = Field(None, description="Only with a projection.")


class Coverage(_Body):
    """How much was searched."""

    fragments: int
    searched_fragments: int
    documents: int
    tokens: int
    candidates: str | None
    exact: bool = Field(description="Equal to float64 MaxSim over the stored float16 vectors.")


class SearchReply(_Body):
    """Best first; equal scores by id."""

    hits: list[Hit]
    version: Version
    coverage: Coverage
    usage: Usage
    timings: Timings


class RerankStoredReply(_Body):
    """Best first; equal scores by id. Every id is answered as often as it was named."""

    hits: list[Hit]
    missing_ids: list[str] = Field(description="Not in this version.")
    empty_ids: list[str] = Field(description="Without token vectors, so without a score.")
    version: Version
    usage: Usage
    timings: Timings


class Alignment(_Body):
    """The document token that one query token matched best."""

    query_token: int
    query_span_start: int | None = Field(None, description="Where the query was a text.")
    query_span_end: int | None = None
    document_token: int
    document_span_start: int | None = Field(None, description="Where spans are stored.")
    document_span_end: int | None = None
    similarity: float


class ExplainReply(_Body):
    """Why a document scores as it does."""

    score: float
    reduction: Literal["sum", "mean"] = Field(description="Of the similarities, to the score.")
    alignments: list[Alignment]
    version: Version
    usage: Usage
    timings: Timings
