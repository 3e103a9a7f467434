"""The seam between the encoder service and whatever runs its batches.

One call carries one batch. Everything that crosses is numpy and frozen dataclasses, so that a batch can go
to a Ray actor, a thread or a test fake alike; nothing here imports ray or torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from phasemesh.recipe.model import Recipe

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]
Float32 = npt.NDArray[np.float32]
Floating = npt.NDArray[np.floating]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One model to load, as the configuration names it.

    Attributes:
        name: the name callers use.
        source: a local directory, or a Hugging Face repository id.
        revision: commit, branch or tag of the repository; None takes its default branch.
        dtype: "auto" (bfloat16 where the device has it, else float32), "float32", "bfloat16" or "float16".
        max_tokens: lowers the recipe's limit; None keeps it.
        matryoshka_dims: sizes to allow where the checkpoint's files don't say; None keeps the files' word.
    """

    name: str
    source: str
    revision: str | None = None
    dtype: str = "auto"
    max_tokens: int | None = None
    matryoshka_dims: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What a worker tells the service about a model it has loaded.

    Attributes:
        name: as in its `ModelSpec`.
        recipe: the recipe, after the specification's overrides.
        tokenizer_json: the serialised `tokenizers.Tokenizer`, without truncation or padding.
        mask_token_id: the tokenizer's mask token, which expands late-interaction queries; None for none.
        dtype: dtype of the backbone's weights, e.g. "bfloat16".
        device: e.g. "cpu", "cuda:0".
        weight_bytes: memory that the weights take.
    """

    name: str
    recipe: Recipe
    tokenizer_json: str
    dtype: str
    device: str
    weight_bytes: int
    mask_token_id: int | None = None


class Output(StrEnum):
    """What a batch is to compute, per item."""

    DENSE = "dense"
    TOKENS = "tokens"
    LOGITS = "logits"
    MAXSIM = "maxsim"


@dataclass(frozen=True, slots=True)
class Sequences:
    """Token sequences of a batch, packed one after another.

    Attributes:
        input_ids: int32[T], special tokens included.
        cu_seqlens: int32[n + 1], row i is `input_ids[cu_seqlens[i]:cu_seqlens[i + 1]]`; no row is empty.
        type_ids: int32[T], or None for all zero.
        attended: bool[T], False where no token attends (ColBERT's unattended expansion); None for all True.
        kept: bool[T], which rows of the token vectors are returned and scored; None for all True.
        prompt_tokens: int32[n], leading tokens that mean pooling leaves out; None for none.
    """

    input_ids: Int32
    cu_seqlens: Int32
    type_ids: Int32 | None = None
    attended: Bool | None = None
    kept: Bool | None = None
    prompt_tokens: Int32 | None = None

    def __len__(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def tokens(self) -> int:
        """Real tokens of all sequences."""
        return len(self.input_ids)


@dataclass(frozen=True, slots=True)
class Batch:
    """One unit of work for one replica: sequences of one model that want the same outputs.

    Attributes:
        batch_id: unique; the batch's span carries it.
        model: name of a loaded model.
        outputs: what to compute; LOGITS for cross-encoders only, MAXSIM for late-interaction models only.
        sequences: the inputs.
        token_dtype: dtype of returned token vectors, "float16" or "float32".
        query_vectors: for MAXSIM: float32[q, token_dim], unit rows, one matrix per distinct query.
        query_of: for MAXSIM: int32[n], index into `query_vectors` for each sequence.
        carrier: W3C trace context of the batch's span, for the worker's own spans.
    """

    batch_id: str
    model: str
    outputs: frozenset[Output]
    sequences: Sequences
    token_dtype: str = "float32"
    query_vectors: tuple[Float32, ...] = ()
    query_of: Int32 | None = None
    carrier: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WorkerTimings:
    """Where a batch's time went inside the worker, nanoseconds.

    Attributes:
        started_unix_ns: wall-clock time at which the worker began with the batch.
        transfer_ns: padding and copying inputs to the device.
        compute_ns: the backbone's forward pass.
        pool_ns: pooling, heads, MaxSim and copying results to the host.
        padded_tokens: tokens computed, padding included.
    """

    started_unix_ns: int
    transfer_ns: int
    compute_ns: int
    pool_ns: int
    padded_tokens: int


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What a replica answers; every array is in the order of the batch's sequences.

    Attributes:
        dense: float32[n, dim], pooled and projected but *not* normalised: slicing comes before the norm.
        tokens: [R, token_dim] of `Batch.token_dtype`: rows kept of all sequences, packed. Unit rows for
            late-interaction models, raw states otherwise.
        token_offsets: int64[n + 1], rows of sequence i are `tokens[token_offsets[i]:token_offsets[i + 1]]`.
        logits: float32[n, labels], before the activation.
        maxsim: float32[n], sum (or mean where the recipe says so) over query vectors of the best similarity.
        nonfinite: indices of sequences whose result holds NaN or Inf; their rows are zero.
        timings: see `WorkerTimings`.
        replica_id: the replica that computed it.
        pid: its operating-system process.
    """

    dense: Float32 | None
    tokens: Floating | None
    token_offsets: Int64 | None
    logits: Float32 | None
    maxsim: Float32 | None
    nonfinite: tuple[int, ...]
    timings: WorkerTimings
    replica_id: str = ""
    pid: int = 0


class ReplicaState(StrEnum):
    """Where a replica stands."""

    STARTING = "starting"
    READY = "ready"
    RESTARTING = "restarting"
    FAILED = "failed"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class ReplicaStats:
    """One replica, as its supervisor last saw it.

    Attributes:
        replica_id: stable over restarts.
        state: see `ReplicaState`.
        pid: operating-system process, 0 before the first start.
        device: e.g. "cuda:0", "cpu".
        accelerator_ids: what `CUDA_VISIBLE_DEVICES` names for it; empty on CPU.
        threads: torch's intra-op threads.
        in_flight: batches running or queued at the replica.
        restarts: times it was restarted.
        last_ok_unix_ns: wall-clock time of its last finite forward, 0 for never.
    """

    replica_id: str
    state: ReplicaState
    pid: int
    device: str
    accelerator_ids: tuple[str, ...]
    threads: int
    in_flight: int
    restarts: int
    last_ok_unix_ns: int


@dataclass(frozen=True, slots=True)
class PoolStats:
    """The pool as its supervisor last saw it; cheap to take."""

    replicas: tuple[ReplicaStats, ...]

    #: One batch runs and one waits behind it, so that the hop to the worker is hidden.
    SLOTS_PER_REPLICA = 2

    @property
    def ready(self) -> int:
        """Replicas that can take work now."""
        return sum(r.state is ReplicaState.READY for r in self.replicas)

    @property
    def capacity(self) -> int:
        """Batches that may be outstanding at once."""
        return self.SLOTS_PER_REPLICA * self.ready

    @property
    def recovering(self) -> bool:
        """Whether a replica that can't take work now may take some later."""
        return any(r.state in (ReplicaState.STARTING, ReplicaState.RESTARTING) for r in self.replicas)

    @property
    def lost(self) -> bool:
        """Whether every replica has failed for good."""
        return all(r.state is ReplicaState.FAILED for r in self.replicas)


class ComputeFailed(Exception):
    """The worker is well but the batch raised; a smaller batch may succeed.

    Attributes:
        out_of_memory: the device ran out of memory, so a smaller batch is likely to succeed.
        worker_traceback: where it was raised, for the service's log: an exception loses its traceback, and
            the one that caused it, on the way out of a worker's process. Empty where the message says all.
    """

    def __init__(self, message: str, *, out_of_memory: bool = False, worker_traceback: str = "") -> None:
        super().__init__(message)
        self.out_of_memory = out_of_memory
        self.worker_traceback = worker_traceback

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_compute_failed, (self.args[0], self.out_of_memory, self.worker_traceback))


def _rebuild_compute_failed(message: str, out_of_memory: bool, worker_traceback: str) -> ComputeFailed:
    return ComputeFailed(message, out_of_memory=out_of_memory, worker_traceback=worker_traceback)


class ReplicaLost(Exception):
    """Every try at the batch met a dead or dying replica, or there is none to try.

    Attributes:
        deaths: tries that ended with the replica's death. It may be the batch that kills them; 0 where the
            batch never got to a replica.
    """

    def __init__(self, message: str, *, deaths: int = 0) -> None:
        super().__init__(message)
        self.deaths = deaths


class ReplicaPool(Protocol):
    """Runs batches on replicas of a fixed set of models."""

    async def submit(self, batch: Batch, *, suspect: bool = False) -> BatchResult:
        """Run `batch` on the least busy replica; wait for one if all are restarting.

        A batch whose replica dies is tried once more, on another replica where there is one.

        Args:
            batch: what to run.
            suspect: it may have killed a replica before. It is then tried once only, and a death that it
                causes says nothing against the replica.

        Raises:
            ComputeFailed: the batch itself failed; the replica lives on.
            ReplicaLost: the retry was lost too, or no replica can come back.
        """
        ...

    def stats(self) -> PoolStats:
        """The replicas as last seen; never blocks."""
        ...
