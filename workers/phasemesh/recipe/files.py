"""Reads a checkpoint's files: JSON, weight files, digests.

Invariant: nothing outside the checkpoint's folder is read, no pickle is opened, and no file is held in
memory whole except JSON.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from phasemesh.recipe.errors import RecipeError

WEIGHTS_NAME = "model.safetensors"
WEIGHTS_INDEX_NAME = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

#: Files that decide token ids, over all tokenizer classes of transformers.
TOKENIZER_FILES = (
    "added_tokens.json",
    "bpe.codes",
    "merges.txt",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)

#: Keys of config.json that leave vectors as they are: provenance, storage dtype, names of labels.
_NEUTRAL_CONFIG_KEYS = frozenset(
    {
        "_name_or_path",
        "architectures",
        "dtype",
        "gradient_checkpointing",
        "id2label",
        "is_matryoshka",
        "label2id",
        "matryoshka_dimensions",
        "sbert_ce_default_activation_function",
        "sentence_transformers",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)

_CHUNK_BYTES = 1 << 20


def read_json(path: Path) -> Any:
    """Parsed content of `path`.

    Raises:
        RecipeError: the file is missing or isn't JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecipeError.at(path, None, "the file is missing", "download the checkpoint again") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise RecipeError.at(path, None, f"not readable as JSON ({error})", "download it again") from error


def read_object(path: Path, *, optional: bool = False) -> dict[str, Any]:
    """Parsed JSON object of `path`; empty if it is missing and `optional`.

    Raises:
        RecipeError: the file is missing, isn't JSON, or holds something other than an object.
    """
    if optional and not path.is_file():
        return {}
    value = read_json(path)
    if not isinstance(value, dict):
        raise RecipeError.at(path, None, f"holds a {type(value).__name__}", "it must hold a JSON object")
    return value


def integer(path: Path, values: Mapping[str, Any], field: str, default: int | None = None) -> int:
    """Positive integer `values[field]`, which was read from `path`.

    Raises:
        RecipeError: the field is missing without a default, or isn't a positive integer.
    """
    value = values.get(field, default)
    if value is None and default is not None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise RecipeError.at(path, field, f"is {value!r}", "it must be a positive integer")
    return value


def boolean(path: Path, values: Mapping[str, Any], field: str, default: bool) -> bool:
    """Boolean `values[field]`, which was read from `path`.

    Raises:
        RecipeError: the field isn't a boolean.
    """
    value = values.get(field)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise RecipeError.at(path, field, f"is {value!r}", "it must be true or false")
    return value


def inside(root: Path, name: str, file: Path, field: str) -> Path:
    """`root / name`, where `name` was read from `field` of `file`.

    Raises:
        RecipeError: `name` leads out of `root`.
    """
    parts = Path(name).parts
    if Path(name).is_absolute() or ".." in parts:
        raise RecipeError.at(file, field, f"names {name!r}", "paths must stay inside the checkpoint's folder")
    return root / name


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Safetensors files of one module, in the order of their names.

    Raises:
        RecipeError: there are none, or a shard is missing.
    """
    if (folder / WEIGHTS_NAME).is_file():
        return (folder / WEIGHTS_NAME,)
    index = folder / WEIGHTS_INDEX_NAME
    if index.is_file():
        weight_map = read_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise RecipeError.at(index, "weight_map", "is missing", "download the checkpoint again")
        shards = [inside(folder, name, index, "weight_map") for name in sorted(set(weight_map.values()))]
        for shard in shards:
            if not shard.is_file():
                raise RecipeError.at(
                    shard, None, f"the shard named by {index.name} is missing", "download it again"
                )
        return tuple(shards)
    pickles = sorted(p.name for p in folder.glob("*") if p.suffix in PICKLE_SUFFIXES)
    if pickles:
        raise RecipeError.at(
            folder / pickles[0],
            None,
            f"the only weights are pickles ({', '.join(pickles)}), which can run code when opened",
            f"convert them to {WEIGHTS_NAME}",
        )
    raise RecipeError.at(folder / WEIGHTS_NAME, None, "there are no weights", f"add {WEIGHTS_NAME}")


def digest_of(root: Path, files: Iterable[Path], *, also: Mapping[str, Any] | None = None) -> str:
    """SHA-256, hex, over relative names and contents of `files`, and over `also` as canonical JSON."""
    total = hashlib.sha256()
    for path in sorted(files):
        total.update(f"{_sha256(path)}  {path.relative_to(root).as_posix()}\n".encode())
    if also is not None:
        canonical = json.dumps(also, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        total.update(canonical.encode())
    return total.hexdigest()


def weights_digest(root: Path, config: Mapping[str, Any], folders: Iterable[Path]) -> str:
    """Digest of the weight files in `folders` and of the keys of `config.json` that change vectors.

    The same tensors give other vectors under another `layer_norm_eps` or `rope_theta`, so both count.
    """
    files = [path for folder in folders for path in weight_files(folder)]
    kept = {key: value for key, value in config.items() if key not in _NEUTRAL_CONFIG_KEYS}
    return digest_of(root, files, also=kept)


def tokenizer_digest(root: Path) -> str:
    """Digest of the tokenizer's files.

    Raises:
        RecipeError: there are none.
    """
    files = [root / name for name in TOKENIZER_FILES if (root / name).is_file()]
    if not {path.name for path in files} - {"tokenizer_config.json", "special_tokens_map.json"}:
        raise RecipeError.at(root / "tokenizer.json", None, "there is no tokenizer", "add tokenizer.json")
    return digest_of(root, files)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
