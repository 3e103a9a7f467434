"""Forms batches when the pool can take one, and sees each through to its items' results.

Invariants: every item taken from the queue is settled exactly once, whatever fails; a batch holds one lane
only; no timer holds work back; at most as many batches are outstanding as the pool has places. While it has
none but may have some later, work stays in the queue, which forgets what nobody waits for any more.

A batch that fails is halved until the item at fault is alone: only that one fails. The items of a batch that
was lost with its workers are tried one by one, and with nothing else in flight (`Isolation`): an item that
kills a worker twice more, by itself, is at fault. They aren't halved, because each half that holds the item
would cost another worker, which takes seconds to come back where a batch of one takes milliseconds.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from opentelemetry import trace
from opentelemetry.context import Context

from phasemesh.encoder.admission import Admission
from phasemesh.encoder.assembly import Assembled, assemble, disassemble
from phasemesh.encoder.isolation import Isolation
from phasemesh.encoder.items import Item, State, Ticket
from phasemesh.encoder.selection import WINDOW_ITEMS, choose, split
from phasemesh.encoder.throughput import BusyMeter
from phasemesh.errors import DeadlineExceeded, Internal, PhasemeshError, ResourceExhausted, Unavailable
from phasemesh.pool.protocol import BatchResult, ComputeFailed, ReplicaLost, ReplicaPool
from phasemesh.telemetry import names
from phasemesh.telemetry.metrics import Metrics
from phasemesh.telemetry.tracing import inject, tracer

_log = logging.getLogger(__name__)

#: A budget is not halved below this; a device without memory for it has another problem.
MIN_BATCH_TOKENS = 64
#: Workers that an item has to kill alone before it is at fault: one may have died of something else.
_TRIALS = 2
#: Time that a lost replica is given to come back, before its callers are told to try again, seconds.
_REPLICA_RETRY_S = 2.0


class WorkerCrashed(Exception):
    """An input killed every worker that it was given to alone; for the log."""


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """How big a batch may be.

    Attributes:
        tokens: padding included.
        items: sequences.
    """

    tokens: int
    items: int


class Batcher:
    """See the module docstring. For one event loop."""

    def __init__(
        self,
        pool: ReplicaPool,
        admission: Admission,
        meter: BusyMeter,
        limits: BatchLimits,
        metrics: Metrics,
        *,
        now_s: Callable[[], float],
        now_ns: Callable[[], int],
        on_finite: Callable[[str], None] = lambda model: None,
        on_stopped: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_finite` is told the model of every batch that brought a finite result.

        `on_stopped` is called if forming batches ends by a bug: nothing will be computed any more.
        """
        self._pool = pool
        self._admission = admission
        self._meter = meter
        self._limits = limits
        self._metrics = metrics
        self._now_s = now_s
        self._now_ns = now_ns
        self._on_finite = on_finite
        self._on_stopped = on_stopped
        self._isolation = Isolation()
        self._budgets: dict[str, int] = {}
        self._last_end_ns: dict[str, int] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to form batches."""
        # An empty context: a task made from a request's would carry that request's trace for ever.
        self._loop = asyncio.create_task(self._form_batches(), name="batcher", context=contextvars.Context())
        self._loop.add_done_callback(self._stopped)

    def wake(self) -> None:
        """Look again: something was queued, or the pool's places changed."""
        self._changed.set()

    async def close(self) -> None:
        """Stop; what still waits or runs fails as unavailable."""
        tasks = [task for task in (self._loop, *self._running) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._loop = None
        self._fail_waiting(_shutting_down())

    def budget(self, model: str) -> int:
        """Tokens of a batch of `model`, padding included."""
        return self._budgets.get(model, self._limits.tokens)

    async def _form_batches(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            while not self._isolation.wanted and len(self._running) < self._places():
                items = self._next_batch()
                if not items:
                    break
                task = asyncio.create_task(self._run(items))
                self._running.add(task)
                task.add_done_callback(self._finished)

    def _places(self) -> int:
        stats = self._pool.stats()
        if stats.capacity or stats.recovering:
            return stats.capacity
        # Nothing will ever come: the pool's refusal is the callers' answer.
        return 1

    def _stopped(self, loop: asyncio.Task[None]) -> None:
        if loop.cancelled():
            return
        error = Internal()
        _log.critical(
            "the batcher has stopped", exc_info=loop.exception(), extra={"error_id": error.error_id}
        )
        self._fail_waiting(error)
        self._on_stopped()

    def _fail_waiting(self, error: PhasemeshError) -> None:
        for lane in list(self._admission.lanes_by_turn()):
            items = list(self._admission.waiting(lane))
            self._admission.take(items)
            _settle(items, error)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self.wake()

    def _next_batch(self) -> list[Item]:
        for lane in list(self._admission.lanes_by_turn()):
            while window := list(islice(self._admission.waiting(lane), WINDOW_ITEMS)):
                now_s = self._now_s()
                expired = {item.ticket for item in window if item.ticket.deadline_s <= now_s}
                if expired:
                    for ticket in expired:
                        self._expire(ticket)
                    continue
                items = choose(window, max_tokens=self.budget(lane.model), max_items=self._limits.items)
                self._admission.take(items)
                return items
        return []

    def _expire(self, ticket: Ticket) -> None:
        self._admission.drop(ticket)
        ticket.fail(DeadlineExceeded("the call's deadline passed while its inputs waited for a batch"))

    async def _run(self, items: list[Item]) -> None:
        tokens = sum(item.tokens for item in items)
        self._admission.outstanding_tokens += tokens
        # Parts still to be computed, the next one last.
        parts = [items]
        suspects: list[Item] = []
        try:
            while parts:
                part = parts.pop()
                async with self._isolation.shared():
                    # Now, and not before: it may have waited, and its callers may have left.
                    if part := self._wanted(part):
                        smaller, lost = await self._compute(part)
                        parts += reversed(smaller)
                        suspects += lost
            if suspects:
                await self._try_alone(suspects)
        except asyncio.CancelledError:
            _settle(items, _shutting_down())
            raise
        except Exception as error:
            self._fail(items, error)
        finally:
            self._admission.outstanding_tokens -= tokens

    def _wanted(self, items: Sequence[Item]) -> list[Item]:
        """Those of `items` that somebody still waits for."""
        now_s = self._now_s()
        for ticket in {item.ticket for item in items if item.state is State.DISPATCHED}:
            if ticket.deadline_s <= now_s:
                self._expire(ticket)
        return [item for item in items if item.state is State.DISPATCHED]

    async def _try_alone(self, suspects: list[Item]) -> None:
        """Compute each of `suspects` by itself; fail those that kill workers."""
        self._metrics.batch_retries.inc()
        async with self._isolation.alone():
            for suspect in suspects:
                for _ in range(_TRIALS):
                    lost = self._wanted([suspect])
                    if lost:
                        _, lost = await self._compute(lost, suspect=True)
                    if not lost:
                        break
                else:
                    self._fail([suspect], WorkerCrashed(f"{suspect.tokens} tokens killed {_TRIALS} workers"))

    async def _compute(
        self, items: list[Item], *, suspect: bool = False
    ) -> tuple[list[list[Item]], list[Item]]:
        """Compute `items` as one batch; if it failed, the parts to try instead and the items to try alone."""
        lane = items[0].lane
        batch_id = uuid.uuid4().hex[:16]
        span = self._start_span(items, batch_id)
        try:
            assembled = assemble(items, batch_id=batch_id, carrier=inject(span))
            dispatched_ns = self._now_ns()
            for item in items:
                item.ticket.dispatched_ns = item.ticket.dispatched_ns or dispatched_ns
            computed = 0
            padded = max(item.tokens for item in items) * len(items)
            full = self._admission.queued_items > 0 or 2 * padded >= self.budget(lane.model)
            self._meter.began()
            try:
                result = await self._pool.submit(assembled.batch, suspect=suspect)
                computed = assembled.batch.sequences.tokens
            finally:
                self._meter.ended(computed, full=full)
            self._deliver(assembled, result, span, dispatched_ns)
        except ReplicaLost as error:
            span.set_attribute(names.ERROR_TYPE, "ReplicaLost")
            _log.warning("batch lost", extra={"batch_id": batch_id, "model": lane.model, "cause": str(error)})
            if error.deaths:
                return [], items
            lost = Unavailable(
                "no replica is left to compute this; try again",
                reason="REPLICA_LOST",
                retry_after_s=_REPLICA_RETRY_S,
            )
            self._count_failures(items, lost)
            _settle(items, lost)
        except ComputeFailed as error:
            span.set_attribute(names.ERROR_TYPE, "OutOfMemory" if error.out_of_memory else "ComputeFailed")
            return self._retry_parts(items, error), []
        finally:
            span.end()
        return [], []

    def _retry_parts(self, items: list[Item], error: ComputeFailed) -> list[list[Item]]:
        model = items[0].lane.model
        if error.out_of_memory:
            padded = max(item.tokens for item in items) * len(items)
            lowered = max(MIN_BATCH_TOKENS, min(self.budget(model), padded) // 2)
            if lowered < self.budget(model):
                self._budgets[model] = lowered
                _log.warning("out of memory", extra={"model": model, "batch_tokens": lowered})
        if len(items) == 1:
            self._fail(items, error)
            return []
        self._metrics.batch_retries.inc()
        return split(items, max_tokens=self.budget(model))

    def _deliver(
        self, assembled: Assembled, result: BatchResult, span: trace.Span, dispatched_ns: int
    ) -> None:
        end_ns = self._now_ns()
        # While the batch before it ran on that replica, this one waited.
        start_ns = max(dispatched_ns, self._last_end_ns.get(result.replica_id, 0))
        self._last_end_ns[result.replica_id] = end_ns
        span.set_attributes(
            {
                names.BATCH_PADDED_TOKENS: result.timings.padded_tokens,
                names.REPLICA_ID: result.replica_id,
            }
        )
        self._measure(assembled, result)
        tickets: dict[Ticket, None] = {}
        parts = list(disassemble(assembled, result))
        for item, part in parts:
            if isinstance(part, PhasemeshError):
                self._count_failures([item], part)
            tickets[item.ticket] = None
        for ticket in tickets:
            ticket.note_batch(start_ns, end_ns, result.timings.pool_ns, span.get_span_context())
        # Last, because it wakes the callers.
        for item, part in parts:
            item.settle(part)

    def _measure(self, assembled: Assembled, result: BatchResult) -> None:
        batch, metrics = assembled.batch, self._metrics
        tokens, padded = batch.sequences.tokens, result.timings.padded_tokens
        metrics.batch_items.labels(batch.model).observe(len(batch.sequences))
        metrics.batch_tokens.labels(batch.model).observe(tokens)
        metrics.batch_fill.labels(batch.model).observe(tokens / max(padded, 1))
        metrics.tokens.labels(batch.model).inc(tokens)
        metrics.padded_tokens.labels(batch.model).inc(padded)
        metrics.tokens_per_second.set(self._meter.tokens_per_second)
        if len(result.nonfinite) < len(batch.sequences):
            self._on_finite(batch.model)

    def _start_span(self, items: Sequence[Item], batch_id: str) -> trace.Span:
        # By id, because contexts can't be hashed.
        contexts = {
            item.ticket.span_context.span_id: item.ticket.span_context
            for item in items
            if item.ticket.span_context.is_valid
        }
        return tracer().start_span(
            names.SPAN_BATCH,
            context=Context(),
            attributes={
                names.BATCH_SAMPLED: any(context.trace_flags.sampled for context in contexts.values()),
                names.BATCH_ID: batch_id,
                names.MODEL: items[0].lane.model,
                names.BATCH_ITEMS: len(items),
                names.BATCH_TOKENS: sum(item.tokens for item in items),
            },
            links=[trace.Link(context) for context in contexts.values()],
        )

    def _fail(self, items: Sequence[Item], cause: Exception) -> None:
        """Fail what isn't settled; the caller gets an id, the log the cause."""
        error: PhasemeshError
        if isinstance(cause, ComputeFailed) and cause.out_of_memory:
            error = ResourceExhausted(
                "the device has too little memory for this input; shorten it", reason="OUT_OF_MEMORY"
            )
            error_id = None
        else:
            error = Internal(reason="WORKER_CRASHED" if isinstance(cause, WorkerCrashed) else None)
            error_id = error.error_id
        fields: dict[str, object] = {"error_id": error_id, "model": items[0].lane.model, "items": len(items)}
        if isinstance(cause, ComputeFailed) and cause.worker_traceback:
            fields["worker_traceback"] = cause.worker_traceback
        _log.error("input failed", exc_info=cause, extra=fields)
        self._count_failures(items, error)
        _settle(items, error)

    def _count_failures(self, items: Sequence[Item], error: PhasemeshError) -> None:
        live = sum(item.state is State.DISPATCHED for item in items)
        if live:
            self._metrics.failed_items.labels(items[0].lane.model, error.reason).inc(live)


def _settle(items: Sequence[Item], error: PhasemeshError) -> None:
    for item in items:
        if item.state is State.DISPATCHED:
            item.settle(error)


def _shutting_down() -> Unavailable:
    return Unavailable("the service is shutting down; try another replica", reason="DRAINING")
