"""A collection's specification: from the wire, checked and completed by its model, and back.

Invariant: a spec that comes out of here is complete. Nothing in it is left to a default that a later release
could change, since a stored spec never changes.
"""

from __future__ import annotations

from phasemesh.errors import FailedPrecondition, InvalidArgument
from phasemesh.index.spec import (
    MAX_DIM,
    Codec,
    CollectionSpec,
    FieldDeclaration,
    FieldType,
    Normalize,
    Reduction,
)
from phasemesh.retrieval.faults import index_faults
from phasemesh.v1 import retrieval_pb2 as pb
from phasemesh.v1.encoder_pb2 import VECTOR_KIND_TOKEN, ModelInfo

CODECS = {
    pb.CODEC_UNSPECIFIED: Codec.INT8,
    pb.CODEC_BF16: Codec.BF16,
    pb.CODEC_INT8: Codec.INT8,
    pb.CODEC_INT4: Codec.INT4,
}
_NORMALIZE = {
    pb.NORMALIZE_POLICY_UNSPECIFIED: Normalize.AUTO,
    pb.NORMALIZE_POLICY_AUTO: Normalize.AUTO,
    pb.NORMALIZE_POLICY_NEVER: Normalize.NEVER,
    pb.NORMALIZE_POLICY_REQUIRE: Normalize.REQUIRE,
}
_REDUCTIONS = {
    pb.MAX_SIM_REDUCTION_UNSPECIFIED: Reduction.SUM,
    pb.MAX_SIM_REDUCTION_SUM: Reduction.SUM,
    pb.MAX_SIM_REDUCTION_MEAN: Reduction.MEAN,
}
_FIELD_TYPES = {
    pb.FIELD_TYPE_STRING: FieldType.STRING,
    pb.FIELD_TYPE_INT64: FieldType.INT64,
    pb.FIELD_TYPE_DOUBLE: FieldType.DOUBLE,
    pb.FIELD_TYPE_BOOL: FieldType.BOOL,
    pb.FIELD_TYPE_TIMESTAMP: FieldType.TIMESTAMP,
    pb.FIELD_TYPE_STRING_LIST: FieldType.STRING_LIST,
}
# The later entry of a value wins, which is the named one and not the unspecified.
CODEC_TO_WIRE = {codec: wire for wire, codec in CODECS.items()}
REDUCTION_TO_WIRE = {reduction: wire for wire, reduction in _REDUCTIONS.items()}
_NORMALIZE_TO_WIRE = {policy: wire for wire, policy in _NORMALIZE.items()}
_FIELD_TYPE_TO_WIRE = {field_type: wire for wire, field_type in _FIELD_TYPES.items()}


def spec_from_wire(wire: pb.CollectionSpec, model: ModelInfo | None) -> CollectionSpec:
    """The spec that `wire` asks for, completed from its model.

    Args:
        wire: as the caller gave it; its name is checked by the catalogue.
        model: what serves `wire.model` now; None where that is empty.

    Raises:
        InvalidArgument: a part is unknown, missing or contradicts another.
        FailedPrecondition: the model gives no token vectors, or has another recipe than the one given.
    """
    if wire.codec not in CODECS:
        raise _unknown("codec", wire.codec, pb.Codec.keys())
    if wire.normalize not in _NORMALIZE:
        raise _unknown("normalize", wire.normalize, pb.NormalizePolicy.keys())
    if wire.reduction not in _REDUCTIONS:
        raise _unknown("reduction", wire.reduction, pb.MaxSimReduction.keys())
    for position, declared in enumerate(wire.fields):
        if declared.type not in _FIELD_TYPES:
            raise _unknown(f"fields[{position}].type", declared.type, pb.FieldType.keys()[1:])
    name, recipe_hash, token_dim = _of_model(wire, model)
    if not 1 <= token_dim <= MAX_DIM:
        raise InvalidArgument(
            f"token_dimension is {token_dim}; give 1 to {MAX_DIM}, or a model that has one",
            reason="DIMENSION_OUT_OF_RANGE",
            field="spec.token_dimension",
        )
    if wire.dense_dimension > MAX_DIM:
        raise InvalidArgument(
            f"dense_dimension is {wire.dense_dimension}; give 1 to {MAX_DIM}, or 0 for none",
            reason="DIMENSION_OUT_OF_RANGE",
            field="spec.dense_dimension",
        )
    with index_faults():
        return CollectionSpec(
            name=wire.name,
            model=name,
            recipe_hash=recipe_hash,
            token_dim=token_dim,
            codec=CODECS[wire.codec],
            fields=tuple(
                FieldDeclaration(declared.name, _FIELD_TYPES[declared.type]) for declared in wire.fields
            ),
            normalize=_NORMALIZE[wire.normalize],
            reduction=_REDUCTIONS[wire.reduction],
            dense_dim=wire.dense_dimension,
        )


def spec_to_wire(spec: CollectionSpec) -> pb.CollectionSpec:
    """A stored spec as callers see it: complete, nothing unspecified."""
    return pb.CollectionSpec(
        name=spec.name,
        model=spec.model,
        recipe_hash=spec.recipe_hash,
        token_dimension=spec.token_dim,
        codec=CODEC_TO_WIRE[spec.codec],
        fields=[
            pb.FieldDeclaration(name=declared.name, type=_FIELD_TYPE_TO_WIRE[declared.type])
            for declared in spec.fields
        ],
        normalize=_NORMALIZE_TO_WIRE[spec.normalize],
        reduction=REDUCTION_TO_WIRE[spec.reduction],
        dense_dimension=spec.dense_dim,
    )


def _of_model(wire: pb.CollectionSpec, model: ModelInfo | None) -> tuple[str, str, int]:
    if model is None:
        if wire.recipe_hash:
            raise InvalidArgument(
                "a recipe hash belongs to a model; name the model, or leave the hash out",
                reason="MODEL_REQUIRED",
                field="spec.recipe_hash",
            )
        return "", "", wire.token_dimension
    if VECTOR_KIND_TOKEN not in model.vector_kinds or not model.token_dimension:
        raise FailedPrecondition(
            f"the model {model.name!r} gives no token vectors, so it can't serve a collection; name a "
            "late-interaction model",
            reason="VECTOR_KIND_NOT_SUPPORTED",
            field="spec.model",
        )
    if wire.recipe_hash not in ("", model.recipe_hash):
        raise FailedPrecondition(
            f"the model {model.name!r} has the recipe {model.recipe_hash}, not {wire.recipe_hash[:64]}; "
            "leave the hash out to take the served one",
            reason="RECIPE_MISMATCH",
            field="spec.recipe_hash",
        )
    if wire.token_dimension not in (0, model.token_dimension):
        raise InvalidArgument(
            f"the model {model.name!r} has token vectors of {model.token_dimension} dimensions, not "
            f"{wire.token_dimension}; leave it out",
            reason="DIMENSION_MISMATCH",
            field="spec.token_dimension",
        )
    return model.name, model.recipe_hash, model.token_dimension


def _unknown(part: str, value: int, offered: list[str]) -> InvalidArgument:
    return InvalidArgument(
        f"there is no {part.rpartition('.')[2]} {value}; use one of {', '.join(offered)}",
        reason="UNKNOWN_ENUM_VALUE",
        field=f"spec.{part}",
    )
