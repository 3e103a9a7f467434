"""Removing what nobody can be reading any more: versions replaced long ago, and files of no version.

Invariant: a version goes only if a newer one took its place before the cutoff and it has no tag; a file goes
only if no version refers to it and it was last written before the cutoff. A version's own age doesn't count:
it may have been the newest until a moment ago.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import lance

#: Folders of a dataset in which writes that failed leave files.
_FOLDERS = ("data", "_deletions", "_transactions")


@dataclass(frozen=True, slots=True)
class Cleaned:
    """What a cleanup removed: versions, files of no version, and the bytes of both."""

    versions: tuple[int, ...] = ()
    orphans: int = 0
    bytes: int = 0


def replaced_versions(
    stamps: Iterable[tuple[int, float]], cutoff_unix_s: float, kept: Iterable[int]
) -> list[int]:
    """Versions that were replaced before the cutoff.

    Args:
        stamps: Number and time of each version, in seconds since 1970 UTC.
        cutoff_unix_s: Versions replaced at this time or later are kept.
        kept: Numbers that stay whatever their age.
    """
    stay = set(kept)
    ordered = sorted(stamps)
    return [
        number
        for (number, _), (_, replaced_unix_s) in pairwise(ordered)
        if replaced_unix_s < cutoff_unix_s and number not in stay
    ]


def remove_versions(dataset: lance.LanceDataset, cutoff_unix_s: float) -> tuple[list[int], int]:
    """Remove the versions that were replaced before the cutoff, and files that only they refer to.

    Args:
        dataset: At the newest version.
        cutoff_unix_s: Versions replaced at this time or later are kept.

    Returns:
        Their numbers, and the bytes that became free.
    """
    stamps = [(int(found["version"]), found["timestamp"].timestamp()) for found in dataset.versions()]
    tagged = [int(tag["version"]) for tag in dataset.tags.list().values()]
    gone = replaced_versions(stamps, cutoff_unix_s, [*tagged, dataset.version])
    if not gone:
        return [], 0
    stats = dataset.cleanup_old_versions(versions=gone, error_if_tagged_old_versions=False)
    return gone, stats.bytes_removed


def remove_orphans(dataset: lance.LanceDataset, cutoff_unix_s: float) -> tuple[int, int]:
    """Remove files that no version refers to and that were last written before the cutoff.

    Returns:
        How many, and their bytes.
    """
    root = Path(dataset.uri)
    old = {
        path.relative_to(root).as_posix(): stat.st_size
        for path, stat in _files(root)
        if stat.st_mtime < cutoff_unix_s
    }
    # The newest version tells for most of them; the others are asked only if that doesn't settle it.
    for least in (dataset.version, None):
        if old:
            for batch in dataset.tracked_files(min_version=least):
                for path in batch.column("path").to_pylist():
                    old.pop(path, None)
    for path in old:
        (root / path).unlink(missing_ok=True)
    return len(old), sum(old.values())


def _files(root: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for folder in _FOLDERS:
        with suppress(FileNotFoundError):
            for path in (root / folder).iterdir():
                with suppress(FileNotFoundError):
                    yield path, path.stat()
