"""One request on its way through the encoder: tokenize, wait for results, keep the clock.

Invariant: when a request ends early, for whatever reason, nothing of it is left in the queue; its phases are
told to spans and metrics exactly once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from typing import TypeVar

from opentelemetry import trace

from phasemesh.encoder.admission import Admission
from phasemesh.encoder.batcher import Batcher
from phasemesh.encoder.items import Encoded, Lane, Ticket
from phasemesh.encoder.models import ModelTable, ServedModel
from phasemesh.encoder.rows import Row
from phasemesh.errors import PhasemeshError, Unavailable
from phasemesh.pool.protocol import Float32
from phasemesh.telemetry import names
from phasemesh.telemetry.metrics import Metrics
from phasemesh.telemetry.phases import PhaseClock
from phasemesh.telemetry.tracing import tracer

T = TypeVar("T")


class Workshop:
    """What requests share.

    Attributes:
        models: of this service.
        max_inputs: most inputs in one request.
        max_input_bytes: largest single text, UTF-8 bytes.
        max_message_bytes: largest reply.
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
    ) -> None:
        self.models = models
        self.metrics = metrics
        self.max_inputs = max_inputs
        self.max_input_bytes = max_input_bytes
        self.max_message_bytes = max_message_bytes
        self.admission = admission
        self.batcher = batcher
        self.tokenizers = tokenizers
        self.now_ns = now_ns
        self.unix_ns = unix_ns

        self.draining = False
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
            job.close()
            self._jobs -= 1
            if not self._jobs:
                self._idle.set()

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
        self._tickets: list[Ticket] = []
        self._tokenized_ns = 0
        self._model: ServedModel | None = None

    def serve(self, model: ServedModel) -> None:
        """Note the model, for metrics and spans."""
        self._model = model
        self._span.set_attribute(names.MODEL, model.name)

    async def tokenize(self, work: Callable[[], T]) -> T:
        """Run `work` on a tokenizer thread, as the phase of that name."""
        start_ns = self.clock.now_ns()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._workshop.tokenizers, work)
        finally:
            self._tokenized_ns = self.clock.now_ns()
            self.clock.note(names.PHASE_TOKENIZE, start_ns, self._tokenized_ns)

    async def compute(
        self, lane: Lane, rows: Sequence[Row], *, queries: Sequence[Float32] | None = None
    ) -> list[Encoded | PhasemeshError]:
        """Results of `rows`, in their order.

        Raises:
            PhasemeshError: the request was refused, or its deadline passed.
        """
        shop = self._workshop
        ticket = shop.admission.admit(
            lane,
            rows,
            deadline_s=self._deadline_s,
            span_context=self._span.get_span_context(),
            queries=queries,
        )
        self._tickets.append(ticket)
        shop.batcher.wake()
        try:
            return await ticket.wait()
        finally:
            if not ticket.done:
                shop.admission.drop(ticket)

    def assembled(self) -> None:
        """Note the phases between tokenizing and now, when the reply is assembled."""
        began = [ticket for ticket in self._tickets if ticket.first_start_ns]
        if not began:
            return
        now_ns = self.clock.now_ns()
        last = max(began, key=lambda ticket: ticket.last_end_ns)
        start_ns = max(self._tokenized_ns, min(ticket.first_start_ns for ticket in began))
        # The worker's pooling happens at the end of its batch; the reply's assembly goes on from there.
        end_ns = max(start_ns, last.last_end_ns - last.last_pool_ns)
        # By id, because contexts can't be hashed.
        batches = {context.span_id: context for ticket in began for context in ticket.batches}
        self.clock.note(names.PHASE_QUEUE, self._tokenized_ns, start_ns)
        self.clock.note(
            names.PHASE_FORWARD,
            start_ns,
            end_ns,
            {names.BATCH_COUNT: len(batches)},
            links=[*batches.values()],
        )
        self.clock.note(names.PHASE_POOL, end_ns, now_ns)
        self._tickets.clear()

    def close(self) -> None:
        """Tell the phases to spans and metrics."""
        self.assembled()
        if self._model is not None:
            self.clock.observe(self._workshop.metrics, self._model.name)
        self.clock.emit_spans(tracer(), self._span)
