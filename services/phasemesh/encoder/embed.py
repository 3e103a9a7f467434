"""Embed: inputs to dense vectors and token vectors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from phasemesh.encoder.items import Encoded, Lane
from phasemesh.encoder.models import ServedModel
from phasemesh.encoder.requests import (
    check_count,
    check_priority,
    check_reply,
    cut_of,
    encode_inputs,
    encoded_items,
    item_error,
    name_fields,
    prompt_of,
    raise_if_all_failed,
    role_of,
    spread,
    timings_of,
    usage_of,
)
from phasemesh.encoder.rows import Row
from phasemesh.encoder.vectors import unit
from phasemesh.encoder.work import Job, Workshop
from phasemesh.errors import FailedPrecondition, InvalidArgument, PhasemeshError
from phasemesh.pool.protocol import Floating, Output
from phasemesh.rpc.codec import encode_tensor
from phasemesh.v1 import encoder_pb2 as pb
from phasemesh.v1.common_pb2 import VECTOR_ENCODING_BFLOAT16, VECTOR_ENCODING_FLOAT16, Tensor, VectorEncoding

_OUTPUTS = {pb.VECTOR_KIND_DENSE: Output.DENSE, pb.VECTOR_KIND_TOKEN: Output.TOKENS}
#: Most bytes of an input's entry in the reply that isn't a vector: two counts, or the error of an input that
#: fails when it is computed. Other errors are known before and are counted as they are.
_ITEM_BYTES = 256
#: Most bytes of a token's id and span in the reply.
_DETAIL_BYTES = 15


async def embed(shop: Workshop, job: Job, request: pb.EmbedRequest) -> pb.EmbedResponse:
    """Answer `request`.

    Raises:
        PhasemeshError: the request as a whole is at fault, or nothing of it succeeded.
    """
    model = shop.models.find(request.model)
    job.serve(model)
    kinds = _kinds(model, request.kinds)
    check_count(len(request.inputs), shop, "inputs")
    _check_encoding(request.encoding)
    check_priority(request.priority)
    if request.adapter:
        raise FailedPrecondition(
            f"the model {model.name!r} has no adapters; leave it empty",
            reason="ADAPTER_NOT_SUPPORTED",
            field="adapter",
        )
    dimensions = _dimensions(model, request)
    normalize = _normalize(model, request, kinds)
    role = role_of(request.role)
    prompt = prompt_of(model, role, request.prompt_name if request.HasField("prompt_name") else None)
    cut = cut_of(request.truncation)
    details = request.include_token_details and pb.VECTOR_KIND_TOKEN in kinds
    wires = [(f"inputs[{i}]", wire) for i, wire in enumerate(request.inputs)]
    rows = await job.tokenize(
        lambda: encode_inputs(model, wires, shop, role=role, prompt=prompt, cut=cut, spans=details),
        request.ByteSize(),
    )
    raise_if_all_failed(rows)
    good = [row for row in rows if isinstance(row, Row)]
    check_reply(
        _reply_bytes(model, rows, kinds, request.encoding, dimensions, details),
        shop,
        "send fewer inputs per request, or ask for VECTOR_ENCODING_FLOAT16",
    )
    half = request.encoding == VECTOR_ENCODING_FLOAT16
    lane = Lane(
        model=model.name,
        outputs=frozenset(_OUTPUTS[kind] for kind in kinds),
        token_dtype="float16" if half and pb.VECTOR_KIND_TOKEN in kinds else "float32",
    )
    results = name_fields(spread(rows, await job.compute(lane, good)), lambda i: f"inputs[{i}]")
    raise_if_all_failed(results)
    reply = pb.EmbedResponse(
        model=model.name,
        recipe_hash=model.recipe.recipe_hash,
        items=encoded_items(rows, results, shop, model),
        usage=usage_of(rows, results, shop, model),
    )
    if pb.VECTOR_KIND_DENSE in kinds:
        reply.dense.CopyFrom(_dense(model, results, request, dimensions, normalize))
    if pb.VECTOR_KIND_TOKEN in kinds:
        _fill_token(reply.token, model, rows, results, request.encoding, normalize, details)
    job.assembled()
    reply.timings.CopyFrom(timings_of(job))
    return reply


def _kinds(
    model: ServedModel, asked: Sequence[pb.VectorKind.ValueType]
) -> tuple[pb.VectorKind.ValueType, ...]:
    if not model.kinds:
        raise FailedPrecondition(
            f"the model {model.name!r} gives scores, not vectors; call Score or name another model",
            reason="TASK_NOT_SUPPORTED",
            field="model",
        )
    kinds = []
    for i, kind in enumerate(asked):
        if kind not in pb.VectorKind.values():
            raise InvalidArgument(
                f"there is no vector kind {kind}; use one of {', '.join(pb.VectorKind.keys())}",
                reason="UNKNOWN_KIND",
                field=f"kinds[{i}]",
            )
        wanted = kind or model.kinds[0]
        if wanted not in model.kinds:
            offered = ", ".join(pb.VectorKind.Name(known) for known in model.kinds)
            raise FailedPrecondition(
                f"the model {model.name!r} doesn't offer {pb.VectorKind.Name(wanted)}; it offers {offered}",
                reason="VECTOR_KIND_NOT_SUPPORTED",
                field=f"kinds[{i}]",
            )
        kinds.append(wanted)
    return tuple(dict.fromkeys(kinds)) or model.kinds[:1]


def _check_encoding(encoding: VectorEncoding.ValueType) -> None:
    if encoding not in VectorEncoding.values():
        raise InvalidArgument(
            f"there is no vector encoding {encoding}; use one of {', '.join(VectorEncoding.keys())}",
            reason="UNKNOWN_ENCODING",
            field="encoding",
        )


def _dimensions(model: ServedModel, request: pb.EmbedRequest) -> int | None:
    if not request.HasField("dimensions"):
        return None
    wanted, full, trained = request.dimensions, model.recipe.dim, model.recipe.matryoshka_dims
    if wanted == full or wanted in trained:
        return wanted
    if not 0 < wanted <= full:
        raise InvalidArgument(
            f"dimensions is {wanted}; the model {model.name!r} has {full}",
            reason="DIMENSIONS_OUT_OF_RANGE",
            field="dimensions",
        )
    if trained:
        sizes = ", ".join(map(str, sorted({*trained, full})))
        words, reason = f"the model {model.name!r} was trained for {sizes}", "DIMENSIONS_OUT_OF_RANGE"
    else:
        words = f"the model {model.name!r} wasn't trained to be cut; leave it out, or give {full}"
        reason = "NOT_MATRYOSHKA"
    raise InvalidArgument(f"dimensions is {wanted}; {words}", reason=reason, field="dimensions")


def _normalize(
    model: ServedModel, request: pb.EmbedRequest, kinds: tuple[pb.VectorKind.ValueType, ...]
) -> bool | None:
    """The caller's wish, None where there is none."""
    if not request.HasField("normalize"):
        return None
    unit_rows = model.recipe.late_interaction is not None and pb.VECTOR_KIND_TOKEN in kinds
    if unit_rows and not request.normalize:
        raise InvalidArgument(
            f"the token vectors of the model {model.name!r} are unit vectors by its definition;"
            " leave normalize out or true",
            reason="NORMALIZE_NOT_SUPPORTED",
            field="normalize",
        )
    return request.normalize


def _reply_bytes(
    model: ServedModel,
    rows: Sequence[Row | PhasemeshError],
    kinds: tuple[pb.VectorKind.ValueType, ...],
    encoding: VectorEncoding.ValueType,
    dimensions: int | None,
    details: bool,
) -> int:
    number = 2 if encoding in (VECTOR_ENCODING_FLOAT16, VECTOR_ENCODING_BFLOAT16) else 4
    faults = sum(item_error(row).ByteSize() for row in rows if isinstance(row, PhasemeshError))
    size = 1024 + _ITEM_BYTES * len(rows) + faults
    if pb.VECTOR_KIND_DENSE in kinds:
        size += len(rows) * (dimensions or model.recipe.dim) * number
    if pb.VECTOR_KIND_TOKEN in kinds:
        vectors = sum(row.rows for row in rows if isinstance(row, Row))
        size += vectors * (model.recipe.token_dim * number + (_DETAIL_BYTES if details else 0))
    return size


def _dense(
    model: ServedModel,
    results: Sequence[Encoded | PhasemeshError],
    request: pb.EmbedRequest,
    dimensions: int | None,
    normalize: bool | None,
) -> Tensor:
    vectors = np.zeros((len(results), model.recipe.dim), np.float32)
    for i, result in enumerate(results):
        if isinstance(result, Encoded):
            assert result.dense is not None
            vectors[i] = result.dense
    if normalize is None:
        normalize = model.recipe.normalize or (dimensions or model.recipe.dim) < model.recipe.dim
    # Slice first: a slice of a unit vector isn't one.
    vectors = vectors[:, :dimensions]
    if normalize:
        vectors = unit(vectors)
    return encode_tensor(vectors, request.encoding)


def _fill_token(
    token: pb.TokenVectors,
    model: ServedModel,
    rows: Sequence[Row | PhasemeshError],
    results: Sequence[Encoded | PhasemeshError],
    encoding: VectorEncoding.ValueType,
    normalize: bool | None,
    details: bool,
) -> None:
    parts: list[Floating] = []
    offsets = [0]
    for row, result in zip(rows, results, strict=True):
        count = 0
        if isinstance(result, Encoded):
            assert result.tokens is not None
            assert isinstance(row, Row)
            parts.append(result.tokens)
            count = len(result.tokens)
            if details:
                kept = slice(None) if row.kept is None else row.kept
                token.token_ids.extend(row.ids[kept].tolist())
                for spans, field in (
                    (row.span_starts, token.span_starts),
                    (row.span_ends, token.span_ends),
                ):
                    # Token ids have no text that a span could be in.
                    field.extend([0] * count if spans is None else spans[kept].tolist())
        offsets.append(offsets[-1] + count)
    vectors: Floating = np.concatenate(parts) if parts else np.zeros((0, model.recipe.token_dim), np.float32)
    # A late-interaction model's rows are unit rows already.
    if normalize and model.recipe.late_interaction is None:
        vectors = unit(vectors.astype(np.float32))
    token.vectors.CopyFrom(encode_tensor(vectors, encoding))
    token.row_offsets.extend(offsets)
