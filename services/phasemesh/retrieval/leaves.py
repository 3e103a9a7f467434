"""What scorers are asked, and what they answered: LeafSearch over fragments, LeafScore of rows.

Invariant: an answer counts for a fragment only where it is whole: a search that names the fragment as
searched, a scoring with a result for every row that was asked for. Nothing is taken that wasn't asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from phasemesh.errors import PhasemeshError, Unavailable, from_code
from phasemesh.retrieval.plan import PlannedFragment
from phasemesh.v1 import retrieval_pb2, scorer_pb2
from phasemesh.v1.common_pb2 import Tensor

#: The query's path in a request that gives its vectors.
VECTORS_FIELD = "query.vectors"


@dataclass(frozen=True, slots=True)
class LeafQuery:
    """What every scorer is asked alike in a search.

    Attributes:
        index: collection and version.
        query: token vectors.
        k: documents wanted.
        candidates: tier.
        field: the query's path in the caller's request.
    """

    index: scorer_pb2.IndexRef
    query: Tensor
    k: int
    candidates: retrieval_pb2.CandidateSource.ValueType
    field: str = VECTORS_FIELD


@dataclass(frozen=True, slots=True)
class RowQuery:
    """What scorers are asked in a scoring of given rows.

    Attributes:
        index: collection and version.
        query: token vectors.
        rows: physical rows by fragment, each once.
        align: also ask for each query token's best document token.
        field: the query's path in the caller's request.
    """

    index: scorer_pb2.IndexRef
    query: Tensor
    rows: Mapping[int, Sequence[int]]
    align: bool = False
    field: str = VECTORS_FIELD


@dataclass(slots=True)
class Gathered:
    """What the scorers found.

    Attributes:
        hits: of each leaf, best first.
        searched: fragments that were.
        lost: fragments that weren't, with the last reason.
        documents: scored.
        tokens: touched.
        exact: every leaf was exact.
    """

    hits: list[Sequence[scorer_pb2.LeafHit]] = field(default_factory=list)
    searched: set[int] = field(default_factory=set)
    lost: dict[int, PhasemeshError] = field(default_factory=dict)
    documents: int = 0
    tokens: int = 0
    exact: bool = True


@dataclass(slots=True)
class Scored:
    """What the scorers say of rows.

    Attributes:
        scores: by fragment and row.
        searched: fragments whose rows all have one.
        lost: fragments whose rows don't, with the last reason.
    """

    scores: dict[tuple[int, int], scorer_pb2.LeafScore] = field(default_factory=dict)
    searched: set[int] = field(default_factory=set)
    lost: dict[int, PhasemeshError] = field(default_factory=dict)


class SearchCall:
    """A LeafSearch, for `FanOut.run`; what it gathered is in `gathered`."""

    method = "LeafSearch"

    def __init__(self, query: LeafQuery) -> None:
        self.gathered = Gathered()
        self.query_field = query.field
        self._query = query

    def message(self, fragments: Sequence[PlannedFragment]) -> scorer_pb2.LeafSearchRequest:
        """See `LeafCall`."""
        return scorer_pb2.LeafSearchRequest(
            index=self._query.index,
            fragments=[
                scorer_pb2.FragmentSelection(
                    fragment_id=fragment.fragment_id, allowed_rows=fragment.allowed_rows
                )
                for fragment in fragments
            ],
            query=self._query.query,
            k=self._query.k,
            candidates=self._query.candidates,
        )

    def take(
        self, reply: scorer_pb2.LeafSearchResponse, asked: Sequence[PlannedFragment]
    ) -> dict[int, PhasemeshError]:
        """See `LeafCall`."""
        wanted = {fragment.fragment_id for fragment in asked}
        searched, failed = set(reply.searched_fragments), _failed(reply.failures)
        if (
            not (searched | failed.keys()) <= wanted
            or not {hit.fragment_id for hit in reply.hits} <= searched
        ):
            raise ValueError("fragments that it wasn't asked for")
        self.gathered.hits.append(reply.hits)
        self.gathered.searched |= searched
        self.gathered.documents += reply.coverage.documents
        self.gathered.tokens += reply.coverage.tokens
        self.gathered.exact = self.gathered.exact and reply.coverage.exact
        return {fragment_id: failed.get(fragment_id, _silent()) for fragment_id in wanted - searched}


class ScoreCall:
    """A LeafScore, for `FanOut.run`; what it gathered is in `scored`."""

    method = "LeafScore"

    def __init__(self, query: RowQuery) -> None:
        self.scored = Scored()
        self.query_field = query.field
        self._query = query
        self._rows = {fragment_id: frozenset(rows) for fragment_id, rows in query.rows.items()}

    def message(self, fragments: Sequence[PlannedFragment]) -> scorer_pb2.LeafScoreRequest:
        """See `LeafCall`."""
        return scorer_pb2.LeafScoreRequest(
            index=self._query.index,
            fragments=[
                scorer_pb2.FragmentRows(
                    fragment_id=fragment.fragment_id, rows=self._query.rows[fragment.fragment_id]
                )
                for fragment in fragments
            ],
            query=self._query.query,
            include_alignment=self._query.align,
        )

    def take(
        self, reply: scorer_pb2.LeafScoreResponse, asked: Sequence[PlannedFragment]
    ) -> dict[int, PhasemeshError]:
        """See `LeafCall`."""
        wanted = {fragment.fragment_id for fragment in asked}
        failed = _failed(reply.failures)
        answered: dict[int, dict[int, scorer_pb2.LeafScore]] = {fragment_id: {} for fragment_id in wanted}
        for score in reply.scores:
            if score.fragment_id not in wanted or score.row not in self._rows[score.fragment_id]:
                raise ValueError("rows that it wasn't asked for")
            answered[score.fragment_id][score.row] = score
        if not failed.keys() <= wanted:
            raise ValueError("fragments that it wasn't asked for")
        lost: dict[int, PhasemeshError] = {}
        for fragment_id, rows in answered.items():
            if fragment_id in failed or len(rows) < len(self._rows[fragment_id]):
                lost[fragment_id] = failed.get(fragment_id, _silent())
            else:
                self.scored.searched.add(fragment_id)
                self.scored.scores.update(((fragment_id, row), score) for row, score in rows.items())
        return lost


def _failed(failures: Iterable[scorer_pb2.FragmentFailure]) -> dict[int, PhasemeshError]:
    return {failure.fragment_id: _fault(failure) for failure in failures}


def _silent() -> PhasemeshError:
    return Unavailable("the scorer said nothing about it", reason="FRAGMENT_NOT_ANSWERED")


def _fault(failure: scorer_pb2.FragmentFailure) -> PhasemeshError:
    error = failure.error
    if failure.retryable:
        return Unavailable(error.message, reason=error.reason or None)
    return from_code(error.code, error.message, reason=error.reason or None, field=error.field)
