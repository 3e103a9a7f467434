"""Dense vectors equal sentence-transformers' on the same folder, in float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from phasemesh.engine.engine import Engine
from phasemesh.pool.protocol import Output
from phasemesh.recipe.model import Role
from tests.fakes import checkpoints
from tests.fakes.checkpoints import SENTENCES
from tests.parity import inputs
from tests.parity.conftest import Load

PROMPTS = {"query": "what is: ", "document": ""}

CASES = {
    "mean": {},
    "cls": {"pooling": "cls"},
    "last": {"pooling": "lasttoken"},
    "concatenated": {"pooling": ("cls", "mean", "lasttoken")},
    "not normalised": {"normalize": False},
    "prompts": {"prompts": PROMPTS},
    "prompt not pooled": {"prompts": PROMPTS, "include_prompt": False},
    "prompt not pooled, cls": {"prompts": PROMPTS, "include_prompt": False, "pooling": ("cls", "lasttoken")},
    "lower case": {"do_lower_case": True, "lowercase_tokenizer": False},
    "short": {"max_seq_length": 9},
    "tokenizer's limit": {"max_seq_length": None},
    "v6 mean": {"layout": "v6"},
    "v6 cls, short": {"layout": "v6", "pooling": "cls", "max_seq_length": 10},
    "v6 concatenated": {"layout": "v6", "pooling": ("lasttoken", "mean")},
    "v6 prompt not pooled": {"layout": "v6", "prompts": PROMPTS, "include_prompt": False},
    "v6 lower case": {"layout": "v6", "do_lower_case": True, "lowercase_tokenizer": False},
    "bare": {"layout": "bare"},
}
BACKBONES = ("camembert", "distilbert", "electra", "modernbert", "mpnet", "roberta", "xlm-roberta")
DECODERS = ("mistral", "qwen2", "qwen3")


def reference(path: Path, role: Role | None) -> np.ndarray:
    model = SentenceTransformer(str(path), device="cpu", model_kwargs={"dtype": "float32"})
    encode = {Role.QUERY: model.encode_query, Role.DOCUMENT: model.encode_document, None: model.encode}[role]
    return encode(list(SENTENCES), batch_size=3)


def ours(engine: Engine, load: Load, path: Path, role: Role | None) -> np.ndarray:
    loaded = load(path)
    prompt = loaded.recipe.prompt_text(loaded.recipe.prompt_for(role))
    result = engine.forward(inputs.batch(loaded, inputs.texts(loaded, SENTENCES, prompt), Output.DENSE))
    assert result.dense is not None
    assert result.nonfinite == ()
    return unit(result.dense) if loaded.recipe.normalize else result.dense


def unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def assert_equal(got: np.ndarray, expected: np.ndarray) -> None:
    assert got.shape == expected.shape
    cosine = (unit(got).astype(np.float64) * unit(expected)).sum(axis=-1)
    assert cosine.min() >= 1 - 1e-5
    np.testing.assert_allclose(got, expected, atol=2e-5 * max(1, np.abs(expected).max()))


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
@pytest.mark.parametrize("role", [Role.QUERY, Role.DOCUMENT, None], ids=str)
def test_layouts_and_poolings(engine: Engine, load: Load, tmp_path: Path, options: dict, role: Role) -> None:
    path = checkpoints.embedder(tmp_path / "model", **options)
    assert_equal(ours(engine, load, path, role), reference(path, role))


def test_default_prompt(engine: Engine, load: Load, tmp_path: Path) -> None:
    path = checkpoints.embedder(tmp_path / "model", prompts={"any": "which "}, default_prompt="any")
    assert_equal(ours(engine, load, path, None), reference(path, None))


@pytest.mark.parametrize("backbone", BACKBONES)
def test_encoder_backbones(engine: Engine, load: Load, tmp_path: Path, backbone: str) -> None:
    path = checkpoints.embedder(tmp_path / "model", backbone=backbone, pooling=("cls", "mean"))
    assert_equal(ours(engine, load, path, None), reference(path, None))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("backbone", DECODERS)
def test_decoder_backbones(engine: Engine, load: Load, tmp_path: Path, backbone: str, causal: bool) -> None:
    """The reference pads them on the left, we on the right."""
    path = checkpoints.embedder(
        tmp_path / "model", backbone=backbone, pooling="lasttoken" if causal else "mean", causal=causal
    )
    assert_equal(ours(engine, load, path, None), reference(path, None))


@pytest.mark.parametrize(("limit", "expected"), [(None, 62), (64, 62), (40, 40)])
def test_roberta_never_leaves_its_position_table(
    engine: Engine, load: Load, tmp_path: Path, limit: int | None, expected: int
) -> None:
    path = checkpoints.embedder(tmp_path / "model", backbone="roberta", max_seq_length=limit)
    loaded = load(path)
    assert loaded.recipe.max_tokens == expected
    text = "river " * 100
    got = engine.forward(inputs.batch(loaded, inputs.texts(loaded, [text]), Output.DENSE)).dense
    assert got is not None
    library = SentenceTransformer(str(path), device="cpu")
    library.max_seq_length = expected
    assert_equal(unit(got), library.encode([text]))


def test_real_minilm(engine: Engine, load: Load, minilm: Path) -> None:
    loaded = load(minilm)
    assert loaded.recipe.max_tokens == 256
    assert_equal(ours(engine, load, minilm, None), reference(minilm, None))


@pytest.mark.parametrize(
    ("wrong", "role"),
    [
        ({"pooling": "cls"}, None),
        ({"pooling": "lasttoken"}, None),
        ({"prompts": {}}, Role.QUERY),
        ({"include_prompt": True}, Role.QUERY),
        ({"max_seq_length": 9}, None),
        ({"normalize": False}, None),
    ],
    ids=str,
)
def test_a_wrong_recipe_is_far_off(
    engine: Engine, load: Load, tmp_path: Path, wrong: dict, role: Role
) -> None:
    """The comparison above would see each of these."""
    right = {"prompts": PROMPTS, "include_prompt": False}
    expected = reference(checkpoints.embedder(tmp_path / "right", **right), role)
    got = ours(engine, load, checkpoints.embedder(tmp_path / "wrong", **right | wrong), role)
    assert np.abs(got - expected).max() > 0.02


def test_ignoring_padding_is_far_off(engine: Engine, load: Load, tmp_path: Path) -> None:
    loaded = load(checkpoints.embedder(tmp_path / "model"))
    row = inputs.texts(loaded, [SENTENCES[0]])
    padded = inputs.pack([[*row.input_ids, 0, 0, 0]])
    right = engine.forward(inputs.batch(loaded, row, Output.DENSE)).dense
    wrong = engine.forward(inputs.batch(loaded, padded, Output.DENSE)).dense
    assert right is not None
    assert wrong is not None
    assert np.abs(unit(right) - unit(wrong)).max() > 0.02


def test_tokens_of_an_embedder_are_the_last_hidden_states(engine: Engine, load: Load, tmp_path: Path) -> None:
    path = checkpoints.embedder(tmp_path / "model")
    loaded = load(path)
    result = engine.forward(
        inputs.batch(loaded, inputs.texts(loaded, SENTENCES), Output.DENSE, Output.TOKENS)
    )
    assert result.tokens is not None
    assert result.token_offsets is not None
    library = SentenceTransformer(str(path), device="cpu")
    expected = library.encode(list(SENTENCES), output_value="token_embeddings", convert_to_numpy=False)
    for got, want in zip(inputs.token_matrices(result.tokens, result.token_offsets), expected, strict=True):
        np.testing.assert_allclose(got, want.numpy(), atol=5e-5)
