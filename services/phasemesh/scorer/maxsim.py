"""MaxSim: given vectors against a given query; touches no index.

A document that can't be scored fails alone, an empty one has no score. Products are accumulated in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from phasemesh.errors import InvalidArgument
from phasemesh.index.kernel import maxsim
from phasemesh.index.spec import Reduction
from phasemesh.rpc.codec import decode_tensor
from phasemesh.scorer.admission import Unit, scan_work
from phasemesh.scorer.faults import item_error
from phasemesh.scorer.requests import overflows, query_of, reduction_of, score_bound, vector_problems
from phasemesh.scorer.search import scored
from phasemesh.scorer.work import Job, Workshop
from phasemesh.v1 import scorer_pb2 as pb


@dataclass(frozen=True, slots=True, eq=False)
class _Given:
    """A checked request.

    Attributes:
        query: float32 [q, d].
        vectors: all documents' rows, floating [rows, d].
        offsets: document i owns rows offsets[i] to offsets[i + 1], int64 [n + 1].
        faults: documents that can't be scored.
    """

    query: npt.NDArray[np.float32]
    vectors: npt.NDArray[Any]
    offsets: npt.NDArray[np.int64]
    faults: dict[int, InvalidArgument]


async def max_sim(shop: Workshop, job: Job, request: pb.MaxSimRequest) -> pb.MaxSimResponse:
    """Answer `request`.

    Raises:
        PhasemeshError: the request or its query is at fault, or there is no room for the work.
    """
    reduction = reduction_of(request.reduction, "reduction")
    given = await shop.check(partial(_given, request))
    rows = len(given.vectors)
    admitted_ns = job.clock.now_ns()
    with shop.queue.admit(scan_work(rows, len(given.query)), deadline_s=job.deadline_s) as claim:
        unit = Unit(scan_work(rows, len(given.query)), partial(_score, given, reduction))
        result = (await claim.run([unit]))[0]
        if isinstance(result, Exception):
            raise result
        good = np.isfinite(result)
        lengths = np.diff(given.offsets)
        scored(shop, job, claim, admitted_ns, documents=int(good.sum()), tokens=int(lengths[good].sum()))
    scores = []
    for i, value in enumerate(result.tolist()):
        if i in given.faults:
            scores.append(pb.MaxSimScore(error=item_error(given.faults[i])))
        else:
            scores.append(pb.MaxSimScore(score=value) if good[i] else pb.MaxSimScore())
    reply = pb.MaxSimResponse(scores=scores)
    reply.timings.CopyFrom(job.timings())
    return reply


def _score(given: _Given, reduction: Reduction, checkpoint: Callable[[], None]) -> npt.NDArray[np.float32]:
    mask = np.ones(len(given.offsets) - 1, np.bool_)
    mask[list(given.faults)] = False
    return maxsim(
        given.query,
        given.vectors,
        given.offsets,
        mask=mask,
        mean=reduction is Reduction.MEAN,
        checkpoint=checkpoint,
    )


def _given(request: pb.MaxSimRequest) -> _Given:
    if not request.HasField("documents"):
        raise InvalidArgument(
            "documents: there are none; give their token vectors", reason="EMPTY_INPUT", field="documents"
        )
    vectors = decode_tensor(request.documents, field="documents")
    if vectors.ndim != 2:
        raise InvalidArgument(
            f"documents: has shape {list(vectors.shape)}, expected [rows, dimension]",
            reason="WRONG_DIMENSION",
            field="documents",
        )
    offsets = _offsets(request, len(vectors))
    query = query_of(request.query if request.HasField("query") else None, vectors.shape[1])
    return _Given(query, vectors, offsets, _faults(query, vectors, offsets))


def _offsets(request: pb.MaxSimRequest, rows: int) -> npt.NDArray[np.int64]:
    offsets = np.array(request.row_offsets, np.uint64)
    problem = ""
    if not len(offsets):
        problem = "there are none; give 0 and the end of each document's rows"
    elif offsets[0] != 0:
        problem = f"begin with {offsets[0]}; the first is 0"
    elif np.any(offsets[1:] < offsets[:-1]):
        problem = f"fall at position {int(np.argmax(offsets[1:] < offsets[:-1])) + 1}; they must ascend"
    elif offsets[-1] != rows:
        problem = f"end with {offsets[-1]}, but documents has {rows} rows"
    if problem:
        raise InvalidArgument(f"row_offsets: {problem}", reason="BAD_OFFSETS", field="row_offsets")
    return offsets.astype(np.int64)


def _faults(
    query: npt.NDArray[np.float32], vectors: npt.NDArray[Any], offsets: npt.NDArray[np.int64]
) -> dict[int, InvalidArgument]:
    """The first fault of each document that has one."""
    problems = vector_problems(vectors)
    if len(vectors):
        # Of what isn't finite too, which is in `problems` already.
        with np.errstate(invalid="ignore"):
            largest = np.maximum(vectors.max(axis=1), -vectors.min(axis=1)).astype(np.float64)
            longest = largest * np.sqrt(vectors.shape[1])
            too_large = overflows(score_bound(query), longest)
        for row in np.flatnonzero(too_large).tolist():
            problems.setdefault(row, ("VALUE_TOO_LARGE", "is so large that a score would overflow; scale it"))
    faults: dict[int, InvalidArgument] = {}
    for row in sorted(problems):
        document = int(np.searchsorted(offsets, row, side="right")) - 1
        if document not in faults:
            reason, problem = problems[row]
            field = f"documents[{document}]"
            faults[document] = InvalidArgument(
                f"{field}: token vector {row - int(offsets[document])} {problem}", reason=reason, field=field
            )
    return faults
