"""The Ray actor: one process, one device, all models.

It is a threaded actor with two concurrency groups: `compute` has one thread, so that one forward runs at a
time, and `control` answers pings while it does. Groups exist only in the class's decorator; `.options()`
would drop them.

Models are loaded in `__init__`, because that is the only code Ray runs again when it restarts the process.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar, cast

import ray

from phasemesh.pool.protocol import Batch, BatchResult, LoadedModel, ModelSpec
from phasemesh.pool.worker import Worker, WorkerLost, WorkerReport
from phasemesh.telemetry import tracing
from phasemesh.telemetry.logs import configure_logging

logger = logging.getLogger(__name__)

_Method = TypeVar("_Method", bound=Callable[..., Any])

#: Threads of the control group: a ping must be answered beside a slow drain.
CONTROL_THREADS = 2

#: Exit status of a worker whose device is gone. Any exit that isn't Ray's own `exit_actor` makes Ray restart
#: the actor.
DEVICE_LOST_STATUS = 70

_FLUSH_TIMEOUT_S = 2.0


def _group(name: str) -> Callable[[_Method], _Method]:
    return cast(Callable[[_Method], _Method], ray.method(concurrency_group=name))


@dataclass(frozen=True, slots=True)
class ActorSettings:
    """What one actor is told.

    Attributes:
        replica_id: stable over restarts.
        needs_gpu: whether it holds one whole GPU; it then refuses to start with any other number.
        device: what the engine is told.
        threads: intra-op threads.
        engine_factory: `module:class`.
        specs: the models.
        tracing: for the tracer of this process; None leaves spans off.
        log_level: of this process.
    """

    replica_id: str
    needs_gpu: bool
    device: str
    threads: int
    engine_factory: str
    specs: tuple[ModelSpec, ...]
    tracing: tracing.TracingSettings | None
    log_level: str = "info"


class EncoderWorker:
    """The actor's class, without Ray's decoration."""

    def __init__(self, settings: ActorSettings) -> None:
        configure_logging(role="encoder-worker", level=settings.log_level, style="json")
        ids = tuple(ray.get_runtime_context().get_accelerator_ids().get("GPU", ()))
        # Two actors that see the same devices would both take the first one, silently.
        if len(ids) != (1 if settings.needs_gpu else 0):
            raise RuntimeError(
                f"replica {settings.replica_id} was given the accelerators {ids}; "
                f"it needs {'exactly one' if settings.needs_gpu else 'none'}"
            )
        if settings.tracing is not None:
            tracing.configure_tracing(settings.tracing, role="encoder-worker", instance=settings.replica_id)
        # All of the engine's work happens on one thread. OpenMP keeps a team for each thread that ever ran a
        # parallel region; a second team, left over from loading, makes libgomp count more threads than CPUs
        # and put them to sleep at every barrier, which cost a short forward pass 60 % (6.3 to 10.1 ms).
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="phasemesh-engine")
        self._worker = self._thread.submit(_make_worker, settings, ids).result()

    @_group("compute")
    def models(self) -> tuple[LoadedModel, ...]:
        """The loaded models; answers once `__init__` is through."""
        return self._worker.models

    @_group("compute")
    def run(self, batch: Batch) -> BatchResult:
        """Compute one batch; the process ends where the device is gone.

        Raises:
            ComputeFailed: the batch failed.
        """
        try:
            return self._thread.submit(self._worker.run, batch).result()
        except WorkerLost as error:
            self._die(error)

    @_group("control")
    def ping(self) -> WorkerReport:
        """What the worker says of itself."""
        return self._worker.report()

    @_group("control")
    def drain(self) -> None:
        """Flush the spans; the pool has seen to it that no batch is left."""
        tracing.shutdown_tracing()

    def _die(self, error: WorkerLost) -> NoReturn:
        logger.critical("the device is lost, ending the process: %s", error)
        # An exporter that hangs must not keep a dead worker alive.
        flush = threading.Thread(target=tracing.shutdown_tracing, daemon=True)
        flush.start()
        flush.join(_FLUSH_TIMEOUT_S)
        os._exit(DEVICE_LOST_STATUS)


def _make_worker(settings: ActorSettings, accelerator_ids: tuple[str, ...]) -> Worker:
    worker = Worker(
        settings.replica_id,
        settings.engine_factory,
        device=settings.device,
        threads=settings.threads,
        accelerator_ids=accelerator_ids,
    )
    worker.load(settings.specs)
    return worker


EncoderActor = ray.remote(concurrency_groups={"compute": 1, "control": CONTROL_THREADS})(EncoderWorker)
