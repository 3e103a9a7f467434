"""A numpy pool under the test's control: what it computes is honest, when it answers is the test's choice.

The dense vector of a sequence is (sum of ids, number of ids, id-weighted positions), so that no two different
sequences of a test share one, repeated to the width asked for. Token vectors are rows of a fixed random table; a logit is the mean id.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

import numpy as np

from phasemesh.pool.protocol import (
    Batch,
    BatchResult,
    ComputeFailed,
    Output,
    PoolStats,
    ReplicaLost,
    ReplicaState,
    ReplicaStats,
    WorkerTimings,
)

TOKEN_DIM = 4


def dense_of(ids: np.ndarray, dim: int = 3) -> np.ndarray:
    wide = ids.astype(np.float64)
    numbers = np.array([wide.sum(), len(wide), (wide * np.arange(1, len(wide) + 1)).sum()], np.float32)
    resized: np.ndarray = np.resize(numbers, dim)
    return resized


def token_vectors(ids: np.ndarray) -> np.ndarray:
    """Unit rows that depend on the id alone."""
    angles = np.outer(ids.astype(np.float64) + 1, np.array([0.7, 1.3, 2.1, 2.9]))
    rows = np.sin(angles) + 0.01
    unit: np.ndarray = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)
    return unit


class FakePool:
    """See the module docstring. With `held`, batches wait until the test lets them go."""

    def __init__(
        self, *, replicas: int = 1, held: bool = False, max_tokens: int | None = None, dim: int = 3
    ) -> None:
        self.batches: list[Batch] = []
        self.held = held
        self.dim = dim
        #: More padded tokens than this are out of memory.
        self.max_tokens = max_tokens
        self.poison: set[int] = set()
        self.nan: set[int] = set()
        self.lost = False
        self.states = [ReplicaState.READY] * replicas
        self.pool_ns = 1_000
        self.in_flight = 0
        self.most_in_flight = 0
        self.arrived = asyncio.Event()
        self.last_ok_unix_ns = 0
        self._gates: list[asyncio.Event] = []
        self._listeners: list[Callable[[], None]] = []
        self._turn = itertools.count()

    def add_listener(self, listener: Callable[[], None]) -> Callable[[], None]:
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def set_states(self, *states: ReplicaState) -> None:
        self.states = list(states)
        for listener in self._listeners:
            listener()

    def stats(self) -> PoolStats:
        return PoolStats(
            tuple(
                ReplicaStats(f"r{i}", state, 100 + i, "cpu", (), 1, 0, 0, self.last_ok_unix_ns)
                for i, state in enumerate(self.states)
            )
        )

    async def wait_for(self, batches: int) -> None:
        """Until so many batches were submitted in all."""
        while len(self.batches) < batches:
            self.arrived.clear()
            await asyncio.wait_for(self.arrived.wait(), 10)

    def release(self, index: int | None = None) -> None:
        """Let one held batch go, or all and everything after."""
        if index is None:
            self.held = False
            for gate in self._gates:
                gate.set()
        else:
            self._gates[index].set()

    async def submit(self, batch: Batch, *, suspect: bool = False) -> BatchResult:
        self.batches.append(batch)
        gate = asyncio.Event()
        self._gates.append(gate)
        self.arrived.set()
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        replica = f"r{next(self._turn) % len(self.states)}"
        try:
            if self.held:
                await gate.wait()
            else:
                await asyncio.sleep(0)
        finally:
            self.in_flight -= 1
        if self.lost:
            raise ReplicaLost("the replica died twice")
        return self._compute(batch, replica)

    def _compute(self, batch: Batch, replica: str) -> BatchResult:
        sequences = batch.sequences
        ids, bounds = sequences.input_ids, sequences.cu_seqlens
        n = len(sequences)
        padded = int(np.diff(bounds).max()) * n
        if self.max_tokens is not None and padded > self.max_tokens:
            raise ComputeFailed("secret: CUDA out of memory", out_of_memory=True)
        if self.poison & set(ids.tolist()):
            raise ComputeFailed("secret: poison")
        rows = [ids[bounds[i] : bounds[i + 1]] for i in range(n)]
        bad = tuple(i for i, row in enumerate(rows) if self.nan & set(row.tolist()))
        dense = np.stack([dense_of(row, self.dim) for row in rows])
        kept = np.ones(len(ids), bool) if sequences.kept is None else sequences.kept
        vectors = [token_vectors(row[kept[bounds[i] : bounds[i + 1]]]) for i, row in enumerate(rows)]
        maxsim = None
        if batch.query_of is not None:
            maxsim = np.array(
                [(batch.query_vectors[batch.query_of[i]] @ vectors[i].T).max(axis=1).sum() for i in range(n)],
                np.float32,
            )
        dense[list(bad)] = 0
        self.last_ok_unix_ns = 1
        wants_tokens = Output.TOKENS in batch.outputs
        return BatchResult(
            dense=dense if Output.DENSE in batch.outputs else None,
            tokens=np.concatenate(vectors).astype(batch.token_dtype) if wants_tokens else None,
            token_offsets=np.cumsum([0, *map(len, vectors)], dtype=np.int64) if wants_tokens else None,
            logits=np.array([[row.mean()] for row in rows], np.float32)
            if Output.LOGITS in batch.outputs
            else None,
            maxsim=maxsim,
            nonfinite=bad,
            timings=WorkerTimings(0, 0, 0, self.pool_ns, padded),
            replica_id=replica,
            pid=1,
        )
