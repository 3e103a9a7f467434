"""A request's filter as the store takes it.

Invariant: a filter restricts or fails; no input makes a condition vanish.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from google.protobuf.struct_pb2 import Value

from phasemesh.errors import InvalidArgument
from phasemesh.index.errors import FilterError
from phasemesh.index.filters import (
    MAX_DEPTH,
    AllOf,
    AnyOf,
    Condition,
    Equals,
    Exists,
    IdIn,
    In,
    Not,
    Prefix,
    Range,
    check_filter,
)
from phasemesh.index.spec import CollectionSpec, FieldType, FieldValue
from phasemesh.retrieval.values import ValueFault, value_from_wire
from phasemesh.v1 import retrieval_pb2 as pb

_ENDS: tuple[Literal["at_least", "at_most", "above", "below"], ...] = (
    "at_least",
    "at_most",
    "above",
    "below",
)


def filter_from_wire(wire: pb.Filter, spec: CollectionSpec) -> Condition:
    """The condition that `wire` states, checked against the collection.

    Raises:
        InvalidArgument: a field isn't declared, a value isn't of its type, a condition is empty, or there is
            too much of it; the field names the place.
    """
    condition = _Reader(spec).read(wire, "filter", 1)
    try:
        check_filter(spec, condition)
    except FilterError as error:
        path, _, problem = str(error).partition(": ")
        raise _fault(f"{path}: {problem}", path) from error
    return condition


class _Reader:
    """Reads conditions; names places as the contract does."""

    def __init__(self, spec: CollectionSpec) -> None:
        self._types = {declared.name: declared.type for declared in spec.fields}

    def read(self, wire: pb.Filter, path: str, depth: int) -> Condition:
        """One condition."""
        # Before anything is looked into, so that nesting can't exhaust the stack.
        if depth > MAX_DEPTH:
            raise _fault(f"filters nest deeper than {MAX_DEPTH}", path)
        match wire.WhichOneof("condition"):
            case None:
                raise _fault("the filter has no condition; set one, or leave the filter out", path)
            case "all":
                return AllOf(self._list(wire.all, f"{path}.all", depth))
            case "any":
                return AnyOf(self._list(wire.any, f"{path}.any", depth))
            case "not":
                return Not(self.read(getattr(wire, "not"), f"{path}.not", depth + 1))
            case "id_in":
                return IdIn(tuple(wire.id_in.ids))
            case "equals":
                return self._equals(wire.equals, f"{path}.equals")
            case "in":
                return self._in(getattr(wire, "in"), f"{path}.in")
            case "range":
                return self._range(wire.range, f"{path}.range")
            case "exists":
                self._type(wire.exists.field, f"{path}.exists")
                return Exists(wire.exists.field)
            case "prefix":
                return self._prefix(wire.prefix, f"{path}.prefix")
            case other:
                raise _fault(f"there is no condition {other!r}", path)

    def _list(self, wire: pb.FilterList, path: str, depth: int) -> tuple[Condition, ...]:
        if not wire.filters:
            raise _fault("lists no filters; give at least one", f"{path}.filters")
        return tuple(
            self.read(inner, f"{path}.filters[{position}]", depth + 1)
            for position, inner in enumerate(wire.filters)
        )

    def _equals(self, wire: pb.FieldEquals, path: str) -> Condition:
        value_type = self._value_type(wire.field, path)
        return Equals(wire.field, _value(wire.value, value_type, wire.field, f"{path}.value"))

    def _in(self, wire: pb.FieldIn, path: str) -> Condition:
        value_type = self._value_type(wire.field, path)
        return In(wire.field, tuple(_values(wire.values, value_type, wire.field, f"{path}.values")))

    def _range(self, wire: pb.FieldRange, path: str) -> Condition:
        declared = self._type(wire.field, path)
        if declared in (FieldType.BOOL, FieldType.STRING_LIST):
            raise _fault(f"{wire.field!r} is a {declared} and has no order; use `equals`", f"{path}.field")
        ends = {
            end: _value(getattr(wire, end), declared, wire.field, f"{path}.{end}")
            for end in _ENDS
            if wire.HasField(end)
        }
        if not ends:
            raise _fault(f"has no end; give one of {', '.join(_ENDS)}", path)
        return Range(wire.field, **ends)

    def _prefix(self, wire: pb.FieldPrefix, path: str) -> Condition:
        if self._value_type(wire.field, path) is not FieldType.STRING:
            raise _fault(f"{wire.field!r} is no text, so it has no prefix", f"{path}.field")
        return Prefix(wire.field, wire.prefix)

    def _type(self, name: str, path: str) -> FieldType:
        if name not in self._types:
            declared = ", ".join(self._types) or "none"
            raise _fault(f"{name[:64]!r} isn't a declared field; declared are {declared}", f"{path}.field")
        return self._types[name]

    def _value_type(self, name: str, path: str) -> FieldType:
        """Type of what a field is compared with: of a list, its elements."""
        declared = self._type(name, path)
        return FieldType.STRING if declared is FieldType.STRING_LIST else declared


def _values(wires: Iterable[Value], value_type: FieldType, name: str, path: str) -> Iterable[FieldValue]:
    return (_value(wire, value_type, name, f"{path}[{position}]") for position, wire in enumerate(wires))


def _value(wire: Value, value_type: FieldType, name: str, path: str) -> FieldValue:
    try:
        value = value_from_wire(wire, value_type)
    except ValueFault as fault:
        raise _fault(f"the value of {name!r} {fault}", path) from None
    if value is None:
        raise _fault(f"{name!r} can't be compared with null; use `not` of `exists`", path)
    return value


def _fault(message: str, field: str) -> InvalidArgument:
    return InvalidArgument(message, reason="INVALID_FILTER", field=field)
