"""Scanning codes instead of vectors, with a proven bound on what that costs.

A segment keeps its vectors in a compact form beside the float16 ones: 8-bit or 4-bit codes of the rotated
vectors, or bfloat16. A scan of the codes reads a half, a quarter or all of the bytes and runs on integer
units. What it gives is off from exact by no more than

    Σⱼ ‖qⱼ‖ · e + Σⱼ ‖qⱼ - q'ⱼ‖ · (n + e)

for a document whose vectors x have codes x' with ‖x - x'‖ ≤ e and ‖x‖ ≤ n, and a query scanned as q':
|q·x - q'·x'| ≤ |q·(x - x')| + |(q - q')·x'|, a maximum moves no further than what it is taken of, and
errors of maxima add up. Both distances are measured when codes are made, not assumed. So a scan of codes
never decides the order of documents; it decides, safely, which ones need no closer look.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from phasemesh.index import native
from phasemesh.index.kernel import ranges_of
from phasemesh.index.spec import Codec
from phasemesh.index.vectors import fold_ranges

#: Seed of the rotation. Part of the format: codes made with another one can't be scanned.
SEED = 0
#: Integer dot products are exact; what is left is the rounding of a few float32 operations per token.
_INTEGER_ROUNDING = 2.0**-21
_UNIT_ROUNDOFF = 2.0**-24
#: Allowance for results that underflow, as in `rescore`.
_UNDERFLOW = 2.0**-100


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """Token vectors in the form that is scanned.

    Args:
        data: Codes, uint8 [tokens, bytes per token].
        scales: Each token's length, float32 [tokens]; [0] where all are of unit length.
        errors: Upper bound of the distance between a vector and its code, the largest of each row, float32
            [rows]; infinite for rows with a vector that has no code.
    """

    data: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.float32]
    errors: npt.NDArray[np.float32]


def served_codec(codec: Codec, dim: int) -> Codec | None:
    """The codec that a scorer of this process keeps for a collection's: None where it scans the vectors."""
    return codec if native.takes(dim) else None


def codes_shape(codec: Codec | None, tokens: int, dim: int) -> tuple[int, int]:
    """Shape of a segment's codes."""
    if codec is None:
        return (0, 0)
    return (tokens, {Codec.BF16: 2 * dim, Codec.INT8: dim, Codec.INT4: dim // 2}[codec])


def no_codes(rows: int) -> Codes:
    """What a segment without codes holds."""
    return Codes(np.zeros((0, 0), np.uint8), np.zeros(0, np.float32), np.zeros(rows, np.float32))


def make_codes(tokens: npt.NDArray[np.float16], row_offsets: npt.NDArray[np.int64], codec: Codec) -> Codes:
    """Encodes all vectors of a segment.

    Args:
        tokens: float16 [tokens, d], C-contiguous; d as `native.takes` wants it.
        row_offsets: Row i owns tokens row_offsets[i] to row_offsets[i + 1], [rows + 1].
        codec: How.

    Raises:
        RuntimeError: The compiled kernels aren't there.
    """
    if native.KERNELS is None:
        raise RuntimeError(f"codec {codec}: {native.slow_kernel()}")
    encoded = native.KERNELS.encode(tokens, codec.value, seed=SEED, refused="skip", errors=True)
    scales = np.zeros(0, np.float32) if encoded.scales is None else encoded.scales
    distances = encoded.errors if encoded.scales is None else encoded.errors * encoded.scales
    for refused in encoded.refused:
        distances[refused.token] = np.inf
    errors = np.zeros(len(row_offsets) - 1, np.float32)
    filled = np.flatnonzero(np.diff(row_offsets))
    if len(filled):
        errors[filled] = np.maximum.reduceat(distances, row_offsets[filled])
    # Rounded up, since a product was rounded and a bound that is too small would be none.
    return Codes(encoded.codes.view(np.uint8), scales, np.nextafter(errors, np.float32(np.inf)))


def scan(
    queries: Sequence[npt.NDArray[np.float32]],
    codes: Codes,
    codec: Codec,
    offsets: npt.NDArray[np.int64],
    norms: npt.NDArray[np.float32],
    *,
    mask: npt.NDArray[np.bool_] | None = None,
    range_to_row: npt.NDArray[np.int64] | None = None,
    checkpoint: Callable[[], None] | None = None,
) -> list[tuple[npt.NDArray[np.float32], npt.NDArray[np.float64]]]:
    """Scores rows by their codes, for several queries while each code is read once.

    Args:
        queries: Each from `rescore.scale_query`, float32 [q, d]; at least one.
        codes: Of the segment.
        codec: They were made with.
        offsets: Range i owns tokens offsets[i] to offsets[i + 1], int64 [n + 1].
        norms: Upper bound of each row's vector norms, float32 [rows].
        mask: Rows to score, bool [rows]; None for all.
        range_to_row: Row of each range, [n]; None where each range is a row.
        checkpoint: Called between blocks; what it raises ends the scan.

    Returns:
        For each query the sums of its tokens' best similarities, float32 [rows], -inf where there is none;
        and how far each can be from exact, float64 [rows]. They don't depend on the other queries.
    """
    kernels: Any = native.KERNELS
    data = codes.data.view(np.uint16) if codec is Codec.BF16 else codes.data
    scores = kernels.maxsim_multi(
        queries,
        data,
        offsets,
        codec.value,
        seed=SEED,
        scales=codes.scales if len(codes.scales) else None,
        select=ranges_of(mask, range_to_row),
        checkpoint=checkpoint,
    )
    results = []
    for query, sums in zip(queries, scores, strict=True):
        spread, reach = similarity_bound(query, codec, norms, codes.errors)
        of_errors, of_reach = spread.sum(axis=1)
        results.append(
            (fold_ranges(sums, range_to_row, len(norms)), of_errors * reach[0] + of_reach * reach[1])
        )
    return results


def similarity_bound(
    scaled: npt.NDArray[np.float32],
    codec: Codec,
    norms: npt.NDArray[np.float32],
    errors: npt.NDArray[np.float32],
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """How far a scanned similarity of query token j and a vector of row i can be from exact.

    Args:
        scaled: The query from `rescore.scale_query`, float32 [q, d].
        codec: That is scanned.
        norms: Upper bound of each row's vector norms, float32 [rows].
        errors: Upper bound of the distance of each row's vectors and their codes, float32 [rows].

    Returns:
        `spread`, float64 [2, q], and `reach`, float64 [2, rows]; the bound is
        spread[0, j] · reach[0, i] + spread[1, j] · reach[1, i].
    """
    kernels: Any = native.KERNELS
    query_errors = kernels.query_errors(scaled, codec.value, seed=SEED).astype(np.float64)
    query_norms = np.linalg.norm(scaled.astype(np.float64), axis=1) * (1 + 2.0**-40)
    dim = scaled.shape[1]
    rounding = 2 * (dim + 1) * _UNIT_ROUNDOFF if codec is Codec.BF16 else _INTEGER_ROUNDING
    spread = np.stack([query_norms, query_errors + rounding * (query_norms + query_errors)])
    # What underflows, as a product of two numbers that are nothing beside what they are added to.
    spread[1] += dim * _UNDERFLOW * 2.0**60
    wide = errors.astype(np.float64)
    return spread, np.stack([wide, norms + wide + 2.0**-60])
