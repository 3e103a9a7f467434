"""Exact MaxSim, and how far the float32 kernel can be from it.

*Exact* is MaxSim of the stored float16 vectors in float64. It is computed so that a score is a function of
the query and of the set of a range's vectors alone: each dot product is summed by itself in one fixed order
(`sum_lanes`; products are exact), never inside a matrix product whose rounding depends on what else it
multiplies. Two documents whose best vectors are equal therefore have equal scores, bit for bit, in whatever
segment, process or company they are scored, and "ties by id" means the same to every scorer.

Only the few vectors that can be the maximum get that treatment. A scan finds them, of the vectors in float32
or of their 8-bit codes: all whose similarity is within twice its proven error of the largest. The compiled
kernels do both where they are installed; numpy does it otherwise, many times slower, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from phasemesh.index import native
from phasemesh.index.coded import SEED, Codes, similarity_bound
from phasemesh.index.portable import MAX_WIDENED, Block, reduce_ranges
from phasemesh.index.spec import Codec
from phasemesh.index.vectors import check_query, check_ranges

_UNIT_ROUNDOFF = 2.0**-24
#: Allowance for results that underflow (flushed to zero or not) once the query is scaled by `scale_query`:
#: 2⁻¹²⁶ times the largest float16, with room to spare.
_UNDERFLOW = 2.0**-100
#: Partial sums of a dot product.
_LANES = 8


@dataclass(frozen=True, slots=True, eq=False)
class Known:
    """What is known of the ranges that are scored, to find the vectors that may be the most similar faster.

    Args:
        rows: Row of each range that is asked for, int64 [m].
        norms: Upper bound of each row's vector norms, float32 [rows]; its vectors are finite.
        codes: Of all tokens; without data where there are none.
        codec: They were made with; None for none.
    """

    rows: npt.NDArray[np.int64]
    norms: npt.NDArray[np.float32]
    codes: Codes
    codec: Codec | None


def sum_lanes(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Sums of rows, float64 [n, d] → [n], in the one order that exact scores are summed in.

    Lane l adds elements l, l + 8, ..., in ascending order and from 0; then lanes l and l + 4 are added, of
    those l and l + 2, and the last two. The compiled kernels do the same, element by element.
    """
    lanes = np.zeros((len(values), _LANES))
    for begin in range(0, values.shape[1], _LANES):
        part = values[:, begin : begin + _LANES]
        lanes[:, : part.shape[1]] += part
    half = lanes[:, :4] + lanes[:, 4:]
    quarter = half[:, :2] + half[:, 2:]
    sums: npt.NDArray[np.float64] = quarter[:, 0] + quarter[:, 1]
    return sums


def scale_query(query: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Scales a query, float32 [q, d], by a power of two, so that its largest element lies in [0.5, 1).

    That is exact but for underflow, keeps float32 products with any finite float16 from overflowing, and
    moves no ranking, since MaxSim is homogeneous. A query of zeros stays as it is.
    """
    exponent = int(np.frexp(float(np.max(np.abs(query))))[1])
    return np.ldexp(query.astype(np.float64), -exponent).astype(np.float32)


def vector_norms(vectors: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """Upper bounds of the Euclidean norms of vectors, [n, d] → float64 [n].

    The vectors are float16, or float32 with elements below 2⁴⁸, so that their squares don't overflow.
    """
    wide = vectors.astype(np.float32, copy=False)
    squares = np.einsum("nd,nd->n", wide, wide, dtype=np.float32).astype(np.float64)
    dim = vectors.shape[1]
    # A float32 sum of squares is off by a relative d · 2⁻²⁴ and by what underflowed.
    bounds: npt.NDArray[np.float64] = np.sqrt(squares * (1 + 4 * dim * _UNIT_ROUNDOFF) + dim * 2.0**-120)
    return bounds


def error_bound(
    scaled: npt.NDArray[np.float32], norms: npt.NDArray[np.floating], scores: npt.NDArray[np.float32]
) -> npt.NDArray[np.float64]:
    """How far `kernel.maxsim` (the sum) can be from exact.

    A float32 dot product of length d, in any order of summation, is off by at most g·Σ|qᵢxᵢ| ≤ g·‖q‖·‖x‖
    with g = d·u / (1 - d·u), u = 2⁻²⁴ (Higham, Accuracy and Stability of Numerical Algorithms, 3.1); so is a
    maximum of them, and sums of maxima add up. The sum itself is rounded to float32 once.

    Args:
        scaled: The query from `scale_query`, [q, d].
        norms: Upper bound of each row's vector norms, [n].
        scores: The kernel's scores for `scaled`, [n]; may be -inf.

    Returns:
        Bounds, float64 [n]; infinite where the score is.
    """
    gamma = _gamma(scaled.shape[1])
    total = float(vector_norms(scaled).sum())
    bounds: npt.NDArray[np.float64] = (
        gamma * total * norms.astype(np.float64)
        + np.abs(scores.astype(np.float64)) * 2 * _UNIT_ROUNDOFF
        + scaled.size * _UNDERFLOW
    )
    return bounds


def exact_maxsim(
    query: npt.NDArray[np.float32],
    tokens: npt.NDArray[np.float16],
    offsets: npt.NDArray[np.int64],
    *,
    ranges: npt.NDArray[np.int64] | None = None,
    mean: bool = False,
    known: Known | None = None,
    checkpoint: Callable[[], None] | None = None,
) -> npt.NDArray[np.float64]:
    """Exact scores of some ranges.

    Args:
        query: As in `kernel.maxsim`.
        tokens: As in `kernel.maxsim`.
        offsets: As in `kernel.maxsim`.
        ranges: Ranges to score, int64 [m], in any order; None for all.
        mean: Divide by the number of query tokens.
        known: What is known of the ranges; it changes how long this takes and nothing else.
        checkpoint: Called between blocks; what it raises ends the scoring.

    Returns:
        Scores, float64 [m]; -inf for empty ranges. Never NaN.

    Raises:
        ValueError: As `kernel.maxsim`, or a range doesn't exist.
    """
    check_query(query, tokens)
    check_ranges(offsets, len(tokens))
    if ranges is None:
        ranges = np.arange(len(offsets) - 1)
    elif len(ranges) and (ranges.min() < 0 or ranges.max() >= len(offsets) - 1):
        raise ValueError(f"ranges: {ranges.min()} to {ranges.max()} leave 0 to {len(offsets) - 2}")
    fast = getattr(native.KERNELS, "exact_maxsim", None)
    if fast is not None and tokens.flags.c_contiguous and native.takes(tokens.shape[1], len(query)):
        return _compiled(fast, query, tokens, offsets, ranges, mean, known, checkpoint)
    filled = np.flatnonzero(offsets[ranges + 1] > offsets[ranges])
    scores = np.full(len(ranges), -np.inf)
    similarities = _ExactSimilarities(query, tokens)
    scores[filled] = reduce_ranges(
        similarities.best_of, offsets, ranges[filled], query.shape, checkpoint, total=sum_lanes
    )
    return scores / len(query) if mean else scores


def best_tokens(
    query: npt.NDArray[np.float32], document: npt.NDArray[np.float16]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Which of a document's vectors is most similar to each of the query's, and by how much.

    Args:
        query: [q, d].
        document: [t, d], t ≥ 1.

    Returns:
        Row of the best vector, int64 [q], the first of equals; and its exact similarity, float64 [q].
    """
    check_query(query, document)
    if not len(document):
        raise ValueError("document: has no token vectors to align")
    token, column, values = _ExactSimilarities(query, document).contenders(
        slice(0, len(document)), np.zeros(1, np.int64)
    )
    best = np.full(len(query), -np.inf)
    np.maximum.at(best, column, values)
    first = np.full(len(query), len(document))
    won = values == best[column]
    np.minimum.at(first, column[won], token[won])
    return first, best


def _compiled(
    fast: Callable[..., npt.NDArray[np.float64]],
    query: npt.NDArray[np.float32],
    tokens: npt.NDArray[np.float16],
    offsets: npt.NDArray[np.int64],
    ranges: npt.NDArray[np.int64],
    mean: bool,
    known: Known | None,
    checkpoint: Callable[[], None] | None,
) -> npt.NDArray[np.float64]:
    scaled = scale_query(query)
    dim = tokens.shape[1]
    coded: dict[str, Any] = {}
    if known is not None and known.codec is Codec.INT8 and len(known.codes.data):
        spread, reach = similarity_bound(scaled, known.codec, known.norms, known.codes.errors)
        reach = reach[:, known.rows]
        scales = known.codes.scales
        coded = {
            "codes": known.codes.data,
            "codec": known.codec.value,
            "seed": SEED,
            "scales": scales if len(scales) else None,
        }
    else:
        norms = _range_norms(tokens, offsets, ranges) if known is None else known.norms[known.rows]
        # One query's similarities are off by no more than `error_bound` says of their sum.
        spread = np.stack([_gamma(dim) * vector_norms(scaled), np.full(len(query), dim * _UNDERFLOW)])
        reach = np.stack([norms.astype(np.float64), np.ones(len(norms))])
    return fast(
        query.astype(np.float32, order="C", copy=False),
        tokens,
        offsets,
        ranges,
        spread=spread,
        reach=np.ascontiguousarray(reach),
        scan_query=scaled,
        mean=mean,
        checkpoint=checkpoint,
        **coded,
    )


def _range_norms(
    tokens: npt.NDArray[np.float16], offsets: npt.NDArray[np.int64], ranges: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Upper bounds of the norms of each range's vectors, float64 [m]; 0 for empty ranges."""
    norms = np.zeros(len(ranges))
    for position, index in enumerate(ranges.tolist()):
        begin, stop = int(offsets[index]), int(offsets[index + 1])
        step = max(1, MAX_WIDENED // tokens.shape[1])
        for first in range(begin, stop, step):
            bounds = vector_norms(tokens[first : min(first + step, stop)])
            if not np.isfinite(bounds).all():
                raise ValueError("tokens: a document's vectors aren't finite")
            norms[position] = max(norms[position], float(bounds.max()))
    return norms


class _ExactSimilarities:
    """Exact similarities of one query with the vectors that may be the most similar."""

    def __init__(self, query: npt.NDArray[np.float32], tokens: npt.NDArray[np.float16]) -> None:
        self._tokens = tokens
        self._query = query.astype(np.float64)
        scaled = scale_query(query)
        self._columns = scaled.T
        self._query_norms = vector_norms(scaled)

    def best_of(self, block: Block) -> npt.NDArray[np.float64]:
        """Best exact similarity of each range of a block with each query token, [ranges, q]."""
        token, column, values = self.contenders(block.tokens, block.starts)
        owner = np.searchsorted(block.starts, token, side="right") - 1
        best = np.full((len(block.starts), len(self._query)), -np.inf)
        np.maximum.at(best, (owner, column), values)
        return best

    def contenders(
        self, positions: slice | npt.NDArray[np.int64], starts: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Vectors that may be the best of their range for some query token.

        Returns:
            Position in the block, query token, exact similarity: three arrays of one length.
        """
        vectors = self._tokens[positions]
        wide = vectors.astype(np.float32)
        norms = vector_norms(wide)
        if not np.isfinite(norms).all():
            raise ValueError("tokens: a document's vectors aren't finite")
        similarities = wide @ self._columns
        lengths = np.diff(starts, append=len(vectors))
        dim = wide.shape[1]
        margins = 2 * _gamma(dim) * np.outer(np.maximum.reduceat(norms, starts), self._query_norms)
        floors = np.maximum.reduceat(similarities, starts, axis=0) - margins - 2 * dim * _UNDERFLOW
        # Half the memory traffic; rounded down, so that no contender is lost.
        narrow = np.nextafter(floors.astype(np.float32), np.float32(-np.inf))
        token, column = np.nonzero(similarities >= np.repeat(narrow, lengths, axis=0))
        values = np.empty(len(token), np.float64)
        step = max(1, MAX_WIDENED // dim)
        for begin in range(0, len(token), step):
            part = slice(begin, begin + step)
            # float16 times float32 is exact in float64.
            values[part] = sum_lanes(vectors[token[part]].astype(np.float64) * self._query[column[part]])
        return token, column, values


def _gamma(dim: int) -> float:
    # The sum has d terms; one more rounding for each product.
    work = (dim + 1) * _UNIT_ROUNDOFF
    return work / (1 - work)
