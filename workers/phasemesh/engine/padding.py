"""Packed sequences to right-padded blocks of similar length.

Invariant: every sequence is in exactly one block, whole. Right padding only: absolute positions shift under
left padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from phasemesh.pool.protocol import Bool, Int64, Sequences


@dataclass(frozen=True, slots=True)
class Block:
    """Some sequences of a batch, padded to their longest.

    Attributes:
        rows: int64[b], their indices in the batch.
        input_ids: int64[b, l].
        type_ids: int64[b, l]; None where the model has none or all are zero.
        attended: bool[b, l], False for padding and for tokens that no token attends to.
        pooled: bool[b, l], `attended` less the prompt's tokens where they aren't pooled.
        kept: bool[b, l], tokens whose vectors are returned or scored.
    """

    rows: Int64
    input_ids: Int64
    type_ids: Int64 | None
    attended: Bool
    pooled: Bool
    kept: Bool

    @property
    def tokens(self) -> int:
        """Tokens computed, padding included."""
        return self.input_ids.size


def blocks(
    sequences: Sequences, *, pad_id: int, launch_tokens: int, with_types: bool, pool_prompt: bool
) -> list[Block]:
    """Cut `sequences` into blocks that cost least.

    Args:
        sequences: the batch.
        pad_id: token that fills up; it is never attended to.
        launch_tokens: cost of one more block, in tokens.
        with_types: whether the model has token types.
        pool_prompt: whether prompt tokens are pooled.
    """
    starts = sequences.cu_seqlens[:-1].astype(np.int64)
    lengths = np.diff(sequences.cu_seqlens).astype(np.int64)
    result = []
    for rows in split(lengths, launch_tokens):
        sizes = lengths[rows]
        columns = np.arange(sizes.max())
        real = columns < sizes[:, None]
        source = (starts[rows][:, None] + columns)[real]

        ids = np.full(real.shape, pad_id, np.int64)
        ids[real] = sequences.input_ids[source]
        types = None
        if with_types and sequences.type_ids is not None:
            types = np.zeros(real.shape, np.int64)
            types[real] = sequences.type_ids[source]
        attended = _masked(real, sequences.attended, source)
        pooled = attended
        if not pool_prompt and sequences.prompt_tokens is not None:
            pooled = attended & (columns >= sequences.prompt_tokens[rows][:, None])
        kept = _masked(real, sequences.kept, source)
        result.append(Block(rows, ids, types, attended, pooled, kept))
    return result


def split(lengths: Int64, launch_tokens: int) -> list[Int64]:
    """Indices of the sequences of each block, so that padded tokens plus launches are fewest.

    Exact, by dynamic programming over distinct lengths: in some best solution a block takes all sequences
    between two lengths. One block keeps the batch's order.
    """
    distinct, counts = np.unique(lengths, return_counts=True)
    ends = np.cumsum(counts)
    # cost[j] is least for the j shortest distinct lengths; the last block then starts at first[j - 1].
    cost = np.zeros(len(distinct) + 1, np.int64)
    first = np.zeros(len(distinct), np.int64)
    before = np.concatenate([[0], ends[:-1]])
    for j, longest in enumerate(distinct):
        costs = cost[: j + 1] + (ends[j] - before[: j + 1]) * longest + launch_tokens
        first[j] = np.argmin(costs)
        cost[j + 1] = costs[first[j]]
    edges: list[int] = []
    j = len(distinct)
    while j > 0:
        j = int(first[j - 1])
        edges.append(j)
    if len(edges) == 1:
        return [np.arange(len(lengths))]
    order = np.argsort(lengths, kind="stable")
    return np.split(order, [int(before[edge]) for edge in reversed(edges) if edge > 0])


def packed_positions(offsets: Int64, rows: Int64) -> Int64:
    """Where the token rows of `rows`, one after another, stand among the batch's packed token rows."""
    counts = np.diff(offsets)[rows]
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    positions: Int64 = np.repeat(offsets[:-1][rows], counts) + within
    return positions


def _masked(real: Bool, flags: npt.NDArray[np.bool_] | None, source: Int64) -> Bool:
    if flags is None:
        return real
    mask = np.zeros(real.shape, np.bool_)
    mask[real] = flags[source]
    return mask
