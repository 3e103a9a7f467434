"""From a checkpoint's folder to its recipe.

Invariant: files are read and nothing is run; what a checkpoint is follows from its own files alone.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from phasemesh.recipe.cross_encoder import cross_encoder_recipe
from phasemesh.recipe.embedder import check_matryoshka_dims, embedder_recipe
from phasemesh.recipe.errors import RecipeError
from phasemesh.recipe.families import read_backbone
from phasemesh.recipe.files import read_object
from phasemesh.recipe.late_interaction import late_interaction_recipe, limited
from phasemesh.recipe.layout import Module, read_modules
from phasemesh.recipe.model import ModelKind, Recipe

#: `model_type` of config_sentence_transformers.json.
_KINDS = {
    "SentenceTransformer": ModelKind.EMBEDDER,
    "CrossEncoder": ModelKind.CROSS_ENCODER,
    "MultiVectorEncoder": ModelKind.LATE_INTERACTION,
    "ColBERT": ModelKind.LATE_INTERACTION,
}

#: Extra heads beside the backbone's weights, under names that no module list mentions.
_FOREIGN_FILES = {
    "adapter_config.json": "is a PEFT adapter, which isn't served: merge it into the weights",
    "artifact.metadata": "is the Stanford ColBERT layout, which isn't served: save it with PyLate",
    "colbert_linear.pt": "is BGE-M3's token head, a pickle, which isn't served: use another checkpoint",
    "sparse_linear.pt": "is BGE-M3's sparse head, a pickle, which isn't served: use another checkpoint",
}

#: Room for [CLS], one token and [SEP].
_SHORTEST = 3


def load_recipe(
    directory: Path, *, max_tokens: int | None = None, matryoshka_dims: tuple[int, ...] | None = None
) -> Recipe:
    """Read the recipe of the checkpoint in `directory`.

    Args:
        directory: a folder laid out as a Hugging Face repository.
        max_tokens: lowers the checkpoint's limit.
        matryoshka_dims: sizes dense vectors may be cut to, in place of the files' word.

    Raises:
        RecipeError: the checkpoint isn't served or would be a guess; the message names file and field.
    """
    config_path = directory / "config.json"
    if (directory / "router_config.json").is_file():
        raise RecipeError.at(directory / "router_config.json", None, "a Router isn't served", "use one route")
    if not config_path.is_file() and (directory / "0_Transformer" / "config.json").is_file():
        config_path = directory / "0_Transformer" / "config.json"
    modules = read_modules(directory)
    for name, problem in _FOREIGN_FILES.items():
        # PyLate keeps a converted checkpoint's metadata beside its own files.
        if (directory / name).is_file() and not (name == "artifact.metadata" and modules):
            raise RecipeError(f"{directory / name}: {problem}")
    side = read_object(directory / "config_sentence_transformers.json", optional=True)
    backbone = read_backbone(config_path, read_object(config_path))
    kind = _kind(directory, side, modules, backbone.is_classifier)
    build = {
        ModelKind.EMBEDDER: embedder_recipe,
        ModelKind.CROSS_ENCODER: cross_encoder_recipe,
        ModelKind.LATE_INTERACTION: late_interaction_recipe,
    }[kind]
    recipe = build(directory, backbone, modules, side)
    if max_tokens is not None:
        recipe = _limit(recipe, max_tokens)
    if matryoshka_dims is not None:
        if recipe.kind is not ModelKind.EMBEDDER:
            raise RecipeError(f"matryoshka_dims: a {recipe.kind} has no dense vector to cut; leave it out")
        dims = check_matryoshka_dims(matryoshka_dims, recipe.dim, "matryoshka_dims")
        recipe = dataclasses.replace(recipe, matryoshka_dims=dims)
    return recipe


def backbone_folder(directory: Path) -> Path:
    """Where the backbone's weights and tokenizer are: the root, or `0_Transformer` in the oldest saves."""
    modules = read_modules(directory)
    return directory if modules is None else modules[0].folder


def projection_folders(directory: Path) -> tuple[Path, ...]:
    """Folders of the linear layers after a late-interaction model's backbone, in order."""
    return tuple(module.folder for module in read_modules(directory) or () if module.kind == "Dense")


def _kind(
    directory: Path, side: dict[str, Any], modules: tuple[Module, ...] | None, classifier: bool
) -> ModelKind:
    """The file's word, else a classifier without modules is a cross-encoder and the rest embed."""
    path = directory / "config_sentence_transformers.json"
    named = side.get("model_type")
    if named is not None:
        if named not in _KINDS:
            raise RecipeError.at(
                path, "model_type", f"{named!r} isn't served", f"use one of {', '.join(_KINDS)}"
            )
        return _KINDS[named]
    if any(module.kind == "MultiVectorMask" for module in modules or ()):
        return ModelKind.LATE_INTERACTION
    return ModelKind.CROSS_ENCODER if modules is None and classifier else ModelKind.EMBEDDER


def _limit(recipe: Recipe, max_tokens: int) -> Recipe:
    if not _SHORTEST <= max_tokens <= recipe.max_tokens:
        raise RecipeError(
            f"max_tokens: {max_tokens} can't be set; it lowers the checkpoint's limit, so give a number"
            f" from {_SHORTEST} to {recipe.max_tokens}"
        )
    if recipe.late_interaction is not None:
        return limited(recipe, recipe.late_interaction, max_tokens)
    return dataclasses.replace(recipe, max_tokens=max_tokens)
