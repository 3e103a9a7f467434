"""Values of declared fields in JSON."""

from __future__ import annotations

import math
from typing import Any

from google.protobuf.struct_pb2 import NULL_VALUE, ListValue, Value

from phasemesh.gateway.fields import invalid, json_type

#: Numbers of a protobuf Value are float64, and below this every integer is one of its own.
_EXACT_BELOW = 2**53


def read_value(value: Any, path: str) -> Value:
    """A field's value: text, number, boolean, null, or a list of texts.

    Raises:
        InvalidArgument: it is something else, or an integer that a float64 can't hold exactly.
    """
    if value is None:
        return Value(null_value=NULL_VALUE)
    if isinstance(value, bool):
        return Value(bool_value=value)
    if isinstance(value, str):
        return Value(string_value=value)
    if isinstance(value, int):
        if abs(value) >= _EXACT_BELOW:
            raise invalid(path, "is 2**53 or beyond, where JSON numbers aren't exact; give it as text")
        return Value(number_value=value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise invalid(path, "has to be a finite number")
        return Value(number_value=value)
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return Value(list_value=ListValue(values=[Value(string_value=item) for item in value]))
    raise invalid(
        path, f"has to be a string, a number, a boolean, null or a list of strings, not {json_type(value)}"
    )
