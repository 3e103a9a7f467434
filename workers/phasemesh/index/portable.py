"""MaxSim over packed ragged token vectors in numpy, for where the compiled kernels can't be used.

For each range of document tokens: the sum, over the query's tokens, of the largest similarity with any token
of the range. Nothing is ever padded, so negative similarities keep their meaning and a score doesn't depend
on which documents are scored beside it but for rounding. The similarity matrix exists one block at a time:
never more than `MAX_CELLS` entries of it (or one entry per query token, if those are more).

`phasemesh.index.kernel` chooses between this and the compiled library; both answer alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from phasemesh.index.vectors import check_arguments, fold_ranges

#: Most entries of the similarity matrix at a time: 4 MiB of float32, about a core's second-level cache.
MAX_CELLS = 1 << 20
#: Most elements of document tokens that are widened to float32 at a time, 4 MiB.
MAX_WIDENED = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """Tokens that are scored together: some whole ranges, or a piece of one that is longer than a block.

    Args:
        first: Position of its first range among the ranges asked for.
        stop: One past the position of its last range.
        tokens: Its tokens' positions: a slice where they lie together, otherwise int64 indices.
        starts: Position of each range's first token within the block, int64 [stop - first].
        last: Whether its ranges end in it; False for all but the last piece of a long range.
    """

    first: int
    stop: int
    tokens: slice | npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    last: bool


def maxsim(
    query: npt.NDArray[np.float32],
    tokens: npt.NDArray[np.float16],
    offsets: npt.NDArray[np.int64],
    *,
    mask: npt.NDArray[np.bool_] | None = None,
    mean: bool = False,
    range_to_row: npt.NDArray[np.int64] | None = None,
    rows: int | None = None,
    checkpoint: Callable[[], None] | None = None,
) -> npt.NDArray[np.float32]:
    """Scores documents against one query; see `phasemesh.index.kernel.maxsim`."""
    rows = check_arguments(query, tokens, offsets, mask, range_to_row, rows)
    scored = offsets[1:] > offsets[:-1]
    if mask is not None:
        scored &= mask if range_to_row is None else mask[range_to_row]
    selected = np.flatnonzero(scored)
    columns = query.astype(np.float32, copy=False).T

    def best_similarities(block: Block) -> npt.NDArray[np.float32]:
        # Overflow shows in the result, which is checked as a whole.
        with np.errstate(over="ignore", invalid="ignore"):
            similarities = tokens[block.tokens].astype(np.float32) @ columns
        return np.maximum.reduceat(similarities, block.starts, axis=0)

    sums = reduce_ranges(best_similarities, offsets, selected, query.shape, checkpoint)
    if mean:
        sums /= len(query)
    with np.errstate(over="ignore"):
        scores = sums.astype(np.float32)
    if not np.isfinite(scores).all():
        bad = int(selected[np.flatnonzero(~np.isfinite(scores))[0]])
        raise ValueError(f"tokens: range {bad} has no finite score; its vectors are not finite or too large")

    best = np.full(len(offsets) - 1, -np.inf, np.float32)
    best[selected] = scores
    return fold_ranges(best, range_to_row, rows)


def _total(best: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    sums: npt.NDArray[np.float64] = np.add.reduce(best, axis=1, dtype=np.float64)
    return sums


def reduce_ranges(
    best_of: Callable[[Block], npt.NDArray[np.floating]],
    offsets: npt.NDArray[np.int64],
    ranges: npt.NDArray[np.int64],
    query_shape: tuple[int, ...],
    checkpoint: Callable[[], None] | None = None,
    *,
    total: Callable[[npt.NDArray[np.floating]], npt.NDArray[np.float64]] = _total,
) -> npt.NDArray[np.float64]:
    """Sums each range's best similarities over the query's tokens, block by block.

    Args:
        best_of: Best similarity of each of a block's ranges with each query token, [ranges of block, q].
        offsets: As in `maxsim`.
        ranges: Ranges to reduce, [m]; none of them empty.
        query_shape: (q, d).
        checkpoint: Called before each block.
        total: Sums over the query's tokens, [ranges, q] → float64 [ranges].

    Returns:
        The sums, float64 [m].
    """
    query_tokens, dim = query_shape
    limit = max(1, min(MAX_CELLS // query_tokens, MAX_WIDENED // dim))
    sums = np.empty(len(ranges), np.float64)
    running: npt.NDArray[np.floating] | None = None
    for block in blocks(offsets, ranges, limit):
        if checkpoint is not None:
            checkpoint()
        best = best_of(block)
        if running is not None:
            best = np.maximum(best, running)
        if block.last:
            sums[block.first : block.stop] = total(best)
            running = None
        else:
            running = best
    return sums


def blocks(offsets: npt.NDArray[np.int64], ranges: npt.NDArray[np.int64], limit: int) -> Iterator[Block]:
    """Cuts ranges into blocks of at most `limit` tokens; a longer range comes in pieces of its own.

    Args:
        offsets: As in `maxsim`.
        ranges: Ranges to cut, int64 [m], in any order; none of them empty.
        limit: Most tokens of a block, at least 1.
    """
    begins, ends = offsets[ranges], offsets[ranges + 1]
    lengths = ends - begins
    filled = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    first = 0
    while first < len(ranges):
        if lengths[first] > limit:
            begin, end = int(begins[first]), int(ends[first])
            for piece in range(begin, end, limit):
                stop = min(piece + limit, end)
                yield Block(first, first + 1, slice(piece, stop), np.zeros(1, np.int64), stop == end)
            first += 1
            continue
        stop = int(np.searchsorted(filled, filled[first] + limit, side="right")) - 1
        starts = filled[first:stop] - filled[first]
        begin, end = int(begins[first]), int(ends[stop - 1])
        positions: slice | npt.NDArray[np.int64] = slice(begin, end)
        if np.any(begins[first + 1 : stop] != ends[first : stop - 1]):
            # Unselected ranges lie between: only the selected ones' tokens are gathered.
            positions = np.repeat(begins[first:stop] - starts, lengths[first:stop])
            positions += np.arange(len(positions))
        yield Block(first, stop, positions, starts, True)
        first = stop
