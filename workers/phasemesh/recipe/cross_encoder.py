"""Recipes of encoders with a sequence classifier, which read query and document together.

Invariant: decoders are refused here, because their classifiers need a prompt template and pool by token id.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phasemesh.recipe.errors import RecipeError
from phasemesh.recipe.families import CLASSIFIER_SUFFIX, Backbone
from phasemesh.recipe.files import integer, tokenizer_digest, weights_digest
from phasemesh.recipe.layout import Module, TransformerFile, read_transformer_file, token_limit
from phasemesh.recipe.model import Activation, ModelKind, Recipe

_ACTIVATIONS = {"Sigmoid": Activation.SIGMOID, "Identity": Activation.IDENTITY}


def cross_encoder_recipe(
    root: Path, backbone: Backbone, modules: tuple[Module, ...] | None, side: Mapping[str, Any]
) -> Recipe:
    """Recipe of a cross-encoder in `root`; `side` is config_sentence_transformers.json.

    Raises:
        RecipeError: the classifier, its activation or a module isn't served.
    """
    config_path = root / "config.json"
    if backbone.family.decoder:
        raise RecipeError.at(
            config_path,
            "architectures",
            f"{backbone.architecture} needs a prompt template, which isn't served",
            "use an encoder's classifier, e.g. BertForSequenceClassification",
        )
    if not backbone.is_classifier:
        raise RecipeError.at(
            config_path,
            "architectures",
            f"{backbone.architecture} has no trained classifier",
            f"a cross-encoder's weights are a ...{CLASSIFIER_SUFFIX}",
        )
    transformer = TransformerFile(root, {})
    if modules is not None:
        if len(modules) > 1:
            raise RecipeError.at(
                root / "modules.json",
                "type",
                f"module {modules[1].kind!r} isn't served after a classifier",
                "a cross-encoder is a Transformer alone",
            )
        if modules[0].folder != root:
            raise RecipeError.at(root / "modules.json", "[0].path", "isn't the root", "it must be empty")
        transformer = read_transformer_file(root, "sequence-classification")
    if side.get("default_prompt_name") is not None:
        raise RecipeError.at(
            root / "config_sentence_transformers.json",
            "default_prompt_name",
            "prompts aren't served for cross-encoders",
            "remove it",
        )
    labels = _labels(config_path, backbone.config)
    return Recipe(
        kind=ModelKind.CROSS_ENCODER,
        architecture=backbone.architecture,
        model_type=backbone.model_type,
        max_tokens=token_limit(root, backbone, transformer),
        hidden_size=backbone.hidden_size,
        dim=0,
        token_dim=0,
        pooling=(),
        include_prompt=True,
        normalize=False,
        lower_case=transformer.values.get("do_lower_case") is True,
        prompts=(),
        default_prompt=None,
        matryoshka_dims=(),
        labels=labels,
        activation=_activation(root, backbone.config, side, labels),
        late_interaction=None,
        vocab_size=backbone.vocab_size,
        weights_digest=weights_digest(root, backbone.config, [root]),
        tokenizer_digest=tokenizer_digest(root),
    )


def _labels(path: Path, config: Mapping[str, Any]) -> int:
    """Outputs of the classifier, counted as transformers does: two where the file is silent."""
    names = config.get("id2label")
    if isinstance(names, dict) and names:
        return len(names)
    return integer(path, config, "num_labels", default=2)


def _activation(root: Path, config: Mapping[str, Any], side: Mapping[str, Any], labels: int) -> Activation:
    """The library's order: its own file, config.json's newer key, the older one, then by labels."""
    newer = config.get("sentence_transformers") or {}
    written = (
        ("config_sentence_transformers.json", "activation_fn", side.get("activation_fn")),
        ("config.json", "sentence_transformers.activation_fn", newer.get("activation_fn")),
        (
            "config.json",
            "sbert_ce_default_activation_function",
            config.get("sbert_ce_default_activation_function"),
        ),
    )
    for name, field, value in written:
        if value is not None:
            return _named_activation(root / name, field, value)
    return Activation.SIGMOID if labels == 1 else Activation.IDENTITY


def _named_activation(path: Path, field: str, value: object) -> Activation:
    if isinstance(value, str) and value.startswith("torch.nn."):
        activation = _ACTIVATIONS.get(value.rsplit(".", 1)[-1])
        if activation is not None:
            return activation
    raise RecipeError.at(
        path,
        field,
        f"{value!r} isn't served",
        "use torch.nn.modules.activation.Sigmoid or ...linear.Identity",
    )
