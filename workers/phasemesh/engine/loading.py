"""From a checkpoint to a model on the device.

Invariant: no weight is random, no code of the checkpoint runs, and the token ids that its tokenizer gives are
those of its serialised copy.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers import normalizers as norm

from phasemesh.engine.errors import ModelLoadError
from phasemesh.engine.pooling import Projection
from phasemesh.pool.protocol import Int32
from phasemesh.recipe.files import weight_files
from phasemesh.recipe.load import backbone_folder, load_recipe, projection_folders
from phasemesh.recipe.model import ModelKind, Recipe

_PROBE = "a short text to try the model with"


@dataclass(frozen=True, slots=True)
class Model:
    """A model on the device.

    Attributes:
        recipe: its recipe.
        network: transformers' module: a backbone, or a classifier for cross-encoders.
        projections: float32 weight [out, in] and bias of the layers after a late-interaction backbone.
        tokenizer_json: the serialised tokenizer, without truncation or padding.
        mask_id: the tokenizer's mask token; None for none.
        pad_id: token that fills up.
        type_count: token types it takes; 0 where its tokenizer gives none.
        dtype: dtype of the backbone.
        probe: int32[t], a short text's tokens.
    """

    recipe: Recipe
    network: Any
    projections: tuple[Projection, ...]
    tokenizer_json: str
    mask_id: int | None
    pad_id: int
    type_count: int
    dtype: torch.dtype
    probe: Int32

    @property
    def weight_bytes(self) -> int:
        """Memory of all weights."""
        tensors = [
            *self.network.parameters(),
            *(t for pair in self.projections for t in pair if t is not None),
        ]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def load_model(
    directory: Path,
    device: torch.device,
    dtype: torch.dtype,
    *,
    max_tokens: int | None,
    matryoshka_dims: tuple[int, ...] | None,
) -> Model:
    """Load the checkpoint in `directory`.

    Raises:
        RecipeError: it isn't served.
        ModelLoadError: its weights are incomplete, or it has no Rust tokenizer.
    """
    recipe = load_recipe(directory, max_tokens=max_tokens, matryoshka_dims=matryoshka_dims)
    folder = backbone_folder(directory)
    python_tokenizer = _python_tokenizer(folder)
    tokenizer = _serialisable(python_tokenizer, lower_case=recipe.lower_case)
    network = _load_network(folder, recipe, dtype)
    if recipe.kind is ModelKind.CROSS_ENCODER:
        _keep_head_in_float32(network)
    projections = _load_projections(directory, device) if recipe.kind is ModelKind.LATE_INTERACTION else ()
    types = int(getattr(network.config, "type_vocab_size", 0) or 0)
    takes_types = types > 1 and "token_type_ids" in python_tokenizer.model_input_names
    # Not the tokenizer's: RoBERTa counts positions from the configuration's, and PyLate saves [MASK].
    pad_id = network.config.pad_token_id
    return Model(
        recipe=recipe,
        network=network.to(device).eval(),
        projections=projections,
        tokenizer_json=tokenizer.to_str(),
        mask_id=python_tokenizer.mask_token_id,
        pad_id=pad_id if pad_id is not None and 0 <= pad_id < recipe.vocab_size else 0,
        type_count=types if takes_types else 0,
        dtype=dtype,
        probe=np.asarray(tokenizer.encode(_PROBE).ids[: recipe.max_tokens], np.int32),
    )


def _load_network(folder: Path, recipe: Recipe, dtype: torch.dtype) -> Any:
    classifier = recipe.kind is ModelKind.CROSS_ENCODER
    auto = transformers.AutoModelForSequenceClassification if classifier else transformers.AutoModel
    transformers.utils.logging.disable_progress_bar()
    try:
        network, report = auto.from_pretrained(
            folder,
            dtype=dtype,
            trust_remote_code=False,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ModelLoadError(f"{folder}: transformers can't load the weights: {error}") from error
    # A backbone's pooler is trained for next-sentence prediction and used by none of our outputs.
    missing = sorted(key for key in report["missing_keys"] if classifier or not key.startswith("pooler."))
    if missing:
        raise ModelLoadError(
            f"{folder}: {len(missing)} weights are missing and would be random, e.g. {missing[0]}; download"
            " the checkpoint again, or correct architectures in config.json"
        )
    if not classifier and getattr(network, "pooler", None) is not None:
        network.pooler = None
    network.config.use_cache = False
    return network


def _keep_head_in_float32(network: Any) -> None:
    """Run everything after the backbone's last layer in float32, so that close scores stay apart."""
    backbone = network.base_model
    for _, child in network.named_children():
        if child is not backbone:
            child.float()
    pooler = getattr(backbone, "pooler", None)
    if pooler is not None:
        pooler.float()
        pooler.register_forward_pre_hook(lambda _, inputs: tuple(tensor.float() for tensor in inputs))

    def upcast(_: Any, __: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state.float()
        return output

    backbone.register_forward_hook(upcast)


def _load_projections(directory: Path, device: torch.device) -> tuple[Projection, ...]:
    projections: list[Projection] = []
    for folder in projection_folders(directory):
        tensors: dict[str, torch.Tensor] = {}
        for path in weight_files(folder):
            tensors.update(load_file(path))
        if "linear.weight" not in tensors:
            raise ModelLoadError(f"{folder}: linear.weight is missing; download the checkpoint again")
        bias = tensors.get("linear.bias")
        projections.append(
            (
                tensors["linear.weight"].to(device, torch.float32),
                None if bias is None else bias.to(device, torch.float32),
            )
        )
    return tuple(projections)


def _python_tokenizer(folder: Path) -> Any:
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            folder, trust_remote_code=False, local_files_only=True
        )
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelLoadError(f"{folder}: transformers can't load the tokenizer: {error}") from error
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ModelLoadError(
            f"{folder}: {type(tokenizer).__name__} has no Rust backend; add a tokenizer.json"
        )
    return tokenizer


def _serialisable(tokenizer: Any, *, lower_case: bool) -> Tokenizer:
    """A copy of the Rust backend that neither cuts nor pads, lower-casing as sentence-transformers would."""
    backend: Tokenizer = copy.deepcopy(tokenizer.backend_tokenizer)
    backend.no_truncation()
    backend.no_padding()
    if lower_case:
        steps = [] if backend.normalizer is None else [backend.normalizer]
        backend.normalizer = norm.Sequence([norm.Lowercase(), *steps])
    return backend
