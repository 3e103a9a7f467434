"""What waits in the queue and what becomes of it: the batcher's own words, free of protobuf.

A `Ticket` is one caller's claim on the results of a group of items; an `Item` is one sequence of it.

Invariant: an item is in exactly one state, and moves only from QUEUED to DISPATCHED to SETTLED, or from
either of the first two to DROPPED.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import Enum, auto

from opentelemetry.trace import SpanContext

from phasemesh.encoder.rows import Row
from phasemesh.errors import PhasemeshError
from phasemesh.pool.protocol import Float32, Floating, Output


@dataclass(frozen=True, slots=True)
class Lane:
    """What items must share to share a batch.

    Attributes:
        model: name of a loaded model.
        outputs: what is computed.
        token_dtype: dtype of token vectors, "float16" or "float32".
    """

    model: str
    outputs: frozenset[Output]
    token_dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class Encoded:
    """What the engine answered for one item; parts that weren't asked for are None.

    Attributes:
        dense: float32[dim], not normalised.
        tokens: [rows kept, token_dim].
        logits: float32[labels].
        maxsim: the score against the item's query.
    """

    dense: Float32 | None = None
    tokens: Floating | None = None
    logits: Float32 | None = None
    maxsim: float | None = None


class State(Enum):
    """Where an item stands."""

    QUEUED = auto()
    DISPATCHED = auto()
    SETTLED = auto()
    DROPPED = auto()


@dataclass(slots=True, eq=False)
class Item:
    """One sequence that waits for its result.

    Attributes:
        ticket: the claim it belongs to.
        position: its place in `Ticket.results`.
        lane: what it may share a batch with.
        row: the sequence.
        query: for MAXSIM: float32[q, token_dim].
        enqueued_s: monotonic time at which it was admitted.
        state: see `State`.
    """

    ticket: Ticket
    position: int
    lane: Lane
    row: Row
    query: Float32 | None
    enqueued_s: float
    state: State = State.QUEUED

    @property
    def tokens(self) -> int:
        """Real tokens."""
        return len(self.row)

    def settle(self, result: Encoded | PhasemeshError) -> None:
        """Give the caller this item's result; no-op for an item that was dropped."""
        if self.state is State.DROPPED:
            return
        assert self.state is State.DISPATCHED, self.state
        self.state = State.SETTLED
        self.ticket.put(self.position, result)


@dataclass(slots=True, eq=False)
class Ticket:
    """One caller's claim; `wait` ends when every item is settled.

    Attributes:
        deadline_s: monotonic time after which nobody waits for it.
        span_context: of the request's server span.
        items: in the order of the caller's rows.
        results: one per item, in the same order.
        dispatched_ns: when the first of the items was handed to the pool; 0 for none yet.
        first_start_ns: start of the first forward that held one of the items and came back; 0 for none yet.
        last_end_ns: arrival of the last result.
        last_pool_ns: what the worker spent pooling in the batch that brought the last result.
        batches: span contexts of the batches that held the items.
    """

    deadline_s: float
    span_context: SpanContext
    items: list[Item] = field(default_factory=list)
    results: list[Encoded | PhasemeshError | None] = field(default_factory=list)
    dispatched_ns: int = 0
    first_start_ns: int = 0
    last_end_ns: int = 0
    last_pool_ns: int = 0
    batches: list[SpanContext] = field(default_factory=list)
    _missing: int = 0
    _error: PhasemeshError | None = None
    _done: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, item: Item) -> None:
        """Claim one more item's result."""
        self.items.append(item)
        self.results.append(None)
        self._missing += 1

    def put(self, position: int, result: Encoded | PhasemeshError) -> None:
        """Note a result, once per position."""
        assert self.results[position] is None, "an item was settled twice"
        self.results[position] = result
        self._missing -= 1
        if self._missing == 0:
            self._done.set()

    def note_batch(self, start_ns: int, end_ns: int, pool_ns: int, batch: SpanContext) -> None:
        """Note a batch that held one or more of the items."""
        self.first_start_ns = min(self.first_start_ns or start_ns, start_ns)
        if end_ns >= self.last_end_ns:
            self.last_end_ns, self.last_pool_ns = end_ns, pool_ns
        if batch.is_valid and batch not in self.batches:
            self.batches.append(batch)

    @property
    def done(self) -> bool:
        """Whether every item is settled."""
        return self._missing == 0

    def fail(self, error: PhasemeshError) -> None:
        """End the claim as a whole; its items have been dropped."""
        self._error = error
        self._done.set()

    async def wait(self) -> list[Encoded | PhasemeshError]:
        """The results, in the order of the items.

        Raises:
            PhasemeshError: the claim failed as a whole.
        """
        if self._missing:
            await self._done.wait()
        if self._error is not None:
            raise self._error
        return [result for result in self.results if result is not None]
