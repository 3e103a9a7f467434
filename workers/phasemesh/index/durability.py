"""Making files survive a power cut: the order of writes and the calls that force them out.

A file is durable once its content and every folder entry on the way to it were forced to the medium, so both
are always done together. The forcing function is passed in, which lets a test list what was forced and when.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterable
from enum import StrEnum
from pathlib import Path
from typing import TypeAlias

#: Forces one file or folder to the medium.
Sync: TypeAlias = Callable[[Path], None]


class Durability(StrEnum):
    """What an acknowledged write survives."""

    #: The end of this process, `kill -9` included; not a power cut.
    PROCESS = "process"
    #: A power cut too.
    DISK = "disk"


def sync_path(path: Path) -> None:
    """Force a file's content or a folder's entries to the medium (`fsync`).

    Raises:
        OSError: The file is gone or the medium refused.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_all(paths: Iterable[Path], sync: Sync) -> None:
    """Force files in the order given, then each folder that holds one of them."""
    folders: dict[Path, None] = {}
    for path in paths:
        sync(path)
        folders[path.parent] = None
    for folder in folders:
        sync(folder)


def make_folder(folder: Path, sync: Sync) -> None:
    """Make a folder with its parents, each durable before anything is put in it."""
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        sync(path.parent)


def put_if_absent(path: Path, content: bytes, sync: Sync) -> None:
    """Create a file with all of its content, or not at all.

    A reader sees no file or the whole one; of several writers exactly one succeeds.

    Raises:
        FileExistsError: There is such a file.
    """
    temporary = path.parent / f"{secrets.token_hex(8)}.tmp"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        sync(temporary)
        # A link, because a rename would silently replace what another writer put there.
        os.link(temporary, path)
    finally:
        temporary.unlink()
    sync(path.parent)
