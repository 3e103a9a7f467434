"""MaxSim over packed ragged token vectors, in float32: the seam that scoring goes through.

For each range of document tokens: the sum, over the query's tokens, of the largest similarity with any token
of the range. Nothing is ever padded, so negative similarities keep their meaning and a score doesn't depend
on which documents are scored beside it but for rounding. The compiled kernels do the work where they are
installed and the dimension is one of theirs, numpy otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from phasemesh.index import native, portable
from phasemesh.index.vectors import check_arguments, fold_ranges

_NO_SCORE = re.compile(r"codes: document (\d+) has no finite score")


def maxsim(
    query: npt.NDArray[np.float32],
    tokens: npt.NDArray[np.floating],
    offsets: npt.NDArray[np.int64],
    *,
    mask: npt.NDArray[np.bool_] | None = None,
    mean: bool = False,
    range_to_row: npt.NDArray[np.int64] | None = None,
    rows: int | None = None,
    checkpoint: Callable[[], None] | None = None,
) -> npt.NDArray[np.float32]:
    """Scores documents against one query.

    Every product of two elements is accumulated in float32, maxima are summed in float64, and the sum is
    rounded to float32. Against float64 arithmetic a range's score is therefore off by at most
    d · 2⁻²³ · Σⱼ‖qⱼ‖ · max‖x‖ (see `phasemesh.index.rescore.error_bound`), whatever the order of summation.

    Args:
        query: Query token vectors, [q, d], q ≥ 1, finite.
        tokens: Document token vectors, float16 or float32 [T, d], finite; may be a read-only memory map.
        offsets: Range i owns tokens offsets[i] to offsets[i + 1], [n + 1].
        mask: Rows to score, [rows]; None for all. Tokens of other rows aren't read.
        mean: Divide by the number of query tokens.
        range_to_row: Row of each range, [n], ascending; a row's score is that of its best range. None where
            each range is a row.
        rows: Number of rows; needed with `range_to_row`, whose last rows may own no range.
        checkpoint: Called between blocks; what it raises ends the scoring.

    Returns:
        Scores, float32 [rows]; -inf for rows without tokens and rows outside the mask. Never NaN.

    Raises:
        ValueError: Shapes don't fit together, offsets leave `tokens`, the query isn't finite, or the result
            isn't (tokens that aren't finite, or values so large that float32 overflows).
    """
    plain = tokens.dtype in (np.float16, np.float32) and tokens.flags.c_contiguous
    if (
        native.KERNELS is None
        or not plain
        or tokens.ndim != 2
        or not native.takes(tokens.shape[1], len(query))
    ):
        return portable.maxsim(
            query, tokens, offsets, mask=mask, mean=mean, range_to_row=range_to_row, rows=rows,
            checkpoint=checkpoint,
        )  # fmt: skip
    rows = check_arguments(query, tokens, offsets, mask, range_to_row, rows)
    try:
        scores: npt.NDArray[np.float32] = native.KERNELS.maxsim(
            query.astype(np.float32, order="C", copy=False),
            tokens,
            np.ascontiguousarray(offsets, np.int64),
            select=ranges_of(mask, range_to_row),
            mean=mean,
            checkpoint=checkpoint,
        )
    except ValueError as error:
        found = _NO_SCORE.match(str(error))
        if found is None:
            raise
        raise ValueError(
            f"tokens: range {found[1]} has no finite score; its vectors are not finite or too large"
        ) from error
    return fold_ranges(scores, range_to_row, rows)


def ranges_of(
    mask: npt.NDArray[np.bool_] | None, range_to_row: npt.NDArray[np.int64] | None
) -> npt.NDArray[np.bool_] | None:
    """A mask of rows, bool [rows], as one of ranges, bool [n]; None for all."""
    return mask if mask is None or range_to_row is None else mask[range_to_row]
