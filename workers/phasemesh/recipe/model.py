"""The frozen description of how one checkpoint turns text into vectors and scores.

A `Recipe` holds everything that decides token ids and heads, and nothing that doesn't (dtype, device and
batching are the engine's business). Two checkpoints with the same `recipe_hash` give the same vectors.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from enum import StrEnum

#: Raised whenever a field is added or changes its meaning, so that old hashes can't collide with new ones.
SCHEMA_VERSION = 1

#: Prompt names that stand for the document side, in sentence-transformers' order of preference
#: (`SentenceTransformer.encode_document`).
DOCUMENT_PROMPT_NAMES = ("document", "passage", "corpus")


class ModelKind(StrEnum):
    """What a checkpoint is for; decides its default output and score type."""

    EMBEDDER = "embedder"
    CROSS_ENCODER = "cross_encoder"
    LATE_INTERACTION = "late_interaction"


class Pooling(StrEnum):
    """How token states become one vector, named as in sentence-transformers' `1_Pooling/config.json`."""

    CLS = "cls"
    MEAN = "mean"
    LAST = "lasttoken"


class ScoreType(StrEnum):
    """How a query and a document become a number."""

    CROSS_ENCODER = "cross_encoder"
    BI_ENCODER = "bi_encoder"
    LATE_INTERACTION = "late_interaction"


class Role(StrEnum):
    """The side of retrieval a text stands on; picks the prompt, the markers and the length limit."""

    QUERY = "query"
    DOCUMENT = "document"


class Activation(StrEnum):
    """What a cross-encoder applies to its logit, in fp32."""

    IDENTITY = "identity"
    SIGMOID = "sigmoid"


@dataclass(frozen=True, slots=True)
class LateInteraction:
    """ColBERT conventions: markers, lengths, query expansion, skiplist.

    Words and markers are kept as text, because ids are the tokenizer's to give; the tokenizer's digest is in
    the recipe hash beside them.

    Attributes:
        query_marker: token inserted after the first special token of a query; None inserts nothing.
        document_marker: the same for documents.
        query_length: tokens of a query, markers and special tokens included.
        document_length: the same for documents.
        expand_queries: pad queries with the mask token up to `query_length`; the pads are scored.
        attend_to_expansion: whether other tokens attend to those pads.
        skip_words: document tokens that are never scored (ColBERT's punctuation skiplist).
        projection_dims: (in, out) sizes of the linear layers after the backbone, in order.
        mean: divide MaxSim by the number of query vectors.
    """

    query_marker: str | None
    document_marker: str | None
    query_length: int
    document_length: int
    expand_queries: bool
    attend_to_expansion: bool
    skip_words: tuple[str, ...]
    projection_dims: tuple[tuple[int, int], ...]
    mean: bool = False


@dataclass(frozen=True, slots=True)
class Recipe:
    """See the module docstring.

    Attributes:
        kind: what the checkpoint is for.
        architecture: `architectures[0]` of `config.json`, e.g. "BertModel".
        model_type: `model_type` of `config.json`, e.g. "bert".
        max_tokens: longest sequence, special tokens included, as the reference library would cut it.
        hidden_size: width of the backbone's token states.
        dim: width of the dense vector; 0 where the model has none.
        token_dim: width of the token vectors; 0 where the model has none.
        pooling: modes, concatenated in order; empty where the model has no dense vector.
        include_prompt: False excludes the prompt's tokens from mean pooling (INSTRUCTOR).
        normalize: whether the model ends in an L2 normalisation.
        lower_case: whether texts are lower-cased (`do_lower_case`); the serialised tokenizer does it.
        prompts: (name, text) pairs; the text is put before the input, with no separator.
        default_prompt: name of the prompt used when the caller names none.
        matryoshka_dims: sizes that dense vectors may be cut to; empty where the model wasn't trained for it.
        labels: number of classifier outputs; 0 where there is no classifier.
        activation: applied to a cross-encoder's logit.
        late_interaction: ColBERT conventions, for that kind only.
        vocab_size: rows of the embedding table; a token id at or above it is refused.
        weights_digest: SHA-256, hex, over the weight files and the keys of `config.json` that change vectors
            (the same tensors give others under another `layer_norm_eps` or `rope_theta`).
        tokenizer_digest: SHA-256 over the tokenizer's files, hex.
    """

    kind: ModelKind
    architecture: str
    model_type: str
    max_tokens: int
    hidden_size: int
    dim: int
    token_dim: int
    pooling: tuple[Pooling, ...]
    include_prompt: bool
    normalize: bool
    lower_case: bool
    prompts: tuple[tuple[str, str], ...]
    default_prompt: str | None
    matryoshka_dims: tuple[int, ...]
    labels: int
    activation: Activation
    late_interaction: LateInteraction | None
    vocab_size: int
    weights_digest: str
    tokenizer_digest: str

    @property
    def recipe_hash(self) -> str:
        """First 32 hex digits of the SHA-256 of the recipe's canonical JSON."""
        fields = {"schema_version": SCHEMA_VERSION, **dataclasses.asdict(self)}
        # What a vector may be cut to doesn't change the vector.
        del fields["matryoshka_dims"]
        canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(canonical.encode()).hexdigest()[:32]

    @property
    def score_types(self) -> tuple[ScoreType, ...]:
        """Score types this model supports, its default first; empty for a classifier of several labels."""
        match self.kind:
            case ModelKind.EMBEDDER:
                return (ScoreType.BI_ENCODER,)
            case ModelKind.LATE_INTERACTION:
                return (ScoreType.LATE_INTERACTION,)
            case ModelKind.CROSS_ENCODER:
                return (ScoreType.CROSS_ENCODER,) if self.labels == 1 else ()

    def prompt_for(self, role: Role | None) -> str | None:
        """Name of the prompt that sentence-transformers would use for `role`.

        `encode_query` takes "query", `encode_document` the first of document, passage, corpus, and neither
        falls back to the default prompt, which is for calls without a role. (sentence-transformers 6.2
        adds an empty "document" prompt to every model, which hides a "passage" prompt from its own documented
        order; here the order counts, since such models were trained with that prompt.)
        """
        names = [name for name, _ in self.prompts]
        match role:
            case Role.QUERY:
                return "query" if "query" in names else None
            case Role.DOCUMENT:
                return next((name for name in DOCUMENT_PROMPT_NAMES if name in names), None)
            case None:
                return self.default_prompt

    def prompt_text(self, name: str | None) -> str:
        """Text of the prompt `name`, "" for None.

        Raises:
            KeyError: the recipe has no such prompt.
        """
        return "" if name is None else dict(self.prompts)[name]
