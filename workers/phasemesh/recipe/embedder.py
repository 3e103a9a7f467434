"""Recipes of checkpoints that give one vector per text.

Invariant: pooling is read from the checkpoint, and assumed (mean, as sentence-transformers does) only for a
bare encoder saved without a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phasemesh.recipe.errors import RecipeError
from phasemesh.recipe.families import Backbone
from phasemesh.recipe.files import tokenizer_digest, weights_digest
from phasemesh.recipe.layout import (
    Module,
    TransformerFile,
    normalized_feature,
    read_pooling,
    read_prompts,
    read_transformer_file,
    token_limit,
)
from phasemesh.recipe.model import Activation, ModelKind, Pooling, Recipe


def embedder_recipe(
    root: Path, backbone: Backbone, modules: tuple[Module, ...] | None, side: Mapping[str, Any]
) -> Recipe:
    """Recipe of an embedder in `root`; `side` is config_sentence_transformers.json.

    Raises:
        RecipeError: a module isn't served, or the pooling would be a guess.
    """
    if backbone.is_classifier:
        raise RecipeError.at(
            root / "modules.json",
            None,
            f"declares an embedder, but the weights are a {backbone.architecture}",
            "remove modules.json to serve it as a cross-encoder",
        )
    if modules is None:
        pooling, include_prompt, normalize = _bare(root, backbone)
        transformer = TransformerFile(root, {})
        folder = root
    else:
        folder = modules[0].folder
        transformer = read_transformer_file(folder, "feature-extraction")
        pooling, include_prompt, normalize = _pooled(root, backbone, modules)
    prompts, default_prompt = read_prompts(root / "config_sentence_transformers.json", side)
    dim = len(pooling) * backbone.hidden_size
    return Recipe(
        kind=ModelKind.EMBEDDER,
        architecture=backbone.architecture,
        model_type=backbone.model_type,
        max_tokens=token_limit(folder, backbone, transformer),
        hidden_size=backbone.hidden_size,
        dim=dim,
        token_dim=backbone.hidden_size,
        pooling=pooling,
        include_prompt=include_prompt,
        normalize=normalize,
        lower_case=transformer.values.get("do_lower_case") is True,
        prompts=prompts,
        default_prompt=default_prompt,
        matryoshka_dims=_matryoshka_dims(root, backbone, side, dim),
        labels=0,
        activation=Activation.IDENTITY,
        late_interaction=None,
        vocab_size=backbone.vocab_size,
        weights_digest=weights_digest(folder, backbone.config, [folder]),
        tokenizer_digest=tokenizer_digest(folder),
    )


def _bare(root: Path, backbone: Backbone) -> tuple[tuple[Pooling, ...], bool, bool]:
    """Mean pooling without normalisation, as SentenceTransformer("bert-base-uncased") builds it."""
    if backbone.family.decoder or not backbone.is_plain:
        why = (
            "a causal model's pooling" if backbone.family.decoder else f"the use of a {backbone.architecture}"
        )
        raise RecipeError.at(
            root / "modules.json",
            None,
            f"is missing, and {why} can't be told without it",
            "add modules.json and 1_Pooling/config.json with the setting pooling_mode",
        )
    return (Pooling.MEAN,), True, False


def _pooled(
    root: Path, backbone: Backbone, modules: tuple[Module, ...]
) -> tuple[tuple[Pooling, ...], bool, bool]:
    path = root / "modules.json"
    kinds = [module.kind for module in modules]
    if kinds[1:] not in (["Pooling"], ["Pooling", "Normalize"]):
        odd = next((k for k in kinds[1:] if k not in ("Pooling", "Normalize")), None)
        raise RecipeError.at(
            path,
            "type",
            f"module {odd!r} isn't served" if odd else f"the modules are {', '.join(kinds)}",
            "an embedder is Transformer, Pooling and, if it has unit vectors, Normalize",
        )
    pooling, include_prompt = read_pooling(modules[1].folder, backbone.hidden_size)
    normalize = len(modules) == 3
    if normalize and normalized_feature(modules[2].folder) != "sentence_embedding":
        raise RecipeError.at(
            modules[2].folder / "config.json",
            "module_input_name",
            "normalises tokens after pooling",
            "it must be 'sentence_embedding'",
        )
    return pooling, include_prompt, normalize


def _matryoshka_dims(root: Path, backbone: Backbone, side: Mapping[str, Any], dim: int) -> tuple[int, ...]:
    """`matryoshka_dimensions`, any size under `is_matryoshka` (vLLM's keys), or the one of `truncate_dim`."""
    dims = backbone.config.get("matryoshka_dimensions")
    if dims is not None:
        if not isinstance(dims, list):
            raise RecipeError.at(root / "config.json", "matryoshka_dimensions", "isn't a list", "correct it")
        return check_matryoshka_dims(dims, dim, f"{root / 'config.json'}: matryoshka_dimensions")
    if backbone.config.get("is_matryoshka") is True:
        return tuple(range(1, dim + 1))
    cut = side.get("truncate_dim")
    if cut is not None:
        name = f"{root / 'config_sentence_transformers.json'}: truncate_dim"
        return check_matryoshka_dims([cut], dim, name)
    return ()


def check_matryoshka_dims(dims: list[Any] | tuple[Any, ...], dim: int, name: str) -> tuple[int, ...]:
    """`dims`, sorted; `name` says where they come from.

    Raises:
        RecipeError: one of them isn't a whole number from 1 to `dim`.
    """
    for size in dims:
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= dim:
            raise RecipeError(f"{name}: {size!r} isn't a size; give whole numbers from 1 to {dim}")
    return tuple(sorted(set(dims)))
