"""A numpy engine for tests of what sits above it: deterministic, torch-free, with faults on request.

Its dense vector of a sequence is the sum over tokens of one-hot vectors at `hash_of(token)`, so that a test
can tell whose result it holds. Token ids at and above `FAULTS` make it misbehave, and `ModelSpec.source`
"hash?seconds=0.5" makes every forward take that long.
"""

from __future__ import annotations

import hashlib
import os
import time

import numpy as np
import numpy.typing as npt

from phasemesh.pool.protocol import (
    Batch,
    BatchResult,
    ComputeFailed,
    LoadedModel,
    ModelSpec,
    Output,
    Sequences,
    WorkerTimings,
)
from phasemesh.recipe.model import Activation, ModelKind, Pooling, Recipe

DIM = 64
FAULTS = 1_000_000
FAIL = FAULTS + 1
OUT_OF_MEMORY = FAULTS + 2
DEVICE_LOST = FAULTS + 3
CRASH = FAULTS + 4
BUG = FAULTS + 5
NAN = FAULTS + 6
#: Sleeps `SLEEP_S`.
SLEEP = FAULTS + 7
SLEEP_S = 1.0


class DeviceLost(Exception):
    """The pretended device is gone."""


def hash_of(tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.int64]:
    """Bucket of each token id (Knuth's multiplicative hash)."""
    return (tokens.astype(np.int64) * 2654435761 % 2**32) % DIM


def expected_dense(rows: list[list[int]]) -> npt.NDArray[np.float32]:
    """What the engine answers for `rows`, computed token by token."""
    out = np.zeros((len(rows), DIM), np.float32)
    for i, row in enumerate(rows):
        for token in row:
            out[i, token * 2654435761 % 2**32 % DIM] += 1
    return out


def batch_of(
    rows: list[list[int]],
    *,
    batch_id: str = "b",
    model: str = "hash",
    outputs: frozenset[Output] = frozenset({Output.DENSE}),
    carrier: dict[str, str] | None = None,
) -> Batch:
    """A batch of token rows."""
    sequences = Sequences(
        input_ids=np.array([t for row in rows for t in row], np.int32),
        cu_seqlens=np.cumsum([0, *map(len, rows)], dtype=np.int32),
    )
    return Batch(batch_id, model, outputs, sequences, carrier=carrier or {})


class HashEngine:
    """See the module docstring."""

    def __init__(self, device: str = "auto", threads: int | None = None) -> None:
        self.device = "cpu" if device == "auto" else device
        self.threads = threads or 1
        self._seconds: dict[str, float] = {}
        self._warm: set[str] = set()

    def load(self, spec: ModelSpec) -> LoadedModel:
        source, _, seconds = spec.source.partition("?seconds=")
        if not source.startswith("hash"):
            raise ValueError(f"model {spec.name!r}: source is {spec.source!r}; this engine knows 'hash' only")
        self._seconds[spec.name] = float(seconds or 0)
        if source == "hash-differs":
            source += str(os.getpid())
        return LoadedModel(
            name=spec.name,
            recipe=_recipe(source),
            tokenizer_json="{}",
            dtype="float32",
            device=self.device,
            weight_bytes=0,
        )

    def warm_up(self, model: str) -> None:
        self._warm.add(model)

    def forward(self, batch: Batch) -> BatchResult:
        started = time.time_ns()
        if batch.model not in self._warm:
            raise AssertionError(f"{batch.model} was never warmed up")
        ids = batch.sequences.input_ids
        _misbehave(ids)
        at = time.perf_counter_ns()
        time.sleep(self._seconds[batch.model])
        offsets = batch.sequences.cu_seqlens
        onehot = np.zeros((len(ids), DIM), np.float32)
        onehot[np.arange(len(ids)), hash_of(ids)] = 1
        dense = np.add.reduceat(onehot, offsets[:-1])
        bad = sorted({int(np.searchsorted(offsets, i, "right")) - 1 for i in np.flatnonzero(ids == NAN)})
        dense[bad] = 0
        computed = time.perf_counter_ns()
        wants_tokens = Output.TOKENS in batch.outputs
        return BatchResult(
            dense=dense if Output.DENSE in batch.outputs else None,
            tokens=onehot.astype(batch.token_dtype) if wants_tokens else None,
            token_offsets=offsets.astype(np.int64) if wants_tokens else None,
            logits=None,
            maxsim=None,
            nonfinite=tuple(bad),
            timings=WorkerTimings(
                started_unix_ns=started,
                transfer_ns=1_000,
                compute_ns=computed - at,
                pool_ns=2_000,
                padded_tokens=len(ids),
            ),
        )


def _misbehave(ids: npt.NDArray[np.int32]) -> None:
    if FAIL in ids:
        raise ComputeFailed("poison")
    if OUT_OF_MEMORY in ids:
        raise ComputeFailed("out of memory", out_of_memory=True)
    if DEVICE_LOST in ids:
        raise DeviceLost("illegal memory access")
    if CRASH in ids:
        os._exit(1)
    if BUG in ids:
        raise IndexError("a bug")
    if SLEEP in ids:
        time.sleep(SLEEP_S)


def _recipe(source: str) -> Recipe:
    return Recipe(
        kind=ModelKind.EMBEDDER,
        architecture="HashModel",
        model_type="hash",
        max_tokens=512,
        hidden_size=DIM,
        dim=DIM,
        token_dim=DIM,
        pooling=(Pooling.MEAN,),
        include_prompt=True,
        normalize=True,
        lower_case=False,
        prompts=(),
        default_prompt=None,
        matryoshka_dims=(),
        labels=0,
        activation=Activation.IDENTITY,
        late_interaction=None,
        vocab_size=2**31 - 1,
        weights_digest=hashlib.sha256(source.encode()).hexdigest(),
        tokenizer_digest="0" * 64,
    )
