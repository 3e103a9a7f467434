"""Tiny checkpoints, written to disk as a hub repository would be: real architectures, random weights.

Everything follows from the seed. Weights are wide (not transformers' standard deviation of 0.02), so that a
wrong pooling, mask, prompt or head lands far off.
"""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

HIDDEN = 32
TOKEN_DIM = 16
POSITIONS = 64

SENTENCES = (
    "what is the capital of france",
    "paris is the capital and a large city of france",
    "Snow, rain and storm: which is slow?",
    "the cat is not a dog",
    "a",
    "the river is long and the bridge of stone is short and the water in the river is green and blue and fast"
    " and the light of the city is red and the mountain is large and the piano is not in the letter",
    "unknownword zyx qqq 123",
    "",
)

PAIRS = (
    ("what is the capital of france", "paris is the capital of france"),
    ("what is the capital of france", "the cat is not a dog"),
    ("how fast is the river", "the river is slow, and the water is blue"),
    ("which model", ""),
    (
        "the cat",
        "the river is long and the bridge of stone is short and the water in the river is green " * 4,
    ),
)

#: Words with a token of their own; every fifth word of the texts above is left to pieces.
WORDS = tuple(
    word
    for index, word in enumerate(
        sorted(
            set(re.findall("[a-z]{2,8}", " ".join([*SENTENCES, *(text for pair in PAIRS for text in pair)])))
        )
    )
    if index % 5
)

_BERT_SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_ROBERTA_SPECIALS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
_DECODER_SPECIALS = ("<|endoftext|>", "<|im_end|>", "<unk>")
_SIZES: Mapping[str, Any] = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": POSITIONS,
}
_DECODER: Mapping[str, Any] = {
    **_SIZES,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
_ROBERTA: Mapping[str, Any] = {
    **_SIZES,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "type_vocab_size": 1,
}
_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "bert": _SIZES,
    "camembert": _ROBERTA,
    "distilbert": {
        "dim": HIDDEN,
        "n_layers": 2,
        "n_heads": 4,
        "hidden_dim": 48,
        "max_position_embeddings": POSITIONS,
        "pad_token_id": 0,
    },
    "electra": {**_SIZES, "embedding_size": 16},
    "mistral": {**_DECODER, "sliding_window": 8},
    "modernbert": {
        **_SIZES,
        "num_hidden_layers": 4,
        "local_attention": 8,
        "pad_token_id": 0,
        "cls_token_id": 2,
        "sep_token_id": 3,
        "bos_token_id": 2,
        "eos_token_id": 3,
    },
    "mpnet": {**_SIZES, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2},
    "qwen2": {k: v for k, v in _DECODER.items() if k != "head_dim"},
    "qwen3": _DECODER,
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
}
_DECODERS = ("mistral", "qwen2", "qwen3")
_ROBERTAS = ("camembert", "mpnet", "roberta", "xlm-roberta")
_WITH_TYPES = ("bert", "electra")

_LEGACY_MODES = {
    "cls": "cls_token",
    "max": "max_tokens",
    "mean": "mean_tokens",
    "weightedmean": "weightedmean_tokens",
    "lasttoken": "lasttoken",
}


def embedder(
    path: Path,
    *,
    backbone: str = "bert",
    pooling: str | tuple[str, ...] = "mean",
    layout: str = "legacy",
    normalize: bool = True,
    prompts: Mapping[str, str] | None = None,
    default_prompt: str | None = None,
    include_prompt: bool = True,
    max_seq_length: int | None = 48,
    do_lower_case: bool = False,
    lowercase_tokenizer: bool = True,
    matryoshka_dims: Iterable[int] = (),
    causal: bool = True,
    seed: int = 0,
) -> Path:
    """An embedder in `path`. `layout` is "legacy" (up to 5.3), "v6" or "bare" (no modules.json).

    The v6 layout has no `max_seq_length`: there it's the tokenizer's `model_max_length`.
    """
    limit = max_seq_length if layout == "v6" and max_seq_length else POSITIONS
    tokenizer = _tokenizer(backbone, limit, lowercase=lowercase_tokenizer)
    config: dict[str, Any] = {"matryoshka_dimensions": sorted(matryoshka_dims)} if matryoshka_dims else {}
    if not causal:
        config["is_causal"] = False
    _save_network(path, backbone, transformers.AutoModel, tokenizer, seed, config)
    if layout == "bare":
        return path
    modes = (pooling,) if isinstance(pooling, str) else pooling
    modules = [("Transformer", ""), ("Pooling", "1_Pooling")]
    if normalize:
        modules.append(("Normalize", "2_Normalize"))
        (path / "2_Normalize").mkdir(exist_ok=True)
    _write_modules(path, layout, modules)
    _write_transformer(path, layout, max_seq_length, do_lower_case=do_lower_case)
    settings: dict[str, Any] = {"include_prompt": include_prompt}
    if layout == "legacy":
        settings["word_embedding_dimension"] = HIDDEN
        settings |= {f"pooling_mode_{key}": mode in modes for mode, key in _LEGACY_MODES.items()}
    else:
        settings["embedding_dimension"] = HIDDEN
        settings["pooling_mode"] = modes[0] if len(modes) == 1 else list(modes)
    write_json(path / "1_Pooling" / "config.json", settings)
    side = {
        "prompts": dict(prompts or {}),
        "default_prompt_name": default_prompt,
        "similarity_fn_name": "cosine",
    }
    if layout == "v6":
        side["model_type"] = "SentenceTransformer"
    write_json(path / "config_sentence_transformers.json", side)
    return path


def cross_encoder(
    path: Path,
    *,
    backbone: str = "bert",
    labels: int = 1,
    activation: str | None = None,
    activation_key: str = "sentence_transformers",
    layout: str = "bare",
    max_seq_length: int | None = 48,
    seed: int = 0,
    **config: Any,
) -> Path:
    """A cross-encoder in `path`.

    `activation` is a class path, written under `activation_key`: "sentence_transformers" (from 4.0),
    "sbert_ce_default_activation_function" (before), or "side" (config_sentence_transformers.json).
    """
    extra: dict[str, Any] = {"id2label": {i: f"LABEL_{i}" for i in range(labels)}, **config}
    if activation and activation_key == "sentence_transformers":
        extra["sentence_transformers"] = {"activation_fn": activation, "version": "4.0.0"}
    elif activation and activation_key != "side":
        extra[activation_key] = activation
    tokenizer = _tokenizer(backbone, max_seq_length or POSITIONS)
    _save_network(path, backbone, transformers.AutoModelForSequenceClassification, tokenizer, seed, extra)
    if layout == "v6":
        _write_modules(path, layout, [("Transformer", "")])
        _write_transformer(path, layout, None, task="sequence-classification", output="logits", name="scores")
        side: dict[str, Any] = {"model_type": "CrossEncoder", "prompts": {}, "default_prompt_name": None}
        if activation and activation_key == "side":
            side["activation_fn"] = activation
        write_json(path / "config_sentence_transformers.json", side)
    return path


def colbert(
    path: Path,
    *,
    backbone: str = "bert",
    layout: str = "pylate",
    query_length: int = 16,
    document_length: int = 40,
    expand: bool = True,
    attend: bool = False,
    skip_words: Iterable[str] = string.punctuation,
    projections: tuple[int, ...] = (TOKEN_DIM,),
    mean: bool = False,
    prompts: Mapping[str, str] | None = None,
    seed: int = 0,
) -> Path:
    """A late-interaction model in `path`; `layout` is "pylate" or "v6" (MultiVectorEncoder)."""
    tokenizer = _tokenizer(backbone, POSITIONS, added=("[Q] ", "[D] "))
    _save_network(path, backbone, transformers.AutoModel, tokenizer, seed, {})
    modules, width = [("Transformer", "")], HIDDEN
    for index, out in enumerate(projections, start=1):
        folder = f"{index}_Dense"
        modules.append(("Dense", folder))
        settings: dict[str, Any] = {
            "in_features": width,
            "out_features": out,
            "bias": False,
            "activation_function": "torch.nn.modules.linear.Identity",
        }
        if layout == "v6":
            settings |= {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
        write_json(path / folder / "config.json", settings)
        weight = _values(seed, folder, (out, width)) / np.sqrt(width)
        save_file(
            {"linear.weight": torch.from_numpy(weight.astype(np.float32))},
            path / folder / "model.safetensors",
        )
        width = out
    side: dict[str, Any] = {
        "prompts": dict(prompts or {"query": "", "document": ""}),
        "default_prompt_name": None,
    }
    side["similarity_fn_name"] = "meanmaxsim" if mean else "MaxSim" if layout == "pylate" else "maxsim"
    if layout == "pylate":
        side |= {
            "model_type": "ColBERT",
            "query_prefix": "[Q] ",
            "document_prefix": "[D] ",
            "query_length": query_length,
            "document_length": document_length,
            "attend_to_expansion_tokens": attend,
            "skiplist_words": list(skip_words),
            "do_query_expansion": expand,
        }
        _write_transformer(path, "legacy", POSITIONS)
    else:
        side["model_type"] = "MultiVectorEncoder"
        side["prompts"] = {k: f"[{k[0].upper()}] {v}" for k, v in side["prompts"].items()}
        expansion = {"strategy": "fixed", "attend": attend, "token": None, "length": query_length}
        lengths = {"document_length": document_length, "query_expansion": expansion if expand else None}
        if not expand:
            lengths["query_length"] = query_length
        _write_transformer(path, "v6", None, **lengths)
        modules += [("MultiVectorMask", f"{len(modules)}_MultiVectorMask")]
        mask = {
            "skiplist_words": list(skip_words),
            "skiplist_tasks": ["document"],
            "keep_only_token_ids": None,
        }
        write_json(path / modules[-1][1] / "config.json", mask)
        modules += [("Normalize", f"{len(modules)}_Normalize")]
        token_level = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
        write_json(path / modules[-1][1] / "config.json", token_level)
    _write_modules(path, layout, modules)
    write_json(path / "config_sentence_transformers.json", side)
    return path


def write_json(path: Path, value: object) -> None:
    """Write `value` to `path`, whose folder is made if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


def edit_json(path: Path, **changes: object) -> None:
    """Set keys of the JSON object in `path`; None removes one."""
    values = json.loads(path.read_text(encoding="utf-8"))
    values.update(changes)
    write_json(path, {key: value for key, value in values.items() if changes.get(key, 0) is not None})


def _save_network(
    path: Path, backbone: str, auto: Any, tokenizer: Any, seed: int, extra: Mapping[str, Any]
) -> None:
    path.mkdir(parents=True, exist_ok=True)
    options = {**_CONFIGS[backbone], **extra, "vocab_size": len(tokenizer)}
    config = transformers.AutoConfig.for_model(backbone, **options)
    with torch.random.fork_rng():
        network = auto.from_config(config)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            values = _values(seed, name, tuple(parameter.shape))
            if parameter.ndim == 1:
                values = 0.2 * values + (1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0)
            else:
                values *= 0.6 if "embed" in name else 1.0 / np.sqrt(parameter.shape[-1])
            parameter.copy_(torch.from_numpy(values))
    network.save_pretrained(path)
    tokenizer.save_pretrained(path)


def _values(seed: int, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Normal numbers that follow from seed and name, whatever the order of parameters."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:8], "little"))).standard_normal(shape)


def _tokenizer(backbone: str, limit: int, *, lowercase: bool = True, added: tuple[str, ...] = ()) -> Any:
    if backbone in _ROBERTAS:
        specials, (cls, pad, sep, unk, mask) = _ROBERTA_SPECIALS, _ROBERTA_SPECIALS
        single, pair = f"{cls} $A {sep}", f"{cls} $A {sep} {sep} $B {sep}"
        names = {"cls_token": cls, "sep_token": sep, "mask_token": mask, "bos_token": cls, "eos_token": sep}
    elif backbone in _DECODERS:
        specials, (pad, _, unk) = _DECODER_SPECIALS, _DECODER_SPECIALS
        single, pair = f"$A {pad}", f"$A $B {pad}"
        names = {"eos_token": "<|im_end|>", "padding_side": "left"}
    else:
        specials, (pad, unk, cls, sep, mask) = _BERT_SPECIALS, _BERT_SPECIALS
        single, pair = f"{cls} $A {sep}", f"{cls} $A {sep} $B:1 {sep}:1"
        names = {"cls_token": cls, "sep_token": sep, "mask_token": mask}
    letters = string.ascii_letters + string.digits
    pieces = (*specials, *string.punctuation, *letters, *(f"##{c}" for c in letters), *WORDS)
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token=unk))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    used = [special for special in specials if special in single]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[(special, vocab[special]) for special in used]
    )
    inputs = ["input_ids", "attention_mask"] + (["token_type_ids"] if backbone in _WITH_TYPES else [])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        unk_token=unk,
        model_max_length=limit,
        model_input_names=inputs,
        **names,
    )
    if added:
        fast.add_tokens([transformers.AddedToken(t, special=True, normalized=False) for t in added])
    return fast


def _write_modules(path: Path, layout: str, modules: list[tuple[str, str]]) -> None:
    def class_path(kind: str) -> str:
        if layout == "pylate" and kind == "Dense":
            return "pylate.models.Dense.Dense"
        if layout != "v6":
            return f"sentence_transformers.models.{kind}"
        if kind == "MultiVectorMask":
            return "sentence_transformers.multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask"
        if kind == "Pooling":
            return "sentence_transformers.sentence_transformer.modules.pooling.Pooling"
        return f"sentence_transformers.base.modules.{kind.lower()}.{kind}"

    entries = [
        {"idx": index, "name": str(index), "path": folder, "type": class_path(kind)}
        for index, (kind, folder) in enumerate(modules)
    ]
    write_json(path / "modules.json", entries)


def _write_transformer(
    path: Path,
    layout: str,
    max_seq_length: int | None,
    *,
    do_lower_case: bool = False,
    task: str = "feature-extraction",
    output: str = "last_hidden_state",
    name: str = "token_embeddings",
    **more: object,
) -> None:
    if layout == "legacy":
        settings: dict[str, Any] = {"max_seq_length": max_seq_length, "do_lower_case": do_lower_case}
    else:
        text = {"method": "forward", "method_output_name": output}
        settings = {"transformer_task": task, "modality_config": {"text": text}, "module_output_name": name}
        if do_lower_case:
            settings["do_lower_case"] = True
    write_json(path / "sentence_bert_config.json", settings | more)
