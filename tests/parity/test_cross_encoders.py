"""Logits and scores equal sentence-transformers' CrossEncoder on the same folder, in float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from sentence_transformers import CrossEncoder
from torch import nn

from phasemesh.engine.engine import Engine
from phasemesh.pool.protocol import LoadedModel, Output
from phasemesh.recipe.model import Activation
from tests.fakes import checkpoints
from tests.fakes.checkpoints import PAIRS
from tests.parity import inputs
from tests.parity.conftest import Load

IDENTITY, SIGMOID = "torch.nn.modules.linear.Identity", "torch.nn.modules.activation.Sigmoid"
OLD_KEY = "sbert_ce_default_activation_function"

CASES = {
    "one label": {},
    "identity": {"activation": IDENTITY},
    "identity, old key": {"activation": IDENTITY, "activation_key": OLD_KEY},
    "sigmoid of three": {"labels": 3, "activation": SIGMOID},
    "three labels": {"labels": 3},
    "v6": {"layout": "v6"},
    "v6 identity": {"layout": "v6", "activation": IDENTITY, "activation_key": "side"},
    "camembert": {"backbone": "camembert"},
    "distilbert": {"backbone": "distilbert"},
    "electra": {"backbone": "electra"},
    "modernbert": {"backbone": "modernbert", "classifier_pooling": "cls"},
    "modernbert mean": {"backbone": "modernbert", "classifier_pooling": "mean"},
    "mpnet": {"backbone": "mpnet"},
    "roberta": {"backbone": "roberta"},
    "xlm-roberta": {"backbone": "xlm-roberta"},
}


def logits(engine: Engine, loaded: LoadedModel) -> np.ndarray:
    found = engine.forward(inputs.batch(loaded, inputs.pairs(loaded, PAIRS), Output.LOGITS)).logits
    assert found is not None
    return found


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_scores(engine: Engine, load: Load, tmp_path: Path, options: dict) -> None:
    path = checkpoints.cross_encoder(tmp_path / "model", **options)
    loaded = load(path)
    library = CrossEncoder(str(path), device="cpu", model_kwargs={"dtype": "float32"})
    got = logits(engine, loaded)
    assert got.shape == (len(PAIRS), options.get("labels", 1))

    expected = library.predict(list(PAIRS), activation_fn=nn.Identity(), batch_size=2)
    np.testing.assert_allclose(got, expected.reshape(got.shape), atol=1e-4)
    scores = 1 / (1 + np.exp(-got)) if loaded.recipe.activation is Activation.SIGMOID else got
    np.testing.assert_allclose(scores, library.predict(list(PAIRS)).reshape(got.shape), atol=1e-4)


def test_without_token_types_it_is_far_off(engine: Engine, load: Load, tmp_path: Path) -> None:
    loaded = load(checkpoints.cross_encoder(tmp_path / "model"))
    typed = inputs.pairs(loaded, PAIRS)
    untyped = inputs.batch(
        loaded, type(typed)(input_ids=typed.input_ids, cu_seqlens=typed.cu_seqlens), Output.LOGITS
    )
    wrong = engine.forward(untyped).logits
    assert wrong is not None
    assert np.abs(wrong - logits(engine, loaded)).max() > 0.02


def test_the_head_runs_in_float32(engine: Engine, load: Load, tmp_path: Path) -> None:
    """Under a bfloat16 backbone: a bfloat16 head would give bfloat16 logits."""
    loaded = load(checkpoints.cross_encoder(tmp_path / "model"), dtype="bfloat16")
    got = logits(engine, loaded)
    rounded = (got.view(np.uint32) & 0xFFFF) == 0
    assert not rounded.all()
