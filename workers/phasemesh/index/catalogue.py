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
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from phasemesh.index.durability import Sync, make_folder, put_if_absent, sync_all, sync_path
from phasemesh.index.errors import (
    CatalogueCorrupt,
    CollectionExists,
    CollectionNotFound,
    InvalidName,
    InvalidSpec,
    StorageFailure,
)
from phasemesh.index.history import create_dataset
from phasemesh.index.names import check_collection_name, check_tenant
from phasemesh.index.reading import referenced_files
from phasemesh.index.schema import arrow_schema
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
#: Age up to which data without an entry is left alone, however short the grace period.
_UNNAMED_NS = 60 * _NS_PER_S

_log = logging.getLogger(__name__)


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
        self._identity: tuple[int, int] | None = None
        if root.is_dir():
            self._check_root()

    def create(self, tenant: str, spec: CollectionSpec) -> CatalogueEntry:
        """Create a collection with its empty dataset; durable on return.

        The dataset comes first: whoever finds the entry finds the data, and data that isn't there later is
        missing, not new. What a process that dies in between leaves is swept as nobody's.

        Raises:
            InvalidName: The tenant or the name can't name a file.
            CollectionExists: There is one of this name.
            StorageFailure: The data root isn't there any more.
            OSError: The medium refuses; nothing is left behind.
        """
        path = self._entry_path(tenant, spec.name)
        if self._identity is None:
            make_folder(self._root, self._sync)
        self._check_root()
        if path.exists():
            raise CollectionExists(f"collection: {spec.name!r} exists already")
        make_folder(path.parent, self._sync)
        entry = CatalogueEntry(spec, secrets.token_hex(16), self._now_unix_ns())
        data = dataset_path(self._root, tenant, entry.incarnation)
        try:
            made = create_dataset(data, arrow_schema(spec))
            sync_all(referenced_files(made), self._sync)
            for folder in (data, data.parent):
                self._sync(folder)
            put_if_absent(path, _encode(entry), self._sync)
        except BaseException as error:
            shutil.rmtree(data, ignore_errors=True)
            if isinstance(error, FileExistsError):
                raise CollectionExists(f"collection: {spec.name!r} exists already") from None
            raise
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
            self._check_root()
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

        An entry that can't be read is left out and logged: it must not hide the others.

        Raises:
            InvalidName: The tenant can't name a folder.
            StorageFailure: The data root isn't there any more.
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
            except CatalogueCorrupt as error:
                _log.error("a collection is left out of the list: %s", error, extra={"tenant": tenant})
        return entries, None

    def delete(self, tenant: str, name: str) -> CatalogueEntry | None:
        """Delete a collection: the entry now and durably, the data by a later `sweep`.

        Returns:
            What was deleted; None where its entry can't be read. The data of such a one is nobody's.

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
        try:
            return _decode(grave, name)
        except CatalogueCorrupt as error:
            _log.warning("a collection was deleted whose entry can't be read: %s", error)
            return None

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
            datasets = [path for path in folder.glob("*.lance") if _INCARNATION.fullmatch(path.stem)]
            # While an entry can't be read, any data may be that collection's.
            named: set[str] | None = set()
            for name in self._names(tenant):
                try:
                    live = _decode(self._entry_path(tenant, name)).incarnation
                except FileNotFoundError:  # deleted since the folder was read: it has a grave by now
                    continue
                except CatalogueCorrupt as error:
                    _log.error("unnamed data is kept while an entry can't be read: %s", error)
                    named = None
                    break
                if named is not None:
                    named.add(live)
            waiting = set()
            for grave in sorted((folder / "_deleted").glob("*.json")):
                match = _TOMBSTONE.fullmatch(grave.name)
                if match is None:
                    continue
                over = now - int(match[1]) >= self._grace_ns
                try:
                    incarnation = _decode(grave, None).incarnation
                except CatalogueCorrupt as error:
                    _log.error("a deletion can't be read and is forgotten once it is old: %s", error)
                    if over:
                        grave.unlink(missing_ok=True)
                    continue
                if not over:
                    waiting.add(incarnation)
                    continue
                shutil.rmtree(dataset_path(self._root, tenant, incarnation), ignore_errors=True)
                grave.unlink(missing_ok=True)
                removed.append(incarnation)
            for path in datasets if named is not None else []:
                if path.stem in (named or set()) | waiting or not path.exists():
                    continue
                # Data is made before its entry: what is young may be about to be named.
                if now - path.stat().st_mtime_ns >= max(self._grace_ns, _UNNAMED_NS):
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
            files = os.listdir(folder)
        except FileNotFoundError:
            self._check_root()
            return []
        names = [name.removesuffix(".json") for name in files if name.endswith(".json")]
        return [name for name in names if _is_name(name)]

    def _check_root(self) -> None:
        """Raises StorageFailure where the data root isn't the folder that it was.

        A disk that is taken away leaves its mount point, or nothing: neither is an empty database.
        """
        try:
            stat = self._root.stat()
        except FileNotFoundError:
            raise StorageFailure("data_dir is gone; mount its disk or put it back, then try again") from None
        identity = (stat.st_dev, stat.st_ino)
        if self._identity is None:
            self._identity = identity
        elif identity != self._identity:
            raise StorageFailure(
                "data_dir is another folder than when this process began; if that is meant, start it again"
            )

    def _entry_path(self, tenant: str, name: str) -> Path:
        return self._root / check_tenant(tenant) / "_catalogue" / f"{check_collection_name(name)}.json"


def _encode(entry: CatalogueEntry) -> bytes:
    body = {"format": _FORMAT, **asdict(entry)}
    return json.dumps(body, indent=1, sort_keys=True, ensure_ascii=True).encode() + b"\n"


def _is_name(name: str) -> bool:
    try:
        check_collection_name(name)
    except InvalidName:
        return False
    return True


def _decode(path: Path, name: str | None = "") -> CatalogueEntry:
    """An entry; `name` is the collection's, "" where the file has it, None for any."""
    try:
        body = json.loads(path.read_bytes())
        if body["format"] != _FORMAT:
            raise ValueError(f"format {body['format']} is not {_FORMAT}")
        spec = dict(body["spec"])
        if name is not None and spec["name"] != (name or path.stem):
            raise ValueError(f"it is of {str(spec['name'])[:128]!r}")
        spec["fields"] = tuple(
            FieldDeclaration(declared["name"], FieldType(declared["type"])) for declared in spec["fields"]
        )
        spec["codec"] = Codec(spec["codec"])
        spec["normalize"] = Normalize(spec["normalize"])
        spec["reduction"] = Reduction(spec["reduction"])
        if not _INCARNATION.fullmatch(body["incarnation"]):
            raise ValueError("the incarnation isn't 32 hexadecimal digits")
        return CatalogueEntry(CollectionSpec(**spec), body["incarnation"], int(body["created_unix_ns"]))
    except (ValueError, KeyError, TypeError, InvalidSpec, RecursionError, IsADirectoryError) as error:
        raise CatalogueCorrupt(f"catalogue entry {path.name} can't be read: {error}") from error
