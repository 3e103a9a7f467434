"""Items to a `Batch` and its result back to the items.

Invariant: items that the engine can't tell apart share one sequence of the batch, and each gets its result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from phasemesh.encoder.items import Encoded, Item
from phasemesh.encoder.rows import Row
from phasemesh.errors import Internal, PhasemeshError
from phasemesh.pool.protocol import Batch, BatchResult, Float32, Int32, Output, Sequences


@dataclass(frozen=True, slots=True)
class Assembled:
    """A batch and who its sequences are for.

    Attributes:
        batch: for the pool.
        owners: for each sequence, the items that it stands for.
    """

    batch: Batch
    owners: tuple[tuple[Item, ...], ...]


def assemble(items: Sequence[Item], *, batch_id: str, carrier: Mapping[str, str]) -> Assembled:
    """The batch of `items`, which share a lane; there is at least one."""
    lane = items[0].lane
    owners: dict[object, list[Item]] = {}
    queries: dict[int, int] = {}
    vectors: list[Float32] = []
    for item in items:
        query_index = -1
        if item.query is not None:
            # By identity: items of one request carry the same array.
            query_index = queries.setdefault(id(item.query), len(vectors))
            if query_index == len(vectors):
                vectors.append(item.query)
        owners.setdefault((item.row.key(), query_index), []).append(item)
    groups = tuple(tuple(group) for group in owners.values())
    rows = [group[0].row for group in groups]
    query_of: Int32 | None = None
    if Output.MAXSIM in lane.outputs:
        query_of = np.array([queries[id(group[0].query)] for group in groups], np.int32)
    batch = Batch(
        batch_id=batch_id,
        model=lane.model,
        outputs=lane.outputs,
        sequences=pack(rows),
        token_dtype=lane.token_dtype,
        query_vectors=tuple(vectors),
        query_of=query_of,
        carrier=dict(carrier),
    )
    return Assembled(batch, groups)


def pack(rows: Sequence[Row]) -> Sequences:
    """Rows one after another; parts that no row has stay None."""
    lengths = [len(row) for row in rows]

    def join(part: Callable[[Row], np.ndarray | None], fill: int, dtype: type) -> np.ndarray | None:
        parts = [part(row) for row in rows]
        if all(one is None for one in parts):
            return None
        return np.concatenate(
            [
                np.full(length, fill, dtype) if one is None else one
                for one, length in zip(parts, lengths, strict=True)
            ]
        )

    prompts = np.array([row.prompt_tokens for row in rows], np.int32)
    return Sequences(
        input_ids=np.concatenate([row.ids for row in rows]),
        cu_seqlens=np.cumsum([0, *lengths], dtype=np.int32),
        type_ids=join(lambda row: row.type_ids, 0, np.int32),
        attended=join(lambda row: row.attended, True, np.bool_),
        kept=join(lambda row: row.kept, True, np.bool_),
        prompt_tokens=prompts if prompts.any() else None,
    )


def disassemble(assembled: Assembled, result: BatchResult) -> Iterator[tuple[Item, Encoded | PhasemeshError]]:
    """Each item with its part of `result`."""
    bad = frozenset(result.nonfinite)
    for i, items in enumerate(assembled.owners):
        part: Encoded | PhasemeshError
        if i in bad:
            part = Internal(
                "the model gave a result that isn't a finite number for this input",
                reason="NON_FINITE_RESULT",
            )
        else:
            part = _part(result, i)
        for item in items:
            yield item, part


def _part(result: BatchResult, i: int) -> Encoded:
    tokens = None
    if result.tokens is not None and result.token_offsets is not None:
        tokens = result.tokens[result.token_offsets[i] : result.token_offsets[i + 1]]
    return Encoded(
        dense=None if result.dense is None else result.dense[i],
        tokens=tokens,
        logits=None if result.logits is None else result.logits[i],
        maxsim=None if result.maxsim is None else float(result.maxsim[i]),
    )
