"""Named, write-once objects under a root, on a local file system or in an object store.

Invariant: a reader sees no object or the whole one, and what `put` returned from is as durable as the root
can make it. Names are relative POSIX paths; nothing outside the root can be named.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from phasemesh.index.durability import Sync, make_folder, put_if_absent, sync_path

_TEMPORARY = ".tmp"


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object that is there: its name, its bytes, and when it was last written, seconds since 1970 UTC."""

    name: str
    size: int
    modified_unix_s: float


class Objects(Protocol):
    """Objects under one root. Safe for several threads and processes."""

    def read(self, name: str) -> bytes:
        """An object's content.

        Raises:
            FileNotFoundError: There is none of this name.
            OSError: The medium refused.
        """
        ...

    def download(self, name: str, target: Path) -> None:
        """Copy an object to a local file, which has all of it or isn't there.

        Raises:
            FileNotFoundError: There is none of this name.
            OSError: A medium refused.
        """
        ...

    def put(self, name: str, content: bytes | Path) -> None:
        """Make or replace an object, from memory or from a local file; durable on return.

        Raises:
            OSError: The medium refused; what was there stays.
        """
        ...

    def put_if_absent(self, name: str, content: bytes) -> None:
        """Make an object; of several writers exactly one succeeds. Durable on return.

        Raises:
            FileExistsError: There is one of this name.
            OSError: The medium refused.
        """
        ...

    def find(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """The objects whose names begin with `prefix`, which is "" or ends with a slash, in no order."""
        ...

    def delete(self, name: str) -> None:
        """Remove an object; nothing happens where there is none."""
        ...


class LocalObjects:
    """Objects as files below a folder.

    Args:
        root: The folder; made when the first object is.
        sync: Forces a file or folder to the medium.
    """

    def __init__(self, root: Path, *, sync: Sync = sync_path) -> None:
        self._root = root
        self._sync = sync

    def read(self, name: str) -> bytes:
        """See `Objects`."""
        return self._path(name).read_bytes()

    def download(self, name: str, target: Path) -> None:
        """See `Objects`."""
        temporary = target.with_name(f"{target.name}.{secrets.token_hex(8)}{_TEMPORARY}")
        try:
            shutil.copyfile(self._path(name), temporary)
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)

    def put(self, name: str, content: bytes | Path) -> None:
        """See `Objects`."""
        path = self._path(name)
        make_folder(path.parent, self._sync)
        temporary = path.with_name(f"{secrets.token_hex(8)}{_TEMPORARY}")
        try:
            if isinstance(content, bytes):
                temporary.write_bytes(content)
            else:
                shutil.copyfile(content, temporary)
            self._sync(temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        self._sync(path.parent)

    def put_if_absent(self, name: str, content: bytes) -> None:
        """See `Objects`."""
        path = self._path(name)
        make_folder(path.parent, self._sync)
        put_if_absent(path, content, self._sync)

    def find(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """See `Objects`."""
        top = self._path(prefix) if prefix else self._root
        for folder, _, files in os.walk(top):
            for file in files:
                path = Path(folder) / file
                if file.endswith(_TEMPORARY):
                    continue
                with suppress(FileNotFoundError):
                    stat = path.stat()
                    yield ObjectInfo(path.relative_to(self._root).as_posix(), stat.st_size, stat.st_mtime)

    def delete(self, name: str) -> None:
        """See `Objects`."""
        self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        parts = name.removesuffix("/").split("/")
        if any(part in {"", ".", ".."} or "\0" in part for part in parts):
            raise ValueError(f"{name[:128]!r} isn't the name of an object")
        return self._root.joinpath(*parts)
