"""Search and scoring within the segments of one scorer.

A leaf search is exact: scores equal float64 MaxSim over the stored float16 vectors, order is by score and
then by id, and what is returned doesn't depend on how documents are spread over segments or scorers. It is a
funnel of three scans, each over what the one before couldn't rule out: all documents by their codes, those
that may be among the best k by their float16 vectors in float32, and what is left of them exactly. Every scan
comes with a proven bound on its error, so none can lose a document. At most k documents come back, and fewer
only where fewer match.

4-bit codes are too coarse to rule much out: with them the best max(4k, 64) by code go on, whatever the bound
says, and the result says whether that is proven to be exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from phasemesh.index.rescore import Known, best_tokens, exact_maxsim, scale_query
from phasemesh.index.scanner import CPU, Scanned, Scanner, scan_vectors
from phasemesh.index.segments import Segment
from phasemesh.index.spec import Reduction

#: With 4-bit codes this many times k documents go on to be scored from their vectors, ...
COARSE_FACTOR = 4
#: ... but at least so many.
COARSE_LEAST = 64


@dataclass(frozen=True, slots=True, eq=False)
class LeafSource:
    """One fragment of the version that is searched.

    Args:
        fragment_id: Its number in the dataset.
        segment: Its vectors.
        visible: Rows that may be seen, bool [rows], from `overlay.visible_rows`; None for all.
    """

    fragment_id: int
    segment: Segment
    visible: npt.NDArray[np.bool_] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class LeafQuery:
    """What is searched for.

    Args:
        vectors: Query token vectors, float32 [q, d], q ≥ 1, finite.
        k: Documents wanted, at least 1.
        reduction: How the query tokens' best similarities are combined.
    """

    vectors: npt.NDArray[np.float32]
    k: int
    reduction: Reduction


@dataclass(frozen=True, slots=True)
class LeafHit:
    """A document found.

    Args:
        id: The document's id.
        score: Exact MaxSim; a float64, because rounding it would make ties that aren't.
        fragment_id: Fragment that holds it.
        row: Its physical row there.
    """

    id: str
    score: float
    fragment_id: int
    row: int


@dataclass(frozen=True, slots=True)
class LeafResult:
    """The best documents of some fragments, and the work that took.

    Args:
        hits: Best first; equal scores by id.
        documents: Documents scored; those without token vectors don't count.
        tokens: Their token vectors.
        rescored: Documents that were scored again, exactly.
        exact: Whether no document can be missing; False only with 4-bit codes.
    """

    hits: tuple[LeafHit, ...]
    documents: int
    tokens: int
    rescored: int
    exact: bool = True


class RowState(StrEnum):
    """Whether a row has a score."""

    OK = "ok"
    EMPTY = "empty"
    DELETED = "deleted"


@dataclass(frozen=True, slots=True, eq=False)
class RowScore:
    """Score of a given row.

    Args:
        fragment_id: Fragment that holds it.
        row: Its physical row.
        id: The document's id.
        state: Whether it has a score; `DELETED` also stands for a row that a filter hides.
        score: Exact MaxSim; None unless the state is OK.
        best_tokens: For each query token the row of the document's best vector, int64 [q]; if asked for.
        best_similarities: For each query token that vector's similarity, float64 [q]; if asked for.
    """

    fragment_id: int
    row: int
    id: str
    state: RowState
    score: float | None = None
    best_tokens: npt.NDArray[np.int64] | None = None
    best_similarities: npt.NDArray[np.float64] | None = None


def leaf_search(
    sources: Sequence[LeafSource],
    query: npt.NDArray[np.float32],
    k: int,
    reduction: Reduction,
    *,
    scanner: Scanner = CPU,
    checkpoint: Callable[[], None] | None = None,
) -> LeafResult:
    """Finds the best documents of some fragments by scanning them all.

    Args:
        sources: Fragments, each once.
        query: Query token vectors, float32 [q, d], q ≥ 1, finite.
        k: Documents wanted, at least 1.
        reduction: How the query tokens' best similarities are combined.
        scanner: Has the first look; doesn't change what is returned.
        checkpoint: Called between blocks of work; what it raises ends the search.

    Raises:
        ValueError: `k` or the query can't be searched with.
    """
    queries = [LeafQuery(query, k, reduction)]
    (result,) = leaf_searches(sources, queries, scanner=scanner, checkpoint=checkpoint)
    if isinstance(result, Exception):
        raise result
    return result


def leaf_searches(
    sources: Sequence[LeafSource],
    queries: Sequence[LeafQuery],
    *,
    scanner: Scanner = CPU,
    checkpoint: Callable[[], None] | None = None,
) -> list[LeafResult | Exception]:
    """Several searches of the same rows of the same fragments, whose codes are read once for all of them.

    Args:
        sources: Fragments, each once.
        queries: What is searched for; at least one.
        scanner: Has the first look.
        checkpoint: Called between blocks of work; what it raises ends all searches.

    Returns:
        For each query what `leaf_search` returns or raises: bit for bit the same, whatever the other queries.

    Raises:
        Exception: What befell the scan that they share.
    """
    results: dict[int, LeafResult | Exception] = {}
    scans: list[_Scan] = []
    for position, query in enumerate(queries):
        try:
            scans.append(_Scan(position, query))
        except ValueError as error:
            results[position] = error
    if scans:
        for number, source in enumerate(sources):
            scaled = [scan.scaled for scan in scans]
            found = scanner.scan(source.segment, scaled, source.visible, checkpoint)
            for scan, scanned in zip(scans, found, strict=True):
                scan.add(number, source, scanned)
    for scan in scans:
        try:
            results[scan.position] = scan.finish(sources, checkpoint)
        except Exception as error:
            # A fault of this query's own rows is no fault of the others'.
            results[scan.position] = error
    return [results[position] for position in range(len(queries))]


class _Scan:
    """One query's way through the funnel."""

    def __init__(self, position: int, query: LeafQuery) -> None:
        if query.k < 1:
            raise ValueError(f"k: is {query.k}, expected at least 1")
        if query.vectors.size == 0:
            raise ValueError(
                f"query: has shape {query.vectors.shape}, expected [query tokens, dimension], both at least 1"
            )
        self.position = position
        self.scaled = scale_query(query.vectors)
        self._query = query
        self._best = _Contenders(query.k)
        self._documents = self._tokens = 0
        self._coarse = False

    def add(self, number: int, source: LeafSource, scanned: Scanned) -> None:
        """Takes in what a scan of a source found."""
        scores, errors = scanned.scores, scanned.errors
        scored = np.flatnonzero(scores > -np.inf)
        self._coarse |= scanned.coarse
        self._documents += len(scored)
        self._tokens += int(source.segment.row_lengths[scored].sum())
        self._best.add(number, scored, scores[scored], errors[scored])

    def finish(self, sources: Sequence[LeafSource], checkpoint: Callable[[], None] | None) -> LeafResult:
        """Scores again what couldn't be ruled out."""
        k = self._query.k
        best = self._best
        proven = not self._coarse or best.keep_best(max(COARSE_FACTOR * k, COARSE_LEAST))
        if len(best) > k:
            finer = _Contenders(k)
            for number, rows in best.by_source():
                segment = sources[number].segment
                mask = np.zeros(segment.rows, np.bool_)
                mask[rows] = True
                scanned = scan_vectors(segment, self.scaled, mask, checkpoint)
                finer.add(number, rows, scanned.scores[rows], scanned.errors[rows])
            best = finer
        hits: list[LeafHit] = []
        mean = self._query.reduction is Reduction.MEAN
        for number, rows in best.by_source():
            source = sources[number]
            exact = _score_rows(source.segment, self._query.vectors, rows, mean, checkpoint)
            hits += [
                LeafHit(source.segment.row_id(row), score, source.fragment_id, row)
                for row, score in zip(rows.tolist(), exact.tolist(), strict=True)
            ]
        rescored = len(hits)
        hits.sort(key=lambda hit: (-hit.score, hit.id))
        return LeafResult(tuple(hits[:k]), self._documents, self._tokens, rescored, proven)


def leaf_score(
    source: LeafSource,
    rows: npt.NDArray[np.integer[Any]],
    query: npt.NDArray[np.float32],
    reduction: Reduction,
    *,
    align: bool = False,
    checkpoint: Callable[[], None] | None = None,
) -> list[RowScore]:
    """Scores given rows of a fragment, exactly; none is dropped, whatever its state.

    Args:
        source: The fragment.
        rows: Physical rows, int64 [m], in any order, repeats allowed.
        query: Query token vectors, float32 [q, d], q ≥ 1, finite.
        reduction: How the query tokens' best similarities are combined.
        align: Also return each query token's best document vector, of the chunk that gives the score.
            Positions count over all chunks.
        checkpoint: Called between blocks of work; what it raises ends the scoring.

    Returns:
        In the order of `rows`.

    Raises:
        ValueError: A row doesn't exist, or the query can't be scored with.
    """
    segment = source.segment
    wanted = np.asarray(rows, np.int64)
    exact = score_rows(source, wanted, query, reduction, checkpoint=checkpoint)
    results = []
    for row, score in zip(wanted.tolist(), exact.tolist(), strict=True):
        name = segment.row_id(row)
        if source.visible is not None and not source.visible[row]:
            results.append(RowScore(source.fragment_id, row, name, RowState.DELETED))
        elif score == -np.inf:
            results.append(RowScore(source.fragment_id, row, name, RowState.EMPTY))
        elif align:
            matched, similarities = _align(segment, query, row)
            results.append(RowScore(source.fragment_id, row, name, RowState.OK, score, matched, similarities))
        else:
            results.append(RowScore(source.fragment_id, row, name, RowState.OK, score))
    return results


def score_rows(
    source: LeafSource,
    rows: npt.NDArray[np.int64],
    query: npt.NDArray[np.float32],
    reduction: Reduction,
    *,
    checkpoint: Callable[[], None] | None = None,
) -> npt.NDArray[np.float64]:
    """Exact scores of given rows, whether they may be seen or not, as `leaf_score` has them.

    Args:
        source: The fragment.
        rows: Physical rows, int64 [m], in any order, repeats allowed.
        query: Query token vectors, float32 [q, d], q ≥ 1, finite.
        reduction: How the query tokens' best similarities are combined.
        checkpoint: Called between blocks of work; what it raises ends the scoring.

    Returns:
        float64 [m]; -inf for rows without token vectors.

    Raises:
        ValueError: A row doesn't exist, or the query can't be scored with.
    """
    segment = source.segment
    if len(rows) and (rows.min() < 0 or rows.max() >= segment.rows):
        raise ValueError(
            f"rows: {rows.min()} to {rows.max()} asked for, but fragment {source.fragment_id} has "
            f"{segment.rows} rows"
        )
    return _score_rows(segment, query, rows, reduction is Reduction.MEAN, checkpoint)


def _align(
    segment: Segment, query: npt.NDArray[np.float32], row: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Best vectors of the row's best range, as positions in the row, and their similarities."""
    ranges = np.arange(segment.row_ranges[row], segment.row_ranges[row + 1])
    scores = exact_maxsim(query, segment.tokens, segment.range_offsets, ranges=ranges)
    best = int(ranges[np.argmax(scores)])
    begin, stop = segment.range_offsets[best], segment.range_offsets[best + 1]
    matched, similarities = best_tokens(query, segment.tokens[begin:stop])
    return matched + (begin - segment.range_offsets[ranges[0]]), similarities


def _score_rows(
    segment: Segment,
    query: npt.NDArray[np.float32],
    rows: npt.NDArray[np.int64],
    mean: bool,
    checkpoint: Callable[[], None] | None,
) -> npt.NDArray[np.float64]:
    """Exact scores of rows, each that of its best range; -inf for rows without tokens."""
    begins, counts = segment.row_ranges[rows], segment.row_ranges[rows + 1] - segment.row_ranges[rows]
    first = np.cumsum(counts) - counts
    ranges = np.repeat(begins - first, counts) + np.arange(counts.sum())
    known = Known(np.repeat(rows, counts), segment.norms, segment.codes, segment.key.codec)
    scores = exact_maxsim(
        query, segment.tokens, segment.range_offsets, ranges=ranges, mean=mean, known=known,
        checkpoint=checkpoint,
    )  # fmt: skip
    # Every row owns at least one range, so no segment of the reduction is empty.
    return np.maximum.reduceat(scores, first) if len(rows) else scores


class _Contenders:
    """Rows that may be among the best k, kept few while segments are scanned.

    A row stays while its upper bound reaches the k-th largest lower bound seen so far, so none that belongs
    to the best k, or ties with its last, ever leaves.
    """

    def __init__(self, k: int) -> None:
        self._k = k
        self._source = np.zeros(0, np.int64)
        self._row = np.zeros(0, np.int64)
        self._lower = np.zeros(0, np.float64)
        self._upper = np.zeros(0, np.float64)

    def add(
        self,
        source: int,
        rows: npt.NDArray[np.int64],
        scores: npt.NDArray[np.float32],
        errors: npt.NDArray[np.float64],
    ) -> None:
        self._source = np.concatenate([self._source, np.full(len(rows), source)])
        self._row = np.concatenate([self._row, rows])
        self._lower = np.concatenate([self._lower, scores - errors])
        self._upper = np.concatenate([self._upper, scores + errors])
        surplus = len(self._lower) - self._k
        if surplus > 0:
            kept = self._upper >= np.partition(self._lower, surplus)[surplus]
            self._source, self._row = self._source[kept], self._row[kept]
            self._lower, self._upper = self._lower[kept], self._upper[kept]

    def __len__(self) -> int:
        return len(self._row)

    def keep_best(self, count: int) -> bool:
        """Keeps the `count` rows that score best; whether those that leave can't be among the best k."""
        surplus = len(self._row) - count
        if surplus <= 0:
            return True
        # A row without a bound has no score either; it isn't ruled out.
        bounded = np.isfinite(self._upper)
        scores = np.where(
            bounded, np.where(bounded, self._lower, 0) + np.where(bounded, self._upper, 0), np.inf
        )
        kept = np.sort(np.argsort(-scores, kind="stable")[:count])
        self._source, self._row = self._source[kept], self._row[kept]
        self._lower, self._upper = self._lower[kept], self._upper[kept]
        # `add` has already dropped every row that is proven not to be among them.
        return False

    def by_source(self) -> list[tuple[int, npt.NDArray[np.int64]]]:
        return [(int(source), self._row[self._source == source]) for source in np.unique(self._source)]
