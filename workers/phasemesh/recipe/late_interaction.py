"""Recipes of ColBERT-type checkpoints: PyLate's layout and sentence-transformers' MultiVectorEncoder.

Invariant: a marker of the recipe is one token of the vocabulary; a prefix that isn't becomes prompt text, as
in sentence-transformers. Without trained projections and lengths there is no recipe.
"""

from __future__ import annotations

import dataclasses
import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phasemesh.recipe.errors import RecipeError
from phasemesh.recipe.families import Backbone
from phasemesh.recipe.files import (
    boolean,
    integer,
    read_json,
    read_object,
    tokenizer_digest,
    weight_files,
    weights_digest,
)
from phasemesh.recipe.layout import (
    Module,
    normalized_feature,
    read_prompts,
    read_transformer_file,
    token_limit,
)
from phasemesh.recipe.model import Activation, LateInteraction, ModelKind, Recipe

#: PyLate's defaults, for keys that its older saves leave out.
PYLATE_QUERY_LENGTH = 32
PYLATE_DOCUMENT_LENGTH = 180

_SIDES = ("query", "document")


@dataclasses.dataclass(frozen=True, slots=True)
class _Conventions:
    prompts: dict[str, str]
    markers: dict[str, str | None]
    query_length: int
    document_length: int
    expand: bool
    attend: bool
    skip_words: tuple[str, ...]


def late_interaction_recipe(
    root: Path, backbone: Backbone, modules: tuple[Module, ...] | None, side: Mapping[str, Any]
) -> Recipe:
    """Recipe of a late-interaction model in `root`; `side` is config_sentence_transformers.json.

    Raises:
        RecipeError: the projection is missing, or a convention isn't served.
    """
    if modules is None:
        raise RecipeError.at(
            root / "modules.json",
            None,
            "is missing, so the projection would be random",
            "save the checkpoint with PyLate or sentence-transformers",
        )
    if backbone.family.decoder or backbone.is_classifier or modules[0].folder != root:
        raise RecipeError.at(
            root / "config.json",
            "architectures",
            f"{backbone.architecture} isn't served for late interaction",
            "use an encoder's backbone, e.g. BertModel",
        )
    path = root / "config_sentence_transformers.json"
    pylate = side.get("model_type") == "ColBERT"
    dense = tuple(module for module in modules[1:] if module.kind == "Dense")
    projections = _projections(root, dense, backbone.hidden_size)
    if pylate:
        _expect_modules(root, modules, ["Dense"] * len(dense))
        read = _read_pylate(root, backbone, path, side)
    else:
        _expect_modules(root, modules, ["Dense"] * len(dense) + ["MultiVectorMask", "Normalize"])
        read = _read_multi_vector(root, backbone, modules, path, side)
    similarity = str(side.get("similarity_fn_name") or "maxsim").lower()
    if similarity not in ("maxsim", "meanmaxsim", "cosine", "dot"):
        raise RecipeError.at(path, "similarity_fn_name", f"{similarity!r} isn't served", "use 'MaxSim'")
    longest = backbone.longest or backbone.max_positions
    if read.query_length > longest:
        raise RecipeError.at(
            path, "query_length", f"is {read.query_length}", f"the backbone holds {longest} tokens"
        )
    late = LateInteraction(
        query_marker=read.markers["query"],
        document_marker=read.markers["document"],
        query_length=read.query_length,
        document_length=min(read.document_length, longest),
        expand_queries=read.expand,
        attend_to_expansion=read.attend,
        skip_words=read.skip_words,
        projection_dims=projections,
        mean=similarity == "meanmaxsim",
    )
    default = read_prompts(path, side)[1]
    return Recipe(
        kind=ModelKind.LATE_INTERACTION,
        architecture=backbone.architecture,
        model_type=backbone.model_type,
        max_tokens=max(late.query_length, late.document_length),
        hidden_size=backbone.hidden_size,
        dim=0,
        token_dim=projections[-1][1],
        pooling=(),
        include_prompt=True,
        normalize=True,
        lower_case=read_transformer_file(root, "feature-extraction").values.get("do_lower_case") is True,
        prompts=tuple(read.prompts.items()),
        default_prompt=default,
        matryoshka_dims=(),
        labels=0,
        activation=Activation.IDENTITY,
        late_interaction=late,
        vocab_size=backbone.vocab_size,
        weights_digest=weights_digest(root, backbone.config, [root, *(module.folder for module in dense)]),
        tokenizer_digest=tokenizer_digest(root),
    )


def limited(recipe: Recipe, late: LateInteraction, max_tokens: int) -> Recipe:
    """`recipe` with documents cut to `max_tokens`; queries keep their length, which is part of the training.

    Raises:
        RecipeError: queries are longer than that.
    """
    if max_tokens < late.query_length:
        raise RecipeError(
            f"max_tokens: {max_tokens} is below the model's query length; give at least {late.query_length}"
        )
    late = dataclasses.replace(late, document_length=min(late.document_length, max_tokens))
    return dataclasses.replace(
        recipe, late_interaction=late, max_tokens=max(late.query_length, late.document_length)
    )


def _expect_modules(root: Path, modules: tuple[Module, ...], expected: list[str]) -> None:
    found = [module.kind for module in modules[1:]]
    if found != expected:
        raise RecipeError.at(
            root / "modules.json",
            "type",
            f"the modules after the Transformer are {', '.join(found)}",
            f"served are {', '.join(expected)}",
        )


def _projections(root: Path, dense: tuple[Module, ...], hidden_size: int) -> tuple[tuple[int, int], ...]:
    if not dense:
        raise RecipeError.at(
            root / "modules.json", "type", "there is no Dense, so the projection would be random", "add it"
        )
    width, dims = hidden_size, []
    for module in dense:
        path = module.folder / "config.json"
        values = read_object(path)
        weight_files(module.folder)
        found, out = integer(path, values, "in_features"), integer(path, values, "out_features")
        if found != width:
            raise RecipeError.at(path, "in_features", f"is {found}", f"its input is {width} wide")
        for feature in ("module_input_name", "module_output_name"):
            if values.get(feature) not in (None, "token_embeddings"):
                raise RecipeError.at(
                    path, feature, f"is {values[feature]!r}", "it must be 'token_embeddings'"
                )
        # The library's default is Tanh, so a missing key isn't Identity.
        activation = values.get("activation_function")
        if activation not in ("torch.nn.modules.linear.Identity", "torch.nn.Identity"):
            raise RecipeError.at(
                path, "activation_function", f"{activation!r} isn't served", "it must be torch.nn.Identity"
            )
        if boolean(path, values, "use_residual", False):
            raise RecipeError.at(path, "use_residual", "isn't served", "it must be false")
        dims.append((width, out))
        width = out
    return tuple(dims)


def _read_pylate(root: Path, backbone: Backbone, path: Path, side: Mapping[str, Any]) -> _Conventions:
    """PyLate's keys; its prefixes are token ids put after the first special token."""
    transformer = read_transformer_file(root, "feature-extraction")
    prompts = dict(read_prompts(path, side)[0])
    vocabulary = _vocabulary(root)
    markers: dict[str, str | None] = {}
    for name in _SIDES:
        prefix = side.get(f"{name}_prefix") or ""
        if not isinstance(prefix, str):
            raise RecipeError.at(path, f"{name}_prefix", f"is {prefix!r}", "it must be a text")
        text = prompts.get(name, "").removeprefix(prefix)
        markers[name], rest = _split_marker(prefix, vocabulary)
        if rest or text or name in prompts:
            prompts[name] = rest + text
    words = side.get("skiplist_words")
    limit = token_limit(root, backbone, transformer)
    expand = boolean(path, side, "do_query_expansion", True)
    return _Conventions(
        prompts=prompts,
        markers=markers,
        query_length=integer(path, side, "query_length", PYLATE_QUERY_LENGTH if expand else limit),
        document_length=integer(path, side, "document_length", PYLATE_DOCUMENT_LENGTH),
        expand=expand,
        attend=boolean(path, side, "attend_to_expansion_tokens", False),
        skip_words=_words(path, "skiplist_words", list(string.punctuation) if words is None else words),
    )


def _read_multi_vector(
    root: Path, backbone: Backbone, modules: tuple[Module, ...], path: Path, side: Mapping[str, Any]
) -> _Conventions:
    """sentence-transformers' keys; its prompts are text, and a marker is one where it's an added token."""
    transformer = read_transformer_file(root, "feature-extraction")
    mask_path = modules[-2].folder / "config.json"
    mask = read_object(mask_path, optional=True)
    if mask.get("skiplist_tasks", ["document"]) != ["document"]:
        raise RecipeError.at(mask_path, "skiplist_tasks", "isn't served", "it must be ['document']")
    if mask.get("keep_only_token_ids"):
        raise RecipeError.at(mask_path, "keep_only_token_ids", "isn't served", "remove it")
    if normalized_feature(modules[-1].folder) != "token_embeddings":
        raise RecipeError.at(
            modules[-1].folder / "config.json",
            "module_input_name",
            "token vectors aren't normalised",
            "it must be 'token_embeddings'",
        )
    values, where = transformer.values, transformer.path
    expansion = values.get("query_expansion")
    if expansion is not None and (
        not isinstance(expansion, dict)
        or expansion.get("strategy") != "fixed"
        or expansion.get("token") is not None
        or not isinstance(expansion.get("length"), int)
    ):
        raise RecipeError.at(
            where,
            "query_expansion",
            f"{expansion!r} isn't served",
            "use strategy 'fixed' with the mask token",
        )
    prompts = dict(read_prompts(path, side)[0])
    special = _special_tokens(root)
    markers: dict[str, str | None] = {}
    for name in _SIDES:
        markers[name], rest = _split_marker(prompts.get(name, ""), special)
        if name in prompts:
            prompts[name] = rest
    limit = token_limit(root, backbone, transformer)
    query_length = expansion["length"] if expansion else integer(where, values, "query_length", limit)
    return _Conventions(
        prompts=prompts,
        markers=markers,
        query_length=query_length,
        document_length=integer(where, values, "document_length", limit),
        expand=expansion is not None,
        attend=bool(expansion and expansion.get("attend")),
        skip_words=_words(mask_path, "skiplist_words", mask.get("skiplist_words") or []),
    )


def _split_marker(prefix: str, tokens: frozenset[str]) -> tuple[str | None, str]:
    """The token that `prefix` begins with, and the text after it.

    PyLate adds "[Q] " to the tokenizer with its trailing space, as one token; other checkpoints have the
    bare word.
    """
    if not prefix.strip():
        return None, prefix
    word = prefix.split(None, 1)[0]
    for marker in (prefix, word):
        if marker in tokens and prefix.startswith(marker):
            return marker, prefix.removeprefix(marker).lstrip()
    return None, prefix


def _added_tokens(root: Path) -> list[dict[str, Any]]:
    added = read_object(root / "tokenizer.json", optional=True).get("added_tokens", [])
    return [entry for entry in added if isinstance(entry, dict) and isinstance(entry.get("content"), str)]


def _special_tokens(root: Path) -> frozenset[str]:
    """Added tokens that match in raw text whatever the normaliser does."""
    return frozenset(t["content"] for t in _added_tokens(root) if t.get("special") or not t.get("normalized"))


def _vocabulary(root: Path) -> frozenset[str]:
    tokens = {entry["content"] for entry in _added_tokens(root)}
    model = read_object(root / "tokenizer.json", optional=True).get("model", {})
    vocab = model.get("vocab", {}) if isinstance(model, dict) else {}
    tokens.update(entry[0] if isinstance(entry, list) else entry for entry in vocab)
    if (root / "vocab.txt").is_file():
        tokens.update((root / "vocab.txt").read_text(encoding="utf-8").splitlines())
    if (root / "added_tokens.json").is_file():
        tokens.update(read_json(root / "added_tokens.json"))
    return frozenset(tokens)


def _words(path: Path, field: str, words: object) -> tuple[str, ...]:
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise RecipeError.at(path, field, f"is {words!r}", "it must be a list of words")
    return tuple(words)
