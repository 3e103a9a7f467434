"""A text's vectors don't depend on its neighbours in the batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from phasemesh.engine.engine import Engine
from phasemesh.pool.protocol import LoadedModel, Output
from phasemesh.recipe.model import Role
from tests.fakes import checkpoints
from tests.fakes.checkpoints import SENTENCES
from tests.parity import inputs
from tests.parity.conftest import Load

#: (dtype, pooled, tokens): smallest cosine allowed between a text alone and in a batch.
LIMITS = (("float32", 1 - 1e-5, 1 - 1e-5), ("bfloat16", 0.9999, 0.9995))
TEXTS = SENTENCES + tuple(" ".join(SENTENCES[1:4]) * n for n in (1, 2, 3))


def cosines(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    a, b = a.astype(np.float64), b.astype(np.float64)
    return (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)


def run(engine: Engine, loaded: LoadedModel, texts: tuple[str, ...]) -> tuple[np.ndarray, list[np.ndarray]]:
    result = engine.forward(inputs.batch(loaded, inputs.texts(loaded, texts), Output.DENSE, Output.TOKENS))
    assert result.dense is not None
    assert result.tokens is not None
    assert result.token_offsets is not None
    return result.dense, inputs.token_matrices(result.tokens, result.token_offsets)


@pytest.mark.parametrize(("dtype", "pooled", "tokens"), LIMITS)
def test_minilm(engine: Engine, load: Load, minilm: Path, dtype: str, pooled: float, tokens: float) -> None:
    loaded = load(minilm, dtype=dtype)
    dense, matrices = run(engine, loaded, TEXTS)
    backwards, _ = run(engine, loaded, TEXTS[::-1])
    assert cosines(dense, backwards[::-1]).min() >= pooled
    for index, text in enumerate(TEXTS):
        alone, [matrix] = run(engine, loaded, (text,))
        assert cosines(alone[0], dense[index]) >= pooled
        assert cosines(matrix, matrices[index]).min() >= tokens


def test_colbert(engine: Engine, load: Load, tmp_path: Path) -> None:
    loaded = load(checkpoints.colbert(tmp_path / "model"))
    together = engine.forward(inputs.batch(loaded, inputs.late(loaded, TEXTS, Role.DOCUMENT), Output.TOKENS))
    assert together.tokens is not None
    assert together.token_offsets is not None
    matrices = inputs.token_matrices(together.tokens, together.token_offsets)
    for text, matrix in zip(TEXTS, matrices, strict=True):
        alone = engine.forward(
            inputs.batch(loaded, inputs.late(loaded, [text], Role.DOCUMENT), Output.TOKENS)
        )
        np.testing.assert_allclose(alone.tokens, matrix, atol=1e-5)
