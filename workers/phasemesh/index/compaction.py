"""Merging small fragments, so that commits and scans stay cheap however many writes there were.

Invariant: a compaction changes no document. It is one commit, whole or absent, never blocks other commits,
and its files are as durable as was asked for before its version is told to anyone. A write that touches a
fragment of a plan makes that plan fail, so plans are small and are made anew.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import lance
from lance.optimize import Compaction, CompactionTask

from phasemesh.index.reading import physical_columns, token_file
from phasemesh.index.schema import TOKEN_COUNT

#: Most fragments of one plan.
MOST_MERGED = 64
#: Share of the target below which fragments are merged whatever their size.
_TINY = 256
#: Token vectors that are in memory at a time while fragments are rewritten.
_BATCH_TOKENS = 65_536
_MAX_BATCH_ROWS = 1024
#: More rows than a fragment has: a plan becomes one fragment.
_ALL_ROWS = 2**31


@dataclass(frozen=True, slots=True)
class FragmentSize:
    """Size of a fragment in one version: live rows, their token vectors, and rows deleted from it."""

    fragment_id: int
    rows: int
    tokens: int
    deleted: int


def plan_tail(
    sizes: Sequence[FragmentSize], target_tokens: int, small_fragments: int, most: int = MOST_MERGED
) -> tuple[int, ...]:
    """The fragments to merge next so that at most `small_fragments` small ones are left.

    Size-tiered: from the smallest on, a fragment is taken along while it is no larger than those before it
    together. So a document is rewritten at most as often as its fragment doubles.

    Args:
        sizes: Of all fragments.
        target_tokens: Most token vectors of what is made; a fragment below half of it is small.
        small_fragments: How many are left alone.
        most: Fragments of one plan, at least 2.

    Returns:
        Ids in rising order, at least two or none.
    """
    small = _small(sizes, target_tokens)
    if len(small) <= small_fragments or len(small) < 2:
        return ()
    taken = [small[0]]
    together = small[0].tokens
    for size in small[1:most]:
        grows = size.tokens <= max(together, target_tokens // _TINY)
        # Two small ones always fit: each is below half of the target.
        if len(taken) >= 2 and not (grows and together + size.tokens <= target_tokens):
            break
        taken.append(size)
        together += size.tokens
    return tuple(sorted(size.fragment_id for size in taken))


def plan_whole(
    sizes: Sequence[FragmentSize], target_tokens: int, most: int = MOST_MERGED
) -> list[tuple[int, ...]]:
    """What to merge so that few small fragments and no deleted rows are left: groups of ids in order."""
    small = {size.fragment_id for size in _small(sizes, target_tokens)}
    groups: list[tuple[int, ...]] = [
        (size.fragment_id,) for size in sizes if size.deleted and size.fragment_id not in small
    ]
    group: list[FragmentSize] = []

    def close() -> None:
        if len(group) > 1 or any(size.deleted for size in group):
            groups.append(tuple(size.fragment_id for size in group))
        group.clear()

    for size in sorted(sizes, key=lambda size: size.fragment_id):
        if size.fragment_id not in small:
            continue
        if len(group) == most or sum(one.tokens for one in group) + size.tokens > target_tokens:
            close()
        group.append(size)
    close()
    return groups


def fragment_sizes(
    dataset: lance.LanceDataset, file_tokens: dict[str, int], live_tokens: dict[str, tuple[int, int]]
) -> list[FragmentSize]:
    """Sizes of all fragments of this version.

    Args:
        dataset: At the version.
        file_tokens: Token vectors of data files that are known; completed.
        live_tokens: Deleted rows of a data file and the token vectors of the others, as last counted;
            completed. Where a restore changed which rows are deleted, but not how many, the sum may be of the
            other ones; it only decides what is merged.
    """
    sizes = []
    for fragment in dataset.get_fragments():
        deleted = fragment.num_deletions
        if deleted:
            key = token_file(dataset, fragment)
            known, tokens = live_tokens.get(key, (0, 0))
            if known != deleted:
                counts = fragment.scanner(columns=[TOKEN_COUNT]).to_table().column(TOKEN_COUNT)
                tokens = sum(int(chunk.to_numpy().sum()) for chunk in counts.chunks)
                live_tokens[key] = (deleted, tokens)
        else:
            tokens = physical_tokens(dataset, fragment, file_tokens)
        sizes.append(FragmentSize(fragment.fragment_id, fragment.physical_rows - deleted, tokens, deleted))
    return sizes


def physical_tokens(
    dataset: lance.LanceDataset, fragment: lance.LanceFragment, file_tokens: dict[str, int]
) -> int:
    """Token vectors of all physical rows of a fragment, looked up in `file_tokens` or noted there."""
    key = token_file(dataset, fragment)
    tokens = file_tokens.get(key)
    if tokens is None:
        counts = physical_columns(dataset, fragment, [TOKEN_COUNT]).column(TOKEN_COUNT)
        tokens = sum(int(chunk.to_numpy().sum()) for chunk in counts.chunks)
        file_tokens[key] = tokens
    return tokens


class Rewrite:
    """Fragments of one version on their way into one new fragment.

    Args:
        dataset: At the version.
        sizes: Sizes of the fragments to merge.
    """

    def __init__(self, dataset: lance.LanceDataset, sizes: Sequence[FragmentSize]) -> None:
        self._dataset = dataset
        task = _task(dataset, sizes)
        self._result = task.execute(dataset)

    @property
    def files(self) -> list[Path]:
        """The data files that were written, which nothing refers to yet."""
        folder = Path(self._dataset.uri) / "data"
        return [folder / file.path for made in self._result.new_fragments for file in made.files]

    def commit(self) -> lance.LanceDataset | None:
        """Make the new fragment take the others' place; a handle at the version that has it.

        Returns:
            None if a write touched one of the fragments meanwhile; the new files are removed then.

        Raises:
            OSError: The medium refused.
        """
        handle = self._dataset.checkout_version(self._dataset.version)
        try:
            Compaction.commit(handle, [self._result])
        except (RuntimeError, OSError) as error:
            if not is_preempted(error):
                raise
            for file in self.files:
                with suppress(FileNotFoundError):
                    file.unlink()
            return None
        return handle


def is_preempted(error: Exception) -> bool:
    """Whether a failure of Lance says that a write touched a fragment of the plan."""
    # Lance has no type of its own for it.
    text = str(error).lower()
    return "commit conflict" in text or "preempted by concurrent" in text or "incompatible with" in text


def _task(dataset: lance.LanceDataset, sizes: Sequence[FragmentSize]) -> CompactionTask:
    # Lance plans by rows and among neighbours, and we by tokens; what it can merge is more than what it
    # plans. So it is asked for a plan of everything, of which a task keeps the fragments that we chose.
    wanted = {size.fragment_id for size in sizes}
    rows = max(1, sum(size.rows for size in sizes))
    batch = _BATCH_TOKENS * rows // max(1, sum(size.tokens for size in sizes))
    plan = Compaction.plan(
        dataset,
        {
            "target_rows_per_fragment": _ALL_ROWS,
            "materialize_deletions_threshold": 0.0,
            "num_threads": 1,
            "batch_size": max(1, min(batch, _MAX_BATCH_ROWS)),
        },
    )
    tasks = [json.loads(task.json()) for task in plan.tasks]
    chosen = [one for task in tasks for one in task["task"]["fragments"] if one["id"] in wanted]
    if {one["id"] for one in chosen} != wanted:
        raise RuntimeError(f"fragments {sorted(wanted)} can't be merged at version {dataset.version}")
    tasks[0]["task"]["fragments"] = sorted(chosen, key=lambda one: int(one["id"]))
    return CompactionTask.from_json(json.dumps(tasks[0]))


def _small(sizes: Sequence[FragmentSize], target_tokens: int) -> list[FragmentSize]:
    small = [size for size in sizes if 2 * size.tokens < target_tokens]
    return sorted(small, key=lambda size: (size.tokens, size.fragment_id))
