"""Recipes from files: what is read, what is refused, and that hashes stay."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from phasemesh.recipe.errors import RecipeError
from phasemesh.recipe.load import load_recipe
from phasemesh.recipe.model import Activation, ModelKind, Pooling
from tests.fakes import checkpoints
from tests.fakes.checkpoints import edit_json, write_json

SIDE = "config_sentence_transformers.json"

#: A change of these breaks every stored vector's link to its model: raise SCHEMA_VERSION, then set them anew.
PINNED = {
    "embedder": "5a2b84ff907eec408a919b276ed9e696",
    "cross_encoder": "c63a6f17c5b097e987d536ba5986c14e",
    "late_interaction": "d560fa730264d9cb6d33a3f478cc3680",
}


def by_hand(root: Path, kind: str) -> Path:
    """A checkpoint whose every byte stands here, so that no library's release can move its hash."""
    config: dict[str, object] = {
        "architectures": ["BertForSequenceClassification" if kind == "cross_encoder" else "BertModel"],
        "model_type": "bert",
        "hidden_size": 4,
        "vocab_size": 8,
        "max_position_embeddings": 16,
    }
    if kind == "cross_encoder":
        config["id2label"] = {"0": "LABEL_0"}
    write_json(root / "config.json", config)
    write_json(root / "tokenizer.json", {"added_tokens": [{"content": "[Q] "}, {"content": "[D] "}]})
    save_file({"w": np.arange(4, dtype=np.float32)}, root / "model.safetensors")
    second = {"embedder": ("Pooling", "1_Pooling"), "late_interaction": ("Dense", "1_Dense")}.get(kind)
    if second is not None:
        modules = [("Transformer", ""), second]
        write_json(root / "modules.json", [{"path": path, "type": f"x.{name}"} for name, path in modules])
    if kind == "embedder":
        write_json(root / "1_Pooling" / "config.json", {"pooling_mode": "mean"})
        write_json(root / SIDE, {"prompts": {"query": "q: "}})
    if kind == "late_interaction":
        dense = {"in_features": 4, "out_features": 2, "activation_function": "torch.nn.Identity"}
        write_json(root / "1_Dense" / "config.json", dense)
        save_file({"linear.weight": np.ones((2, 4), np.float32)}, root / "1_Dense" / "model.safetensors")
        side = {"model_type": "ColBERT", "query_prefix": "[Q] ", "document_prefix": "[D] ", "query_length": 8}
        write_json(root / SIDE, side)
    return root


@pytest.mark.parametrize("kind", PINNED)
def test_hashes_are_pinned(tmp_path: Path, kind: str) -> None:
    assert load_recipe(by_hand(tmp_path, kind)).recipe_hash == PINNED[kind]


@pytest.mark.parametrize(
    ("file", "changes", "same"),
    [
        ("config.json", {"layer_norm_eps": 0.5}, False),
        ("config.json", {"transformers_version": "9", "torch_dtype": "bfloat16"}, True),
        ("1_Pooling/config.json", {"pooling_mode": "cls"}, False),
        ("tokenizer.json", {"normalizer": {"type": "Lowercase"}}, False),
        (SIDE, {"prompts": {"query": "other: "}}, False),
        (SIDE, {"similarity_fn_name": "dot"}, True),
        (SIDE, {"truncate_dim": 2}, True),
    ],
    ids=str,
)
def test_the_hash_follows_what_changes_vectors(tmp_path: Path, file: str, changes: dict, same: bool) -> None:
    path = by_hand(tmp_path, "embedder")
    before = load_recipe(path).recipe_hash
    edit_json(path / file, **changes)
    assert (load_recipe(path).recipe_hash == before) is same


def test_the_hash_follows_the_weights_of_every_module(tmp_path: Path) -> None:
    path = by_hand(tmp_path, "late_interaction")
    before = load_recipe(path).recipe_hash
    save_file({"linear.weight": np.zeros((2, 4), np.float32)}, path / "1_Dense" / "model.safetensors")
    assert load_recipe(path).recipe_hash != before


def test_reading_needs_no_torch(tmp_path: Path) -> None:
    by_hand(tmp_path, "embedder")
    script = (
        "import sys; from pathlib import Path; from phasemesh.recipe.load import load_recipe;"
        "import phasemesh.recipe.source; load_recipe(Path(sys.argv[1]));"
        "print(sorted({'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)))"
    )
    found = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("layout", ["legacy", "v6"])
def test_both_generations_say_the_same(tmp_path: Path, layout: str) -> None:
    path = checkpoints.embedder(
        tmp_path, layout=layout, pooling=("cls", "mean"), include_prompt=False, prompts={"query": "q: "}
    )
    recipe = load_recipe(path)
    assert recipe.kind is ModelKind.EMBEDDER
    assert recipe.pooling == (Pooling.CLS, Pooling.MEAN)
    assert (recipe.dim, recipe.token_dim, recipe.max_tokens) == (64, 32, 48)
    assert not recipe.include_prompt
    assert recipe.normalize
    assert recipe.prompts == (("query", "q: "),)


@pytest.mark.parametrize(
    ("model_max_length", "expected"), [(12, 12), (int(1e30), 64), (1e30, 64), (None, 64), (100, 64)]
)
def test_limit_without_max_seq_length(tmp_path: Path, model_max_length: object, expected: int) -> None:
    path = checkpoints.embedder(tmp_path, max_seq_length=None)
    edit_json(path / "tokenizer_config.json", model_max_length=model_max_length)
    assert load_recipe(path).max_tokens == expected


def test_overrides(tmp_path: Path) -> None:
    path = checkpoints.embedder(tmp_path, matryoshka_dims=(16, 8))
    assert load_recipe(path).matryoshka_dims == (8, 16)
    recipe = load_recipe(path, max_tokens=20, matryoshka_dims=(4,))
    assert (recipe.max_tokens, recipe.matryoshka_dims) == (20, (4,))
    for wrong in (
        {"max_tokens": 49},
        {"max_tokens": 2},
        {"matryoshka_dims": (33,)},
        {"matryoshka_dims": (0,)},
    ):
        with pytest.raises(RecipeError, match=next(iter(wrong))):
            load_recipe(path, **wrong)


def test_matryoshka_from_files(tmp_path: Path) -> None:
    path = checkpoints.embedder(tmp_path)
    assert load_recipe(path).matryoshka_dims == ()
    edit_json(path / SIDE, truncate_dim=24)
    assert load_recipe(path).matryoshka_dims == (24,)
    edit_json(path / "config.json", is_matryoshka=True)
    assert load_recipe(path).matryoshka_dims == tuple(range(1, 33))


def test_late_interaction_limits(tmp_path: Path) -> None:
    path = checkpoints.colbert(tmp_path, query_length=16, document_length=40)
    late = load_recipe(path, max_tokens=20).late_interaction
    assert late is not None
    assert (late.query_length, late.document_length) == (16, 20)
    with pytest.raises(RecipeError, match="max_tokens: 10 is below"):
        load_recipe(path, max_tokens=10)


def test_a_prefix_that_is_no_token_is_prompt_text(tmp_path: Path) -> None:
    path = checkpoints.colbert(tmp_path, prompts={"query": "find "})
    edit_json(path / SIDE, query_prefix="search_query: ")
    recipe = load_recipe(path)
    assert recipe.late_interaction is not None
    assert recipe.late_interaction.query_marker is None
    assert recipe.prompt_text("query") == "search_query: find "


@pytest.mark.parametrize("value", ["torch.nn.modules.activation.Tanh", "mine.Sigmoid", "os.system", 3])
def test_an_activation_is_only_a_name(tmp_path: Path, value: object) -> None:
    path = checkpoints.cross_encoder(tmp_path)
    assert load_recipe(path).activation is Activation.SIGMOID
    edit_json(path / "config.json", sentence_transformers={"activation_fn": value})
    with pytest.raises(
        RecipeError, match=r"config\.json: sentence_transformers\.activation_fn: .*isn't served"
    ):
        load_recipe(path)


def _set(name: str, **changes: object) -> Callable[[Path], None]:
    return lambda root: edit_json(root / name, **changes)


def _modules(*kinds: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        entries = json.loads((root / "modules.json").read_text())
        for index, kind in enumerate(kinds):
            entries[index]["type"] = kind
        write_json(root / "modules.json", entries[: len(kinds)])

    return change


def _pickled(root: Path) -> None:
    (root / "model.safetensors").rename(root / "pytorch_model.bin")


T = "sentence_transformers.models.Transformer"
REFUSED_EMBEDDERS = {
    "mode": (_set("1_Pooling/config.json", pooling_mode="max"), r"pooling_mode: 'max' isn't served"),
    "legacy mode": (_set("1_Pooling/config.json", pooling_mode_max_tokens=True), r"pooling_mode_\*: 'max'"),
    "width": (_set("1_Pooling/config.json", word_embedding_dimension=8), "word_embedding_dimension: is 8"),
    "module": (_modules(T, "x.Pooling", "x.LayerNorm"), r"modules\.json: type: module 'LayerNorm'"),
    "router": (_modules("x.Router"), r"modules\.json: \[0\]\.type"),
    "splade": (_modules(T, "x.SpladePooling"), "module 'SpladePooling'"),
    "unpooled": (_modules(T), r"modules\.json: type: the modules are Transformer"),
    "sparse": (_set(SIDE, model_type="SparseEncoder"), "model_type: 'SparseEncoder' isn't served"),
    "default prompt": (_set(SIDE, default_prompt_name="x"), "default_prompt_name: 'x' isn't in prompts"),
    "unknown backbone": (_set("config.json", model_type="gpt9"), "model_type: 'gpt9' isn't served"),
    "code": (_set("config.json", auto_map={"AutoModel": "a.B"}), "auto_map: .*never run"),
    "foreign class": (
        _set("config.json", architectures=["JinaForRanking"]),
        "architectures: 'JinaForRanking'",
    ),
    "retrieval": (_set("config.json", architectures=["ColPaliForRetrieval"]), "ColPaliForRetrieval"),
    "stanford": (_set("config.json", architectures=["HF_ColBERT"]), "Stanford ColBERT layout"),
    "rotary": (_set("config.json", position_embedding_type="rotary"), "position_embedding_type: 'rotary'"),
    "quantised": (_set("config.json", quantization_config={"bits": 4}), "quantization_config"),
    "classifier": (
        _set("config.json", architectures=["BertForSequenceClassification"]),
        "as a cross-encoder",
    ),
    "chat": (_set("sentence_bert_config.json", modality_config={"message": {}}), "modality_config"),
    "option": (_set("sentence_bert_config.json", tokenizer_args={"x": 1}), r"tokenizer_args\.x"),
    "task": (
        _set("sentence_bert_config.json", transformer_task="fill-mask"),
        "transformer_task: 'fill-mask'",
    ),
    "pickle": (_pickled, r"pytorch_model\.bin: the only weights are pickles"),
    "no tokenizer": (
        lambda root: (root / "tokenizer.json").unlink(),
        r"tokenizer\.json: there is no tokenizer",
    ),
    "broken JSON": (lambda root: (root / SIDE).write_text("{"), "not readable as JSON"),
    "no config": (lambda root: (root / "config.json").unlink(), r"config\.json: the file is missing"),
}


@pytest.mark.parametrize("case", REFUSED_EMBEDDERS)
def test_refused_embedders(tmp_path: Path, case: str) -> None:
    change, match = REFUSED_EMBEDDERS[case]
    path = checkpoints.embedder(tmp_path)
    load_recipe(path)
    change(path)
    with pytest.raises(RecipeError, match=match):
        load_recipe(path)


@pytest.mark.parametrize("architecture", ["BertForMaskedLM", "Qwen3ForCausalLM"])
def test_unknown_pooling_is_refused(tmp_path: Path, architecture: str) -> None:
    backbone = "bert" if architecture.startswith("Bert") else "qwen3"
    path = checkpoints.embedder(tmp_path, backbone=backbone, layout="bare")
    edit_json(path / "config.json", architectures=[architecture])
    with pytest.raises(RecipeError, match=r"modules\.json: is missing.*pooling_mode"):
        load_recipe(path)


REFUSED_COLBERTS = {
    "no projection": ({}, _modules(T), "projection would be random"),
    "wrong width": ({}, _set("1_Dense/config.json", in_features=8), "in_features: is 8"),
    "tanh": ({}, _set("1_Dense/config.json", activation_function=None), "activation_function: None"),
    "residual": ({}, _set("1_Dense/config.json", use_residual=True), "use_residual"),
    "not normalised": (
        {"layout": "v6"},
        _set("3_Normalize/config.json", module_input_name=None, module_output_name=None),
        "token vectors aren't normalised",
    ),
    "query skiplist": (
        {"layout": "v6"},
        _set("2_MultiVectorMask/config.json", skiplist_tasks=["query"]),
        "tasks",
    ),
    "minimum": (
        {"layout": "v6"},
        _set("sentence_bert_config.json", query_expansion={"strategy": "min", "length": 8}),
        "query_expansion",
    ),
    "long query": ({}, _set(SIDE, query_length=65), "query_length: is 65"),
}


@pytest.mark.parametrize("case", REFUSED_COLBERTS)
def test_refused_late_interaction(tmp_path: Path, case: str) -> None:
    options, change, match = REFUSED_COLBERTS[case]
    path = checkpoints.colbert(tmp_path, **options)
    load_recipe(path)
    change(path)
    with pytest.raises(RecipeError, match=match):
        load_recipe(path)


def test_paths_stay_inside(tmp_path: Path) -> None:
    path = checkpoints.embedder(tmp_path / "model")
    modules = json.loads((path / "modules.json").read_text())
    modules[1]["path"] = "../elsewhere"
    write_json(path / "modules.json", modules)
    with pytest.raises(RecipeError, match="must stay inside"):
        load_recipe(path)
