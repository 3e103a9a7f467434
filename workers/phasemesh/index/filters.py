"""Filters: conditions on declared fields, checked against the spec and evaluated over typed columns.

A filter restricts or fails; no input makes it vanish. Logic is two-valued: a condition on a field that has no
value is false, and its negation is true. So `Not(Equals("lang", "en"))` finds documents without a language
too, and every filter and its negation split the documents in two.

Conditions become calls of pyarrow's compute functions on the columns they name, batch by batch; token vectors
are never read for them. Nothing is ever put together as text: column names come from the spec, values are
typed scalars. (Lance's own predicates would be SQL or Substrait, which know neither elements of a list nor
all of our types; the columns of metadata are small beside the vectors.)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from phasemesh.index.checks import value_problem
from phasemesh.index.errors import FilterError
from phasemesh.index.schema import ID, arrow_type, field_column, field_types
from phasemesh.index.spec import CollectionSpec, FieldType, FieldValue

#: Deepest nesting.
MAX_DEPTH = 16
#: Most conditions and listed values together.
MAX_SIZE = 10_000


@dataclass(frozen=True, slots=True)
class Equals:
    """The field has this value; of a list, one of its elements has."""

    field: str
    value: FieldValue


@dataclass(frozen=True, slots=True)
class In:
    """The field has one of these values; of a list, one of its elements has. No values: nothing does."""

    field: str
    values: tuple[FieldValue, ...]


@dataclass(frozen=True, slots=True)
class Range:
    """The field lies between these ends, of which there is at least one; texts are ordered by their UTF-8."""

    field: str
    at_least: FieldValue = None
    at_most: FieldValue = None
    above: FieldValue = None
    below: FieldValue = None


@dataclass(frozen=True, slots=True)
class Exists:
    """The field has a value; an empty list is one."""

    field: str


@dataclass(frozen=True, slots=True)
class Prefix:
    """The text begins with this; of a list, one of its elements does."""

    field: str
    prefix: str


@dataclass(frozen=True, slots=True)
class IdIn:
    """The document's id is one of these."""

    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AllOf:
    """All of these hold; there is at least one."""

    conditions: tuple[Condition, ...]


@dataclass(frozen=True, slots=True)
class AnyOf:
    """At least one of these holds; there is at least one."""

    conditions: tuple[Condition, ...]


@dataclass(frozen=True, slots=True)
class Not:
    """This doesn't hold."""

    condition: Condition


Condition: TypeAlias = Equals | In | Range | Exists | Prefix | IdIn | AllOf | AnyOf | Not

_BOUNDS = {
    "at_least": pc.greater_equal,
    "at_most": pc.less_equal,
    "above": pc.greater,
    "below": pc.less,
}
_UNORDERED = {FieldType.BOOL: "has no order", FieldType.STRING_LIST: "is a list, which has no order"}


def check_filter(spec: CollectionSpec, condition: Condition) -> None:
    """Checks a filter against a collection's specification.

    Raises:
        FilterError: A field isn't declared, a value isn't of its field's type, a list of conditions is empty,
            or there is too much of it; the message names the place.
    """
    size = _check(spec, condition, "filter", 1)
    if size > MAX_SIZE:
        raise FilterError(f"filter: has {size} conditions and values, at most {MAX_SIZE} are taken")


def columns_of(condition: Condition) -> list[str]:
    """Columns that a filter looks at."""
    found: dict[str, None] = {}
    pending = [condition]
    while pending:
        match pending.pop():
            case AllOf(conditions) | AnyOf(conditions):
                pending += conditions
            case Not(inner):
                pending.append(inner)
            case IdIn():
                found[ID] = None
            case leaf:
                found[field_column(leaf.field)] = None
    return list(found)


def evaluate(spec: CollectionSpec, condition: Condition, columns: pa.RecordBatch) -> npt.NDArray[np.bool_]:
    """Which rows meet a checked filter, bool [rows]; `columns` has those of `columns_of`."""
    match condition:
        case AllOf(conditions):
            return np.logical_and.reduce([evaluate(spec, one, columns) for one in conditions])
        case AnyOf(conditions):
            return np.logical_or.reduce([evaluate(spec, one, columns) for one in conditions])
        case Not(inner):
            return ~evaluate(spec, inner, columns)
        case IdIn(ids):
            return _true(pc.is_in(columns.column(ID), value_set=pa.array(ids, pa.string())))
        case leaf:
            column = columns.column(field_column(leaf.field))
            return _leaf(field_types(spec)[leaf.field], leaf, column)


def ids_sql(ids: Iterable[str]) -> str:
    """The predicate that a document's id is one of `ids`, of which there is at least one."""
    return f"{ID} IN ({', '.join(_quoted(document_id) for document_id in ids)})"


def _leaf(
    field_type: FieldType, leaf: Equals | In | Range | Exists | Prefix, column: pa.Array
) -> npt.NDArray[np.bool_]:
    if isinstance(leaf, Exists):
        return _true(pc.is_valid(column))
    if field_type is FieldType.STRING_LIST:
        found = np.zeros(len(column), np.bool_)
        # Both leave out rows without a list.
        met = _leaf(FieldType.STRING, leaf, pc.list_flatten(column))
        found[pc.list_parent_indices(column).to_numpy()[met]] = True
        return found
    data_type = arrow_type(field_type)
    match leaf:
        case Equals(_, value):
            return _true(pc.equal(column, _scalar(value, data_type)))
        case In(_, values):
            return _true(pc.is_in(column, value_set=pa.array([_plain(one) for one in values], data_type)))
        case Prefix(_, prefix):
            return _true(pc.starts_with(column, pattern=prefix))
        case Range():
            masks = [
                _true(holds(column, _scalar(end, data_type)))
                for name, holds in _BOUNDS.items()
                if (end := getattr(leaf, name)) is not None
            ]
            return np.logical_and.reduce(masks)


def _true(mask: pa.Array) -> npt.NDArray[np.bool_]:
    known: npt.NDArray[np.bool_] = mask.fill_null(False).to_numpy(zero_copy_only=False)
    return known


def _scalar(value: FieldValue, data_type: pa.DataType) -> pa.Scalar:
    return pa.scalar(_plain(value), data_type)


def _plain(value: FieldValue) -> Any:
    return value.astimezone(UTC) if isinstance(value, datetime) else value


def _check(spec: CollectionSpec, condition: Condition, path: str, depth: int) -> int:
    """Size of a condition, once it is seen to be right."""
    if depth > MAX_DEPTH:
        raise FilterError(f"{path}: filters nest deeper than {MAX_DEPTH}")
    match condition:
        case AllOf(conditions) | AnyOf(conditions):
            name = "all" if isinstance(condition, AllOf) else "any"
            if not conditions:
                raise FilterError(f"{path}.{name}: lists no conditions; give at least one")
            return 1 + sum(
                _check(spec, one, f"{path}.{name}[{position}]", depth + 1)
                for position, one in enumerate(conditions)
            )
        case Not(inner):
            return 1 + _check(spec, inner, f"{path}.not", depth + 1)
        case IdIn(ids):
            for position, document_id in enumerate(ids):
                _check_value(FieldType.STRING, document_id, f"{path}.id_in[{position}]")
            return 1 + len(ids)
        case leaf:
            return _check_leaf(spec, leaf, f"{path}.{type(leaf).__name__.lower()}")


def _check_leaf(spec: CollectionSpec, leaf: Equals | In | Range | Exists | Prefix, path: str) -> int:
    types = field_types(spec)
    if leaf.field not in types:
        declared = ", ".join(sorted(types)) or "none"
        raise FilterError(f"{path}: {leaf.field[:64]!r} isn't a declared field; declared: {declared}")
    declared_type = types[leaf.field]
    # A list is asked for its elements.
    value_type = FieldType.STRING if declared_type is FieldType.STRING_LIST else declared_type
    match leaf:
        case Equals(name, value):
            _check_value(value_type, value, f"{path}.{name}")
        case In(name, values):
            for position, value in enumerate(values):
                _check_value(value_type, value, f"{path}.{name}[{position}]")
            return 1 + len(values)
        case Prefix(name, prefix):
            if value_type is not FieldType.STRING:
                raise FilterError(f"{path}.{name}: is no text, so it has no prefix")
            _check_value(FieldType.STRING, prefix, f"{path}.{name}")
        case Range(name):
            if declared_type in _UNORDERED:
                raise FilterError(f"{path}.{name}: {_UNORDERED[declared_type]}")
            ends = {bound: end for bound in _BOUNDS if (end := getattr(leaf, bound)) is not None}
            if not ends:
                raise FilterError(f"{path}.{name}: has no end; give one of {', '.join(_BOUNDS)}")
            for bound, end in ends.items():
                _check_value(value_type, end, f"{path}.{name}.{bound}")
    return 1


def _check_value(value_type: FieldType, value: FieldValue, path: str) -> None:
    problem = value_problem(value_type, value)
    if problem is not None:
        raise FilterError(f"{path}: {problem}")


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
