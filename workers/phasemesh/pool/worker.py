"""What runs inside every worker, be it a Ray actor or a thread: one engine, its models, its spans.

Invariant: `run` either returns a result, or raises `ComputeFailed` (the batch is at fault, the worker lives
on), or raises `WorkerLost` (the device is gone and this process with it). It raises nothing else, because
the batcher can act on no other word.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
import os
import time
import traceback
from dataclasses import dataclass
from typing import Protocol, cast

from phasemesh.pool.protocol import Batch, BatchResult, ComputeFailed, LoadedModel, ModelSpec
from phasemesh.pool.spans import emit_batch_spans

logger = logging.getLogger(__name__)


class EngineLike(Protocol):
    """What a worker needs of an engine.

    It may also have the properties `threads`, the threads really in use, and `device_count`, the devices of
    its kind that it could use (1 for the CPU).
    """

    def load(self, spec: ModelSpec) -> LoadedModel:
        """Load one model."""
        ...

    def warm_up(self, model: str) -> None:
        """Run a loaded model once, so that the first caller doesn't pay for it."""
        ...

    def forward(self, batch: Batch) -> BatchResult:
        """Compute one batch."""
        ...


class EngineFactory(Protocol):
    """An engine class."""

    def __call__(self, device: str = "auto", threads: int | None = None) -> EngineLike:
        """Make the engine, on `device`, with `threads` intra-op threads."""
        ...


class WorkerLost(Exception):
    """The device answered with an error that only a new process can clear."""


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What a worker says of itself.

    Attributes:
        incarnation: random, new with every process; a process id may be used again.
        pid: operating-system process.
        device: e.g. "cpu", "cuda:0".
        accelerator_ids: devices that this process may see.
        threads: intra-op threads, as the engine reports them.
        last_ok_unix_ns: wall-clock time of the last finite forward, 0 for never.
    """

    incarnation: str
    pid: int
    device: str
    accelerator_ids: tuple[str, ...]
    threads: int
    last_ok_unix_ns: int


def resolve_engine(path: str) -> tuple[EngineFactory, type[Exception]]:
    """The engine class that `path` ("module:class") names, and the `DeviceLost` that it raises.

    `DeviceLost` is looked for in the same module, then in `errors` beside it.

    Raises:
        ValueError: the path names no such class, or there is no `DeviceLost`.
    """
    module_name, _, class_name = path.partition(":")
    if not (module_name and class_name):
        raise ValueError(f"engine_factory is {path!r}; write it as 'package.module:Class'")
    module = importlib.import_module(module_name)
    try:
        factory = getattr(module, class_name)
        home = (
            module
            if hasattr(module, "DeviceLost")
            else importlib.import_module(".errors", module.__package__)
        )
        device_lost = home.DeviceLost
    except (AttributeError, ImportError) as error:
        raise ValueError(f"engine_factory is {path!r}, but {error}") from error
    return cast(EngineFactory, factory), cast(type[Exception], device_lost)


class Worker:
    """One engine and its models. `run` is for one thread at a time, `report` for any."""

    def __init__(
        self,
        replica_id: str,
        engine_factory: str,
        *,
        device: str,
        threads: int,
        accelerator_ids: tuple[str, ...] = (),
    ) -> None:
        make_engine, self._device_lost = resolve_engine(engine_factory)
        self._replica_id = replica_id
        self._engine = make_engine(device=device, threads=threads)
        # Ray's word for it is an environment variable, which a library may have read before it was set.
        visible = int(getattr(self._engine, "device_count", len(accelerator_ids)))
        if accelerator_ids and visible != len(accelerator_ids):
            raise RuntimeError(
                f"{replica_id} holds the accelerators {accelerator_ids}, but its engine sees {visible}"
            )
        # What the engine says it uses, since a library may have its own mind about what it is told.
        self._threads = int(getattr(self._engine, "threads", threads))
        self._device = device
        self._accelerator_ids = accelerator_ids
        self._incarnation = os.urandom(8).hex()
        self._last_ok_unix_ns = 0
        self.models: tuple[LoadedModel, ...] = ()

    def load(self, specs: tuple[ModelSpec, ...]) -> tuple[LoadedModel, ...]:
        """Load and warm up `specs`, and return all models loaded so far."""
        for spec in specs:
            model = self._engine.load(spec)
            self._engine.warm_up(spec.name)
            self._device = model.device
            self.models += (model,)
        return self.models

    def run(self, batch: Batch) -> BatchResult:
        """Compute `batch` and emit its spans.

        Raises:
            ComputeFailed: the batch failed.
            WorkerLost: the device is gone.
        """
        try:
            result = self._engine.forward(batch)
        except ComputeFailed:
            raise
        except self._device_lost as error:
            raise WorkerLost(str(error)) from error
        except Exception as error:
            # A bug, perhaps in one item's path only: bisection finds the item, the log holds the trace.
            logger.exception("batch %s failed in the engine", batch.batch_id)
            raise ComputeFailed(
                f"{type(error).__name__} in the engine", worker_traceback=traceback.format_exc()
            ) from error
        if len(result.nonfinite) < len(batch.sequences):
            self._last_ok_unix_ns = time.time_ns()
        result = dataclasses.replace(result, replica_id=self._replica_id, pid=os.getpid())
        emit_batch_spans(batch, result)
        return result

    def report(self) -> WorkerReport:
        """See `WorkerReport`."""
        return WorkerReport(
            incarnation=self._incarnation,
            pid=os.getpid(),
            device=self._device,
            accelerator_ids=self._accelerator_ids,
            threads=self._threads,
            last_ok_unix_ns=self._last_ok_unix_ns,
        )
