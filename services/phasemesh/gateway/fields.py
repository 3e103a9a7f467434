"""Fields of a JSON body, read with errors that name the field and say what it should be.

Rules of every dialect: unknown fields are ignored, an explicit null is an absent field, and a boolean is not
a number (in Python it would be).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from phasemesh.errors import InvalidArgument

#: The wire's integers are uint32.
MAX_UINT32 = 2**32 - 1


def json_type(value: object) -> str:
    """Name of a parsed value's type, in JSON's words, with its article."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    for kind, name in (
        (str, "a string"),
        (int, "an integer"),
        (float, "a number with a fraction or exponent"),
        (list, "a list"),
    ):
        if isinstance(value, kind):
            return name
    return "an object"


def invalid(field: str, message: str, *, reason: str = "INVALID_FIELD") -> InvalidArgument:
    """An error about `field`, whose text begins with it."""
    return InvalidArgument(f"{field}: {message}", reason=reason, field=field)


def required(body: Mapping[str, Any], field: str, what: str) -> Any:
    """Value of a field that must be there; `what` says what it is, for the error."""
    value = body.get(field)
    if value is None:
        raise invalid(field, f"is missing; give {what}", reason="MISSING_FIELD")
    return value


def required_text(body: Mapping[str, Any], field: str, what: str) -> str:
    """A string of at least one character."""
    value = required(body, field, what)
    if not isinstance(value, str):
        raise invalid(field, f"has to be a string, not {json_type(value)}")
    if not value:
        raise invalid(field, f"is empty; give {what}", reason="EMPTY_INPUT")
    return value


def optional_count(body: Mapping[str, Any], field: str) -> int | None:
    """An integer from 1 to 2**32 - 1, or None."""
    value = body.get(field)
    if value is None:
        return None
    if type(value) is not int:
        raise invalid(field, f"has to be an integer, not {json_type(value)}")
    if not 1 <= value <= MAX_UINT32:
        raise invalid(field, f"has to be between 1 and {MAX_UINT32}, not {value}")
    return value


def optional_choice(body: Mapping[str, Any], field: str, choices: tuple[str, ...], default: str) -> str:
    """One of `choices`."""
    value = body.get(field)
    if value is None:
        return default
    if not isinstance(value, str) or value not in choices:
        shown = repr(value) if isinstance(value, str) and len(value) <= 40 else json_type(value)
        raise invalid(field, f"has to be one of {', '.join(map(repr, choices))}, not {shown}")
    return value


def optional_bool(body: Mapping[str, Any], field: str, *, default: bool) -> bool:
    """A boolean."""
    value = body.get(field)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise invalid(field, f"has to be true or false, not {json_type(value)}")
    return value
