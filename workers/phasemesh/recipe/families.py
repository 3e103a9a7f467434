"""Which backbones are served, and what of their `config.json` decides lengths and classes.

Invariant: a backbone outside the table is refused, since transformers builds many of them without an error
and with wrong or random weights (custom code, other position encodings, other key names).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phasemesh.recipe.errors import RecipeError
from phasemesh.recipe.files import integer

_BASE_SUFFIXES = ("Model", "ForMaskedLM", "ForPreTraining", "LMHeadModel")
CLASSIFIER_SUFFIX = "ForSequenceClassification"
CAUSAL_SUFFIX = "ForCausalLM"


@dataclass(frozen=True, slots=True)
class Family:
    """One `model_type` of transformers.

    Attributes:
        prefix: what its class names begin with, e.g. "Bert".
        decoder: a causal language model's backbone; its pooling can't be assumed.
        absolute: positions are a table, so that longer inputs can't be computed at all.
        offset_positions: positions begin after the padding index, as in fairseq's RoBERTa.
        hidden_size: name of the width in `config.json`.
    """

    prefix: str
    decoder: bool = False
    absolute: bool = True
    offset_positions: bool = False
    hidden_size: str = "hidden_size"


FAMILIES: Mapping[str, Family] = {
    "bert": Family("Bert"),
    "camembert": Family("Camembert", offset_positions=True),
    "distilbert": Family("DistilBert", hidden_size="dim"),
    "electra": Family("Electra"),
    "mistral": Family("Mistral", decoder=True, absolute=False),
    "modernbert": Family("ModernBert", absolute=False),
    "mpnet": Family("MPNet", offset_positions=True),
    "qwen2": Family("Qwen2", decoder=True, absolute=False),
    "qwen3": Family("Qwen3", decoder=True, absolute=False),
    "roberta": Family("Roberta", offset_positions=True),
    "xlm-roberta": Family("XLMRoberta", offset_positions=True),
}


@dataclass(frozen=True, slots=True)
class Backbone:
    """What `config.json` says, checked.

    Attributes:
        config: the whole file.
        family: the row of the table.
        model_type: its key.
        architecture: `architectures[0]`.
        hidden_size: width of token states.
        vocab_size: rows of the embedding table.
        max_positions: `max_position_embeddings`, as written.
        longest: most tokens that can be computed; None where positions are no table.
    """

    config: Mapping[str, Any]
    family: Family
    model_type: str
    architecture: str
    hidden_size: int
    vocab_size: int
    max_positions: int
    longest: int | None

    @property
    def is_classifier(self) -> bool:
        """Whether the checkpoint holds a sequence classifier."""
        return self.architecture.endswith(CLASSIFIER_SUFFIX)

    @property
    def is_plain(self) -> bool:
        """Whether the checkpoint holds the backbone and no task's head."""
        return self.architecture == f"{self.family.prefix}Model"


def read_backbone(path: Path, config: Mapping[str, Any]) -> Backbone:
    """Check `config`, the content of `path`.

    Raises:
        RecipeError: the backbone isn't served, or needs custom code.
    """
    model_type = config.get("model_type")
    architectures = config.get("architectures") or [None]
    architecture = architectures[0]
    _refuse_special(path, config, architecture)
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None or not isinstance(model_type, str):
        raise RecipeError.at(
            path,
            "model_type",
            f"{model_type!r} isn't served",
            f"use a checkpoint whose backbone is one of {', '.join(FAMILIES)}",
        )
    suffixes = (*_BASE_SUFFIXES, CAUSAL_SUFFIX, CLASSIFIER_SUFFIX)
    if architecture not in {family.prefix + suffix for suffix in suffixes}:
        raise RecipeError.at(
            path,
            "architectures",
            f"{architecture!r} isn't served for model_type {model_type!r}",
            f"name one of {', '.join(family.prefix + s for s in suffixes)}",
        )
    embedding_size = config.get("embedding_size")
    hidden_size = integer(path, config, family.hidden_size)
    if embedding_size is not None and model_type != "electra" and embedding_size != hidden_size:
        raise RecipeError.at(
            path, "embedding_size", f"is {embedding_size!r}", "factorised tables aren't served"
        )
    max_positions = integer(path, config, "max_position_embeddings")
    offset = 1 + _padding_index(path, config) if family.offset_positions else 0
    return Backbone(
        config=config,
        family=family,
        model_type=model_type,
        architecture=architecture,
        hidden_size=hidden_size,
        vocab_size=integer(path, config, "vocab_size"),
        max_positions=max_positions,
        longest=max_positions - offset if family.absolute else None,
    )


def _padding_index(path: Path, config: Mapping[str, Any]) -> int:
    index = config.get("pad_token_id", 1)
    if isinstance(index, bool) or not isinstance(index, int) or index < 0:
        raise RecipeError.at(
            path, "pad_token_id", f"is {index!r}", "positions start after it: give its number"
        )
    return index


def _refuse_special(path: Path, config: Mapping[str, Any], architecture: str | None) -> None:
    """Refuse what looks like a served backbone and isn't."""
    if architecture == "HF_ColBERT":
        raise RecipeError.at(
            path,
            "architectures",
            "HF_ColBERT is the Stanford ColBERT layout, which isn't served",
            "save the checkpoint with PyLate or sentence-transformers, so that it has modules.json",
        )
    if architecture is not None and architecture.endswith("ForRetrieval"):
        raise RecipeError.at(
            path,
            "architectures",
            f"{architecture} retrieves over images, which isn't served",
            "use a text checkpoint in PyLate's or sentence-transformers' layout",
        )
    if config.get("auto_map"):
        raise RecipeError.at(
            path,
            "auto_map",
            "the checkpoint brings its own model code, which is never run",
            "use a checkpoint of an architecture that transformers has itself",
        )
    if config.get("quantization_config"):
        raise RecipeError.at(
            path, "quantization_config", "quantised weights aren't served", "use the unquantised checkpoint"
        )
    position_type = config.get("position_embedding_type", "absolute")
    if position_type not in (None, "absolute"):
        raise RecipeError.at(
            path,
            "position_embedding_type",
            f"{position_type!r} isn't what transformers computes for this model_type",
            "use a checkpoint with absolute positions",
        )
