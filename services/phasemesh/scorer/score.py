"""LeafScore: given rows of some fragments, each scored exactly.

A row that isn't there (never was, or this version has deleted it) is left out of the scores and named in a
failure of its fragment; the fragment's other rows are scored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from phasemesh.errors import InvalidArgument, NotFound
from phasemesh.index.leaf import LeafSource, RowScore, RowState, leaf_score
from phasemesh.index.spec import Reduction
from phasemesh.scorer.admission import Unit, scan_work
from phasemesh.scorer.fragments import Asked, Found, Fragments
from phasemesh.scorer.requests import index_of, query_of
from phasemesh.scorer.search import scored
from phasemesh.scorer.work import Job, Workshop
from phasemesh.telemetry import names
from phasemesh.v1 import scorer_pb2 as pb

#: Bytes of one row's entry for one query token, alignment included, and of the entry itself.
_ALIGNED_BYTES = 9
_ROW_BYTES = 300
#: Missing rows that a failure's words name.
_NAMED_ROWS = 5


async def score(
    shop: Workshop, fragments: Fragments, job: Job, request: pb.LeafScoreRequest
) -> pb.LeafScoreResponse:
    """Answer `request`.

    Raises:
        PhasemeshError: the request is at fault, the version isn't there, or there is no room for the work.
    """
    index = index_of(request.index)
    query = query_of(request.query if request.HasField("query") else None, index.dim)
    align = request.include_alignment
    _check_reply(request, len(query), shop.max_message_bytes)
    asked = [
        Asked(selection.fragment_id, f"fragments[{i}]", rows=len(selection.rows))
        for i, selection in enumerate(request.fragments)
    ]

    start_ns = job.clock.now_ns()
    found = await fragments.lookup(index, asked)
    tokens = sum(one.tokens for one in found if isinstance(one, Found))
    failures: list[pb.FragmentFailure] = []
    scores: list[RowScore] = []
    with shop.queue.admit(scan_work(tokens, len(query)), deadline_s=job.deadline_s) as claim:
        async with fragments.sources(found) as looked:
            loaded_ns = job.clock.now_ns()
            job.clock.note(names.PHASE_LOAD, start_ns, loaded_ns, {names.FRAGMENTS: len(asked)})
            units: list[Unit[list[RowScore]]] = []
            positions: list[int] = []
            for position, (one, selection) in enumerate(zip(looked, request.fragments, strict=True)):
                if isinstance(one, pb.FragmentFailure):
                    failures.append(one)
                    continue
                # Beyond any fragment already means "isn't there", and fits an int64.
                rows = np.array([min(row, one.segment.rows) for row in selection.rows], np.int64)
                present = rows < one.segment.rows
                if one.visible is not None:
                    present[present] = one.visible[rows[present]]
                if not present.all():
                    gone = [row for row, there in zip(selection.rows, present, strict=True) if not there]
                    failures.append(fragments.failed(one.fragment_id, _missing(gone, position)))
                rows = rows[present]
                work = scan_work(int(one.segment.row_lengths[rows].sum()), len(query))
                units.append(Unit(work, partial(_score, one, rows, query, index.reduction, align)))
                positions.append(position)
            for position, result in zip(positions, await claim.run(units), strict=True):
                if isinstance(result, Exception):
                    failures.append(fragments.failed(asked[position].fragment_id, result))
                else:
                    scores += result
            scored(
                shop, job, claim, loaded_ns,
                documents=sum(one.state is RowState.OK for one in scores),
                tokens=_tokens(looked, scores),
            )  # fmt: skip
    reply = pb.LeafScoreResponse(scores=[_wire(one) for one in scores], failures=failures)
    reply.timings.CopyFrom(job.timings())
    return reply


def _score(
    source: LeafSource,
    rows: npt.NDArray[np.int64],
    query: npt.NDArray[np.float32],
    reduction: Reduction,
    align: bool,
    checkpoint: Callable[[], None],
) -> list[RowScore]:
    return leaf_score(source, rows, query, reduction, align=align, checkpoint=checkpoint)


def _tokens(looked: Sequence[LeafSource | pb.FragmentFailure], scores: Sequence[RowScore]) -> int:
    segments = {one.fragment_id: one.segment for one in looked if isinstance(one, LeafSource)}
    lengths = {fragment_id: segment.row_lengths for fragment_id, segment in segments.items()}
    return sum(int(lengths[one.fragment_id][one.row]) for one in scores)


def _wire(one: RowScore) -> pb.LeafScore:
    wire = pb.LeafScore(fragment_id=one.fragment_id, row=one.row, id=one.id)
    if one.state is RowState.OK and one.score is not None:
        wire.score = one.score
    if one.best_tokens is not None and one.best_similarities is not None:
        wire.best_tokens.extend(one.best_tokens.tolist())
        wire.best_similarities.extend(one.best_similarities.tolist())
    return wire


def _missing(rows: Sequence[int], position: int) -> NotFound:
    named = ", ".join(map(str, rows[:_NAMED_ROWS])) + (", ..." if len(rows) > _NAMED_ROWS else "")
    return NotFound(
        f"fragments[{position}].rows: {named} aren't in this version (deleted, or never there)",
        reason="ROW_NOT_FOUND",
        field=f"fragments[{position}].rows",
    )


def _check_reply(request: pb.LeafScoreRequest, query_tokens: int, limit: int) -> None:
    rows = sum(len(selection.rows) for selection in request.fragments)
    size = rows * (_ROW_BYTES + (query_tokens * _ALIGNED_BYTES if request.include_alignment else 0))
    if size > limit:
        raise InvalidArgument(
            f"fragments: the reply for {rows} rows would have about {size} bytes and a message holds {limit}"
            " (rpc.max_message_bytes); ask for fewer rows at once",
            reason="REPLY_TOO_LARGE",
            field="fragments",
        )
