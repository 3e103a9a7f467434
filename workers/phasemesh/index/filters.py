"""Filters on declared fields, turned into the store's language.

A filter restricts or fails; no input makes it vanish. Values become typed literals here and nowhere else, and
column names come from the spec, never from the request.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import TypeAlias

from phasemesh.index.checks import value_problem
from phasemesh.index.errors import FilterError
from phasemesh.index.schema import ID, field_column, field_types
from phasemesh.index.spec import CollectionSpec, FieldType, FieldValue

#: All of these fields have these values. For a `STRING_LIST` the value is one text: an element equals it.
EqualityFilter: TypeAlias = Mapping[str, FieldValue]

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def equality_sql(spec: CollectionSpec, equals: EqualityFilter) -> str | None:
    """The predicate of a filter; None if it has no conditions, which all documents meet.

    Raises:
        FilterError: A field isn't declared, or a value isn't of its field's type.
    """
    types = field_types(spec)
    conditions = []
    for name, value in equals.items():
        if name not in types:
            declared = ", ".join(sorted(types)) or "none"
            raise FilterError(f"filter: {name[:64]!r} isn't a declared field; declared: {declared}")
        field_type = types[name]
        value_type = FieldType.STRING if field_type is FieldType.STRING_LIST else field_type
        problem = value_problem(value_type, value)
        if problem is not None:
            raise FilterError(f"filter.{name}: {problem}")
        column = f"`{field_column(name)}`"
        if field_type is FieldType.STRING_LIST:
            conditions.append(f"array_has({column}, {_literal(value_type, value)})")
        elif field_type is FieldType.TIMESTAMP:
            # The planner takes no literal with a time zone; columns hold microseconds since 1970 UTC.
            conditions.append(f"CAST({column} AS BIGINT) = {_literal(value_type, value)}")
        else:
            conditions.append(f"{column} = {_literal(value_type, value)}")
    return " AND ".join(conditions) or None


def ids_sql(ids: Iterable[str]) -> str:
    """The predicate that a document's id is one of `ids`, of which there is at least one."""
    return f"{ID} IN ({', '.join(_quoted(document_id) for document_id in ids)})"


def _literal(value_type: FieldType, value: FieldValue) -> str:
    match value_type, value:
        case FieldType.STRING, str():
            return _quoted(value)
        case FieldType.INT64, int():
            return f"CAST('{value:d}' AS BIGINT)"
        case FieldType.DOUBLE, int() | float():
            return f"CAST('{float(value)!r}' AS DOUBLE)"
        case FieldType.BOOL, bool():
            return "true" if value else "false"
        case FieldType.TIMESTAMP, datetime():
            return f"CAST('{(value - _EPOCH) // timedelta(microseconds=1):d}' AS BIGINT)"
    raise FilterError(f"filter: a value of type {type(value).__name__} can't be compared")


def _quoted(text: str) -> str:
    # Standard SQL: the quote is the only character with a meaning inside a literal.
    return "'" + text.replace("'", "''") + "'"
