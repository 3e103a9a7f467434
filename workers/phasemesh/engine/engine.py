"""Runs batches of several models on one device.

Invariant: a sequence's result doesn't depend on its neighbours, beyond the rounding of the backbone's dtype;
non-finite results are reported by index and never raised.
"""

from __future__ import annotations

import logging
import traceback
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from phasemesh.engine.device import free_cached_memory, pick_device, pick_dtype, translate
from phasemesh.engine.errors import ModelLoadError
from phasemesh.engine.late_interaction import maxsim_scores
from phasemesh.engine.loading import Model, load_model
from phasemesh.engine.padding import Block, blocks, packed_positions
from phasemesh.engine.pooling import pool, token_rows
from phasemesh.engine.stopwatch import Clocks, Stopwatch
from phasemesh.pool.protocol import (
    Batch,
    BatchResult,
    Bool,
    ComputeFailed,
    Floating,
    Int64,
    LoadedModel,
    ModelSpec,
    Output,
    Sequences,
)
from phasemesh.recipe.model import ModelKind
from phasemesh.recipe.source import resolve_source

_OUTPUTS = {
    ModelKind.EMBEDDER: frozenset({Output.DENSE, Output.TOKENS}),
    ModelKind.CROSS_ENCODER: frozenset({Output.LOGITS}),
    ModelKind.LATE_INTERACTION: frozenset({Output.TOKENS, Output.MAXSIM}),
}
_TOKEN_DTYPES = {"float16": torch.float16, "float32": torch.float32}

#: Cost of one more forward pass, in tokens of computation. CPU: measured with MiniLM on Zen 4, 5 to 7 ms
#: against 0.13 (bfloat16) to 0.24 ms per token. An accelerator is far from full below some thousand tokens.
_LAUNCH_TOKENS = {"cpu": 48}
_LAUNCH_TOKENS_ACCELERATOR = 4096

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Partial:
    """One block's results, still on the device; `finite` is per sequence."""

    rows: Int64
    kept: Int64
    dense: torch.Tensor | None = None
    tokens: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    maxsim: torch.Tensor | None = None
    rows_finite: torch.Tensor | None = None


class Engine:
    """A device and the models on it. Calls must come one at a time.

    Args:
        device: "auto", "cpu", "cuda", "cuda:1", "mps" or "xpu".
        threads: torch's intra-op threads, for the whole process; None leaves them.
        clocks: where `WorkerTimings` come from.
    """

    def __init__(
        self, device: str = "auto", threads: int | None = None, clocks: Clocks | None = None
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self.device = pick_device(device)
        self._clocks = clocks or Clocks()
        self._models: dict[str, Model] = {}

    @property
    def threads(self) -> int:
        """Intra-op threads that torch really uses."""
        count: int = torch.get_num_threads()
        return count

    @property
    def device_count(self) -> int:
        """Devices of its kind that this process may use."""
        count: int = torch.cuda.device_count() if self.device.type == "cuda" else 1
        return count

    def load(self, spec: ModelSpec) -> LoadedModel:
        """Load the model of `spec`, in place of one of the same name.

        Raises:
            RecipeError: the checkpoint isn't found or isn't served.
            ModelLoadError: its weights or tokenizer can't be used, or `spec.dtype` is unknown.
        """
        dtype = pick_dtype(spec.dtype, self.device)
        model = load_model(
            resolve_source(spec.source, spec.revision),
            self.device,
            dtype,
            max_tokens=spec.max_tokens,
            matryoshka_dims=spec.matryoshka_dims,
        )
        self._models[spec.name] = model
        return LoadedModel(
            name=spec.name,
            recipe=model.recipe,
            tokenizer_json=model.tokenizer_json,
            mask_token_id=model.mask_id,
            dtype=str(dtype).removeprefix("torch."),
            device=str(self.device),
            weight_bytes=model.weight_bytes,
        )

    def forward(self, batch: Batch) -> BatchResult:
        """Compute `batch`. Its arrays may be read-only.

        Raises:
            ComputeFailed: the batch doesn't fit the model or the memory, or torch failed.
            DeviceLost: the device can't be used any more; the process has to be replaced.
        """
        watch = Stopwatch(self._clocks, self.device)
        model = self._checked(batch)
        try:
            with torch.inference_mode():
                return self._forward(model, batch, watch)
        except ComputeFailed:
            raise
        except Exception as error:
            failure = translate(error)
            if isinstance(failure, ComputeFailed) and not failure.out_of_memory:
                failure.worker_traceback = traceback.format_exc()
        if isinstance(failure, ComputeFailed) and failure.out_of_memory:
            # Outside the handler, because the exception's frames hold the batch's tensors.
            free_cached_memory(self.device)
        raise failure

    def warm_up(self, model: str) -> None:
        """Run a short text through `model`, so that lazy set-up is done and its weights are known to work.

        Raises:
            ModelLoadError: the result isn't finite.
            ComputeFailed, DeviceLost: as `forward`.
        """
        if not self._probe(model):
            raise ModelLoadError(
                f"{model}: a plain text gives NaN or Inf in {self._models[model].dtype}; set dtype: float32"
            )

    def _probe(self, name: str) -> bool:
        model = self._models[name]
        ids = model.probe
        # Two rows of unequal length, so that the masked path runs too.
        short = ids[: max(1, len(ids) // 2)]
        sequences = Sequences(
            input_ids=np.concatenate([ids, short]),
            cu_seqlens=np.array([0, len(ids), len(ids) + len(short)], np.int32),
        )
        outputs = _OUTPUTS[model.recipe.kind] - {Output.MAXSIM}
        return not self.forward(Batch("probe", name, outputs, sequences)).nonfinite

    def _checked(self, batch: Batch) -> Model:
        """The batch's model. Whatever would fail on the device fails here, where it breaks nothing."""
        model = self._models.get(batch.model)
        if model is None:
            raise ComputeFailed(f"model {batch.model!r} isn't loaded; there are {', '.join(self._models)}")
        wrong = batch.outputs - _OUTPUTS[model.recipe.kind]
        if wrong or not batch.outputs:
            raise ComputeFailed(
                f"outputs {sorted(batch.outputs)}: a {model.recipe.kind} gives"
                f" {', '.join(sorted(_OUTPUTS[model.recipe.kind]))}"
            )
        if batch.token_dtype not in _TOKEN_DTYPES:
            raise ComputeFailed(f"token_dtype {batch.token_dtype!r}: use {' or '.join(_TOKEN_DTYPES)}")
        sequences = batch.sequences
        lengths = np.diff(sequences.cu_seqlens)
        if not len(lengths) or lengths.min() < 1 or sequences.cu_seqlens[-1] != sequences.tokens:
            raise ComputeFailed("cu_seqlens: sequences must be one or more, not empty, and cover input_ids")
        if lengths.max() > model.recipe.max_tokens:
            raise ComputeFailed(
                f"sequence {int(lengths.argmax())} has {lengths.max()} tokens, the limit is"
                f" {model.recipe.max_tokens}"
            )
        if sequences.input_ids.min() < 0 or sequences.input_ids.max() >= model.recipe.vocab_size:
            raise ComputeFailed(f"input_ids must be from 0 to {model.recipe.vocab_size - 1}")
        types = sequences.type_ids
        if model.type_count and types is not None and not 0 <= types.min() <= types.max() < model.type_count:
            raise ComputeFailed(f"type_ids must be from 0 to {model.type_count - 1}")
        if Output.MAXSIM in batch.outputs:
            _check_queries(batch, model.recipe.token_dim)
        return model

    def _forward(self, model: Model, batch: Batch, watch: Stopwatch) -> BatchResult:
        queries = [self._move(np.array(q, np.float32)) for q in batch.query_vectors]
        watch.begin()
        prepared = blocks(
            batch.sequences,
            pad_id=model.pad_id,
            launch_tokens=_LAUNCH_TOKENS.get(self.device.type, _LAUNCH_TOKENS_ACCELERATOR),
            with_types=model.type_count > 0,
            pool_prompt=model.recipe.include_prompt,
        )
        partials = []
        for block in prepared:
            inputs = self._inputs(block)
            watch.ready()
            output = model.network(**inputs)
            watch.computed()
            partials.append(self._finish(model, batch, block, output, queries))
            del output
            watch.begin()
        return self._collect(batch, partials, watch, sum(block.tokens for block in prepared))

    def _inputs(self, block: Block) -> dict[str, torch.Tensor]:
        inputs = {"input_ids": self._move(block.input_ids)}
        if not block.attended.all():
            inputs["attention_mask"] = self._move(block.attended.astype(np.int64))
        if block.type_ids is not None:
            inputs["token_type_ids"] = self._move(block.type_ids)
        return inputs

    def _finish(
        self, model: Model, batch: Batch, block: Block, output: Any, queries: list[torch.Tensor]
    ) -> _Partial:
        """Pool `output` for one block, without waiting for the device."""
        recipe = model.recipe
        partial = _Partial(block.rows, block.kept.sum(axis=1))
        if Output.LOGITS in batch.outputs:
            partial.logits = output.logits.float()
            return partial
        states = output.last_hidden_state
        if Output.DENSE in batch.outputs:
            partial.dense = pool(states, self._move(block.pooled), recipe.pooling)
        if batch.outputs & {Output.TOKENS, Output.MAXSIM}:
            rows = token_rows(states, self._move(np.flatnonzero(block.kept)), model.projections)
            if Output.TOKENS in batch.outputs:
                partial.tokens = rows.to(_TOKEN_DTYPES[batch.token_dtype])
            # After the conversion: a raw state may not fit float16.
            partial.rows_finite = torch.isfinite(rows if partial.tokens is None else partial.tokens).all(
                dim=1
            )
            if Output.MAXSIM in batch.outputs:
                assert recipe.late_interaction is not None
                mean = recipe.late_interaction.mean
                partial.maxsim = self._score(batch, block, rows, queries, mean=mean)
        return partial

    def _score(
        self, batch: Batch, block: Block, rows: torch.Tensor, queries: list[torch.Tensor], *, mean: bool
    ) -> torch.Tensor:
        """MaxSim of each of the block's sequences with its query: float32[b]."""
        assert batch.query_of is not None
        query_of = batch.query_of[block.rows]
        counts = block.kept.sum(axis=1)
        scores = torch.zeros(len(block.rows), device=self.device)
        for query in np.unique(query_of):
            mine = np.flatnonzero(query_of == query)
            wanted = np.flatnonzero(np.repeat(query_of == query, counts))
            chosen = rows.index_select(0, self._move(wanted))
            scores[self._move(mine)] = maxsim_scores(chosen, counts[mine], queries[int(query)], mean=mean)
        return scores

    def _collect(
        self, batch: Batch, partials: list[_Partial], watch: Stopwatch, padded_tokens: int
    ) -> BatchResult:
        """Read the blocks' results, put them in the batch's order and blank what isn't finite."""
        count = len(batch.sequences)
        finite = np.ones(count, np.bool_)
        dense = _gather([p.dense for p in partials], partials, count)
        logits = _gather([p.logits for p in partials], partials, count)
        maxsim = _gather([p.maxsim for p in partials], partials, count)
        for array in (dense, logits, maxsim):
            if array is not None:
                finite &= np.isfinite(array).reshape(count, -1).all(axis=1)
        offsets = np.zeros(count + 1, np.int64)
        for partial in partials:
            offsets[1:][partial.rows] = partial.kept
            if partial.rows_finite is not None:
                owners = np.repeat(partial.rows, partial.kept)
                finite[owners[~partial.rows_finite.cpu().numpy()]] = False
        np.cumsum(offsets, out=offsets)
        tokens = _gather_tokens(partials, offsets) if Output.TOKENS in batch.outputs else None

        broken = np.flatnonzero(~finite)
        for array in (dense, logits, maxsim):
            if array is not None:
                array[broken] = 0
        if tokens is not None:
            tokens[packed_positions(offsets, broken)] = 0
        if len(broken):
            _logger.warning("batch %s: %d sequences gave NaN or Inf", batch.batch_id, len(broken))
        return BatchResult(
            dense=dense,
            tokens=tokens,
            token_offsets=offsets if tokens is not None else None,
            logits=logits,
            maxsim=maxsim,
            nonfinite=tuple(int(index) for index in broken),
            timings=watch.timings(padded_tokens),
        )

    def _move(self, array: Bool | Int64 | Floating) -> torch.Tensor:
        """`array`, which must be writable, on the device."""
        tensor = torch.from_numpy(array)
        if self.device.type == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor.to(self.device)


def _check_queries(batch: Batch, dim: int) -> None:
    query_of, count = batch.query_of, len(batch.query_vectors)
    if query_of is None or len(query_of) != len(batch.sequences):
        raise ComputeFailed("query_of must name a query for every sequence")
    if len(query_of) and not 0 <= query_of.min() <= query_of.max() < count:
        raise ComputeFailed(f"query_of must be from 0 to {count - 1}")
    for index, query in enumerate(batch.query_vectors):
        if query.ndim != 2 or query.shape[1] != dim:
            raise ComputeFailed(f"query_vectors[{index}] has shape {query.shape}, it must be [q, {dim}]")


def _gather(tensors: list[torch.Tensor | None], partials: list[_Partial], count: int) -> Floating | None:
    """Per-sequence results of all blocks in the batch's order, float32."""
    found = [tensor for tensor in tensors if tensor is not None]
    if not found:
        return None
    values = torch.cat(found).cpu().numpy()
    result = np.empty((count, *values.shape[1:]), np.float32)
    result[np.concatenate([partial.rows for partial in partials])] = values
    return result


def _gather_tokens(partials: list[_Partial], offsets: Int64) -> Floating:
    """Token rows of all blocks in the batch's order, packed."""
    values = torch.cat([p.tokens for p in partials if p.tokens is not None]).cpu().numpy()
    result: Floating = np.empty_like(values)
    result[packed_positions(offsets, np.concatenate([partial.rows for partial in partials]))] = values
    return result
