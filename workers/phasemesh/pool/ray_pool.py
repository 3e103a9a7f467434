"""Replicas as Ray actors: placement, one call per batch, supervision.

Invariants:
- A replica holds at most one running and one queued batch (`SlotTable`).
- A call that meets a dead replica is tried once more, on another replica where one is ready.
- `stats()` is the supervisor's last word: a replica is READY only if it answered since its last trouble.
- Cancelling `submit` gives the caller's wait up, not the slot: a running forward can't be interrupted, so
  the slot is free again when the replica is, and the result is dropped.

Ray is told never to retry (`max_task_retries=0`: a call to a restarting actor fails at once instead of
waiting) and always to restart; the crash-loop breaker ends that.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
from collections.abc import Callable
from typing import Any, Self, cast

import ray
from ray.exceptions import PendingCallsLimitExceeded, RayError, RayTaskError

from phasemesh.pool.actor import CONTROL_THREADS, ActorSettings, EncoderActor
from phasemesh.pool.placement import Resources, check_fit, need_per_replica
from phasemesh.pool.protocol import (
    Batch,
    BatchResult,
    LoadedModel,
    ModelSpec,
    PoolStats,
    ReplicaLost,
    ReplicaState,
)
from phasemesh.pool.replica import Replica
from phasemesh.pool.settings import PoolConfig, PoolStartError
from phasemesh.pool.slots import SlotTable
from phasemesh.pool.worker import WorkerReport

logger = logging.getLogger(__name__)

_RETRY_PING_S = 0.1
_EXIT_TIMEOUT_S = 10.0


class RayPool:
    """A `ReplicaPool` on Ray; made by `start`, on the event loop that uses it."""

    def __init__(self, config: PoolConfig, replicas: tuple[Replica, ...], models: tuple[LoadedModel, ...]):
        self.models = models
        self._config = config
        self._replicas = {replica.replica_id: replica for replica in replicas}
        self._slots = SlotTable(tuple(self._replicas), config.random())
        self._listeners: list[Callable[[], None]] = []
        self._submits = 0
        self._draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        for replica in replicas:
            self._slots.set_ready(replica.replica_id, True)
        # An empty context: a task made within a request would carry that request's trace for ever.
        self._supervisors = [
            asyncio.create_task(self._keep_supervising(replica), context=contextvars.Context())
            for replica in replicas
        ]

    @classmethod
    async def start(cls, config: PoolConfig, specs: tuple[ModelSpec, ...]) -> Self:
        """Place the replicas and load `specs` in each; Ray must be initialised (`RayCluster.start`).

        Raises:
            PoolStartError: the replicas don't fit the cluster, don't come up in `start_timeout_s`, can't load
                a model, or disagree on a model's recipe; the message says which.
        """
        nodes = _alive_nodes()
        need = need_per_replica(config, nodes)
        check_fit(config.replicas, need, nodes)
        replicas = tuple(_make_replica(f"replica-{i}", config, specs, need) for i in range(config.replicas))
        try:
            async with asyncio.timeout(config.start_timeout_s):
                loaded = await asyncio.gather(*(_await(r.handle.models.remote()) for r in replicas))
                reports = await asyncio.gather(*(_await(r.handle.ping.remote()) for r in replicas))
            models = _agreed(loaded)
        except BaseException as error:
            free = ray.available_resources()
            left = Resources(free.get("CPU", 0), free.get("GPU", 0))
            for replica in replicas:
                ray.kill(replica.handle)
            if isinstance(error, TimeoutError):
                raise PoolStartError(
                    f"{config.replicas} replica(s) were not up within {config.start_timeout_s:g} s. "
                    f"Each needs {need}; the cluster has {left} left. "
                    "Free some, or raise start_timeout_s if the models take longer to load."
                ) from error
            if isinstance(error, RayError):
                raise PoolStartError(f"a replica did not start: {_last_line(error)}") from error
            raise
        for replica, report in zip(replicas, reports, strict=True):
            replica.answered(report)
        return cls(config, replicas, models)

    def add_listener(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` on the event loop whenever `stats()` may have changed: a replica's state, a slot.

        Returns a function that removes it. A listener must not raise or block; set an event in it.
        """
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def stats(self) -> PoolStats:
        """See `ReplicaPool.stats`."""
        return PoolStats(
            tuple(
                replica.stats(self._slots.in_flight(replica_id), draining=self._draining)
                for replica_id, replica in self._replicas.items()
            )
        )

    async def submit(self, batch: Batch, *, suspect: bool = False) -> BatchResult:
        """See `ReplicaPool.submit`; arrays of the result may be read-only views of shared memory."""
        if self._draining:
            raise ReplicaLost("the pool is draining")
        self._submits += 1
        self._idle.clear()
        try:
            lost: str | None = None
            tries = 1 if suspect else 2
            for _ in range(tries):
                replica = self._replicas[await self._slots.acquire(avoid=lost)]
                try:
                    return await self._call(replica, batch, suspect=suspect)
                except (RayError, PendingCallsLimitExceeded) as error:
                    lost, reason = replica.replica_id, _last_line(error)
            met = "a dead replica" if suspect else "two dead replicas, the last"
            raise ReplicaLost(f"the batch met {met}: {lost}: {reason}", deaths=tries)
        finally:
            self._submits -= 1
            self._changed()

    async def drain(self, timeout_s: float) -> bool:
        """Refuse new batches, let those submitted finish, flush the workers' spans.

        Returns False if batches were still out after `timeout_s` seconds.
        """
        self._draining = True
        self._changed()
        finished = True
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            finished = False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_EXIT_TIMEOUT_S):
                await asyncio.gather(
                    *(_await(r.handle.drain.remote()) for r in self._replicas.values() if r.alive),
                    return_exceptions=True,
                )
        return finished

    async def close(self) -> None:
        """End the workers, cleanly where they answer; safe to call twice. `drain` first to lose nothing."""
        self._draining = True
        for task in self._supervisors:
            task.cancel()
        await asyncio.gather(*self._supervisors, return_exceptions=True)
        self._supervisors = []
        self._slots.close("the pool is closed")
        await asyncio.gather(*(_end(replica) for replica in self._replicas.values()))
        self._changed()

    async def _call(self, replica: Replica, batch: Batch, *, suspect: bool) -> BatchResult:
        """Run `batch` in the slot just acquired, and see to the slot's release."""
        incarnation = replica.incarnation

        def settle(done: asyncio.Future[Any]) -> None:
            # Here and not where it is awaited, since the caller may have been cancelled meanwhile. The
            # quarantine comes first: a slot freed on a dead replica must not go to the next waiter.
            error = None if done.cancelled() else done.exception()
            if isinstance(error, RayError) and not isinstance(error, RayTaskError):
                if suspect and replica.incarnation == incarnation:
                    replica.excuse()
                self._trouble(replica, incarnation, error)
            self._slots.release(replica.replica_id)
            self._changed()

        try:
            reply = _await(replica.handle.run.remote(batch))
        except BaseException as error:
            if isinstance(error, RayError | PendingCallsLimitExceeded):
                self._trouble(replica, incarnation, error)
            self._slots.release(replica.replica_id)
            raise
        reply.add_done_callback(settle)
        self._changed()
        try:
            return cast(BatchResult, await asyncio.shield(reply))
        except RayTaskError as error:
            # Ray wraps what the method raised; the seam speaks of ComputeFailed only.
            logger.debug("batch %s failed in %s: %s", batch.batch_id, replica.replica_id, error)
            raise error.cause from None

    def _trouble(self, replica: Replica, incarnation: str, error: Exception) -> None:
        """Quarantine the replica until it answers a ping; the supervisor does the rest."""
        # Late news of a process that has been replaced since.
        if replica.incarnation == incarnation and replica.quarantine():
            logger.warning("%s is quarantined: %s", replica.replica_id, _last_line(error))
            self._slots.set_ready(replica.replica_id, False)
            replica.alarm.set()
            self._changed()

    async def _keep_supervising(self, replica: Replica) -> None:
        try:
            await self._supervise(replica)
        except Exception:
            # Nobody awaits this task, and a replica that nobody watches would be called ready for ever.
            logger.exception("the supervision of %s failed", replica.replica_id)
            self._give_up(replica, "its supervision failed")

    async def _supervise(self, replica: Replica) -> None:
        """Ping one replica for as long as it has a future."""
        config = self._config
        while True:
            interval = config.ping_interval_s if replica.state is ReplicaState.READY else _RETRY_PING_S
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(replica.alarm.wait(), interval)
            # The alarm shortens one wait; without an answer the retry interval sets the pace.
            replica.alarm.clear()
            try:
                report = await self._ping(replica)
            except (RayError, PendingCallsLimitExceeded, TimeoutError) as error:
                self._trouble(replica, replica.incarnation, error)
                if getattr(error, "actor_init_failed", False):
                    return self._give_up(replica, f"it can't start again: {_last_line(error)}")
                if replica.away_s > config.restart_timeout_s:
                    return self._give_up(replica, f"it stayed away for {config.restart_timeout_s:g} s")
                continue
            before = replica.state
            if replica.answered(report):
                logger.warning("%s was restarted, its process is now %d", replica.replica_id, report.pid)
            if replica.breaker.tripped:
                return self._give_up(replica, f"{config.crash_limit} restarts in {config.crash_window_s:g} s")
            if before is not replica.state:
                self._slots.set_ready(replica.replica_id, True)
                self._changed()

    async def _ping(self, replica: Replica) -> WorkerReport:
        reply = _await(replica.handle.ping.remote())
        # Keep waiting for the same ping: a worker that hangs must not collect them.
        while True:
            done, _ = await asyncio.wait({reply}, timeout=self._config.ping_timeout_s)
            if done:
                return cast(WorkerReport, reply.result())
            self._trouble(replica, replica.incarnation, TimeoutError("it doesn't answer pings"))
            if replica.away_s > self._config.restart_timeout_s:
                reply.cancel()
                raise TimeoutError

    def _give_up(self, replica: Replica, reason: str) -> None:
        logger.error("%s has failed for good: %s", replica.replica_id, reason)
        replica.fail()
        ray.kill(replica.handle)
        self._slots.fail(replica.replica_id)
        self._changed()

    def _changed(self) -> None:
        if self._submits == 0 and self._slots.total_in_flight == 0:
            self._idle.set()
        for listener in tuple(self._listeners):
            listener()


def _await(ref: Any) -> asyncio.Future[Any]:
    """`ref` for the running loop; `asyncio.wait` on raw refs would leak (ray#45895)."""
    return asyncio.wrap_future(ref.future())


def _alive_nodes() -> tuple[Resources, ...]:
    return tuple(
        Resources(node["Resources"].get("CPU", 0), node["Resources"].get("GPU", 0))
        for node in ray.nodes()
        if node["Alive"]
    )


def _make_replica(
    replica_id: str, config: PoolConfig, specs: tuple[ModelSpec, ...], need: Resources
) -> Replica:
    on_gpu = need.gpus > 0
    auto = "cuda" if on_gpu else "cpu"
    settings = ActorSettings(
        replica_id=replica_id,
        needs_gpu=on_gpu,
        device=config.engine_device or (auto if config.device == "auto" else config.device),
        threads=config.engine_threads,
        engine_factory=config.engine_factory,
        specs=specs,
        tracing=config.tracing,
        log_level=config.log_level,
    )
    handle = EncoderActor.options(
        num_cpus=need.cpus,
        num_gpus=need.gpus,
        max_restarts=-1,
        max_task_retries=0,
        # An assertion: the slots keep batches below it; pings and a drain come on top.
        max_pending_calls=PoolStats.SLOTS_PER_REPLICA + CONTROL_THREADS,
    ).remote(settings)
    return Replica(replica_id, handle, config)


def _agreed(loaded: list[tuple[LoadedModel, ...]]) -> tuple[LoadedModel, ...]:
    """The models, if every replica has loaded the same."""
    first = loaded[0]
    for other in loaded[1:]:
        for mine, theirs in zip(first, other, strict=True):
            if mine.recipe.recipe_hash != theirs.recipe.recipe_hash:
                raise PoolStartError(
                    f"replicas loaded different recipes of {mine.name!r}: {mine.recipe.recipe_hash} and "
                    f"{theirs.recipe.recipe_hash}. Give every node the same files, or pin the revision."
                )
    return first


async def _end(replica: Replica) -> None:
    """Let the worker run its exit handlers; `ray.kill` skips them."""
    if replica.alive:
        with contextlib.suppress(TimeoutError, RayError, PendingCallsLimitExceeded):
            async with asyncio.timeout(_EXIT_TIMEOUT_S):
                await _await(replica.handle.__ray_terminate__.remote())
    replica.fail()
    ray.kill(replica.handle)


def _last_line(error: BaseException) -> str:
    """The error without the remote traceback that Ray puts before it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
