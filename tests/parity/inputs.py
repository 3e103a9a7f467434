"""Token sequences for the parity tests, from a loaded model's own serialised tokenizer.

A plain reading of the reference's rules, kept apart from the service's tokenizing so that each checks the
other.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from tokenizers import Encoding, Tokenizer

from phasemesh.pool.protocol import Batch, LoadedModel, Output, Sequences
from phasemesh.recipe.model import Role


def tokenizer_of(loaded: LoadedModel, limit: int | None = None) -> Tokenizer:
    tokenizer = Tokenizer.from_str(loaded.tokenizer_json)
    tokenizer.enable_truncation(limit or loaded.recipe.max_tokens)
    return tokenizer


def pack(rows: Sequence[Sequence[int]], **columns: Sequence[Sequence[int]]) -> Sequences:
    """Sequences of `rows`; every array is read-only, as Ray hands them over."""
    cu_seqlens = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int32)
    arrays = {"input_ids": np.concatenate(rows).astype(np.int32), "cu_seqlens": cu_seqlens}
    for name, values in columns.items():
        dtype = np.int32 if name == "type_ids" else np.bool_
        arrays[name] = np.concatenate(values).astype(dtype)
    for array in arrays.values():
        array.flags.writeable = False
    return Sequences(**arrays)


def texts(loaded: LoadedModel, inputs: Sequence[str], prompt: str = "") -> Sequences:
    """One sequence per text, with `prompt` before it."""
    tokenizer = tokenizer_of(loaded)
    sequences = pack([tokenizer.encode(prompt + text).ids for text in inputs])
    if loaded.recipe.include_prompt or not prompt:
        return sequences
    leading = tokenizer.encode(prompt)
    # A trailing special token belongs to the text, not to the prompt.
    count = len(leading.ids) - leading.special_tokens_mask[-1]
    return Sequences(
        sequences.input_ids,
        sequences.cu_seqlens,
        prompt_tokens=np.full(len(inputs), count, np.int32),
    )


def pairs(loaded: LoadedModel, inputs: Sequence[tuple[str, str]]) -> Sequences:
    """One sequence per (query, document), cut longest first."""
    found: list[Encoding] = tokenizer_of(loaded).encode_batch([(q, d) for q, d in inputs])
    return pack([e.ids for e in found], type_ids=[e.type_ids for e in found])


def late(loaded: LoadedModel, inputs: Sequence[str], role: Role) -> Sequences:
    """ColBERT's queries or documents."""
    late = loaded.recipe.late_interaction
    assert late is not None
    query = role is Role.QUERY
    marker = late.query_marker if query else late.document_marker
    length = late.query_length if query else late.document_length
    tokenizer = tokenizer_of(loaded, length - (marker is not None))
    marker_ids = [] if marker is None else [tokenizer.token_to_id(marker)]
    skipped = {tokenizer.token_to_id(word) for word in late.skip_words} - {None}
    prompt = loaded.recipe.prompt_text(loaded.recipe.prompt_for(role))
    mask_id = tokenizer.token_to_id("[MASK]")

    rows, attended, kept = [], [], []
    for text in inputs:
        ids = tokenizer.encode(prompt + text).ids
        ids = [ids[0], *marker_ids, *ids[1:]]
        pads = length - len(ids) if query and late.expand_queries else 0
        rows.append(ids + [mask_id] * pads)
        attended.append([True] * len(ids) + [late.attend_to_expansion] * pads)
        kept.append([query or i not in skipped for i in ids] + [True] * pads)
    return pack(rows, attended=attended, kept=kept)


def batch(loaded: LoadedModel, sequences: Sequences, *outputs: Output, **more: object) -> Batch:
    return Batch("test", loaded.name, frozenset(outputs), sequences, **more)  # type: ignore[arg-type]  # fields


def token_matrices(tokens: np.ndarray, offsets: np.ndarray) -> list[np.ndarray]:
    return [tokens[a:b] for a, b in itertools.pairwise(offsets)]
