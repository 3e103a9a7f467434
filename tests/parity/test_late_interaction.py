"""Token vectors and MaxSim equal sentence-transformers' MultiVectorEncoder on the same folder, in float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import MultiVectorEncoder

from phasemesh.engine.engine import Engine
from phasemesh.pool.protocol import LoadedModel, Output
from phasemesh.recipe.model import Role
from tests.fakes import checkpoints
from tests.fakes.checkpoints import SENTENCES
from tests.parity import inputs
from tests.parity.conftest import Load

QUERIES = SENTENCES[:3] + SENTENCES[5:6]

CASES = {
    "pylate": {},
    "pylate attending": {"attend": True},
    "pylate without expansion": {"expand": False},
    "pylate without skiplist": {"skip_words": ()},
    "pylate two layers": {"projections": (24, 16)},
    "pylate with prompts": {"prompts": {"query": "find ", "document": "text: "}},
    "pylate modernbert": {"backbone": "modernbert"},
    "v6": {"layout": "v6"},
    "v6 attending": {"layout": "v6", "attend": True},
    "v6 without expansion": {"layout": "v6", "expand": False},
    "v6 mean": {"layout": "v6", "mean": True},
}


def vectors(engine: Engine, loaded: LoadedModel, texts: tuple[str, ...], role: Role) -> list[np.ndarray]:
    result = engine.forward(inputs.batch(loaded, inputs.late(loaded, texts, role), Output.TOKENS))
    assert result.tokens is not None
    assert result.token_offsets is not None
    return inputs.token_matrices(result.tokens, result.token_offsets)


def scores(engine: Engine, loaded: LoadedModel, queries: list[np.ndarray]) -> np.ndarray:
    """All queries against all documents, in one batch."""
    count = len(SENTENCES)
    documents = inputs.late(loaded, SENTENCES * len(queries), Role.DOCUMENT)
    for query in queries:
        query.flags.writeable = False
    query_of = np.repeat(np.arange(len(queries), dtype=np.int32), count)
    result = engine.forward(
        inputs.batch(loaded, documents, Output.MAXSIM, query_vectors=tuple(queries), query_of=query_of)
    )
    assert result.maxsim is not None
    return result.maxsim.reshape(len(queries), count)


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_vectors_and_scores(engine: Engine, load: Load, tmp_path: Path, options: dict) -> None:
    path = checkpoints.colbert(tmp_path / "model", **options)
    loaded = load(path)
    library = MultiVectorEncoder(str(path), device="cpu", model_kwargs={"dtype": "float32"})
    expected_queries = library.encode_query(list(QUERIES), batch_size=2)
    expected_documents = library.encode_document(list(SENTENCES), batch_size=3)

    queries = vectors(engine, loaded, QUERIES, Role.QUERY)
    documents = vectors(engine, loaded, SENTENCES, Role.DOCUMENT)
    for got, expected in zip(queries + documents, [*expected_queries, *expected_documents], strict=True):
        assert got.shape == tuple(expected.shape)
        np.testing.assert_allclose(got, np.asarray(expected), atol=2e-5)
    expected_scores = library.similarity(expected_queries, expected_documents)
    np.testing.assert_allclose(scores(engine, loaded, queries), expected_scores.numpy(), atol=1e-4)


@pytest.mark.parametrize("wrong", [{"attend": True}, {"expand": False}, {"skip_words": ()}], ids=str)
def test_a_wrong_recipe_is_far_off(engine: Engine, load: Load, tmp_path: Path, wrong: dict) -> None:
    found = []
    for name, options in (("right", {}), ("wrong", wrong)):
        loaded = load(checkpoints.colbert(tmp_path / name, **options))
        found.append(scores(engine, loaded, vectors(engine, loaded, QUERIES, Role.QUERY)))
    assert np.abs(found[0] - found[1]).max() > 0.02


def test_a_query_is_no_document(engine: Engine, load: Load, tmp_path: Path) -> None:
    loaded = load(checkpoints.colbert(tmp_path / "model", expand=False, skip_words=()))
    query = vectors(engine, loaded, QUERIES[:1], Role.QUERY)[0]
    document = vectors(engine, loaded, QUERIES[:1], Role.DOCUMENT)[0]
    assert np.abs(query - document).max() > 0.02
