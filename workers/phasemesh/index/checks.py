"""Which documents a collection takes: the last check before anything is written.

Each document is checked by itself, so a caller can report one and store its neighbours.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime

import numpy as np

from phasemesh.index.errors import InvalidDocument
from phasemesh.index.schema import field_types
from phasemesh.index.spec import CollectionSpec, FieldType, FieldValue, StoredDocument

#: Longest id in bytes of UTF-8.
MAX_ID_BYTES = 512

_INT64 = range(-(2**63), 2**63)


def check_document(spec: CollectionSpec, document: StoredDocument, max_tokens: int) -> None:
    """Check one document against its collection.

    Args:
        spec: The collection's specification.
        document: What is to be stored.
        max_tokens: Most token vectors that one fragment may hold.

    Raises:
        InvalidDocument: A part has another shape or type than the collection's, a value isn't finite, or the
            id can't be one. The message names the part.
    """
    _check_id(document.id)
    if document.text is not None and not _is_text(document.text):
        raise InvalidDocument("text: isn't valid unicode")
    rows = _check_tokens(spec, document, max_tokens)
    _check_chunks(document, rows)
    _check_dense(spec, document)
    types = field_types(spec)
    for name, value in document.fields.items():
        if name not in types:
            raise InvalidDocument(f"fields: {name[:64]!r} isn't declared by the collection")
        problem = value_problem(types[name], value)
        if problem is not None and value is not None:
            raise InvalidDocument(f"fields.{name}: {problem}")


def value_problem(field_type: FieldType, value: object) -> str | None:
    """Say why `value` isn't one of a declared field of that type, or None if it is."""
    match field_type:
        case FieldType.STRING:
            fits = isinstance(value, str) and _is_text(value)
        case FieldType.INT64:
            fits = isinstance(value, int) and not isinstance(value, bool) and value in _INT64
        case FieldType.DOUBLE:
            fits = isinstance(value, int | float) and not isinstance(value, bool) and _is_finite(value)
        case FieldType.BOOL:
            fits = isinstance(value, bool)
        case FieldType.TIMESTAMP:
            fits = isinstance(value, datetime) and _has_utc(value)
        case FieldType.STRING_LIST:
            fits = isinstance(value, tuple) and all(
                isinstance(item, str) and _is_text(item) for item in value
            )
    return None if fits else f"{_shown(value)} isn't a {_DESCRIPTIONS[field_type]}"


_DESCRIPTIONS = {
    FieldType.STRING: "text",
    FieldType.INT64: "64-bit integer",
    FieldType.DOUBLE: "finite number",
    FieldType.BOOL: "boolean",
    FieldType.TIMESTAMP: "time with a time zone",
    FieldType.STRING_LIST: "list of texts",
}


def _shown(value: FieldValue | object) -> str:
    return f"{type(value).__name__} {repr(value)[:64]}"


def _is_text(text: str) -> bool:
    # Lone surrogates come from broken clients; Arrow can't hold them.
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _has_utc(value: datetime) -> bool:
    if value.utcoffset() is None:
        return False
    try:
        value.astimezone(UTC)
    except OverflowError:  # before year 1 or after 9999 in UTC, though not where it was written
        return False
    return True


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


def _check_id(document_id: str) -> None:
    if not _is_text(document_id):
        raise InvalidDocument("id: isn't valid unicode")
    length = len(document_id.encode())
    if not 1 <= length <= MAX_ID_BYTES:
        raise InvalidDocument(f"id: has {length} bytes; use 1 to {MAX_ID_BYTES}")


def _check_tokens(spec: CollectionSpec, document: StoredDocument, max_tokens: int) -> int:
    tokens, spans = document.tokens, document.token_spans
    if tokens.dtype != np.float16 or tokens.ndim != 2 or tokens.shape[1] != spec.token_dim:
        raise InvalidDocument(
            f"tokens: is {tokens.dtype} {list(tokens.shape)}; the collection takes float16 "
            f"[tokens, {spec.token_dim}]"
        )
    if not np.isfinite(tokens).all():
        raise InvalidDocument("tokens: holds NaN or infinity")
    if len(tokens) > max_tokens:
        raise InvalidDocument(f"tokens: has {len(tokens)} vectors; at most {max_tokens} fit one fragment")
    if spans is not None and (spans.dtype != np.int32 or spans.shape != (len(tokens), 2)):
        raise InvalidDocument(
            f"token_spans: is {spans.dtype} {list(spans.shape)}, not int32 [{len(tokens)}, 2]"
        )
    return len(tokens)


def _check_chunks(document: StoredDocument, rows: int) -> None:
    chunks = document.chunk_offsets
    if chunks.dtype != np.int32 or chunks.ndim != 1:
        raise InvalidDocument(
            f"chunk_offsets: is {chunks.dtype} {list(chunks.shape)}, not int32 [chunks - 1]"
        )
    edges = np.concatenate([[0], chunks, [rows]])
    if len(chunks) and not (np.diff(edges) > 0).all():
        raise InvalidDocument(f"chunk_offsets: must rise strictly between 0 and the {rows} vectors")


def _check_dense(spec: CollectionSpec, document: StoredDocument) -> None:
    dense = document.dense
    if dense is None:
        return
    if not spec.dense_dim:
        raise InvalidDocument("dense: the collection has no dense vector")
    if dense.dtype != np.float32 or dense.shape != (spec.dense_dim,):
        raise InvalidDocument(f"dense: is {dense.dtype} {list(dense.shape)}, not float32 [{spec.dense_dim}]")
    if not np.isfinite(dense).all():
        raise InvalidDocument("dense: holds NaN or infinity")
