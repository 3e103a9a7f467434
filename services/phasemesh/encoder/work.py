"""One request on its way through the encoder: tokenize, wait for results, keep the clock.

Invariants: when a request ends early, for whatever reason, nothing of it is left in the queue; its phases are
told to spans and metrics exactly once, also those of a request that failed; phases don't overlap, and those
after tokenizing come again for each group of inputs that a request waits for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from opentelemetry import trace

from phasemesh.encoder.admission import Admission
from phasemesh.encoder.batcher import Batcher
from phasemesh.encoder.items import Encoded, Lane, Ticket
from phasemesh.encoder.models import ModelTable, ServedModel
from phasemesh.encoder.rows import Row
from phasemesh.errors import PhasemeshError, ResourceExhausted, Unavailable
from phasemesh.pool.protocol import Float32
from phasemesh.telemetry import names
from phasemesh.telemetry.metrics import Metrics
from phasemesh.telemetry.phases import PhaseClock
from phasemesh.telemetry.tracing import tracer

T = TypeVar("T")

#: Request bytes that may be at the tokenizer at once. It sees a few megabytes a second and thread, and every
#: byte that waits for it is memory; a single larger request is taken when there is nothing else.
TOKENIZER_BACKLOG_BYTES = 32 * 2**20
_TOKENIZER_RETRY_S = 1.0


@dataclass(slots=True)
class _Claim:
    """One wait for results, on the job's clock.

    Attributes:
        asked_ns: when it began.
        ticket: what is waited for; None if admission refused.
        ended_ns: when it was over; 0 while it lasts.
        error: why it brought no result.
    """

    asked_ns: int
    ticket: Ticket | None = None
    ended_ns: int = 0
    error: str = ""


class Workshop:
    """What requests share.

    Attributes:
        models: of this service.
        max_inputs: most inputs in one request.
        max_input_bytes: largest single text, UTF-8 bytes.
        max_message_bytes: largest reply.
        tokenizer_backlog_bytes: see `TOKENIZER_BACKLOG_BYTES`.
    """

    def __init__(
        self,
        *,
        models: ModelTable,
        admission: Admission,
        batcher: Batcher,
        tokenizers: Executor,
        metrics: Metrics,
        max_inputs: int,
        max_input_bytes: int,
        max_message_bytes: int,
        now_ns: Callable[[], int],
        unix_ns: Callable[[], int] = time.time_ns,
        tokenizer_backlog_bytes: int = TOKENIZER_BACKLOG_BYTES,
    ) -> None:
        self.models = models
        self.metrics = metrics
        self.max_inputs = max_inputs
        self.max_input_bytes = max_input_bytes
        self.max_message_bytes = max_message_bytes
        self.admission = admission
        self.batcher = batcher
        self.tokenizer_backlog_bytes = tokenizer_backlog_bytes
        self.now_ns = now_ns
        self.unix_ns = unix_ns

        self.draining = False
        self._tokenizers = tokenizers
        self._tokenizing_bytes = 0
        self._jobs = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def job(self, deadline_s: float) -> Iterator[Job]:
        """A request's job, from the request's arrival to its reply; `deadline_s` is monotonic.

        Raises:
            Unavailable: the service is draining. Jobs that were begun before may still compute.
        """
        if self.draining:
            self.metrics.rejected.labels("DRAINING").inc()
            raise Unavailable("the service is shutting down; try another replica", reason="DRAINING")
        self._jobs += 1
        self._idle.clear()
        job = Job(self, deadline_s)
        try:
            yield job
        finally:
            try:
                job.close()
            finally:
                self._jobs -= 1
                if not self._jobs:
                    self._idle.set()

    async def tokenize(self, work: Callable[[], T], size_bytes: int) -> T:
        """Run `work` on a tokenizer thread.

        Raises:
            ResourceExhausted: too much is there already.
        """
        waiting = self._tokenizing_bytes
        if waiting and waiting + size_bytes > self.tokenizer_backlog_bytes:
            self.metrics.rejected.labels("QUEUE_FULL").inc()
            raise ResourceExhausted(
                f"{waiting} bytes wait for the tokenizer; try again in {_TOKENIZER_RETRY_S:.0f} s",
                reason="QUEUE_FULL",
                retry_after_s=_TOKENIZER_RETRY_S,
            )
        self._tokenizing_bytes += size_bytes
        loop = asyncio.get_running_loop()
        running = self._tokenizers.submit(work)
        # Counted until the thread is done, which can't be interrupted when its caller leaves.
        running.add_done_callback(lambda _: loop.call_soon_threadsafe(self._tokenized, size_bytes))
        return await asyncio.wrap_future(running)

    def _tokenized(self, size_bytes: int) -> None:
        self._tokenizing_bytes -= size_bytes

    async def idle(self) -> None:
        """Wait until no job is open."""
        await self._idle.wait()


class Job:
    """One request; made by `Workshop.job`, for one task."""

    def __init__(self, workshop: Workshop, deadline_s: float) -> None:
        self.clock = PhaseClock(now_ns=workshop.now_ns, unix_ns=workshop.unix_ns)
        self._workshop = workshop
        self._deadline_s = deadline_s
        self._span = trace.get_current_span()
        self._claims: list[_Claim] = []
        self._model: ServedModel | None = None

    def serve(self, model: ServedModel) -> None:
        """Note the model, for metrics and spans."""
        self._model = model
        self._span.set_attribute(names.MODEL, model.name)

    async def tokenize(self, work: Callable[[], T], size_bytes: int) -> T:
        """Run `work` on a tokenizer thread, as the phase of that name.

        Args:
            work: what to run.
            size_bytes: of the request.

        Raises:
            ResourceExhausted: too much waits for the tokenizer already.
        """
        start_ns = self.clock.now_ns()
        try:
            return await self._workshop.tokenize(work, size_bytes)
        finally:
            self.clock.note(names.PHASE_TOKENIZE, start_ns, self.clock.now_ns())

    async def compute(
        self, lane: Lane, rows: Sequence[Row], *, queries: Sequence[Float32] | None = None
    ) -> list[Encoded | PhasemeshError]:
        """Results of `rows`, in their order.

        Raises:
            PhasemeshError: the request was refused, or its deadline passed.
        """
        shop = self._workshop
        claim = _Claim(self.clock.now_ns())
        self._claims.append(claim)
        try:
            claim.ticket = ticket = shop.admission.admit(
                lane,
                rows,
                deadline_s=self._deadline_s,
                span_context=self._span.get_span_context(),
                queries=queries,
            )
            shop.batcher.wake()
            try:
                results = await ticket.wait()
            finally:
                if not ticket.done:
                    shop.admission.drop(ticket)
        except BaseException as error:
            claim.error = error.reason if isinstance(error, PhasemeshError) else type(error).__name__
            raise
        finally:
            claim.ended_ns = self.clock.now_ns()
        first = results[0]
        if not ticket.first_start_ns and isinstance(first, PhasemeshError):
            claim.error = first.reason
        return results

    def assembled(self) -> None:
        """Note the phases between tokenizing and now, when the reply is assembled."""
        claims, self._claims = self._claims, []
        # The results of each are used until the next is asked for.
        ends_ns = [*(claim.asked_ns for claim in claims), self.clock.now_ns()][1:]
        for claim, until_ns in zip(claims, ends_ns, strict=True):
            if claim.error:
                self._note_failure(claim)
            elif claim.ticket is not None:
                self._note_results(claim.asked_ns, claim.ticket, until_ns)

    def _note_results(self, asked_ns: int, ticket: Ticket, until_ns: int) -> None:
        start_ns = max(asked_ns, ticket.first_start_ns)
        # The worker's pooling happens at the end of its batch; the use of its results goes on from there.
        end_ns = max(start_ns, ticket.last_end_ns - ticket.last_pool_ns)
        self.clock.note(names.PHASE_QUEUE, asked_ns, start_ns)
        self.clock.note(
            names.PHASE_FORWARD,
            start_ns,
            end_ns,
            {names.BATCH_COUNT: len(ticket.batches)},
            links=[*ticket.batches],
        )
        self.clock.note(names.PHASE_POOL, end_ns, until_ns)

    def _note_failure(self, claim: _Claim) -> None:
        why = {names.ERROR_TYPE: claim.error}
        dispatched_ns = claim.ticket.dispatched_ns if claim.ticket is not None else 0
        if not dispatched_ns:
            self.clock.note(names.PHASE_QUEUE, claim.asked_ns, claim.ended_ns, why)
            return
        self.clock.note(names.PHASE_QUEUE, claim.asked_ns, dispatched_ns)
        self.clock.note(names.PHASE_FORWARD, dispatched_ns, claim.ended_ns, why)

    def close(self) -> None:
        """Tell the phases to spans and metrics."""
        self.assembled()
        if self._model is not None:
            self.clock.observe(self._workshop.metrics, self._model.name)
        self.clock.emit_spans(tracer(), self._span)
