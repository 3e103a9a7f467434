"""Names for versions, which keep them from being cleaned up.

Invariant: a tag that was acknowledged is as durable as was asked for, and names a version that is there.
"""

from __future__ import annotations

from pathlib import Path

import lance

from phasemesh.index.errors import TagExists, TagNotFound
from phasemesh.index.names import check_tag


def set_tag(dataset: lance.LanceDataset, tag: str, number: int, *, move: bool) -> None:
    """Name a version.

    Args:
        dataset: At any version.
        tag: The name.
        number: The version, which has to be there.
        move: Take the name from the version that has it; otherwise that is an error.

    Raises:
        InvalidTag: The name can't be one.
        TagExists: Another version, or this one, has it and `move` is false.
    """
    check_tag(tag)
    known = tag in dataset.tags.list()
    if known and not move:
        raise TagExists(f"tag: {tag!r} names a version already; move it, or choose another name")
    if known:
        dataset.tags.update(tag, number)
    else:
        dataset.tags.create(tag, number)


def drop_tag(dataset: lance.LanceDataset, tag: str) -> None:
    """Take a name away.

    Raises:
        InvalidTag: The name can't be one.
        TagNotFound: Nothing has it.
    """
    tagged_version(dataset, tag)
    dataset.tags.delete(tag)


def tagged_version(dataset: lance.LanceDataset, tag: str) -> int:
    """Number of the version that has a name.

    Raises:
        InvalidTag: The name can't be one.
        TagNotFound: Nothing has it.
    """
    found = dataset.tags.list().get(check_tag(tag))
    if found is None:
        raise TagNotFound(f"tag: there is no {tag!r}")
    return int(found["version"])


def tag_files(dataset: lance.LanceDataset, tag: str) -> tuple[list[Path], list[Path]]:
    """The file of a tag as far as there is one, and the folders on the way to it from within."""
    root = Path(dataset.uri)
    folder = root / "_refs" / "tags"
    file = folder / f"{tag}.json"
    return [file] if file.exists() else [], [folder, folder.parent, root]
