"""LeafScore: given rows of some fragments, each scored exactly.

A row that isn't there (never was, or this version has deleted it) is left out of the scores and named in a
failure of its fragment; the fragment's other rows are scored. All rows are dealt out to as many units as
there are threads, so that one scoring alone uses them all; a fragment that fails, fails alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from phasemesh.errors import Cancelled, InvalidArgument, NotFound
from phasemesh.index.leaf import LeafSource, RowScore, RowState, leaf_score, score_rows
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
#: Scan work that is worth a unit of its own: some tenths of a millisecond.
_UNIT_WORK = 1 << 14


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Rows of one fragment that one thread scores; `lengths` has the token vectors of each, int64 [rows]."""

    position: int
    source: LeafSource
    rows: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int64]

    @classmethod
    def of(cls, position: int, source: LeafSource, rows: npt.NDArray[np.int64]) -> _Part:
        """A part with the lengths of its rows."""
        offsets, ranges = source.segment.range_offsets, source.segment.row_ranges
        return cls(position, source, rows, offsets[ranges[rows + 1]] - offsets[ranges[rows]])

    @property
    def tokens(self) -> int:
        """Token vectors of all rows."""
        return int(self.lengths.sum())

    @property
    def documents(self) -> int:
        """Rows that have token vectors."""
        return int(np.count_nonzero(self.lengths))


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
    scores: list[pb.LeafScore] = []
    documents = scanned = 0
    with shop.queue.admit(scan_work(tokens, len(query)), deadline_s=job.deadline_s) as claim:
        async with fragments.sources(found) as looked:
            loaded_ns = job.clock.now_ns()
            job.clock.note(names.PHASE_LOAD, start_ns, loaded_ns, {names.FRAGMENTS: len(asked)})
            parts: list[_Part] = []
            for position, (one, selection) in enumerate(zip(looked, request.fragments, strict=True)):
                if isinstance(one, pb.FragmentFailure):
                    failures.append(one)
                    continue
                # Beyond any fragment already means "isn't there", and fits an int64.
                rows = np.minimum(np.array(selection.rows, np.uint64), one.segment.rows).astype(np.int64)
                present = rows < one.segment.rows
                if one.visible is not None:
                    present[present] = one.visible[rows[present]]
                if not present.all():
                    gone = [row for row, there in zip(selection.rows, present, strict=True) if not there]
                    failures.append(fragments.failed(one.fragment_id, _missing(gone, position)))
                parts.append(_Part.of(position, one, rows[present]))
            groups = _dealt(parts, scan_work(1, len(query)), shop.queue.threads)
            units = [
                Unit(
                    scan_work(sum(part.tokens for part in group), len(query)),
                    partial(_score, group, query, index.reduction, align),
                )
                for group in groups
            ]
            failed: dict[int, pb.FragmentFailure] = {}
            for group, results in zip(groups, await claim.run(units), strict=True):
                each = [results] * len(group) if isinstance(results, Exception) else results
                for part, result in zip(group, each, strict=True):
                    if isinstance(result, Exception):
                        number = part.source.fragment_id
                        failed.setdefault(part.position, fragments.failed(number, result))
                    else:
                        scores += result
                        documents += part.documents
                        scanned += part.tokens
            failures += failed.values()
            scored(shop, job, claim, loaded_ns, documents=documents, tokens=scanned)
    reply = pb.LeafScoreResponse(scores=scores, failures=failures)
    reply.timings.CopyFrom(job.timings())
    return reply


def _score(
    parts: Sequence[_Part],
    query: npt.NDArray[np.float32],
    reduction: Reduction,
    align: bool,
    checkpoint: Callable[[], None],
) -> list[list[pb.LeafScore] | Exception]:
    results: list[list[pb.LeafScore] | Exception] = []
    for part in parts:
        try:
            results.append(_score_part(part, query, reduction, align, checkpoint))
        except Cancelled:
            raise
        except Exception as error:
            results.append(error)
    return results


def _score_part(
    part: _Part,
    query: npt.NDArray[np.float32],
    reduction: Reduction,
    align: bool,
    checkpoint: Callable[[], None],
) -> list[pb.LeafScore]:
    source, rows = part.source, part.rows
    if align:
        return [
            _wire(one)
            for one in leaf_score(source, rows, query, reduction, align=True, checkpoint=checkpoint)
        ]
    number = source.fragment_id
    scores = score_rows(source, rows, query, reduction, checkpoint=checkpoint)
    names = source.segment.row_ids(rows)
    return [
        pb.LeafScore(fragment_id=number, row=row, id=name)
        if score == -np.inf
        else pb.LeafScore(fragment_id=number, row=row, id=name, score=score)
        for row, name, score in zip(rows.tolist(), names, scores.tolist(), strict=True)
    ]


def _dealt(parts: Sequence[_Part], token_work: int, hands: int) -> list[list[_Part]]:
    """The rows in at most `hands` groups of about as many token vectors each, in their order."""
    total = sum(part.tokens for part in parts)
    count = max(1, min(hands, total * token_work // _UNIT_WORK))
    groups: list[list[_Part]] = [[] for _ in range(count)]
    before = 0
    for part in parts:
        ends = before + np.cumsum(part.lengths)
        group = np.minimum((ends - part.lengths) * count // max(total, 1), count - 1)
        for number in np.unique(group).tolist():
            groups[number].append(_Part.of(part.position, part.source, part.rows[group == number]))
        before += part.tokens
    return [group for group in groups if group]


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
