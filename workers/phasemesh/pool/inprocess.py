"""One replica in this very process: the pool for `--no-ray` and for tests of what sits above the seam.

The engine runs in a thread of its own, through the same `Worker` as the Ray actor, so that results, errors
and spans are the same. What it can't do is come back: a lost device ends the replica.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Self

from phasemesh.pool.protocol import (
    Batch,
    BatchResult,
    LoadedModel,
    ModelSpec,
    PoolStats,
    ReplicaLost,
    ReplicaState,
    ReplicaStats,
)
from phasemesh.pool.settings import PoolConfig, PoolStartError
from phasemesh.pool.slots import SlotTable
from phasemesh.pool.worker import Worker, WorkerLost

REPLICA_ID = "in-process"


class InProcessPool:
    """A `ReplicaPool` of one thread; made by `start`, on the event loop that uses it."""

    def __init__(self, config: PoolConfig, worker: Worker, thread: ThreadPoolExecutor) -> None:
        self.models: tuple[LoadedModel, ...] = worker.models
        self._worker = worker
        self._thread = thread
        self._slots = SlotTable((REPLICA_ID,), config.random())
        self._slots.set_ready(REPLICA_ID, True)
        self._state = ReplicaState.READY
        self._listeners: list[Callable[[], None]] = []
        self._submits = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @classmethod
    async def start(cls, config: PoolConfig, specs: tuple[ModelSpec, ...]) -> Self:
        """Load `specs`.

        Raises:
            PoolStartError: more than one replica is asked for, or a model can't be loaded.
        """
        if config.replicas != 1:
            raise PoolStartError(f"replicas is {config.replicas}; without Ray there is exactly one")
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="phasemesh-engine")

        def load() -> Worker:
            device = config.engine_device or config.device
            worker = Worker(REPLICA_ID, config.engine_factory, device=device, threads=config.engine_threads)
            worker.load(specs)
            return worker

        try:
            async with asyncio.timeout(config.start_timeout_s):
                worker = await asyncio.get_running_loop().run_in_executor(thread, load)
        except BaseException as error:
            thread.shutdown(wait=False)
            if isinstance(error, TimeoutError):
                raise PoolStartError(f"models were not loaded within {config.start_timeout_s:g} s") from error
            if isinstance(error, Exception):
                raise PoolStartError(f"the worker did not start: {type(error).__name__}: {error}") from error
            raise
        return cls(config, worker, thread)

    def add_listener(self, listener: Callable[[], None]) -> Callable[[], None]:
        """See `RayPool.add_listener`."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def stats(self) -> PoolStats:
        """See `ReplicaPool.stats`."""
        report = self._worker.report()
        return PoolStats(
            (
                ReplicaStats(
                    replica_id=REPLICA_ID,
                    state=self._state,
                    pid=report.pid,
                    device=report.device,
                    accelerator_ids=report.accelerator_ids,
                    threads=report.threads,
                    in_flight=self._slots.in_flight(REPLICA_ID),
                    restarts=0,
                    last_ok_unix_ns=report.last_ok_unix_ns,
                ),
            )
        )

    async def submit(self, batch: Batch, *, suspect: bool = False) -> BatchResult:
        """See `ReplicaPool.submit`; every batch is tried once here."""
        if self._state is ReplicaState.DRAINING:
            raise ReplicaLost("the pool is draining")
        self._submits += 1
        self._idle.clear()
        try:
            await self._slots.acquire()
            return await self._call(batch)
        finally:
            self._submits -= 1
            self._changed()

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new batches, let those submitted finish; False if some were still out after `timeout_s`."""
        if self._state is ReplicaState.READY:
            self._state = ReplicaState.DRAINING
        self._changed()
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """End the thread, after the batch that it is running; queued ones are dropped. Safe to call twice."""
        self._state = ReplicaState.FAILED
        self._slots.close("the pool is closed")
        await asyncio.to_thread(self._thread.shutdown, wait=True, cancel_futures=True)
        self._changed()

    async def _call(self, batch: Batch) -> BatchResult:
        def settle(done: asyncio.Future[BatchResult]) -> None:
            # Here and not where it is awaited, since the caller may have been cancelled meanwhile.
            if not done.cancelled() and isinstance(done.exception(), WorkerLost):
                self._state = ReplicaState.FAILED
                self._slots.fail(REPLICA_ID)
            self._slots.release(REPLICA_ID)
            self._changed()

        try:
            reply = asyncio.get_running_loop().run_in_executor(self._thread, self._worker.run, batch)
        except RuntimeError as error:  # the thread has been shut down meanwhile
            self._slots.release(REPLICA_ID)
            raise ReplicaLost("the pool is closed") from error
        reply.add_done_callback(settle)
        self._changed()
        try:
            return await asyncio.shield(reply)
        except WorkerLost as error:
            raise ReplicaLost(f"the device is lost: {error}", deaths=1) from error
        except asyncio.CancelledError:
            # Dropped by close, not by the caller.
            if reply.cancelled():
                raise ReplicaLost("the pool is closed") from None
            raise

    def _changed(self) -> None:
        if self._submits == 0 and self._slots.total_in_flight == 0:
            self._idle.set()
        for listener in tuple(self._listeners):
            listener()
