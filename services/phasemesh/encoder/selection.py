"""Which of the waiting items go into the next batch.

The engine pads, so a batch costs its longest sequence times its number of sequences. Lengths that are alike
are put together from a bounded window of the queue, around its oldest item, which is always taken: every
batch moves the head on, so that an item waits for no more batches than there are items before it.
"""

from __future__ import annotations

from collections.abc import Sequence

from phasemesh.encoder.items import Item

#: Items looked at for one batch; sorting more would cost more than the padding it saves.
WINDOW_ITEMS = 1024


def choose(window: Sequence[Item], *, max_tokens: int, max_items: int) -> list[Item]:
    """The batch around the head of `window`.

    Args:
        window: oldest first, at least one.
        max_tokens: longest times number stays at or below it, except for a single item that is longer.
        max_items: most items.
    """
    head = window[0]
    chosen, longest = [head], head.tokens
    # Stable, so that among equals the older goes first.
    for item in sorted(window[1:], key=lambda item: abs(item.tokens - head.tokens)):
        if len(chosen) == max_items:
            break
        longer = max(longest, item.tokens)
        if longer * (len(chosen) + 1) <= max_tokens:
            chosen.append(item)
            longest = longer
    return chosen


def split(items: Sequence[Item], *, max_tokens: int) -> list[list[Item]]:
    """`items` in parts of at most `max_tokens`, padding included, and of at most half of them."""
    ordered = sorted(items, key=lambda item: item.tokens, reverse=True)
    parts: list[list[Item]] = []
    most = max(1, (len(ordered) + 1) // 2)
    for item in ordered:
        part = parts[-1] if parts else None
        if part and len(part) < most and part[0].tokens * (len(part) + 1) <= max_tokens:
            part.append(item)
        else:
            parts.append([item])
    return parts
