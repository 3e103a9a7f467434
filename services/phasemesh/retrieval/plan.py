"""What a search has to cover, and who is asked for it: fragments of one version, each with its scorers.

Invariants: a plan names every fragment that may hold a hit, and no other; a filter became bitmaps before
anything is scored; the same plan comes out of the same version, filter and scorers in every process.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from phasemesh.index.filters import Condition
from phasemesh.index.reading import RowMask
from phasemesh.index.spec import CollectionSpec, FragmentRef, Version
from phasemesh.index.store import CollectionStore
from phasemesh.retrieval.placement import PlacedSegment, place, rendezvous_order

#: Bytes of a token vector's number in the form that is always kept, float16.
_NUMBER_BYTES = 2


@dataclass(frozen=True, slots=True)
class PlannedFragment:
    """A fragment to search.

    Attributes:
        fragment_id: its number within the dataset.
        allowed_rows: bitmap over physical rows, least significant bit first; None for all that are live.
        scorers: all of them, in the order in which they are to be tried.
        replicas: how many of the first scorers the fragment is placed on; to the others it would be new.
    """

    fragment_id: int
    allowed_rows: bytes | None
    scorers: tuple[str, ...]
    replicas: int


def plan_search(
    store: CollectionStore,
    version: Version,
    condition: Condition | None,
    scorers: Sequence[str],
    replicas: int,
) -> list[PlannedFragment]:
    """The fragments to search; blocks.

    Args:
        store: of the collection.
        version: exact.
        condition: the filter; None for none.
        scorers: names of all of them.
        replicas: scorers that each fragment is placed on.

    Raises:
        IndexFailure: the version or the filter is at fault.
    """
    fragments = store.fragments(version)
    order = _orders(store.spec, store.incarnation, fragments, scorers, replicas)
    masks = None if condition is None else store.allowed_rows(version, condition)
    return [
        PlannedFragment(
            fragment_id=fragment.fragment_id,
            allowed_rows=None if masks is None else _bitmap(masks[fragment.fragment_id]),
            scorers=order[fragment.fragment_id],
            replicas=min(replicas, len(scorers)),
        )
        for fragment in fragments
        if masks is None or fragment.fragment_id in masks
    ]


def plan_rows(
    store: CollectionStore,
    version: Version,
    fragment_ids: Collection[int],
    scorers: Sequence[str],
    replicas: int,
) -> list[PlannedFragment]:
    """Who is asked for rows of given fragments; blocks.

    Args:
        store: of the collection.
        version: exact.
        fragment_ids: of this version.
        scorers: names of all of them.
        replicas: scorers that each fragment is placed on.

    Raises:
        IndexFailure: the version is at fault.
    """
    if not fragment_ids:
        return []
    order = _orders(store.spec, store.incarnation, store.fragments(version), scorers, replicas)
    return [
        PlannedFragment(fragment_id, None, order[fragment_id], min(replicas, len(scorers)))
        for fragment_id in sorted(fragment_ids)
    ]


def _bitmap(mask: RowMask) -> bytes:
    return np.packbits(mask, bitorder="little").tobytes()


def _orders(
    spec: CollectionSpec,
    incarnation: str,
    fragments: Sequence[FragmentRef],
    scorers: Sequence[str],
    replicas: int,
) -> dict[int, tuple[str, ...]]:
    # All fragments take part, whatever the filter leaves, or a filter would move segments about.
    keys = {fragment.fragment_id: f"{incarnation}/{fragment.data_key}" for fragment in fragments}
    placed = place(
        [
            PlacedSegment(keys[fragment.fragment_id], fragment.tokens * spec.token_dim * _NUMBER_BYTES)
            for fragment in fragments
        ],
        scorers,
        replicas,
    )
    orders = {}
    for fragment_id, key in keys.items():
        chosen = placed[key]
        others = [scorer for scorer in rendezvous_order(key, scorers) if scorer not in chosen]
        orders[fragment_id] = (*chosen, *others)
    return orders
