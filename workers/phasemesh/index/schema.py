"""How documents lie in a dataset: one column per part, declared fields as typed columns.

The schema is a pure function of the spec, so every process that opens an incarnation agrees on it. `id` is
marked as Lance's unenforced primary key: without that mark two processes that insert the same new id at once
both succeed, and the id is there twice, silently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from phasemesh.index.spec import CollectionSpec, FieldType, FieldValue, StoredDocument

ID = "id"
TEXT = "text"
TOKENS = "tokens"
#: Rows of `tokens`, so that sizes are known without reading vectors.
TOKEN_COUNT = "token_count"
TOKEN_SPANS = "token_spans"
CHUNK_OFFSETS = "chunk_offsets"
DENSE = "dense"

#: Keeps declared names apart from the columns above.
_FIELD_PREFIX = "field_"

_FIELD_TYPES: dict[FieldType, pa.DataType] = {
    FieldType.STRING: pa.string(),
    FieldType.INT64: pa.int64(),
    FieldType.DOUBLE: pa.float64(),
    FieldType.BOOL: pa.bool_(),
    FieldType.TIMESTAMP: pa.timestamp("us", tz="UTC"),
    FieldType.STRING_LIST: pa.list_(pa.string()),
}


class Part(StrEnum):
    """A part of a document that a read may ask for; the id always comes along."""

    TEXT = "text"
    FIELDS = "fields"
    TOKENS = "tokens"
    TOKEN_SPANS = "token_spans"
    CHUNK_OFFSETS = "chunk_offsets"
    DENSE = "dense"


@dataclass(frozen=True, slots=True, eq=False)
class TokenRows:
    """Token vectors of consecutive rows, packed.

    Args:
        ids: Id of each row.
        vectors: float16 [tokens, d], row after row.
        offsets: int64 [rows + 1]; row i has `vectors[offsets[i]:offsets[i + 1]]`.
        chunk_offsets: Per row, first rows of its second and later chunks, int32, relative to the row.
    """

    ids: list[str]
    vectors: npt.NDArray[np.float16]
    offsets: npt.NDArray[np.int64]
    chunk_offsets: list[npt.NDArray[np.int32]]


def field_column(name: str) -> str:
    """Name of a declared field's column."""
    return _FIELD_PREFIX + name


def arrow_type(field_type: FieldType) -> pa.DataType:
    """Type of a declared field's column."""
    return _FIELD_TYPES[field_type]


def arrow_schema(spec: CollectionSpec) -> pa.Schema:
    """The dataset's schema, a pure function of the spec."""
    columns = [
        pa.field(ID, pa.string(), nullable=False, metadata={"lance-schema:unenforced-primary-key": "true"}),
        pa.field(TEXT, pa.string()),
        *(pa.field(field_column(declared.name), _FIELD_TYPES[declared.type]) for declared in spec.fields),
        pa.field(TOKEN_COUNT, pa.int32(), nullable=False),
        pa.field(TOKENS, _vectors_type(pa.float16(), spec.token_dim), nullable=False),
        pa.field(TOKEN_SPANS, _vectors_type(pa.int32(), 2)),
        pa.field(CHUNK_OFFSETS, pa.list_(pa.field("item", pa.int32(), nullable=False)), nullable=False),
    ]
    if spec.dense_dim:
        columns.append(pa.field(DENSE, pa.list_(pa.float32(), spec.dense_dim)))
    return pa.schema(columns)


def part_columns(spec: CollectionSpec, parts: frozenset[Part]) -> list[str]:
    """Columns to read for those parts, the id first."""
    columns = [ID]
    for part in Part:
        if part not in parts or (part is Part.DENSE and not spec.dense_dim):
            continue
        if part is Part.FIELDS:
            columns.extend(field_column(declared.name) for declared in spec.fields)
        else:
            columns.append(part.value)
    return columns


def documents_to_table(spec: CollectionSpec, documents: Sequence[StoredDocument]) -> pa.Table:
    """Lay out checked documents in the collection's schema."""
    schema = arrow_schema(spec)
    columns: dict[str, pa.Array] = {
        ID: pa.array([document.id for document in documents], pa.string()),
        TEXT: pa.array([document.text for document in documents], pa.string()),
        TOKEN_COUNT: pa.array([len(document.tokens) for document in documents], pa.int32()),
        TOKENS: _ragged([document.tokens for document in documents], schema.field(TOKENS).type),
        TOKEN_SPANS: _ragged(
            [document.token_spans for document in documents], schema.field(TOKEN_SPANS).type
        ),
        CHUNK_OFFSETS: pa.array(
            [document.chunk_offsets for document in documents], schema.field(CHUNK_OFFSETS).type
        ),
    }
    for declared in spec.fields:
        values = [document.fields.get(declared.name) for document in documents]
        columns[field_column(declared.name)] = pa.array(
            [_to_arrow_value(value) for value in values], _FIELD_TYPES[declared.type]
        )
    if spec.dense_dim:
        columns[DENSE] = pa.array([document.dense for document in documents], schema.field(DENSE).type)
    return pa.table([columns[name] for name in schema.names], schema=schema)


def table_to_documents(spec: CollectionSpec, table: pa.Table) -> list[StoredDocument]:
    """Read documents back. Parts whose columns aren't there are empty (vectors of no rows) or None."""
    rows = table.num_rows
    nothing: list[Any] = [None] * rows

    def plain(name: str) -> list[Any]:
        return table.column(name).to_pylist() if name in table.column_names else nothing

    def arrays(name: str, dtype: npt.DTypeLike, width: int | None) -> list[Any]:
        if name not in table.column_names:
            return nothing
        return _ragged_rows(table.column(name), np.dtype(dtype), width)

    fields = {declared.name: plain(field_column(declared.name)) for declared in spec.fields}
    ids, texts = plain(ID), plain(TEXT)
    tokens = arrays(TOKENS, np.float16, spec.token_dim)
    spans = arrays(TOKEN_SPANS, np.int32, 2)
    chunks = arrays(CHUNK_OFFSETS, np.int32, None)
    dense = plain(DENSE)
    return [
        StoredDocument(
            id=ids[row],
            text=texts[row],
            fields={
                name: _from_arrow_value(values[row])
                for name, values in fields.items()
                if values[row] is not None
            },
            tokens=np.zeros((0, spec.token_dim), np.float16) if tokens[row] is None else tokens[row],
            token_spans=spans[row],
            chunk_offsets=np.zeros(0, np.int32) if chunks[row] is None else chunks[row],
            dense=None if dense[row] is None else np.asarray(dense[row], np.float32),
        )
        for row in range(rows)
    ]


def table_to_token_rows(spec: CollectionSpec, table: pa.Table) -> TokenRows:
    """Pack a table of `id`, `tokens` and `chunk_offsets`."""
    vectors, offsets, _ = _flatten(table.column(TOKENS), np.dtype(np.float16), spec.token_dim)
    return TokenRows(
        ids=table.column(ID).to_pylist(),
        vectors=vectors,
        offsets=offsets,
        chunk_offsets=_ragged_rows(table.column(CHUNK_OFFSETS), np.dtype(np.int32), None),
    )


def _vectors_type(value_type: pa.DataType, width: int) -> pa.DataType:
    vector = pa.list_(pa.field("item", value_type), width)
    return pa.list_(pa.field("item", vector, nullable=False))


def _ragged(parts: Sequence[npt.NDArray[Any] | None], list_type: pa.DataType) -> pa.Array:
    """Matrices of one width as a list of fixed-size lists, without a Python object per number."""
    vector_type = list_type.value_type
    present = [part for part in parts if part is not None and len(part)]
    flat = pa.array(np.concatenate([part.reshape(-1) for part in present])) if present else pa.array([])
    values = pa.FixedSizeListArray.from_arrays(flat.cast(vector_type.value_type), type=vector_type)
    lengths = [0 if part is None else len(part) for part in parts]
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    absent = pa.array([part is None for part in parts], pa.bool_())
    return pa.ListArray.from_arrays(offsets, values, type=list_type, mask=absent)


def _flatten(
    column: pa.ChunkedArray, dtype: np.dtype[Any], width: int | None
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
    """Values one after another, offsets [rows + 1], and which rows are null."""
    flats: list[npt.NDArray[Any]] = []
    lengths: list[npt.NDArray[np.int64]] = []
    for chunk in column.chunks:
        values = chunk.flatten()
        if width is not None:
            values = values.flatten()
        flats.append(values.to_numpy(zero_copy_only=False).astype(dtype, copy=False))
        lengths.append(chunk.value_lengths().fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64))
    flat = np.concatenate(flats) if flats else np.zeros(0, dtype)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate(lengths) if lengths else [])])
    nulls = np.asarray(column.is_null().to_numpy(), bool)
    return (flat if width is None else flat.reshape(-1, width)), offsets.astype(np.int64), nulls


def _ragged_rows(column: pa.ChunkedArray, dtype: np.dtype[Any], width: int | None) -> list[Any]:
    flat, offsets, nulls = _flatten(column, dtype, width)
    return [None if nulls[row] else flat[offsets[row] : offsets[row + 1]] for row in range(len(offsets) - 1)]


def _to_arrow_value(value: FieldValue) -> object:
    return list(value) if isinstance(value, tuple) else value


def _from_arrow_value(value: Any) -> FieldValue:
    if isinstance(value, list):
        return tuple(value)
    if isinstance(value, datetime):
        return value.astimezone(UTC)
    result: FieldValue = value
    return result


def field_types(spec: CollectionSpec) -> Mapping[str, FieldType]:
    """Type of each declared field."""
    return {declared.name: declared.type for declared in spec.fields}
