"""Exact scores: binary64 arithmetic in one order, the same bits on every machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from phasemesh_kernels import _core
from phasemesh_kernels._arguments import (
    check_array,
    check_integers,
    check_offsets,
    check_query,
    check_scales,
    check_seed,
    codes_as_bytes,
)
from phasemesh_kernels._machine import isa_limit

_FLOAT64 = (np.dtype(np.float64),)


def exact_maxsim(
    query: npt.NDArray[np.floating],
    tokens: npt.NDArray[np.float16],
    offsets: npt.NDArray[np.integer[Any]],
    select: npt.NDArray[np.integer[Any]],
    *,
    spread: npt.NDArray[np.float64],
    reach: npt.NDArray[np.float64],
    scan_query: npt.NDArray[np.floating] | None = None,
    codes: npt.NDArray[Any] | None = None,
    codec: str | None = None,
    seed: int = 0,
    scales: npt.NDArray[np.float32] | None = None,
    mean: bool = False,
    cancel: _core.CancelToken | None = None,
    checkpoint: Callable[[], object] | None = None,
    isa: str | None = None,
) -> npt.NDArray[np.float64]:
    """Score documents of float16 vectors exactly, on the calling thread.

    A dot product adds its products, which are exact in binary64, in eight lanes, lane l those of elements l,
    l + 8, ..., in ascending order and from 0; then lanes l and l + 4, of those l and l + 2, and the last two.
    The maxima of the query's tokens are added in the same way. So scores are the same bits whatever the
    machine, the instruction set, the bounds, or what else is scored.

    A scan, of the vectors in binary32 or of their int8 codes, finds the vectors that may be a maximum; the
    caller bounds its error. A bound that is too small makes wrong scores; one that is too large, slow ones.

    Args:
        query: Token vectors, float32 (or float16) [q, d].
        tokens: Document vectors, float16 [T, d], C-contiguous, finite.
        offsets: int64 [n + 1]: document i has the tokens offsets[i] to offsets[i + 1].
        select: Document numbers, [m], in any order, repeats allowed.
        spread: With `reach`, how far a scanned similarity of query token j and a vector of `select[i]` can be
            from exact: spread[0, j] · reach[0, i] + spread[1, j] · reach[1, i]. float64 [2, q].
        reach: float64 [2, m]; infinite where nothing is known.
        scan_query: What the scan multiplies with, as `spread` takes it; the query unless given.
        codes: What the scan reads, int8 codes [T, d] of the same tokens; the tokens unless given.
        codec: Of `codes`.
        seed: The one the codes were made with.
        scales: float32 [T], where they were kept.
        mean: Divide by the number of query tokens.
        cancel: Ends the call with `Cancelled` from another thread.
        checkpoint: Called first and then every few milliseconds; what it raises ends the call.
        isa: Upper limit of the instruction set; None: that of the environment.

    Returns:
        Scores, float64 [m]; -inf for documents without tokens.

    Raises:
        Cancelled: `cancel` was called.
        ValueError: An argument cannot be used.
    """
    vectors = check_array("tokens", tokens, 2, (np.dtype(np.float16),), aligned=False)
    packed, name = (vectors.view(np.uint8), "f16") if codes is None else codes_as_bytes(codes, codec)
    if cancel is not None and not isinstance(cancel, _core.CancelToken):
        raise TypeError(f"cancel: a CancelToken is needed, got {type(cancel).__name__}")
    if checkpoint is not None and not callable(checkpoint):
        raise TypeError(f"checkpoint: a function is needed, got {type(checkpoint).__name__}")
    rows = check_query("query", query)
    return _core.exact_maxsim(
        rows,
        vectors.view(np.uint8),
        check_offsets(offsets),
        check_integers("select", select),
        rows if scan_query is None else check_query("scan_query", scan_query),
        packed,
        name,
        check_seed(seed),
        check_scales(scales),
        check_array("spread", spread, 2, _FLOAT64),
        check_array("reach", reach, 2, _FLOAT64),
        bool(mean),
        cancel,
        checkpoint,
        isa_limit(isa),
    )
