"""The scorer put together, and the truth about its health.

Invariant: it calls itself ready only while its cache folder can be written and no drain has begun. It knows
neither its peers nor the catalogue: what it searches is named in each request, and found below its own data
root or not at all.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from threadpoolctl import ThreadpoolController

from phasemesh.config.settings import RpcSettings, ScorerSettings
from phasemesh.index.cache import CacheFolderInUse, SegmentCache
from phasemesh.index.scanner import CPU, Scanner
from phasemesh.rpc.admin import Health
from phasemesh.scorer.admission import ScanQueue
from phasemesh.scorer.fragments import Fragments
from phasemesh.scorer.servicer import ScorerServicer
from phasemesh.scorer.snapshots import Snapshots
from phasemesh.scorer.work import Workshop, start_at_zero
from phasemesh.telemetry.metrics import Metrics

_log = logging.getLogger(__name__)

#: Threads for short reads: versions, deletions, sizes, large messages.
_LOOKUP_THREADS = 4
#: Segments that are read or derived at a time; each may take twice a fragment's bytes while it is derived.
_LOAD_THREADS = 2
#: Age up to which an answer about the cache folder is given again.
_FOLDER_CHECK_S = 1.0


class ScorerStartError(Exception):
    """The scorer can't work; the message names the setting and why."""


class ScorerRuntime:
    """The service over a data root and a cache folder. `start`, `drain` and `close` belong to one event loop.

    Args:
        settings: limits; ports are others' business.
        data_dir: root of all collections; read only.
        cache_dir: this scorer's segments; nobody else's, made if missing.
        metrics: of the process.
        max_message_bytes: largest reply.
        scanner: has the first look at all vectors; it changes no answer.
        now_s: monotonic seconds, the clock of deadlines.
        now_ns: monotonic nanoseconds, the clock of phases.
        unix_ns: nanoseconds since 1970, which spans are dated with.

    Raises:
        ScorerStartError: the cache folder can't be used, or another scorer uses it.
    """

    def __init__(
        self,
        settings: ScorerSettings,
        data_dir: Path,
        cache_dir: Path,
        metrics: Metrics,
        *,
        max_message_bytes: int | None = None,
        scanner: Scanner = CPU,
        now_s: Callable[[], float] = time.monotonic,
        now_ns: Callable[[], int] = time.perf_counter_ns,
        unix_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._cache_dir = cache_dir
        self._now_s = now_s
        self._blas: Any = None
        self._folder_fault = ""
        self._folder_full = False
        self._folder_checked_s = float("-inf")
        try:
            self._cache = SegmentCache(cache_dir, settings.capacity_bytes)
        except (CacheFolderInUse, OSError) as error:
            raise ScorerStartError(f"scorer.cache_dir: {error}") from error
        self._lookups = ThreadPoolExecutor(_LOOKUP_THREADS, thread_name_prefix="phasemesh-lookup")
        self._loaders = ThreadPoolExecutor(_LOAD_THREADS, thread_name_prefix="phasemesh-load")
        self._queue = ScanQueue(
            settings.max_queued_scan_work,
            settings.threads or os.cpu_count() or 1,
            metrics,
            now_s=now_s,
            now_ns=now_ns,
        )
        self._shop = Workshop(
            queue=self._queue,
            checkers=self._lookups,
            metrics=metrics,
            max_message_bytes=max_message_bytes or RpcSettings().max_message_bytes,
            now_ns=now_ns,
            unix_ns=unix_ns,
            scanner=scanner,
        )
        self._fragments = Fragments(
            Snapshots(data_dir, now_s=now_s),
            self._cache,
            metrics,
            lookups=self._lookups,
            loaders=self._loaders,
        )
        self.servicer = ScorerServicer(self._shop, self._fragments)
        start_at_zero(metrics)

    async def start(self) -> None:
        """See that the cache folder works, and tell what it holds.

        Raises:
            ScorerStartError: it can't be written or read.
        """
        fault = await asyncio.to_thread(self._check_folder)
        if fault and not self._folder_full:
            await self.close()
            raise ScorerStartError(f"scorer.cache_dir: {fault}")
        if fault:
            _log.warning("scorer.cache_dir: %s; segments are held in memory only until there is room", fault)
        scanner = self._shop.scanner
        if scanner.warning:
            _log.warning(scanner.warning)
        else:
            _log.info("ready to scan", extra={"kernel": scanner.name})
        # The scoring threads already take every CPU; matrix products that each started as many of their own
        # would fight over them (on two CPUs a search takes more than twice as long).
        controller = await asyncio.to_thread(ThreadpoolController)
        self._blas = controller.limit(limits=1, user_api="blas")
        await self._fragments.size()

    async def drain(self) -> None:
        """Refuse new requests and wait for those that were begun."""
        self._shop.draining = True
        await self._shop.idle()

    async def close(self) -> None:
        """Stop at once; what still waits fails as unavailable."""
        self._shop.draining = True
        await self._queue.close()
        for threads in (self._loaders, self._lookups):
            await asyncio.to_thread(threads.shutdown, wait=True, cancel_futures=True)
        self._cache.close()
        if self._blas is not None:
            self._blas.restore_original_limits()
            self._blas = None

    def health(self) -> Health:
        """Whether requests can be answered now; may be asked from any thread."""
        now_s = self._now_s()
        if now_s - self._folder_checked_s >= _FOLDER_CHECK_S:
            self._folder_fault = self._check_folder()
            self._folder_checked_s = now_s
        draining = self._shop.draining
        return Health(
            # Without room in the folder it still answers, from memory.
            ok=(not self._folder_fault or self._folder_full) and not draining,
            detail={
                "cache_dir": self._folder_fault or "works",
                "draining": draining,
                "queued_scan_work": self._queue.queued_work,
                "running_searches": self._queue.running_claims,
            },
        )

    def _check_folder(self) -> str:
        """Why the cache folder can't be written; empty if it can."""
        try:
            # Written, not asked for: permissions say nothing of a full or a read-only disk.
            with tempfile.NamedTemporaryFile(dir=self._cache_dir, prefix="check-") as file:
                file.write(b"0")
                file.flush()
        except OSError as error:
            self._folder_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            return f"{self._cache_dir} can't be written: {error.strerror}"
        self._folder_full = False
        return ""
