"""The collections that this process has open: one store per incarnation, the catalogue asked every time.

Invariants: whether a collection is there, and which incarnation it has, is read anew for every request; an
incarnation has one store in this process, so that a read sees all that the process acknowledged; the index's
blocking calls run on threads, and what they raise is mapped.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from weakref import WeakValueDictionary

from phasemesh.config.settings import RetrievalSettings
from phasemesh.errors import FailedPrecondition
from phasemesh.index.catalogue import Catalogue
from phasemesh.index.commit import StoreOptions
from phasemesh.index.durability import Durability
from phasemesh.index.errors import IndexFailure
from phasemesh.index.spec import CatalogueEntry, CollectionSpec, Version
from phasemesh.index.store import CollectionStore, StoreStats
from phasemesh.retrieval.faults import index_faults
from phasemesh.retrieval.specs import spec_to_wire
from phasemesh.v1 import retrieval_pb2 as pb

_log = logging.getLogger(__name__)

T = TypeVar("T")

#: Stores that are kept open though nobody uses them.
KEPT_OPEN = 64
#: Token vectors that one fragment may hold: the longest document.
LIMIT_TOKENS = 4_000_000


@dataclass(frozen=True, slots=True, eq=False)
class Opened:
    """A collection that a request works on."""

    entry: CatalogueEntry
    store: CollectionStore

    @property
    def spec(self) -> CollectionSpec:
        """The collection's specification."""
        return self.entry.spec

    def resolve(self, wire: pb.ReadVersion) -> Version:
        """The exact version that a read asks for; blocks.

        Raises:
            FailedPrecondition: it asks for a version of another incarnation.
            NotFound: there is no such version, or it was cleaned up.
            Aborted: nobody has committed it yet.
        """
        which = wire.WhichOneof("read")
        if which is None:
            return self.store.resolve()
        asked = wire.at_version if which == "at_version" else wire.min_version
        if asked.incarnation != self.entry.incarnation:
            raise FailedPrecondition(
                f"{which} is of the incarnation {asked.incarnation[:64]!r}; the collection "
                f"{self.spec.name!r} was made anew since and is {self.entry.incarnation!r}",
                reason="INCARNATION_MISMATCH",
                field=f"version.{which}",
            )
        version = Version(asked.incarnation, asked.number)
        if which == "at_version":
            return self.store.resolve(at_version=version)
        return self.store.resolve(min_version=version)


class Collections:
    """Collections of all tenants.

    Args:
        root: of all data.
        settings: durability, refresh, fragments.
        readers: threads for the index's calls that read.
        writers: threads for those that commit. Commits to one collection wait for each other, so they have
            threads of their own, or many of them would keep every read waiting too.
        committed: told tenant and incarnation after every commit; must return at once.
    """

    def __init__(
        self,
        root: Path,
        settings: RetrievalSettings,
        *,
        readers: Executor,
        writers: Executor,
        committed: Callable[[tuple[str, str]], None] = lambda key: None,
    ) -> None:
        self._committed = committed
        self._root = root
        self._readers = readers
        self._writers = writers
        self._catalogue = Catalogue(root, grace_s=settings.delete_grace_s)
        self._options = StoreOptions(
            durability=Durability(settings.durability),
            refresh_ms=settings.refresh_ms,
            target_tokens=settings.fragment_tokens,
            limit_tokens=max(LIMIT_TOKENS, settings.fragment_tokens),
        )
        self._lock = threading.Lock()
        # Whoever works on a store keeps it here even when it is no longer among those kept open.
        self._opening: dict[tuple[str, str], threading.Lock] = {}
        self._open: WeakValueDictionary[tuple[str, str], CollectionStore] = WeakValueDictionary()
        self._recent: OrderedDict[tuple[str, str], CollectionStore] = OrderedDict()

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work`, which reads, on a thread, with the index's failures mapped.

        Raises:
            PhasemeshError: what the index meant.
        """
        with index_faults():
            return await asyncio.get_running_loop().run_in_executor(self._readers, work)

    async def commit(self, work: Callable[[], T]) -> T:
        """Run `work`, which commits, as `run` does. A cancelled caller doesn't stop what has begun.

        Raises:
            PhasemeshError: what the index meant.
        """
        with index_faults():
            return await asyncio.get_running_loop().run_in_executor(self._writers, work)

    async def create(self, tenant: str, spec: CollectionSpec) -> Opened:
        """Make a collection.

        Raises:
            InvalidArgument: the name can't be one.
            AlreadyExists: there is one of that name.
        """
        return await self.commit(lambda: self._opened(tenant, self._catalogue.create(tenant, spec)))

    async def open(self, tenant: str, name: str) -> Opened:
        """A collection by name.

        Raises:
            InvalidArgument: the name can't be one.
            NotFound: there is none of that name.
        """
        return await self.run(lambda: self._opened(tenant, self._catalogue.get(tenant, name)))

    async def page(self, tenant: str, *, size: int, after: str) -> tuple[list[pb.Collection], str | None]:
        """Up to `size` collections after the name `after`, described, and where to go on."""

        def read() -> tuple[list[pb.Collection], str | None]:
            entries, further = self._catalogue.list_collections(tenant, page_size=size, after=after)
            return [self._described(tenant, entry) for entry in entries], further

        return await self.run(read)

    def _described(self, tenant: str, entry: CatalogueEntry) -> pb.Collection:
        try:
            return describe(self._opened(tenant, entry))
        except (IndexFailure, OSError, RuntimeError) as error:
            # One whose data can't be read must not hide the others. Its version is missing.
            _log.error("a collection is listed without its figures: %s", error, extra={"tenant": tenant})
            wire = pb.Collection(spec=spec_to_wire(entry.spec))
            wire.create_time.FromNanoseconds(entry.created_unix_ns)
            return wire

    async def delete(self, tenant: str, name: str) -> None:
        """Delete a collection; its data goes after the grace period.

        Raises:
            InvalidArgument: the name can't be one.
            NotFound: there is none of that name.
        """

        def remove() -> None:
            entry = self._catalogue.delete(tenant, name)
            if entry is not None:
                with self._lock:
                    self._recent.pop((tenant, entry.incarnation), None)

        await self.commit(remove)

    async def sweep(self) -> list[str]:
        """Remove the data of collections whose grace period is over; returns their incarnations."""
        return await self.commit(self._catalogue.sweep)

    def find(self, key: tuple[str, str]) -> CollectionStore | None:
        """The open store of a tenant's incarnation; None if there is none."""
        with self._lock:
            return self._open.get(key)

    def each(self) -> Iterator[CollectionStore]:
        """The stores of all collections, one after another; blocks."""
        for tenant, entry in self._catalogue.everything():
            with self._lock:
                store = self._open.get((tenant, entry.incarnation))
            yield store or CollectionStore(self._root, tenant, entry, self._options)

    def _opened(self, tenant: str, entry: CatalogueEntry) -> Opened:
        key = (tenant, entry.incarnation)
        with self._lock:
            store = self._open.get(key)
            opening = self._opening.setdefault(key, threading.Lock()) if store is None else None
        if opening is not None:
            # One at a time for a collection, and none of the others waits for it.
            with opening:
                with self._lock:
                    store = self._open.get(key)
                if store is None:
                    store = CollectionStore(
                        self._root, tenant, entry, self._options, committed=lambda: self._committed(key)
                    )
                    with self._lock:
                        self._open[key] = store
        assert store is not None
        with self._lock:
            self._opening.pop(key, None)
            self._recent[key] = store
            self._recent.move_to_end(key)
            while len(self._recent) > KEPT_OPEN:
                self._recent.popitem(last=False)
        return Opened(entry, store)


def describe(opened: Opened) -> pb.Collection:
    """The collection as it stands; blocks."""
    version = opened.store.latest()
    stats: StoreStats = opened.store.stats(version)
    wire = pb.Collection(
        spec=spec_to_wire(opened.spec),
        version=version_to_wire(version),
        documents=stats.documents,
        tokens=stats.tokens,
        fragments=stats.fragments,
    )
    wire.create_time.FromNanoseconds(opened.entry.created_unix_ns)
    return wire


def version_to_wire(version: Version) -> pb.Version:
    """A version as callers see it."""
    return pb.Version(incarnation=version.incarnation, number=version.number)
