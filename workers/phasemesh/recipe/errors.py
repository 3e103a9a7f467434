"""The one error of this package: a checkpoint whose recipe can't be told from its files.

Invariant: the message names the file, the field in it, what is wrong and what to do.
"""

from __future__ import annotations

from pathlib import Path


class RecipeError(Exception):
    """A checkpoint is refused, because serving it would be a guess or would run foreign code."""

    @classmethod
    def at(cls, file: Path | str, field: str | None, problem: str, fix: str) -> RecipeError:
        """Error about `field` of `file` (None for the file as a whole)."""
        where = str(file) if field is None else f"{file}: {field}"
        return cls(f"{where}: {problem}; {fix}")
