"""JSON objects of a native body, read with errors that name the full path of the field at fault.

Rules: an explicit null is an absent field; a boolean is not a number; and unlike in the dialects of other
people's clients an unknown field is refused, because a misspelt `filter` would be a search without one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from phasemesh.gateway.fields import MAX_UINT32, invalid, json_type

#: A generated enumeration. Its stub is a class of its own kind per enumeration and release of the generator.
WireEnum: TypeAlias = Any

_SHOWN_CHARS = 40


@dataclass(frozen=True, slots=True)
class JsonObject:
    """An object of the body.

    Attributes:
        values: its fields.
        path: where it stands, e.g. "documents[3]"; "" for the body itself.
    """

    values: Mapping[str, Any]
    path: str = ""

    @classmethod
    def of(cls, value: Any, path: str, *known: str) -> JsonObject:
        """`value` as an object that has no fields but `known` ones.

        Raises:
            InvalidArgument: it isn't an object, or has another field.
        """
        if not isinstance(value, dict):
            raise invalid(path, f"has to be an object, not {json_type(value)}")
        made = cls(value, path)
        for key in value:
            if key not in known:
                raise invalid(
                    made.at(key[:_SHOWN_CHARS]),
                    f"there is no such field; there are {', '.join(known)}",
                    reason="UNKNOWN_FIELD",
                )
        return made

    def at(self, key: str) -> str:
        """Path of a field."""
        return f"{self.path}.{key}" if self.path else key

    def get(self, key: str) -> Any:
        """Value of a field; None if it is absent."""
        return self.values.get(key)

    def required(self, key: str, what: str) -> Any:
        """Value of a field that must be there; `what` says what it is, for the error."""
        value = self.values.get(key)
        if value is None:
            raise invalid(self.at(key), f"is missing; give {what}", reason="MISSING_FIELD")
        return value

    def text(self, key: str, default: str = "") -> str:
        """A string."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise invalid(self.at(key), f"has to be a string, not {json_type(value)}")
        return value

    def required_text(self, key: str, what: str) -> str:
        """A string that must be there; it may be empty."""
        self.required(key, what)
        return self.text(key)

    def integer(self, key: str, *, least: int, most: int = MAX_UINT32) -> int | None:
        """An integer from `least` to `most`, or None."""
        value = self.values.get(key)
        return None if value is None else checked_integer(value, self.at(key), least=least, most=most)

    def flag(self, key: str) -> bool:
        """A boolean; false if it is absent."""
        value = self.values.get(key)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise invalid(self.at(key), f"has to be true or false, not {json_type(value)}")
        return value

    def enum(self, key: str, kind: WireEnum, prefix: str) -> Any:
        """A value of the wire's enumeration by its name in lower case without `prefix`; 0 if it is absent."""
        value = self.values.get(key)
        if value is None:
            return 0
        choices = enum_names(kind, prefix)
        if not isinstance(value, str) or value not in choices:
            shown = repr(value) if isinstance(value, str) and len(value) <= _SHOWN_CHARS else json_type(value)
            raise invalid(self.at(key), f"has to be one of {', '.join(map(repr, choices))}, not {shown}")
        return choices[value]

    def items(self, key: str) -> list[Any]:
        """A list; empty if it is absent."""
        value = self.values.get(key)
        if value is None:
            return []
        if not isinstance(value, list):
            raise invalid(self.at(key), f"has to be a list, not {json_type(value)}")
        return value

    def texts(self, key: str) -> list[str]:
        """A list of strings; empty if it is absent."""
        values = self.items(key)
        for index, value in enumerate(values):
            if not isinstance(value, str):
                raise invalid(f"{self.at(key)}[{index}]", f"has to be a string, not {json_type(value)}")
        return values

    def integers(self, key: str) -> list[int]:
        """A list of integers from 0 to 2**32 - 1; empty if it is absent."""
        return [
            checked_integer(value, f"{self.at(key)}[{index}]", least=0)
            for index, value in enumerate(self.items(key))
        ]


def checked_integer(value: Any, path: str, *, least: int, most: int = MAX_UINT32) -> int:
    """`value` as an integer from `least` to `most`.

    Raises:
        InvalidArgument: it is something else.
    """
    if type(value) is not int:
        raise invalid(path, f"has to be an integer, not {json_type(value)}")
    if not least <= value <= most:
        raise invalid(path, f"has to be between {least} and {most}, not {value}")
    return value


def enum_names(kind: WireEnum, prefix: str) -> dict[str, Any]:
    """Names of an enumeration as JSON has them, with their numbers; "not stated" has none."""
    return {name.removeprefix(prefix).lower(): number for name, number in kind.items() if number}


def enum_name(kind: WireEnum, prefix: str, number: int) -> str | None:
    """Name of `number` as JSON has it; None for "not stated" and for what this release doesn't know."""
    return next((name for name, known in enum_names(kind, prefix).items() if known == number), None)
