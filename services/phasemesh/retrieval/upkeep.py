"""Upkeep of the collections that this process has open: compaction after commits, cleanup on a timer.

Invariant: it runs on one thread of its own. A commit only leaves a note there and never waits for it; what
fails is counted and logged, and the next commit or the next turn of the timer tries again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import TypeAlias

from phasemesh.index.errors import CollectionNotFound, LeaseHeld, WriteConflict
from phasemesh.index.maintenance import Compacted
from phasemesh.index.store import CollectionStore
from phasemesh.telemetry.metrics import CLEANUP_OUTCOMES, COMPACTION_OUTCOMES, Metrics

#: Tenant and incarnation.
StoreKey: TypeAlias = tuple[str, str]

_log = logging.getLogger(__name__)


class Upkeep:
    """Compacts what was written to, and cleans up.

    Args:
        metrics: of the process.
        small_fragments: small fragments of a collection that are left alone; 0 leaves all.
        keep_s: age since their replacement at which versions go, seconds.
        find: an open store; None if it isn't open any more.
        now_ns: monotonic nanoseconds.
        now_unix_s: seconds since 1970 UTC.
    """

    def __init__(
        self,
        metrics: Metrics,
        *,
        small_fragments: int,
        keep_s: float,
        find: Callable[[StoreKey], CollectionStore | None],
        now_ns: Callable[[], int] = time.perf_counter_ns,
        now_unix_s: Callable[[], float] = time.time,
    ) -> None:
        self._metrics = metrics
        self._small_fragments = small_fragments
        self._keep_s = keep_s
        self._find = find
        self._now_ns = now_ns
        self._now_unix_s = now_unix_s
        # A missing series reads as nothing wrong.
        for outcome in COMPACTION_OUTCOMES:
            metrics.compactions.labels(outcome)
        for outcome in CLEANUP_OUTCOMES:
            metrics.cleanups.labels(outcome)
        self._changed = threading.Condition()
        self._noted: OrderedDict[StoreKey, None] = OrderedDict()
        self._fragments: dict[StoreKey, int] = {}
        self._stopping = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to compact what is noted."""
        if self._small_fragments:
            self._thread = threading.Thread(target=self._work, name="phasemesh-compact", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Finish what was begun, and end; blocks."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def note(self, key: StoreKey) -> None:
        """Note that a collection was written to; returns at once."""
        if self._small_fragments:
            with self._changed:
                self._noted[key] = None
                self._changed.notify()

    def compact_noted(self) -> bool:
        """Compact the collection that has waited longest; whether there was one."""
        with self._changed:
            if not self._noted:
                return False
            key, _ = self._noted.popitem(last=False)
        store = self._find(key)
        if store is None:
            self._fragments.pop(key, None)
        else:
            try:
                self._fragments[key] = self._tail(store)
            except (LeaseHeld, CollectionNotFound):
                # Whoever has the lease sees the same fragments; what is deleted needs nothing.
                self._fragments.pop(key, None)
            except WriteConflict:
                _log.info("compaction gave way to writes", extra={"incarnation": key[1]})
            except Exception:
                _log.exception("compaction failed", extra={"incarnation": key[1]})
        self._metrics.tail_fragments.set(max(self._fragments.values(), default=0))
        return True

    def compact(self, store: CollectionStore, wait_s: float) -> Compacted:
        """Compact a whole collection, now; blocks.

        Raises:
            IndexFailure: another maintains the collection, or writes kept coming first.
            OSError: the medium refused.
        """
        return self._counted(lambda: store.maintenance.compact(wait_s=wait_s))

    def clean(self, stores: Iterable[CollectionStore]) -> None:
        """Remove old versions and files of no version; blocks."""
        for store in stores:
            try:
                cleaned = store.maintenance.clean(self._keep_s, self._now_unix_s)
            except (LeaseHeld, CollectionNotFound):
                continue
            except Exception:
                self._metrics.cleanups.labels("failed").inc()
                _log.exception("cleanup failed", extra={"incarnation": store.incarnation})
                continue
            self._metrics.cleanups.labels("done").inc()
            self._metrics.removed_versions.inc(len(cleaned.versions))
            self._metrics.removed_bytes.inc(cleaned.bytes)
            if cleaned.orphans:
                _log.info(
                    "files of failed writes removed",
                    extra={"incarnation": store.incarnation, "files": cleaned.orphans},
                )

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._noted and not self._stopping:
                    self._changed.wait()
                if self._stopping:
                    return
            self.compact_noted()

    def _tail(self, store: CollectionStore) -> int:
        """Compact if there are too many small fragments; how many fragments there are then."""
        # Cheap enough after every commit, which a look at their sizes isn't.
        fragments = len(store.fragment_ids(store.latest()))
        if fragments <= self._small_fragments:
            return fragments
        return self._counted(lambda: store.maintenance.compact_tail(self._small_fragments)).after

    def _counted(self, work: Callable[[], Compacted]) -> Compacted:
        begin_ns = self._now_ns()
        outcome = "failed"
        try:
            done = work()
            outcome = "merged" if done.merged else ""
        except (LeaseHeld, CollectionNotFound):
            outcome = ""
            raise
        except WriteConflict:
            outcome = "conflict"
            raise
        finally:
            if outcome:
                self._metrics.compactions.labels(outcome).inc()
                self._metrics.compaction_duration.observe((self._now_ns() - begin_ns) / 1e9)
        self._metrics.compacted_fragments.inc(done.merged)
        return done
