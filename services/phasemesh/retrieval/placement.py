"""Which scorers hold which segments: a pure function of segments, scorers and replica count.

Every process that knows the same three computes the same assignment, so nothing has to be agreed upon or
stored. Load never enters: it only chooses among the replicas of a segment, elsewhere.

Each segment has its own order of all scorers (rendezvous hashing), so a scorer that leaves takes only its
own segments with it, and they spread over all others. A segment goes to the first scorers in its order whose
bytes, before adding it, are below 1.05 times the mean.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

#: Fullness, in percent of the mean, from which a scorer is passed over. With one replica, no scorer ever
#: holds more than this and one segment.
BALANCE_PERCENT = 105


@dataclass(frozen=True, slots=True)
class PlacedSegment:
    """A segment to place.

    Args:
        key: Unique and stable: the same data must have the same key in every process.
        nbytes: Its bytes in a scorer.
    """

    key: str
    nbytes: int


def rendezvous_order(key: str, scorers: Iterable[str]) -> list[str]:
    """All scorers in a segment's own order, the preferred first; stable over processes and machines."""
    return sorted(scorers, key=lambda scorer: (_weight(key, scorer), scorer), reverse=True)


def place(
    segments: Iterable[PlacedSegment], scorers: Sequence[str], replicas: int = 1
) -> dict[str, tuple[str, ...]]:
    """Assigns segments to scorers.

    Args:
        segments: Segments, in any order.
        scorers: Names of the scorers, in any order, each once.
        replicas: Scorers that each segment goes to; all of them where there are fewer.

    Returns:
        Scorers of each segment by its key, the preferred first; all distinct.

    Raises:
        ValueError: There is no scorer, a name or key comes twice, or a number makes no sense.
    """
    if not scorers:
        raise ValueError("scorers: there is none to place segments on")
    if len(set(scorers)) != len(scorers):
        raise ValueError(f"scorers: a name comes twice in {sorted(scorers)}")
    if replicas < 1:
        raise ValueError(f"replicas: is {replicas}, expected at least 1")
    # An order of its own, so that the order of the input doesn't matter; by hash, because by size or by name
    # (which may tell the age) neighbours would be alike, and losing a scorer would then move more.
    ordered = sorted(segments, key=lambda segment: (_digest(segment.key), segment.key))
    if len({segment.key for segment in ordered}) != len(ordered):
        raise ValueError("segments: a key comes twice")
    for segment in ordered:
        if segment.nbytes < 0:
            raise ValueError(f"segments: {segment.key!r} has {segment.nbytes} bytes")

    copies = min(replicas, len(scorers))
    total = sum(segment.nbytes for segment in ordered) * copies
    held = dict.fromkeys(scorers, 0)
    assignment = {}
    for segment in ordered:
        order = rendezvous_order(segment.key, scorers)
        # In integers: a scorer exactly at the limit must not depend on how a mean was rounded.
        chosen = [name for name in order if held[name] * len(scorers) * 100 < BALANCE_PERCENT * total][
            :copies
        ]
        if len(chosen) < copies:
            # Only replicas can run out of scorers below the limit; the emptiest of the others take over.
            # A segment without bytes comes here too once nothing is held anywhere.
            others = [name for name in order if name not in chosen]
            chosen += sorted(others, key=held.__getitem__)[: copies - len(chosen)]
        for name in chosen:
            held[name] += segment.nbytes
        assignment[segment.key] = tuple(chosen)
    return assignment


def _weight(key: str, scorer: str) -> bytes:
    # Length first, so that no two pairs of names run together to the same bytes.
    return _digest(f"{len(key)}:{key}{scorer}")


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
