"""Filters in JSON: an object with one condition, named as in the contract, which may nest others.

{"equals": {"field": "lang", "value": "en"}}
{"all": [{"range": {"field": "year", "at_least": 2020}}, {"not": {"exists": {"field": "draft"}}}]}
"""

from __future__ import annotations

from typing import Any

from google.protobuf.message import Message

from phasemesh.gateway.dialects.native.objects import JsonObject
from phasemesh.gateway.dialects.native.values import read_value
from phasemesh.gateway.fields import invalid, json_type
from phasemesh.v1 import retrieval_pb2 as pb

_CONDITIONS = ("equals", "in", "range", "exists", "prefix", "all", "any", "not", "id_in")
_ENDS = ("at_least", "at_most", "above", "below")
#: Deeper than the service takes, and far from the end of the stack.
_MAX_DEPTH = 32


def read_filter(value: Any, path: str = "filter", depth: int = 1) -> pb.Filter:
    """A condition.

    Raises:
        InvalidArgument: it has another shape; what it says of fields and types is the service's to judge.
    """
    if depth > _MAX_DEPTH:
        raise invalid(path, f"nests deeper than {_MAX_DEPTH}", reason="INVALID_FILTER")
    given = JsonObject.of(value, path, *_CONDITIONS)
    named = [name for name in _CONDITIONS if given.get(name) is not None]
    if len(named) != 1:
        problem = "has no condition" if not named else f"has {len(named)} conditions; combine them with `all`"
        raise invalid(path, f"{problem}; give one of {', '.join(_CONDITIONS)}", reason="INVALID_FILTER")
    name = named[0]
    at, inner = given.at(name), given.get(name)
    match name:
        case "all" | "any":
            filters = [
                read_filter(one, f"{at}[{position}]", depth + 1)
                for position, one in enumerate(_list(inner, at))
            ]
            return _made(name, pb.FilterList(filters=filters))
        case "not":
            return _made("not", read_filter(inner, at, depth + 1))
        case "id_in":
            return pb.Filter(id_in=pb.IdIn(ids=_texts(inner, at)))
        case "equals":
            return pb.Filter(equals=_equals(inner, at))
        case "in":
            return _made("in", _in(inner, at))
        case "range":
            return pb.Filter(range=_range(inner, at))
        case "prefix":
            condition = JsonObject.of(inner, at, "field", "prefix")
            field = _field(condition)
            condition.required("prefix", "what the text begins with")
            return pb.Filter(prefix=pb.FieldPrefix(field=field, prefix=condition.text("prefix")))
        case _:
            return pb.Filter(exists=pb.FieldExists(field=_field(JsonObject.of(inner, at, "field"))))


def _made(name: str, condition: Message) -> pb.Filter:
    """A filter of a condition whose name Python may have taken for itself."""
    made = pb.Filter()
    getattr(made, name).CopyFrom(condition)
    return made


def _equals(value: Any, path: str) -> pb.FieldEquals:
    condition = JsonObject.of(value, path, "field", "value")
    field = _field(condition)
    if "value" not in condition.values:
        raise invalid(condition.at("value"), "is missing; give the field's value", reason="MISSING_FIELD")
    return pb.FieldEquals(field=field, value=read_value(condition.get("value"), condition.at("value")))


def _in(value: Any, path: str) -> pb.FieldIn:
    condition = JsonObject.of(value, path, "field", "values")
    field = _field(condition)
    at = condition.at("values")
    if "values" not in condition.values:
        raise invalid(at, "is missing; give a list of values", reason="MISSING_FIELD")
    values = _list(condition.get("values"), at)
    read = [read_value(one, f"{at}[{position}]") for position, one in enumerate(values)]
    return pb.FieldIn(field=field, values=read)


def _range(value: Any, path: str) -> pb.FieldRange:
    condition = JsonObject.of(value, path, "field", *_ENDS)
    ends = {
        end: read_value(condition.get(end), condition.at(end))
        for end in _ENDS
        if condition.get(end) is not None
    }
    return pb.FieldRange(field=_field(condition), **ends)


def _field(condition: JsonObject) -> str:
    return condition.required_text("field", "the name of a declared field")


def _list(value: Any, path: str) -> list[Any]:
    if not isinstance(value, list):
        raise invalid(path, f"has to be a list, not {json_type(value)}")
    return value


def _texts(value: Any, path: str) -> list[str]:
    texts = _list(value, path)
    for position, text in enumerate(texts):
        if not isinstance(text, str):
            raise invalid(f"{path}[{position}]", f"has to be a string, not {json_type(text)}")
    return texts
