"""The passages and questions that ship with Phasemesh."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True, slots=True)
class Passage:
    """A passage that ships with Phasemesh."""

    id: str
    title: str
    text: str


def passages() -> list[Passage]:
    """The passages, in the file's order."""
    lines = (
        (resources.files("phasemesh.cli") / "data" / "passages.jsonl")
        .read_text(encoding="utf-8")
        .splitlines()
    )
    return [Passage(row["id"], row["title"], row["text"]) for row in map(json.loads, lines)]


def queries() -> list[tuple[str, set[str]]]:
    """Questions with the ids of the passages that answer them."""
    rows = json.loads(
        (resources.files("phasemesh.cli") / "data" / "queries.json").read_text(encoding="utf-8")
    )
    return [(row["query"], set(row["relevant"])) for row in rows]
