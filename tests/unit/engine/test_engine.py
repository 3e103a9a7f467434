"""The engine's edges: broken items, refused batches, clocks, devices."""

from __future__ import annotations

import itertools
import pickle
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from phasemesh.engine.device import has_fast_bfloat16, pick_device, pick_dtype, translate
from phasemesh.engine.engine import Engine
from phasemesh.engine.errors import DeviceLost, ModelLoadError
from phasemesh.engine.padding import split
from phasemesh.engine.stopwatch import Clocks
from phasemesh.pool.protocol import Batch, BatchResult, ComputeFailed, ModelSpec, Output, Sequences
from tests.fakes import checkpoints

POISON = 20


@pytest.fixture
def engine() -> Engine:
    return Engine("cpu", threads=1)


def packed(*rows: list[int], **more: object) -> Sequences:
    cu_seqlens = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int32)
    return Sequences(np.concatenate(rows).astype(np.int32), cu_seqlens, **more)  # type: ignore[arg-type]  # fields


def run(engine: Engine, model: str, sequences: Sequences, *outputs: Output, **more: object) -> BatchResult:
    return engine.forward(Batch("b", model, frozenset(outputs), sequences, **more))  # type: ignore[arg-type]  # fields


def poison(path: Path, name: str = "embeddings.word_embeddings.weight") -> Path:
    """Make the model give NaN for every text that holds the token `POISON`."""
    weights = load_file(path / "model.safetensors")
    weights[name][POISON] = float("nan")
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def test_broken_items_are_blanked_and_neighbours_are_not(engine: Engine, tmp_path: Path) -> None:
    path = checkpoints.embedder(tmp_path)
    engine.load(ModelSpec("clean", str(path), dtype="float32"))
    rows = [[2, 9, 3], [2, POISON, 9, 3], [2, 8, 8, 8, 3]]
    clean = run(engine, "clean", packed(*rows), Output.DENSE, Output.TOKENS)
    engine.load(ModelSpec("broken", str(poison(path)), dtype="float32"))
    broken = run(engine, "broken", packed(*rows), Output.DENSE, Output.TOKENS)
    assert clean.nonfinite == ()
    assert broken.nonfinite == (1,)
    for got, want in ((broken.dense, clean.dense), (broken.tokens, clean.tokens)):
        assert got is not None
        assert want is not None
        blank = [1] if len(got) == 3 else [3, 4, 5, 6]
        assert not got[blank].any()
        np.testing.assert_allclose(np.delete(got, blank, 0), np.delete(want, blank, 0), atol=1e-6)


def test_broken_scores(engine: Engine, tmp_path: Path) -> None:
    path = checkpoints.cross_encoder(tmp_path / "ce", labels=2)
    engine.load(ModelSpec("ce", str(poison(path, "bert.embeddings.word_embeddings.weight")), dtype="float32"))
    result = run(engine, "ce", packed([2, POISON, 3], [2, 9, 3]), Output.LOGITS)
    assert result.nonfinite == (0,)
    assert result.logits is not None
    assert not result.logits[0].any()
    assert result.logits[1].all()


def test_maxsim_against_brute_force(engine: Engine, tmp_path: Path) -> None:
    """Float64, two queries, a document without kept tokens (0) and a broken one."""
    path = poison(checkpoints.colbert(tmp_path))
    engine.load(ModelSpec("colbert", str(path), dtype="float32"))
    rows = [[2, 9, 3], [2, 10, 11, 12, 3], [2, POISON, 3], [2, 13, 3], [2, 14, 15, 3]]
    flat = [token for row in rows for token in row]
    kept = np.array([index % 4 != 1 for index in range(len(flat))])
    kept[11:14] = False
    sequences = packed(*rows, kept=kept)
    generator = np.random.default_rng(0)
    queries = tuple(generator.standard_normal((n, checkpoints.TOKEN_DIM)).astype(np.float32) for n in (3, 5))
    query_of = np.array([1, 0, 1, 0, 1], np.int32)
    result = run(
        engine, "colbert", sequences, Output.MAXSIM, Output.TOKENS, query_vectors=queries, query_of=query_of
    )
    assert result.nonfinite == (2,)
    assert result.tokens is not None
    assert result.token_offsets is not None
    assert result.maxsim is not None
    assert list(np.diff(result.token_offsets)) == [
        int(kept[a:b].sum()) for a, b in itertools.pairwise((0, 3, 8, 11, 14, 18))
    ]
    for index, (start, end) in enumerate(itertools.pairwise(result.token_offsets)):
        document = result.tokens[start:end].astype(np.float64)
        query = queries[query_of[index]].astype(np.float64)
        expected = (query @ document.T).max(axis=1).sum() if len(document) and index != 2 else 0.0
        assert result.maxsim[index] == pytest.approx(expected, abs=1e-4)


def test_warm_up_finds_weights_that_give_no_number(engine: Engine, tmp_path: Path) -> None:
    path = checkpoints.embedder(tmp_path)
    engine.load(ModelSpec("m", str(path)))
    engine.warm_up("m")
    weights = load_file(path / "model.safetensors")
    weights["encoder.layer.1.output.LayerNorm.bias"][0] = float("inf")
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    engine.load(ModelSpec("m", str(path)))
    with pytest.raises(ModelLoadError, match="NaN or Inf"):
        engine.warm_up("m")


@pytest.mark.parametrize(
    ("sequences", "output", "match"),
    [
        (packed([2] * 49), Output.DENSE, "sequence 0 has 49 tokens, the limit is 48"),
        (packed([2, 100_000]), Output.DENSE, "input_ids must be from 0"),
        (packed([2, -1]), Output.DENSE, "input_ids must be from 0"),
        (packed([2, 3], type_ids=np.array([0, 2], np.int32)), Output.DENSE, "type_ids must be"),
        (packed([2, 3], []), Output.DENSE, "not empty"),
        (packed([2, 3]), Output.LOGITS, "outputs"),
    ],
)
def test_what_would_break_the_device_is_refused(
    engine: Engine, tmp_path: Path, sequences: Sequences, output: Output, match: str
) -> None:
    engine.load(ModelSpec("m", str(checkpoints.embedder(tmp_path))))
    with pytest.raises(ComputeFailed, match=match):
        run(engine, "m", sequences, output)
    with pytest.raises(ComputeFailed, match="isn't loaded"):
        run(engine, "other", sequences, output)


def test_random_weights_are_refused(engine: Engine, tmp_path: Path) -> None:
    for path, name in (
        (checkpoints.embedder(tmp_path / "e"), "encoder.layer.0.output.dense.weight"),
        (checkpoints.cross_encoder(tmp_path / "c"), "classifier.weight"),
    ):
        weights = load_file(path / "model.safetensors")
        del weights[name]
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ModelLoadError, match=name):
            engine.load(ModelSpec("m", str(path)))


def test_several_models_and_a_missing_pooler(engine: Engine, tmp_path: Path) -> None:
    path = checkpoints.embedder(tmp_path / "e")
    weights = {k: v for k, v in load_file(path / "model.safetensors").items() if "pooler" not in k}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    loaded = engine.load(ModelSpec("a", str(path), dtype="float32"))
    engine.load(ModelSpec("b", str(checkpoints.embedder(tmp_path / "f", seed=1)), dtype="bfloat16"))
    assert loaded.weight_bytes == sum(tensor.nbytes for tensor in weights.values())
    assert (loaded.dtype, loaded.device) == ("float32", "cpu")
    a, b = (run(engine, name, packed([2, 9, 3]), Output.DENSE).dense for name in "ab")
    assert a is not None
    assert b is not None
    assert np.abs(a - b).max() > 0.1


def test_times_come_from_the_injected_clocks(tmp_path: Path) -> None:
    ticks = itertools.count(0, 10)
    engine = Engine("cpu", clocks=Clocks(unix_ns=lambda: 77, elapsed_ns=lambda: next(ticks)))
    engine.load(ModelSpec("m", str(checkpoints.embedder(tmp_path))))
    timings = run(engine, "m", packed([2, 9, 3], [2, 3]), Output.DENSE).timings
    # start, begin, ready, computed, begin, end: ten apart.
    assert timings.started_unix_ns == 77
    assert (timings.transfer_ns, timings.compute_ns, timings.pool_ns) == (10, 10, 30)
    assert timings.padded_tokens == 6


def test_blocks_cost_least() -> None:
    """Against every way to cut the sorted lengths."""
    chance = random.Random(3)
    for _ in range(150):
        count, launch = chance.randint(1, 8), chance.randint(0, 20)
        lengths = np.array([chance.randint(1, 12) for _ in range(count)])
        found = split(lengths, launch)
        assert sorted(np.concatenate(found)) == list(range(count))
        cost = sum(len(rows) * lengths[rows].max() + launch for rows in found)
        ordered = np.sort(lengths)
        cuts = itertools.chain.from_iterable(itertools.combinations(range(1, count), n) for n in range(count))
        assert cost == min(
            sum((b - a) * ordered[b - 1] + launch for a, b in itertools.pairwise((0, *cut, count)))
            for cut in cuts
        )


@pytest.mark.parametrize(
    ("error", "kind", "out_of_memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), ComputeFailed, True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), ComputeFailed, True),
        (RuntimeError("CUDA error: out of memory"), ComputeFailed, True),
        (MemoryError(), ComputeFailed, True),
        (RuntimeError("CUDA error: device-side assert triggered"), DeviceLost, None),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), DeviceLost, None),
        (RuntimeError("shape mismatch"), ComputeFailed, False),
        (IndexError("index out of range"), ComputeFailed, False),
    ],
    ids=str,
)
def test_errors(error: Exception, kind: type[Exception], out_of_memory: bool | None) -> None:
    found = pickle.loads(pickle.dumps(translate(error)))
    assert type(found) is kind
    assert getattr(found, "out_of_memory", None) is out_of_memory


def test_running_out_of_memory(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.load(ModelSpec("m", str(checkpoints.embedder(tmp_path))))

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr("phasemesh.engine.engine.pool", full)
    with pytest.raises(ComputeFailed) as failure:
        run(engine, "m", packed([2, 9, 3]), Output.DENSE)
    assert failure.value.out_of_memory


def test_device_and_dtype() -> None:
    cpu = torch.device("cpu")
    assert pick_dtype("auto", cpu) is (torch.bfloat16 if has_fast_bfloat16(cpu) else torch.float32)
    assert pick_dtype("float16", cpu) is torch.float16
    for call in (lambda: pick_dtype("int8", cpu), lambda: pick_device("tpu9")):
        with pytest.raises(ModelLoadError):
            call()
    if not torch.cuda.is_available():
        with pytest.raises(ModelLoadError, match="isn't available"):
            pick_device("cuda")
