"""Score: documents against a query, by the model's own score type.

A fault of the query fails the request, a fault of a document fails that document alone, with the score 0.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from phasemesh.encoder.items import Encoded, Lane
from phasemesh.encoder.models import SCORE_TYPE_TO_WIRE, ServedModel
from phasemesh.encoder.requests import (
    check_count,
    check_priority,
    content_of,
    cut_of,
    encode_inputs,
    encoded_items,
    located,
    name_fields,
    prompt_of,
    raise_if_all_failed,
    spread,
    timings_of,
    usage_of,
)
from phasemesh.encoder.rows import Row
from phasemesh.encoder.tokenizing import Cut
from phasemesh.encoder.vectors import cosine, sigmoid
from phasemesh.encoder.work import Job, Workshop
from phasemesh.errors import FailedPrecondition, InvalidArgument, PhasemeshError
from phasemesh.pool.protocol import Float32, Output
from phasemesh.recipe.model import Activation, Role, ScoreType
from phasemesh.v1 import encoder_pb2 as pb
from phasemesh.v1.common_pb2 import SCORE_TYPE_UNSPECIFIED
from phasemesh.v1.common_pb2 import ScoreType as WireScoreType


@dataclass(frozen=True, slots=True)
class _Scored:
    """What a strategy gives; lists are in the order of the documents.

    Attributes:
        rows: the documents' rows, or pairs.
        results: what the engine answered for each.
        scores: float32[n], 0 for a document that failed.
        query: the query's own row; None where it is part of each pair.
    """

    rows: list[Row | PhasemeshError]
    results: list[Encoded | PhasemeshError]
    scores: Float32
    query: Row | None


async def score(shop: Workshop, job: Job, request: pb.ScoreRequest) -> pb.ScoreResponse:
    """Answer `request`.

    Raises:
        PhasemeshError: the request or its query is at fault, or no document succeeded.
    """
    model = shop.models.find(request.model)
    job.serve(model)
    score_type = _score_type(model, request)
    check_count(len(request.documents), shop, "documents")
    if not request.HasField("query"):
        raise InvalidArgument("there is no query; set it", reason="EMPTY_INPUT", field="query")
    if request.activation not in pb.ScoreActivation.values():
        raise InvalidArgument(
            f"there is no activation {request.activation}; use one of {', '.join(pb.ScoreActivation.keys())}",
            reason="UNKNOWN_ACTIVATION",
            field="activation",
        )
    check_priority(request.priority)
    if request.HasField("instruction"):
        raise FailedPrecondition(
            f"the template of the model {model.name!r} takes no instruction; leave it out",
            reason="INSTRUCTION_NOT_SUPPORTED",
            field="instruction",
        )
    scored = await _STRATEGIES[score_type](shop, job, model, request, cut_of(request.truncation))
    rows, results, query = scored.rows, scored.results, scored.query
    raise_if_all_failed(results)
    usage = usage_of(rows, results, shop, model)
    if query is not None:
        usage.tokens += len(query)
        usage.truncated_inputs += query.truncated
        if query.truncated:
            shop.metrics.truncated.labels(model.name).inc()
    reply = pb.ScoreResponse(
        model=model.name,
        recipe_hash=model.recipe.recipe_hash,
        score_type=SCORE_TYPE_TO_WIRE[score_type],
        scores=scored.scores.tolist(),
        items=encoded_items(rows, results, shop, model),
        usage=usage,
    )
    job.assembled()
    reply.timings.CopyFrom(timings_of(job))
    return reply


def _score_type(model: ServedModel, request: pb.ScoreRequest) -> ScoreType:
    offered = model.recipe.score_types
    if not offered:
        raise FailedPrecondition(
            f"the model {model.name!r} gives no scores; name another model",
            reason="TASK_NOT_SUPPORTED",
            field="model",
        )
    if not request.HasField("score_type") or request.score_type == SCORE_TYPE_UNSPECIFIED:
        return offered[0]
    for known in offered:
        if SCORE_TYPE_TO_WIRE[known] == request.score_type:
            return known
    asked = request.score_type
    name = WireScoreType.Name(asked) if asked in WireScoreType.values() else str(asked)
    names = ", ".join(WireScoreType.Name(SCORE_TYPE_TO_WIRE[known]) for known in offered)
    raise FailedPrecondition(
        f"the model {model.name!r} doesn't offer {name}; it offers {names}",
        reason="SCORE_TYPE_NOT_SUPPORTED",
        field="score_type",
    )


async def _cross_encoder(
    shop: Workshop, job: Job, model: ServedModel, request: pb.ScoreRequest, cut: Cut
) -> _Scored:
    def encode() -> list[Row | PhasemeshError]:
        query = _query_content(shop, request)
        contents: dict[int, str | list[int]] = {}
        rows: dict[int, Row | PhasemeshError] = {}
        for i, wire in enumerate(request.documents):
            try:
                contents[i] = content_of(wire, shop, f"documents[{i}]")
            except PhasemeshError as error:
                rows[i] = error
        try:
            pairs = model.encoder.encode_pairs(query, list(contents.values()), cut=cut)
        except InvalidArgument as error:
            raise located(error, "query") from None
        for i, pair in zip(contents, pairs, strict=True):
            part = "text" if isinstance(contents[i], str) else "token_ids"
            located_at = f"documents[{i}]"
            if isinstance(pair, PhasemeshError) and not pair.field:
                located_at = f"{located_at}.{part}"
            rows[i] = located(pair, located_at) if isinstance(pair, PhasemeshError) else pair
        return [rows[i] for i in range(len(request.documents))]

    rows = await job.tokenize(encode, request.ByteSize())
    raise_if_all_failed(rows)
    lane = Lane(model.name, frozenset({Output.LOGITS}))
    results = _documents(rows, await job.compute(lane, _good(rows)))
    logits = np.array(
        [
            result.logits[0] if isinstance(result, Encoded) and result.logits is not None else 0
            for result in results
        ],
        np.float32,
    )
    apply = {
        pb.SCORE_ACTIVATION_UNSPECIFIED: model.recipe.activation is Activation.SIGMOID,
        pb.SCORE_ACTIVATION_NONE: False,
        pb.SCORE_ACTIVATION_SIGMOID: True,
    }[request.activation]
    scores = sigmoid(logits) if apply else logits
    scores[[not isinstance(result, Encoded) for result in results]] = 0
    return _Scored(rows, results, scores, None)


async def _bi_encoder(
    shop: Workshop, job: Job, model: ServedModel, request: pb.ScoreRequest, cut: Cut
) -> _Scored:
    query, rows = await _tokenize_sides(shop, job, model, request, cut)
    lane = Lane(model.name, frozenset({Output.DENSE}))
    first, *others = await job.compute(lane, [query, *_good(rows)])
    answer = _query_result(first)
    results = _documents(rows, others)
    vectors = np.zeros((len(results), model.recipe.dim), np.float32)
    for i, result in enumerate(results):
        if isinstance(result, Encoded) and result.dense is not None:
            vectors[i] = result.dense
    assert answer.dense is not None
    return _Scored(rows, results, cosine(answer.dense, vectors), query)


async def _late_interaction(
    shop: Workshop, job: Job, model: ServedModel, request: pb.ScoreRequest, cut: Cut
) -> _Scored:
    query, rows = await _tokenize_sides(shop, job, model, request, cut)
    rows = [
        InvalidArgument(
            "every token of the document is on the model's skiplist; nothing is left to score",
            reason="EMPTY_INPUT",
            field=f"documents[{i}]",
        )
        if isinstance(row, Row) and not row.rows
        else row
        for i, row in enumerate(rows)
    ]
    raise_if_all_failed(rows)
    # Two rounds, because the documents are scored where their vectors are born, which needs the query's.
    first = await job.compute(Lane(model.name, frozenset({Output.TOKENS})), [query])
    answer = _query_result(first[0])
    assert answer.tokens is not None
    matrix = np.ascontiguousarray(answer.tokens, np.float32)
    good = _good(rows)
    lane = Lane(model.name, frozenset({Output.MAXSIM}))
    results = _documents(rows, await job.compute(lane, good, queries=[matrix] * len(good)))
    scores = np.array([result.maxsim if isinstance(result, Encoded) else 0 for result in results], np.float32)
    return _Scored(rows, results, scores, query)


_STRATEGIES: dict[
    ScoreType, Callable[[Workshop, Job, ServedModel, pb.ScoreRequest, Cut], Awaitable[_Scored]]
] = {
    ScoreType.CROSS_ENCODER: _cross_encoder,
    ScoreType.BI_ENCODER: _bi_encoder,
    ScoreType.LATE_INTERACTION: _late_interaction,
}


async def _tokenize_sides(
    shop: Workshop, job: Job, model: ServedModel, request: pb.ScoreRequest, cut: Cut
) -> tuple[Row, list[Row | PhasemeshError]]:
    """The query's row and the documents' rows or faults.

    Raises:
        PhasemeshError: the query is at fault, or every document.
    """

    def encode() -> tuple[Row | PhasemeshError, list[Row | PhasemeshError]]:
        sides = {Role.QUERY: [("query", request.query)]}
        sides[Role.DOCUMENT] = [(f"documents[{i}]", wire) for i, wire in enumerate(request.documents)]
        encoded = {
            role: encode_inputs(model, wires, shop, role=role, prompt=prompt_of(model, role, None), cut=cut)
            for role, wires in sides.items()
        }
        return encoded[Role.QUERY][0], encoded[Role.DOCUMENT]

    query, rows = await job.tokenize(encode, request.ByteSize())
    if isinstance(query, PhasemeshError):
        raise query
    raise_if_all_failed(rows)
    return query, rows


def _query_content(shop: Workshop, request: pb.ScoreRequest) -> str | list[int]:
    return content_of(request.query, shop, "query")


def _query_result(result: Encoded | PhasemeshError) -> Encoded:
    if isinstance(result, PhasemeshError):
        raise name_fields([result], lambda _: "query")[0]
    return result


def _documents(
    rows: Sequence[Row | PhasemeshError], results: Sequence[Encoded | PhasemeshError]
) -> list[Encoded | PhasemeshError]:
    return name_fields(spread(rows, results), lambda i: f"documents[{i}]")


def _good(rows: Sequence[Row | PhasemeshError]) -> list[Row]:
    return [row for row in rows if isinstance(row, Row)]
