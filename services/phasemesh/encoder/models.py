"""The models of this service: found by name or alias, and described to clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phasemesh.encoder.tokenizing import TextEncoder
from phasemesh.errors import InvalidArgument, NotFound
from phasemesh.pool.protocol import LoadedModel, PoolStats, ReplicaState
from phasemesh.recipe.model import Recipe, ScoreType
from phasemesh.v1 import encoder_pb2 as pb
from phasemesh.v1.common_pb2 import (
    SCORE_TYPE_BI_ENCODER,
    SCORE_TYPE_CROSS_ENCODER,
    SCORE_TYPE_LATE_INTERACTION,
)
from phasemesh.v1.common_pb2 import ScoreType as WireScoreType

SCORE_TYPE_TO_WIRE: dict[ScoreType, WireScoreType.ValueType] = {
    ScoreType.CROSS_ENCODER: SCORE_TYPE_CROSS_ENCODER,
    ScoreType.BI_ENCODER: SCORE_TYPE_BI_ENCODER,
    ScoreType.LATE_INTERACTION: SCORE_TYPE_LATE_INTERACTION,
}


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model.

    Attributes:
        loaded: what the worker said of it.
        encoder: its tokenizer.
        aliases: its other names.
    """

    loaded: LoadedModel
    encoder: TextEncoder
    aliases: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name of the configuration."""
        return self.loaded.name

    @property
    def recipe(self) -> Recipe:
        """Its recipe."""
        return self.loaded.recipe

    @property
    def kinds(self) -> tuple[pb.VectorKind.ValueType, ...]:
        """Kinds of vectors that it offers, its default first."""
        dense = (pb.VECTOR_KIND_DENSE,) if self.recipe.dim else ()
        token = (pb.VECTOR_KIND_TOKEN,) if self.recipe.token_dim else ()
        return (*dense, *token)

    @property
    def tasks(self) -> tuple[pb.Task.ValueType, ...]:
        """What it can be asked to do."""
        embed = (pb.TASK_EMBED,) if self.kinds else ()
        score = (pb.TASK_SCORE,) if self.recipe.score_types else ()
        return (*embed, *score)


class ModelTable:
    """All models of the service, in the order of the configuration."""

    def __init__(self, models: Sequence[LoadedModel], aliases: Mapping[str, tuple[str, ...]]) -> None:
        """Build a tokenizer for each model.

        Raises:
            ValueError: a tokenizer lacks a token that its recipe needs.
        """
        self.models = tuple(
            ServedModel(model, TextEncoder(model), tuple(aliases.get(model.name, ()))) for model in models
        )
        self._by_name = {name: model for model in self.models for name in (model.name, *model.aliases)}

    def find(self, name: str) -> ServedModel:
        """The model of that name or alias; the only one for the empty name.

        Raises:
            InvalidArgument: the name is empty and there are several.
            NotFound: there is no such model.
        """
        served = ", ".join(self._by_name)
        if not name:
            if len(self.models) == 1:
                return self.models[0]
            raise InvalidArgument(
                f"model is empty and this service has several; name one of {served}",
                reason="MODEL_REQUIRED",
                field="model",
            )
        model = self._by_name.get(name)
        if model is None:
            raise NotFound(
                f"there is no model {name[:256]!r}; served are {served}",
                reason="MODEL_NOT_FOUND",
                field="model",
            )
        return model


def describe(model: ServedModel, stats: PoolStats, *, draining: bool, max_inputs: int) -> pb.ModelInfo:
    """What clients are told of `model`."""
    recipe = model.recipe
    late = recipe.late_interaction
    return pb.ModelInfo(
        name=model.name,
        aliases=model.aliases,
        recipe_hash=recipe.recipe_hash,
        tasks=model.tasks,
        vector_kinds=model.kinds,
        score_types=[SCORE_TYPE_TO_WIRE[kind] for kind in recipe.score_types],
        dense_dimension=recipe.dim,
        token_dimension=recipe.token_dim,
        matryoshka_dimensions=recipe.matryoshka_dims,
        max_tokens=recipe.max_tokens,
        max_query_tokens=late.query_length if late else 0,
        normalizes=recipe.normalize,
        prompts=[pb.Prompt(name=name, text=text) for name, text in recipe.prompts],
        default_prompt_name=recipe.default_prompt or "",
        architecture=recipe.architecture,
        dtype=model.loaded.dtype,
        state=_state(stats, draining),
        ready_replicas=stats.ready,
        replicas=len(stats.replicas),
        max_inputs=max_inputs,
        vocabulary_size=recipe.vocab_size,
    )


def _state(stats: PoolStats, draining: bool) -> pb.ModelState.ValueType:
    if draining:
        return pb.MODEL_STATE_DRAINING
    if stats.ready:
        return pb.MODEL_STATE_READY
    if any(replica.state is ReplicaState.STARTING for replica in stats.replicas):
        return pb.MODEL_STATE_LOADING
    return pb.MODEL_STATE_UNAVAILABLE
