"""Reads sentence-transformers' side files, of both generations: up to 5.3 and from 5.4 on.

Invariant: class paths are data. Only the last name of a path is compared, and only with names that stand
here; a module, option or mode that isn't understood is refused, never skipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phasemesh.recipe.errors import RecipeError
from phasemesh.recipe.families import Backbone
from phasemesh.recipe.files import boolean, inside, integer, read_json, read_object
from phasemesh.recipe.model import Pooling

#: Older releases named the file after the backbone (sentence_transformers.base.modules.transformer).
TRANSFORMER_CONFIGS = (
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_albert_config.json",
    "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
)

#: The library's own order when several booleans are set (sentence_transformer.modules.pooling).
LEGACY_POOLING = (
    ("pooling_mode_cls_token", "cls"),
    ("pooling_mode_max_tokens", "max"),
    ("pooling_mode_mean_tokens", "mean"),
    ("pooling_mode_mean_sqrt_len_tokens", "mean_sqrt_len_tokens"),
    ("pooling_mode_weightedmean_tokens", "weightedmean"),
    ("pooling_mode_lasttoken", "lasttoken"),
)

#: Constructor options that change neither token ids nor vectors, beyond what is read elsewhere.
_HARMLESS_OPTIONS = frozenset(
    {"attn_implementation", "dtype", "padding_side", "revision", "torch_dtype", "trust_remote_code"}
)

#: A tokenizer without a limit says int(1e30) (transformers.tokenization_utils_base.VERY_LARGE_INTEGER).
_NO_LIMIT = 10**9


@dataclass(frozen=True, slots=True)
class Module:
    """One entry of modules.json.

    Attributes:
        kind: last name of the class path, e.g. "Pooling".
        folder: where its files are.
    """

    kind: str
    folder: Path


@dataclass(frozen=True, slots=True)
class TransformerFile:
    """sentence_bert_config.json, or the same file under an older name.

    Attributes:
        path: the file read, or the name it would have.
        values: its content, empty where there is none.
    """

    path: Path
    values: Mapping[str, Any]


def read_modules(root: Path) -> tuple[Module, ...] | None:
    """Modules in the order they run; None without modules.json.

    Raises:
        RecipeError: the file isn't a list of modules, or the first isn't a Transformer in the root.
    """
    path = root / "modules.json"
    if not path.is_file():
        return None
    entries = read_json(path)
    if not isinstance(entries, list) or not entries:
        raise RecipeError.at(path, None, "holds no list of modules", "download the checkpoint again")
    modules = []
    for index, entry in enumerate(entries):
        if not isinstance(entry, dict) or not isinstance(entry.get("type"), str):
            raise RecipeError.at(path, f"[{index}].type", "is missing", "download the checkpoint again")
        if entry.get("kwargs"):
            raise RecipeError.at(
                path, f"[{index}].kwargs", f"{entry['kwargs']!r} isn't understood", "remove the entry"
            )
        folder = inside(root, str(entry.get("path", "")), path, f"[{index}].path")
        modules.append(Module(entry["type"].rsplit(".", 1)[-1], folder))
    if modules[0].kind != "Transformer" or modules[0].folder not in (root, root / "0_Transformer"):
        raise RecipeError.at(
            path, "[0].type", f"is {entries[0]['type']!r}", "only a text Transformer can come first"
        )
    return tuple(modules)


def read_transformer_file(folder: Path, task: str) -> TransformerFile:
    """Read the Transformer module's own file and refuse what isn't plain text through `task`.

    Raises:
        RecipeError: an option isn't understood.
    """
    present = next((name for name in TRANSFORMER_CONFIGS if (folder / name).is_file()), None)
    path = folder / (present or TRANSFORMER_CONFIGS[0])
    values = read_object(path, optional=True)
    found = values.get("transformer_task", task)
    if found != task:
        raise RecipeError.at(
            path, "transformer_task", f"{found!r} isn't served for this checkpoint", f"it must be {task!r}"
        )
    modalities = values.get("modality_config")
    if modalities is not None:
        output = "last_hidden_state" if task == "feature-extraction" else "logits"
        text = modalities.get("text") if isinstance(modalities, dict) else None
        if text != {"method": "forward", "method_output_name": output} or "message" in modalities:
            raise RecipeError.at(
                path, "modality_config", f"{modalities!r} isn't served", f"text must go forward to {output}"
            )
    for option in ("model", "processor", "tokenizer", "config"):
        for key in (f"{option}_args", f"{option}_kwargs"):
            unknown = sorted(set(values.get(key) or {}) - _HARMLESS_OPTIONS)
            if unknown:
                raise RecipeError.at(path, f"{key}.{unknown[0]}", "isn't understood", "remove the option")
    if values.get("processing_kwargs"):
        raise RecipeError.at(path, "processing_kwargs", "isn't understood", "remove the option")
    return TransformerFile(path, values)


def token_limit(root: Path, backbone: Backbone, transformer: TransformerFile) -> int:
    """Longest sequence as sentence-transformers 6 cuts it, special tokens included.

    A `max_seq_length` is taken as it stands; without one it is the smaller of the tokenizer's
    `model_max_length` and `max_position_embeddings`. Beyond that we never exceed a position table, where
    the library would fail: RoBERTa's 514 rows hold 512 tokens.

    Raises:
        RecipeError: a limit isn't a positive integer.
    """
    if transformer.values.get("max_seq_length") is not None:
        limit = integer(transformer.path, transformer.values, "max_seq_length")
    else:
        limit = backbone.max_positions
        tokenizer = root / "tokenizer_config.json"
        written = read_object(tokenizer, optional=True).get("model_max_length")
        if written is not None:
            if isinstance(written, bool) or not isinstance(written, int | float) or written < 1:
                raise RecipeError.at(
                    tokenizer, "model_max_length", f"is {written!r}", "it must be a positive integer"
                )
            limit = min(limit, int(written)) if written < _NO_LIMIT else limit
    return limit if backbone.longest is None else min(limit, backbone.longest)


def read_pooling(folder: Path, hidden_size: int) -> tuple[tuple[Pooling, ...], bool]:
    """Modes in the order of concatenation, and whether prompt tokens are pooled.

    Raises:
        RecipeError: a mode isn't served, or the width isn't the backbone's.
    """
    path = folder / "config.json"
    values = read_object(path)
    if "pooling_mode" in values:
        field = "pooling_mode"
        named = values[field]
        modes = [named] if isinstance(named, str) else list(named or [])
    else:
        field = "pooling_mode_*"
        modes = [mode for key, mode in LEGACY_POOLING if boolean(path, values, key, False)] or ["mean"]
    served = [pooling.value for pooling in Pooling]
    for mode in modes:
        if mode not in served:
            raise RecipeError.at(path, field, f"{mode!r} isn't served", f"use one of {', '.join(served)}")
    if not modes:
        raise RecipeError.at(path, field, "names no mode", f"use one of {', '.join(served)}")
    for width in ("embedding_dimension", "word_embedding_dimension"):
        if width in values and integer(path, values, width) != hidden_size:
            raise RecipeError.at(
                path, width, f"is {values[width]}", f"the backbone's hidden size is {hidden_size}"
            )
    return tuple(Pooling(mode) for mode in modes), boolean(path, values, "include_prompt", True)


def normalized_feature(folder: Path) -> str:
    """What a Normalize module acts on: "sentence_embedding" or "token_embeddings".

    Raises:
        RecipeError: it writes elsewhere than it reads.
    """
    path = folder / "config.json"
    values = read_object(path, optional=True)
    name = values.get("module_input_name", "sentence_embedding")
    if values.get("module_output_name", name) != name or not isinstance(name, str):
        raise RecipeError.at(path, "module_output_name", "differs from the input", "they must be equal")
    return name


def read_prompts(path: Path, values: Mapping[str, Any]) -> tuple[tuple[tuple[str, str], ...], str | None]:
    """Prompts and the default prompt's name, from config_sentence_transformers.json.

    Raises:
        RecipeError: they aren't names and texts, or the default isn't among them.
    """
    prompts = values.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(text, str | None) for text in prompts.values()):
        raise RecipeError.at(path, "prompts", "isn't a map of names to texts", "correct the file")
    default = values.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise RecipeError.at(
            path, "default_prompt_name", f"{default!r} isn't in prompts", f"use one of {sorted(prompts)}"
        )
    return tuple((name, text or "") for name, text in prompts.items()), default
