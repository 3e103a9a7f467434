"""Checks of the arrays that scoring works on: a wrong one is refused before any arithmetic.

Messages start with the argument at fault, so that a service can name the field.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def check_query(query: npt.NDArray[np.float32], tokens: npt.NDArray[np.floating]) -> None:
    """Checks a query matrix against the tokens it is to be scored with.

    Args:
        query: [q, d], q ≥ 1, d ≥ 1, of a floating type, finite.
        tokens: [T, d].

    Raises:
        ValueError: A shape or type is wrong, or the query isn't finite.
    """
    if query.ndim != 2 or query.shape[0] < 1 or query.shape[1] < 1:
        raise ValueError(
            f"query: has shape {query.shape}, expected [query tokens, dimension], both at least 1"
        )
    if tokens.ndim != 2 or tokens.shape[1] != query.shape[1]:
        raise ValueError(f"query: has dimension {query.shape[1]}, but tokens have shape {tokens.shape}")
    if query.dtype not in (np.float32, np.float16):
        raise ValueError(f"query: is {query.dtype}, expected float32")
    finite = np.isfinite(query).all(axis=1)
    if not finite.all():
        raise ValueError(f"query: token {int(np.argmin(finite))} isn't finite")


def check_ranges(offsets: npt.NDArray[np.int64], tokens: int) -> None:
    """Checks that offsets [n + 1] ascend within 0 to `tokens`.

    Raises:
        ValueError: They don't, or aren't integers.
    """
    if offsets.ndim != 1 or len(offsets) < 1 or offsets.dtype.kind not in "iu":
        raise ValueError(f"offsets: is {offsets.dtype} {offsets.shape}, expected at least one integer")
    if offsets[0] < 0 or offsets[-1] > tokens:
        raise ValueError(f"offsets: run from {offsets[0]} to {offsets[-1]}, beyond 0 to {tokens}")
    if np.any(offsets[1:] < offsets[:-1]):
        raise ValueError(f"offsets: fall at {int(np.argmax(offsets[1:] < offsets[:-1]))}; they must ascend")


def check_arguments(
    query: npt.NDArray[np.float32],
    tokens: npt.NDArray[np.floating],
    offsets: npt.NDArray[np.int64],
    mask: npt.NDArray[np.bool_] | None,
    range_to_row: npt.NDArray[np.int64] | None,
    rows: int | None,
) -> int:
    """Checks the arguments of `kernel.maxsim` against each other.

    Returns:
        The number of rows.

    Raises:
        ValueError: They don't fit together.
    """
    check_query(query, tokens)
    check_ranges(offsets, len(tokens))
    ranges = len(offsets) - 1
    rows = ranges if rows is None else rows
    if range_to_row is None:
        if rows != ranges:
            raise ValueError(f"rows: {rows} rows need range_to_row, since there are {ranges} ranges")
    elif len(range_to_row) != ranges:
        raise ValueError(f"range_to_row: has {len(range_to_row)} entries for {ranges} ranges")
    elif ranges and (
        range_to_row[0] < 0 or range_to_row[-1] >= rows or np.any(range_to_row[1:] < range_to_row[:-1])
    ):
        raise ValueError(f"range_to_row: must ascend within 0 to {rows - 1}")
    if mask is not None and mask.shape != (rows,):
        raise ValueError(f"mask: has shape {mask.shape}, expected ({rows},)")
    return rows


def fold_ranges(
    scores: npt.NDArray[np.float32], range_to_row: npt.NDArray[np.int64] | None, rows: int
) -> npt.NDArray[np.float32]:
    """Scores of ranges, float32 [n], to those of rows, [rows]: each row's best, or -inf."""
    if range_to_row is None:
        return scores
    result = np.full(rows, -np.inf, np.float32)
    np.maximum.at(result, range_to_row, scores)
    return result
