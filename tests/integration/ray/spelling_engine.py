"""The hash engine with a tokenizer, so that the whole encoder service can stand on it; imported by workers."""

from __future__ import annotations

import dataclasses

from tokenizers import Tokenizer, models, pre_tokenizers

from phasemesh.pool.protocol import LoadedModel, ModelSpec
from tests.fakes.engine import DeviceLost, HashEngine

__all__ = ["DeviceLost", "SpellingEngine"]


class SpellingEngine(HashEngine):
    """Its vocabulary has two words; callers send token ids."""

    def load(self, spec: ModelSpec) -> LoadedModel:
        tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        return dataclasses.replace(super().load(spec), tokenizer_json=tokenizer.to_str())
