"""Who may send a batch to which replica: the accounting of the slots.

Invariant: a replica never holds more than `PoolStats.SLOTS_PER_REPLICA` batches, one running and one queued
behind it. A slot is taken when `acquire` returns and is free again only after `release`, whatever became of
the task that asked for it. Waiters are served in the order in which they came.

Everything runs on one event loop; nothing here knows of Ray.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from dataclasses import dataclass, field

from phasemesh.pool.protocol import PoolStats, ReplicaLost


@dataclass(slots=True)
class _Slot:
    in_flight: int = 0
    ready: bool = False
    failed: bool = False


@dataclass(slots=True)
class _Waiter:
    avoid: str | None
    granted: asyncio.Future[str] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class SlotTable:
    """Slots of a fixed set of replicas."""

    def __init__(self, replica_ids: tuple[str, ...], rng: random.Random) -> None:
        self._slots = {replica_id: _Slot() for replica_id in replica_ids}
        self._waiters: deque[_Waiter] = deque()
        self._rng = rng
        self._closed: str | None = None

    def in_flight(self, replica_id: str) -> int:
        """Slots of the replica that are taken."""
        return self._slots[replica_id].in_flight

    @property
    def total_in_flight(self) -> int:
        """Slots that are taken, of all replicas."""
        return sum(slot.in_flight for slot in self._slots.values())

    async def acquire(self, avoid: str | None = None) -> str:
        """Take a slot at the least busy ready replica and return the replica's id; wait for one if need be.

        Args:
            avoid: a replica to leave alone for as long as another one is ready.

        Raises:
            ReplicaLost: every replica has failed for good, or the table is closed.
        """
        waiter = _Waiter(avoid)
        self._waiters.append(waiter)
        self._serve()
        try:
            return await waiter.granted
        except asyncio.CancelledError:
            # The grant may have come in the same turn of the loop as the cancellation.
            if waiter.granted.done() and not waiter.granted.cancelled() and not waiter.granted.exception():
                self.release(waiter.granted.result())
            raise

    def release(self, replica_id: str) -> None:
        """Give one slot back."""
        slot = self._slots[replica_id]
        if slot.in_flight < 1:
            raise AssertionError(f"replica {replica_id} has no slot to release")
        slot.in_flight -= 1
        self._serve()

    def set_ready(self, replica_id: str, ready: bool) -> None:
        """Let the replica take batches, or stop it from taking more; its taken slots stay taken."""
        self._slots[replica_id].ready = ready
        self._serve()

    def fail(self, replica_id: str) -> None:
        """Give the replica up for good."""
        slot = self._slots[replica_id]
        slot.ready, slot.failed = False, True
        self._serve()

    def close(self, reason: str) -> None:
        """Refuse everyone who waits and everyone who comes."""
        self._closed = reason
        self._serve()

    def _serve(self) -> None:
        """Grant what can be granted."""
        refusal = self._closed
        if refusal is None and all(slot.failed for slot in self._slots.values()):
            refusal = "every replica has failed"
        kept: deque[_Waiter] = deque()
        while self._waiters:
            waiter = self._waiters.popleft()
            if waiter.granted.done():
                continue
            if refusal is not None:
                waiter.granted.set_exception(ReplicaLost(refusal))
            elif (replica_id := self._pick(waiter.avoid)) is not None:
                self._slots[replica_id].in_flight += 1
                waiter.granted.set_result(replica_id)
            else:
                kept.append(waiter)
        self._waiters = kept

    def _pick(self, avoid: str | None) -> str | None:
        ready = [replica_id for replica_id, slot in self._slots.items() if slot.ready]
        eligible = [replica_id for replica_id in ready if replica_id != avoid] or ready
        free = [r for r in eligible if self._slots[r].in_flight < PoolStats.SLOTS_PER_REPLICA]
        if not free:
            return None
        least = min(self._slots[r].in_flight for r in free)
        return self._rng.choice([r for r in free if self._slots[r].in_flight == least])
