"""Merging what several scorers found into one ranking.

Scores of a document are equal, bit for bit, on whichever scorer it lies, so the merged ranking is the one
that a single scorer with all segments would give: by score, then by id. That holds only while scores travel
unrounded (float64).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar


class Ranked(Protocol):
    """A document found, as merging needs to know it."""

    @property
    def id(self) -> str:
        """The document's id."""

    @property
    def score(self) -> float:
        """Its exact score."""


HitT = TypeVar("HitT", bound=Ranked)


def merge_hits(leaves: Iterable[Iterable[HitT]], k: int) -> list[HitT]:
    """The best k of all leaves' hits: highest score first, equal scores by id.

    A document has one row at any version, so an id that comes twice was searched twice (two replicas
    answered); it counts once.

    Args:
        leaves: Hits of each leaf, each leaf's best k at least, in any order.
        k: Documents wanted, at least 1.

    Raises:
        ValueError: `k` is less than 1.
    """
    if k < 1:
        raise ValueError(f"k: is {k}, expected at least 1")
    ranked = sorted((hit for leaf in leaves for hit in leaf), key=lambda hit: (-hit.score, hit.id))
    merged: list[HitT] = []
    seen = set()
    for hit in ranked:
        if hit.id not in seen:
            seen.add(hit.id)
            merged.append(hit)
            if len(merged) == k:
                break
    return merged
