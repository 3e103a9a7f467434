"""The catalogue: which collections a tenant has, one JSON object per collection.

An entry is created by put-if-absent and never changes, so every process that reads it sees the same spec.
Each entry carries a random incarnation that names the data; a collection that is deleted and made anew under
the same name has another one and can't reach the old data, nor satisfy an old version.

    root/<tenant>/_catalogue/<name>.json          a collection that is
    root/<tenant>/_deleted/<when>-<random>.json   one that was, until its data is swept
    root/<tenant>/<incarnation>.lance             the data, see `store`
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from phasemesh.index.durability import Sync, make_folder, put_if_absent, sync_path
from phasemesh.index.errors import CatalogueCorrupt, CollectionExists, CollectionNotFound, InvalidSpec
from phasemesh.index.names import check_collection_name, check_tenant
from phasemesh.index.spec import (
    CatalogueEntry,
    Codec,
    CollectionSpec,
    FieldDeclaration,
    FieldType,
    Normalize,
    Reduction,
)

#: Raised when an entry's layout changes its meaning.
_FORMAT = 1
_INCARNATION = re.compile(r"[0-9a-f]{32}", re.ASCII)
_TOMBSTONE = re.compile(r"(\d{20})-[0-9a-f]{16}\.json", re.ASCII)
_NS_PER_S = 1_000_000_000


def dataset_path(root: Path, tenant: str, incarnation: str) -> Path:
    """Where the data of one incarnation lies.

    Raises:
        InvalidName: The tenant can't name a folder.
    """
    if not _INCARNATION.fullmatch(incarnation):
        raise CatalogueCorrupt(f"incarnation {incarnation[:64]!r} isn't 32 hexadecimal digits")
    return root / check_tenant(tenant) / f"{incarnation}.lance"


class Catalogue:
    """Collections of all tenants under one root. Safe for several processes at once.

    Args:
        root: Data root, on a local file system with hard links.
        grace_s: Seconds that a deleted collection's data is kept, for reads that are under way.
        now_unix_ns: Clock, nanoseconds since 1970 UTC.
        sync: Forces a file or folder to the medium.
    """

    def __init__(
        self,
        root: Path,
        *,
        grace_s: float = 3600.0,
        now_unix_ns: Callable[[], int] = time.time_ns,
        sync: Sync = sync_path,
    ) -> None:
        self._root = root
        self._grace_ns = int(grace_s * _NS_PER_S)
        self._now_unix_ns = now_unix_ns
        self._sync = sync

    def create(self, tenant: str, spec: CollectionSpec) -> CatalogueEntry:
        """Create a collection; durable on return.

        Raises:
            InvalidName: The tenant or the name can't name a file.
            CollectionExists: There is one of this name.
        """
        path = self._entry_path(tenant, spec.name)
        make_folder(path.parent, self._sync)
        entry = CatalogueEntry(spec, secrets.token_hex(16), self._now_unix_ns())
        try:
            put_if_absent(path, _encode(entry), self._sync)
        except FileExistsError:
            raise CollectionExists(f"collection: {spec.name!r} exists already") from None
        return entry

    def get(self, tenant: str, name: str) -> CatalogueEntry:
        """Return one collection.

        Raises:
            InvalidName: The tenant or the name can't name a file.
            CollectionNotFound: There is none of this name.
            CatalogueCorrupt: Its entry can't be read.
        """
        path = self._entry_path(tenant, name)
        try:
            return _decode(path)
        except FileNotFoundError:
            raise CollectionNotFound(f"collection: there is no {name!r}") from None

    def list_collections(
        self, tenant: str, *, page_size: int = 1000, after: str = ""
    ) -> tuple[list[CatalogueEntry], str | None]:
        """Return up to `page_size` collections in order of name (by code point), and where to go on.

        Args:
            tenant: Whose.
            page_size: Most entries, at least 1.
            after: Last name of the page before; empty for the first page.

        Returns:
            The entries, and `after` for the next page or None at the end. Pages stay in order and miss
            nothing that is there throughout, whatever is created or deleted between them.

        Raises:
            InvalidName: The tenant can't name a folder.
            CatalogueCorrupt: An entry can't be read.
        """
        if page_size < 1:
            raise ValueError(f"page_size: {page_size} isn't positive")
        names = sorted(name for name in self._names(tenant) if name > after)
        entries: list[CatalogueEntry] = []
        for position, name in enumerate(names):
            if len(entries) == page_size:
                return entries, names[position - 1]
            try:
                entries.append(_decode(self._entry_path(tenant, name)))
            except FileNotFoundError:  # deleted since the folder was read
                continue
        return entries, None

    def delete(self, tenant: str, name: str) -> CatalogueEntry:
        """Delete a collection: the entry now and durably, the data by a later `sweep`.

        Raises:
            InvalidName: The tenant or the name can't name a file.
            CollectionNotFound: There is none of this name.
        """
        path = self._entry_path(tenant, name)
        if not path.exists():
            raise CollectionNotFound(f"collection: there is no {name!r}")
        graves = path.parent.parent / "_deleted"
        make_folder(graves, self._sync)
        # One atomic step takes the name and records the data to sweep: whichever incarnation had the name at
        # that moment, exactly one caller has deleted it.
        grave = graves / f"{self._now_unix_ns():020d}-{secrets.token_hex(8)}.json"
        try:
            os.rename(path, grave)
        except FileNotFoundError:
            raise CollectionNotFound(f"collection: there is no {name!r}") from None
        self._sync(graves)
        self._sync(path.parent)
        return _decode(grave)

    def sweep(self, now_unix_ns: int | None = None) -> list[str]:
        """Remove the data of collections that were deleted longer ago than the grace period.

        Data that neither an entry nor a deletion names (left by a process that still wrote to a swept
        collection) goes too, once it is that old.

        Returns:
            Incarnations whose data was removed.
        """
        now = self._now_unix_ns() if now_unix_ns is None else now_unix_ns
        removed: list[str] = []
        for tenant in self._tenants():
            folder = self._root / tenant
            # Before the entries: a dataset is made after its entry, so one listed here without an entry
            # below was deleted, not about to be born.
            datasets = [path for path in folder.glob("*.lance") if _INCARNATION.fullmatch(path.stem)]
            live = {_decode(self._entry_path(tenant, name)).incarnation for name in self._names(tenant)}
            waiting = set()
            for grave in sorted((folder / "_deleted").glob("*.json")):
                match = _TOMBSTONE.fullmatch(grave.name)
                if match is None:
                    continue
                incarnation = _decode(grave).incarnation
                if now - int(match[1]) < self._grace_ns:
                    waiting.add(incarnation)
                    continue
                shutil.rmtree(dataset_path(self._root, tenant, incarnation), ignore_errors=True)
                grave.unlink(missing_ok=True)
                removed.append(incarnation)
            for path in datasets:
                if path.stem in live | waiting or not path.exists():
                    continue
                if now - path.stat().st_mtime_ns >= self._grace_ns:
                    shutil.rmtree(path, ignore_errors=True)
                    removed.append(path.stem)
        return removed

    def everything(self) -> list[tuple[str, CatalogueEntry]]:
        """All collections with their tenants, without those that are deleted meanwhile.

        Raises:
            CatalogueCorrupt: An entry can't be read.
        """
        found = []
        for tenant in self._tenants():
            for name in sorted(self._names(tenant)):
                with suppress(FileNotFoundError):
                    found.append((tenant, _decode(self._entry_path(tenant, name))))
        return found

    def _tenants(self) -> list[str]:
        return sorted(path.parent.name for path in self._root.glob("*/_catalogue"))

    def _names(self, tenant: str) -> list[str]:
        folder = self._root / check_tenant(tenant) / "_catalogue"
        try:
            return [name.removesuffix(".json") for name in os.listdir(folder) if name.endswith(".json")]
        except FileNotFoundError:
            return []

    def _entry_path(self, tenant: str, name: str) -> Path:
        return self._root / check_tenant(tenant) / "_catalogue" / f"{check_collection_name(name)}.json"


def _encode(entry: CatalogueEntry) -> bytes:
    body = {"format": _FORMAT, **asdict(entry)}
    return json.dumps(body, indent=1, sort_keys=True, ensure_ascii=True).encode() + b"\n"


def _decode(path: Path) -> CatalogueEntry:
    try:
        body = json.loads(path.read_bytes())
        if body["format"] != _FORMAT:
            raise ValueError(f"format {body['format']} is not {_FORMAT}")
        spec = dict(body["spec"])
        spec["fields"] = tuple(
            FieldDeclaration(declared["name"], FieldType(declared["type"])) for declared in spec["fields"]
        )
        spec["codec"] = Codec(spec["codec"])
        spec["normalize"] = Normalize(spec["normalize"])
        spec["reduction"] = Reduction(spec["reduction"])
        if not _INCARNATION.fullmatch(body["incarnation"]):
            raise ValueError("the incarnation isn't 32 hexadecimal digits")
        return CatalogueEntry(CollectionSpec(**spec), body["incarnation"], int(body["created_unix_ns"]))
    except (ValueError, KeyError, TypeError, InvalidSpec) as error:
        raise CatalogueCorrupt(f"catalogue entry {path.name} can't be read: {error}") from error
