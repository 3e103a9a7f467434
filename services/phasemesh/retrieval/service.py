"""The retrieval service put together, and the truth about its health.

Invariant: it calls itself ready only while its data root can be written and no drain has begun. It doesn't
ask for encoders or scorers: what needs none of them is answered without.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from phasemesh.config.settings import Settings
from phasemesh.index.commit import TARGET_TOKENS
from phasemesh.retrieval.catalogue import CatalogueLines
from phasemesh.retrieval.encoding import TextEncoder
from phasemesh.retrieval.explain import Explain
from phasemesh.retrieval.fanout import FanOut
from phasemesh.retrieval.handles import Collections
from phasemesh.retrieval.ingest import Ingest
from phasemesh.retrieval.listing import Listing
from phasemesh.retrieval.query import Queries
from phasemesh.retrieval.reads import Reads
from phasemesh.retrieval.rerank import Rerank, RowScorer
from phasemesh.retrieval.search import Search
from phasemesh.retrieval.servicer import RetrievalServicer
from phasemesh.retrieval.upkeep import Upkeep
from phasemesh.retrieval.versions import Versions
from phasemesh.retrieval.work import Requests
from phasemesh.rpc.admin import Health
from phasemesh.rpc.client import RpcClient
from phasemesh.rpc.directory import ModelDirectory
from phasemesh.telemetry import names
from phasemesh.telemetry.metrics import Metrics

#: Phases that this service notes itself.
PHASES = (names.PHASE_PLAN, names.PHASE_MERGE, names.PHASE_COMMIT)
#: Longest time between sweeps of deleted collections, seconds.
SWEEP_S = 300.0
#: Least age since their replacement at which versions may be removed, seconds.
KEEP_S = 3600.0
#: Threads that wait for the store beyond the machine's processors: most of the time they wait for files.
_EXTRA_THREADS = 8

#: Value of the model label where a collection has none.
_NO_MODEL = ""

_log = logging.getLogger(__name__)


class RetrievalStartError(Exception):
    """The service can't answer; the message names the setting and why."""


class RetrievalRuntime:
    """The service. `start`, `drain` and `close` belong to one event loop; client and directory are others'.

    Args:
        settings: all of them; `retrieval`, `data_dir` and `rpc` count here.
        client: calls encoders and scorers.
        directory: who serves which model; None where no encoder is configured.
        metrics: of the process.
        now_s: monotonic seconds, the clock of deadlines.
        now_ns: monotonic nanoseconds, the clock of phases.
    """

    def __init__(
        self,
        settings: Settings,
        client: RpcClient,
        directory: ModelDirectory | None,
        metrics: Metrics,
        *,
        now_s: Callable[[], float] = time.monotonic,
        now_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        retrieval, max_message_bytes = settings.retrieval, settings.rpc.max_message_bytes
        self._root = settings.data_dir
        self._scorers = retrieval.scorers
        self._grace_s = retrieval.delete_grace_s
        self._directory = directory
        threads = (os.cpu_count() or 1) + _EXTRA_THREADS
        self._readers = ThreadPoolExecutor(threads, thread_name_prefix="phasemesh-read")
        self._writers = ThreadPoolExecutor(threads, thread_name_prefix="phasemesh-commit")
        self._requests = Requests(metrics, now_s=now_s, now_ns=now_ns)
        self._upkeep = Upkeep(
            metrics,
            small_fragments=retrieval.compact_fragments,
            keep_s=max(KEEP_S, 2 * settings.rpc.max_deadline_s),
            find=lambda key: self._collections.find(key),
            now_ns=now_ns,
        )
        self._cleanup_interval_s = retrieval.cleanup_interval_s
        self._collections = Collections(
            settings.data_dir,
            retrieval,
            readers=self._readers,
            writers=self._writers,
            committed=self._upkeep.note,
        )
        encoder = TextEncoder(
            client, directory, max_batch=retrieval.encode_batch, max_message_bytes=max_message_bytes
        )
        queries = Queries(self._collections, encoder)
        fan_out = FanOut(client, now_s=now_s)
        row_scorer = RowScorer(fan_out, scorers=retrieval.scorers, replicas=retrieval.scorer_replicas)
        self.servicer = RetrievalServicer(
            self._requests,
            CatalogueLines(self._collections, encoder),
            Ingest(
                self._collections,
                encoder,
                max_documents=retrieval.max_documents,
                max_tokens=max(retrieval.fragment_tokens, TARGET_TOKENS),
            ),
            Reads(
                self._collections, max_documents=retrieval.max_documents, max_message_bytes=max_message_bytes
            ),
            Search(
                self._collections,
                queries,
                fan_out,
                scorers=retrieval.scorers,
                replicas=retrieval.scorer_replicas,
                max_k=retrieval.max_k,
                max_message_bytes=max_message_bytes,
            ),
            Rerank(self._collections, queries, row_scorer, max_message_bytes=max_message_bytes),
            Explain(self._collections, queries, row_scorer),
            Listing(
                self._collections, max_documents=retrieval.max_documents, max_message_bytes=max_message_bytes
            ),
            Versions(self._collections, self._upkeep),
        )
        for phase in PHASES:
            metrics.phase_duration.labels(phase, _NO_MODEL)
        self._timers: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Make the data root, and begin to sweep deleted collections.

        Raises:
            RetrievalStartError: the root can't be made or written.
        """
        try:
            await asyncio.to_thread(self._root.mkdir, mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise RetrievalStartError(f"data_dir: {self._root} can't be made: {error.strerror}") from error
        if not await asyncio.to_thread(self._writable):
            # Reads are worth having without writes: a disk that went read-only, say.
            _log.error(
                "data_dir can't be written; collections can be read only", extra={"data_dir": str(self._root)}
            )
        self._upkeep.start()
        self._timers = [
            asyncio.create_task(self._sweep(), name="sweep of deleted collections"),
            asyncio.create_task(self._clean(), name="cleanup of old versions"),
        ]

    async def drain(self) -> None:
        """Refuse new requests and wait for those that were begun."""
        self._requests.draining = True
        await self._requests.idle()

    async def close(self) -> None:
        """Stop at once; a commit that has begun is finished."""
        self._requests.draining = True
        for timer in self._timers:
            timer.cancel()
        if self._timers:
            await asyncio.wait(self._timers)
            self._timers = []
        await asyncio.to_thread(self._upkeep.stop)
        for threads in (self._readers, self._writers):
            await asyncio.to_thread(threads.shutdown, wait=True, cancel_futures=True)

    def health(self) -> Health:
        """Whether requests can be answered now; may be asked from any thread."""
        writable, draining = self._writable(), self._requests.draining
        return Health(
            ok=writable and not draining,
            detail={
                "data_dir": str(self._root),
                "writable": writable,
                "scorers": list(self._scorers),
                "models": [info.name for info in self._directory.models()] if self._directory else [],
                "draining": draining,
            },
        )

    def _writable(self) -> bool:
        return os.access(self._root, os.W_OK | os.X_OK)

    async def _sweep(self) -> None:
        while True:
            try:
                removed = await self._collections.sweep()
            except Exception:
                # Space that isn't freed is no reason to stop serving; the log has the cause.
                _log.exception("sweep of deleted collections failed")
            else:
                if removed:
                    _log.info("deleted collections swept", extra={"incarnations": removed})
            await asyncio.sleep(min(SWEEP_S, max(self._grace_s, 1.0)))

    async def _clean(self) -> None:
        while True:
            await asyncio.sleep(self._cleanup_interval_s)
            try:
                await self._collections.commit(lambda: self._upkeep.clean(self._collections.each()))
            except Exception:
                # As for the sweep.
                _log.exception("cleanup of old versions failed")
