"""The encoder service put together, and the truth about its health.

Invariants: it calls itself ready only while a replica answers, every model has given a finite result, and no
drain has begun; when nothing can make it ready again, it says so (`wait_lost`), so that its process can end
and be started anew.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from phasemesh.config.settings import EncoderSettings, RpcSettings
from phasemesh.encoder.admission import Admission, QueueLimits
from phasemesh.encoder.assembly import pack
from phasemesh.encoder.batcher import Batcher, BatchLimits
from phasemesh.encoder.models import ModelTable, ServedModel
from phasemesh.encoder.rows import Row
from phasemesh.encoder.servicer import EncoderServicer
from phasemesh.encoder.throughput import BusyMeter
from phasemesh.encoder.tokenizing import Cut
from phasemesh.encoder.work import Workshop
from phasemesh.pool.protocol import Batch, LoadedModel, Output, ReplicaPool
from phasemesh.recipe.model import ModelKind
from phasemesh.rpc.admin import Health
from phasemesh.telemetry import names
from phasemesh.telemetry.metrics import REPLICA_STATES, Metrics

#: Token budgets of a batch where the settings leave it open.
CUDA_BATCH_TOKENS = 16_384
CPU_BATCH_TOKENS = 2_048


class EncoderStartError(Exception):
    """The service can't answer; the message names the model and why."""


class ListenedPool(ReplicaPool, Protocol):
    """A pool that tells when its replicas change."""

    def add_listener(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` on the event loop at every change; returns what removes it."""
        ...


class EncoderRuntime:
    """The service over a pool that has started. `start`, `drain` and `close` belong to one event loop.

    Args:
        settings: limits; ports and devices are others' business.
        models: what the pool has loaded.
        aliases: other names of models.
        pool: runs batches.
        metrics: of the process.
        max_message_bytes: largest reply.
        now_s: monotonic seconds, the clock of deadlines.
        now_ns: monotonic nanoseconds, the clock of phases.

    Raises:
        EncoderStartError: there is no model, or a tokenizer doesn't fit its recipe.
    """

    def __init__(
        self,
        settings: EncoderSettings,
        models: Sequence[LoadedModel],
        aliases: Mapping[str, tuple[str, ...]],
        pool: ListenedPool,
        metrics: Metrics,
        *,
        max_message_bytes: int | None = None,
        now_s: Callable[[], float] = time.monotonic,
        now_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        if not models:
            raise EncoderStartError("no model is configured; set encoder.models")
        try:
            table = ModelTable(models, aliases)
        except ValueError as error:
            raise EncoderStartError(str(error)) from error
        self._pool = pool
        self._metrics = metrics
        self._table = table
        self._finite: set[str] = set()
        self._threads = ThreadPoolExecutor(
            settings.tokenizer_threads or os.cpu_count() or 1, thread_name_prefix="phasemesh-tokenizer"
        )
        meter = BusyMeter(now_s)
        self._admission = Admission(
            QueueLimits(settings.max_queued_tokens, settings.max_queue_wait_s), meter, metrics, now_s=now_s
        )
        on_cuda = any(model.device.startswith("cuda") for model in models)
        self._batcher = Batcher(
            pool,
            self._admission,
            meter,
            BatchLimits(
                settings.max_batch_tokens or (CUDA_BATCH_TOKENS if on_cuda else CPU_BATCH_TOKENS),
                settings.max_batch_items,
            ),
            metrics,
            now_s=now_s,
            now_ns=now_ns,
            on_finite=self._finite.add,
            on_stopped=lambda: self._lose("the batcher has stopped"),
        )
        self._shop = Workshop(
            models=table,
            admission=self._admission,
            batcher=self._batcher,
            tokenizers=self._threads,
            metrics=metrics,
            max_inputs=settings.max_inputs,
            max_input_bytes=settings.max_input_bytes,
            max_message_bytes=max_message_bytes or RpcSettings().max_message_bytes,
            now_ns=now_ns,
        )
        self.servicer = EncoderServicer(self._shop, pool.stats)
        metrics.start_at_zero(names.ENCODE_PHASES, [model.name for model in models])
        self._unlisten: Callable[[], None] | None = None
        self._why_lost = ""
        self._lost = asyncio.Event()

    async def start(self) -> None:
        """Try each model once, then begin to serve.

        Raises:
            EncoderStartError: a model fails, or gives a result that isn't a finite number.
        """
        for model in self._table.models:
            await self._try(model)
        self._unlisten = self._pool.add_listener(self._pool_changed)
        self._pool_changed()
        self._batcher.start()

    async def drain(self) -> None:
        """Refuse new requests and wait for those that were begun."""
        self._shop.draining = True
        await self._shop.idle()

    async def wait_lost(self) -> str:
        """Wait until nothing will ever be computed here again; returns why."""
        await self._lost.wait()
        return self._why_lost

    async def close(self) -> None:
        """Stop at once; what still waits fails as unavailable."""
        self._shop.draining = True
        if self._unlisten is not None:
            self._unlisten()
            self._unlisten = None
        await self._batcher.close()
        await asyncio.to_thread(self._threads.shutdown, wait=True, cancel_futures=True)

    def health(self) -> Health:
        """Whether requests can be answered now; may be asked from any thread."""
        stats = self._pool.stats()
        draining = self._shop.draining
        unproven = [model.name for model in self._table.models if model.name not in self._finite]
        return Health(
            ok=stats.ready > 0 and not unproven and not draining and not self._why_lost,
            detail={
                "lost": self._why_lost,
                "ready_replicas": stats.ready,
                "replicas": [
                    {
                        "id": replica.replica_id,
                        "state": replica.state.value,
                        "device": replica.device,
                        "pid": replica.pid,
                        "restarts": replica.restarts,
                    }
                    for replica in stats.replicas
                ],
                "models": [model.name for model in self._table.models],
                "without_finite_result": unproven,
                "draining": draining,
                "queued_tokens": self._admission.queued_tokens,
            },
        )

    async def _try(self, model: ServedModel) -> None:
        cross = model.recipe.kind is ModelKind.CROSS_ENCODER
        encoder = model.encoder
        if cross:
            encoded = encoder.encode_pairs("a", ["b"], cut=Cut(enabled=True))[0]
            outputs = frozenset({Output.LOGITS})
        else:
            encoded = encoder.encode(["a"], prompt="", role=None, cut=Cut(enabled=True))[0]
            outputs = frozenset({Output.DENSE if model.recipe.dim else Output.TOKENS})
        assert isinstance(encoded, Row)
        batch = Batch(f"self-check-{uuid.uuid4().hex[:8]}", model.name, outputs, pack([encoded]))
        try:
            result = await self._pool.submit(batch)
        except Exception as error:
            raise EncoderStartError(f"the model {model.name!r} failed its first input: {error}") from error
        if result.nonfinite:
            raise EncoderStartError(
                f"the model {model.name!r} gives results that aren't finite numbers; try dtype: float32"
            )
        self._finite.add(model.name)

    def _pool_changed(self) -> None:
        stats = self._pool.stats()
        for state in REPLICA_STATES:
            count = sum(replica.state.value == state for replica in stats.replicas)
            self._metrics.replicas.labels(state).set(count)
        self._metrics.replica_restarts.set(sum(replica.restarts for replica in stats.replicas))
        self._batcher.wake()
        if stats.lost:
            self._lose("every replica has failed for good")

    def _lose(self, why: str) -> None:
        if not self._why_lost:
            self._why_lost = why
            self._lost.set()
