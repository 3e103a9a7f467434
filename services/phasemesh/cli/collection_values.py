"""Values of declared fields on the command line: from text and JSON to the wire, by the declared type."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from google.protobuf.json_format import ParseDict, ParseError
from google.protobuf.struct_pb2 import Struct, Value

from phasemesh.config.settings import SettingsError
from phasemesh.errors import InvalidArgument
from phasemesh.gateway.dialects.native.filters import read_filter
from phasemesh.v1 import retrieval_pb2 as pb

_TRUTH = {"true": True, "false": False}


def filter_of(text: str, declared: Iterable[pb.FieldDeclaration]) -> pb.Filter:
    """The condition that `field=value` states, or a filter in JSON.

    Raises:
        SettingsError: it has another shape, the field isn't declared, or the value isn't of its type.
    """
    if text.lstrip().startswith("{"):
        return _json_filter(text)
    name, separator, value = text.partition("=")
    types = {declaration.name: declaration.type for declaration in declared}
    if not separator or not name:
        raise SettingsError(f"--filter {text}: has to be FIELD=VALUE, or a filter in JSON")
    if name not in types:
        known = ", ".join(types) or "none"
        raise SettingsError(f"--filter {text}: the collection has no field {name!r}; declared are {known}")
    return pb.Filter(equals=pb.FieldEquals(field=name, value=_value(text, value, types[name])))


def _json_filter(text: str) -> pb.Filter:
    try:
        return read_filter(json.loads(text))
    except (json.JSONDecodeError, RecursionError) as error:
        raise SettingsError(f"--filter: isn't JSON: {error}") from None
    except InvalidArgument as error:
        raise SettingsError(f"--{error.message}") from None


def _value(option: str, text: str, kind: int) -> Value:
    if kind == pb.FIELD_TYPE_BOOL:
        if text not in _TRUTH:
            raise SettingsError(f"--filter {option}: the field takes true or false")
        return Value(bool_value=_TRUTH[text])
    if kind == pb.FIELD_TYPE_DOUBLE:
        try:
            return Value(number_value=float(text))
        except ValueError:
            raise SettingsError(f"--filter {option}: the field takes a number") from None
    # Integers and times travel as text too, exactly; the service reads them.
    return Value(string_value=text)


def declared_fields(values: Mapping[str, Any], declared: Iterable[pb.FieldDeclaration]) -> Struct:
    """Those of `values` that the collection declares; the others have no place in it.

    Raises:
        SettingsError: a value is none of JSON's.
    """
    names = {declaration.name for declaration in declared}
    kept = {name: value for name, value in values.items() if name in names and value is not None}
    try:
        return ParseDict(kept, Struct())
    except ParseError as error:
        raise SettingsError(f"fields: {error}") from None
