"""The queue in front of the batcher: what may wait, what is refused, and in which order it is offered.

Invariants: the counters equal the sum over the items that wait, at every moment; an item that is dropped is
out of them, and of the queue, at once; nothing waits that its caller no longer wants; what a scrape reads
from its own thread is a number, never a queue that the loop may be changing.

Order: first in, first out within a lane; between lanes the one whose head is oldest. Fairness between callers
belongs into `lanes_by_turn`.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from opentelemetry.trace import SpanContext

from phasemesh.encoder.items import Item, Lane, State, Ticket
from phasemesh.encoder.rows import Row
from phasemesh.encoder.throughput import BusyMeter
from phasemesh.errors import InvalidArgument, ResourceExhausted
from phasemesh.pool.protocol import Float32
from phasemesh.telemetry.metrics import Metrics

#: What is said before anything was measured.
_UNMEASURED_RETRY_S = 1.0
_SHORTEST_RETRY_S = 0.05


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """What may wait.

    Attributes:
        tokens: of all items; a request of more by itself is refused for good.
        items: the same for their number.
        wait_s: longest estimated wait.
    """

    tokens: int
    wait_s: float
    items: int = 65_536


class Admission:
    """See the module docstring. For one event loop, no locks."""

    def __init__(
        self, limits: QueueLimits, meter: BusyMeter, metrics: Metrics, *, now_s: Callable[[], float]
    ) -> None:
        self._limits = limits
        self._meter = meter
        self._metrics = metrics
        self._now_s = now_s
        self._lanes: dict[Lane, OrderedDict[Item, None]] = {}
        self._model_tokens: dict[str, int] = {}
        self._model_items: dict[str, int] = {}
        self.queued_tokens = 0
        self.queued_items = 0
        #: Tokens handed to the pool and not yet back; they are ahead of whatever is admitted.
        self.outstanding_tokens = 0
        #: When the oldest waiting item was admitted; infinity for none.
        self._oldest_enqueued_s = math.inf
        metrics.queue_oldest.set_function(self.oldest_s)

    def admit(
        self,
        lane: Lane,
        rows: Sequence[Row],
        *,
        deadline_s: float,
        span_context: SpanContext,
        queries: Sequence[Float32] | None = None,
    ) -> Ticket:
        """Queue `rows` as one claim; all of them or none.

        Args:
            lane: of all rows.
            rows: at least one.
            deadline_s: monotonic time after which nobody waits for them.
            span_context: of the request's server span.
            queries: for MAXSIM, one float32[q, token_dim] per row.

        Raises:
            InvalidArgument: the rows are more than the whole queue (REQUEST_TOO_LARGE).
            ResourceExhausted: they don't fit now, or would wait too long; says when to come back.
        """
        tokens = sum(len(row) for row in rows)
        self._check(tokens, len(rows), deadline_s)
        now_s = self._now_s()
        ticket = Ticket(deadline_s=deadline_s, span_context=span_context)
        queue = self._lanes.setdefault(lane, OrderedDict())
        for position, row in enumerate(rows):
            query = None if queries is None else queries[position]
            item = Item(ticket, position, lane, row, query, now_s)
            ticket.add(item)
            queue[item] = None
        self._count(lane.model, tokens, len(rows))
        return ticket

    def drop(self, ticket: Ticket) -> int:
        """Forget what of `ticket` isn't settled; the number of items that were still queued."""
        queued = [item for item in ticket.items if item.state is State.QUEUED]
        self._remove(queued)
        for item in ticket.items:
            if item.state is not State.SETTLED:
                item.state = State.DROPPED
        if queued:
            self._metrics.cancelled_items.inc(len(queued))
        return len(queued)

    def lanes_by_turn(self) -> Iterator[Lane]:
        """Lanes that have items, in the order in which they should be served."""
        heads = (
            (next(iter(queue)).enqueued_s, n, lane) for n, (lane, queue) in enumerate(self._lanes.items())
        )
        for _, _, lane in sorted(heads, key=lambda head: head[:2]):
            yield lane

    def waiting(self, lane: Lane) -> Iterable[Item]:
        """Items of `lane`, oldest first; not to be changed while iterated."""
        return self._lanes.get(lane, OrderedDict())

    def take(self, items: Sequence[Item]) -> None:
        """Move queued items of one lane out, to a batch."""
        self._remove(items)
        for item in items:
            item.state = State.DISPATCHED

    def oldest_s(self) -> float:
        """Age of the oldest waiting item, seconds; 0 for none. May be asked from any thread."""
        enqueued_s = self._oldest_enqueued_s
        return 0.0 if enqueued_s == math.inf else self._now_s() - enqueued_s

    def estimated_wait_s(self) -> float:
        """Seconds until the pool could begin with what is admitted now; 0 before anything was measured."""
        rate = self._meter.tokens_per_second
        return (self.queued_tokens + self.outstanding_tokens) / rate if rate else 0.0

    def _check(self, tokens: int, items: int, deadline_s: float) -> None:
        limits = self._limits
        for size, limit, unit in ((tokens, limits.tokens, "tokens"), (items, limits.items, "inputs")):
            if size > limit:
                raise InvalidArgument(
                    f"the request has {size} {unit} and the whole queue holds {limit}"
                    f" (encoder.max_queued_tokens is {limits.tokens}); split it",
                    reason="REQUEST_TOO_LARGE",
                )
        excess_tokens = self.queued_tokens + tokens - limits.tokens
        excess_items = self.queued_items + items - limits.items
        if excess_tokens > 0 or excess_items > 0:
            share = excess_items / self.queued_items * self.queued_tokens if excess_items > 0 else 0.0
            raise self._refusal("QUEUE_FULL", "the queue is full", max(float(excess_tokens), share))
        wait_s = self.estimated_wait_s()
        remaining_s = deadline_s - self._now_s()
        longest_s = min(limits.wait_s, remaining_s)
        if wait_s > longest_s:
            what = "the call's deadline" if remaining_s < limits.wait_s else "the longest wait"
            excess = (wait_s - longest_s) * self._meter.tokens_per_second
            raise self._refusal(
                "WAIT_TOO_LONG",
                f"the estimated wait of {wait_s:.1f} s is beyond {what} of {longest_s:.1f} s",
                excess,
            )

    def _refusal(self, reason: str, words: str, excess_tokens: float) -> ResourceExhausted:
        """An error that says to come back when `excess_tokens` have been computed."""
        self._metrics.rejected.labels(reason).inc()
        rate = self._meter.tokens_per_second
        retry_s = max(_SHORTEST_RETRY_S, excess_tokens / rate) if rate else _UNMEASURED_RETRY_S
        return ResourceExhausted(
            f"{words}; try again in {retry_s:.2f} s", reason=reason, retry_after_s=retry_s
        )

    def _remove(self, items: Sequence[Item]) -> None:
        """Take queued items of one lane out of queue and counters."""
        if not items:
            return
        lane = items[0].lane
        queue = self._lanes[lane]
        for item in items:
            del queue[item]
        if not queue:
            # Lanes differ by what callers ask for; empty ones would pile up.
            del self._lanes[lane]
        self._count(lane.model, -sum(item.tokens for item in items), -len(items))

    def _count(self, model: str, tokens: int, items: int) -> None:
        self._oldest_enqueued_s = min(
            (next(iter(queue)).enqueued_s for queue in self._lanes.values()), default=math.inf
        )
        self.queued_tokens += tokens
        self.queued_items += items
        self._model_tokens[model] = self._model_tokens.get(model, 0) + tokens
        self._model_items[model] = self._model_items.get(model, 0) + items
        self._metrics.queue_tokens.labels(model).set(self._model_tokens[model])
        self._metrics.queue_items.labels(model).set(self._model_items[model])
