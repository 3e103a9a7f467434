"""Values of declared fields between JSON-like wire values and the index.

Invariant: what was stored comes back as the same wire value. JSON has one kind of number, so integers that a
double can't hold travel as text, as protobuf's own JSON mapping does it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

from google.protobuf.struct_pb2 import ListValue, Struct, Value

from phasemesh.index.spec import CollectionSpec, FieldType, FieldValue

#: Below this every integer is a double of its own; 2⁵³ + 1 is rounded to 2⁵³.
EXACT_DOUBLE = 2**53
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_INT64 = range(-(2**63), 2**63)


class ValueFault(ValueError):
    """A value isn't one of its field's type; the message says what the type takes."""


def value_from_wire(wire: Value, field_type: FieldType) -> FieldValue:
    """The value that `wire` holds; None for null.

    Raises:
        ValueFault: it isn't of that type.
    """
    kind = wire.WhichOneof("kind")
    if kind is None:
        raise ValueFault("holds nothing; give a value, or null for none")
    if kind == "null_value":
        return None
    match field_type, kind:
        case FieldType.STRING, "string_value":
            return wire.string_value
        case FieldType.BOOL, "bool_value":
            return wire.bool_value
        case FieldType.DOUBLE, "number_value" if math.isfinite(wire.number_value):
            return wire.number_value
        case FieldType.INT64, "number_value" | "string_value":
            return _integer(wire)
        case FieldType.TIMESTAMP, "string_value":
            return _moment(wire.string_value)
        case FieldType.TIMESTAMP, "number_value":
            return _from_micros(_integer(wire))
        case FieldType.STRING_LIST, "list_value":
            return _texts(wire.list_value)
    raise ValueFault(f"is a {kind.removesuffix('_value')}; {_TAKES[field_type]}")


def value_to_wire(value: FieldValue) -> Value:
    """A stored value as callers see it."""
    match value:
        case None:
            return Value(null_value=0)  # type: ignore[arg-type]  # NULL_VALUE is 0; the stub wants the enum
        case bool():
            return Value(bool_value=value)
        case str():
            return Value(string_value=value)
        case int():
            exact = abs(value) < EXACT_DOUBLE
            return Value(number_value=value) if exact else Value(string_value=str(value))
        case float():
            return Value(number_value=value)
        case datetime():
            moment = value.astimezone(UTC)
            spec = "microseconds" if moment.microsecond else "seconds"
            return Value(string_value=moment.isoformat(timespec=spec).replace("+00:00", "Z"))
        case tuple():
            return Value(list_value=ListValue(values=[Value(string_value=text) for text in value]))


def fields_from_wire(wire: Struct, spec: CollectionSpec) -> dict[str, FieldValue]:
    """Values of a document's fields; nulls are left out.

    Raises:
        ValueFault: a field isn't declared, or its value isn't of its type; the message starts with its name.
    """
    types = {declared.name: declared.type for declared in spec.fields}
    values: dict[str, FieldValue] = {}
    for name in sorted(wire.fields):
        if name not in types:
            declared = ", ".join(types) or "none"
            raise ValueFault(f"{name[:64]!r} isn't a declared field; declared are {declared}")
        try:
            value = value_from_wire(wire.fields[name], types[name])
        except ValueFault as fault:
            raise ValueFault(f"{name!r} {fault}") from None
        if value is not None:
            values[name] = value
    return values


def fields_to_wire(values: Mapping[str, FieldValue]) -> Struct:
    """A document's fields as callers see them; those without a value are left out."""
    return Struct(fields={name: value_to_wire(value) for name, value in values.items() if value is not None})


_TAKES = {
    FieldType.STRING: "the field takes text",
    FieldType.INT64: "the field takes a whole number of 64 bits, above 2^53 as decimal text",
    FieldType.DOUBLE: "the field takes a finite number",
    FieldType.BOOL: "the field takes true or false",
    FieldType.TIMESTAMP: "the field takes an RFC 3339 time with a zone, or microseconds since 1970 UTC",
    FieldType.STRING_LIST: "the field takes a list of texts",
}


def _integer(wire: Value) -> int:
    if wire.WhichOneof("kind") == "string_value":
        text = wire.string_value
        # int() also takes blanks, underscores and other scripts' digits.
        if not (text.isascii() and text.removeprefix("-").isdigit() and len(text) <= 20):
            raise ValueFault(f"is the text {text[:32]!r}; {_TAKES[FieldType.INT64]}")
        number = int(text)
    elif not wire.number_value.is_integer():
        raise ValueFault(f"is {wire.number_value}; {_TAKES[FieldType.INT64]}")
    else:
        number = int(wire.number_value)
        if abs(number) >= EXACT_DOUBLE:
            raise ValueFault(f"is {number}, and JSON numbers are exact below 2**53 only; give it as text")
    if number not in _INT64:
        raise ValueFault(f"is {number}; {_TAKES[FieldType.INT64]}")
    return number


def _moment(text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is not None:
            return moment.astimezone(UTC)
    except (ValueError, OverflowError):
        pass
    raise ValueFault(f"is {text[:64]!r}; {_TAKES[FieldType.TIMESTAMP]}")


def _from_micros(micros: int) -> datetime:
    try:
        return _EPOCH + timedelta(microseconds=micros)
    except OverflowError:
        raise ValueFault(f"is {micros} microseconds; give a time of the years 1 to 9999") from None


def _texts(wire: ListValue) -> tuple[str, ...]:
    for position, element in enumerate(wire.values):
        if element.WhichOneof("kind") != "string_value":
            raise ValueFault(f"has something else than a text at {position}; {_TAKES[FieldType.STRING_LIST]}")
    return tuple(element.string_value for element in wire.values)
