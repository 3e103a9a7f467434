"""Scoring documents: MaxSim of all, of some, of the best, and of many queries at once.

MaxSim of a query and a document is the sum over the query's token vectors of the largest dot product with one
of the document's. A document without tokens scores -inf and is never among the best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeAlias, TypeGuard, overload

import numpy as np
import numpy.typing as npt

from phasemesh_kernels import _core
from phasemesh_kernels._arguments import (
    check_codec,
    check_integer,
    check_integers,
    check_offsets,
    check_query,
    check_scales,
    check_seed,
    check_threads,
    codes_as_bytes,
)
from phasemesh_kernels._machine import isa_limit

Scores: TypeAlias = npt.NDArray[np.float32]
Offsets: TypeAlias = npt.NDArray[np.int64] | Sequence[int]
Select: TypeAlias = slice | npt.NDArray[np.integer] | npt.NDArray[np.bool_] | Sequence[int] | None


@overload
def maxsim(
    query: npt.NDArray[np.floating],
    codes: npt.NDArray[Any],
    offsets: Offsets,
    codec: str | None = None,
    *,
    seed: int = 0,
    scales: npt.NDArray[np.float32] | None = None,
    select: Select = None,
    mean: bool = False,
    argmax: Literal[False] = False,
    threads: int = 1,
    cancel: _core.CancelToken | None = None,
    checkpoint: Callable[[], object] | None = None,
    isa: str | None = None,
) -> Scores: ...
@overload
def maxsim(
    query: npt.NDArray[np.floating],
    codes: npt.NDArray[Any],
    offsets: Offsets,
    codec: str | None = None,
    *,
    seed: int = 0,
    scales: npt.NDArray[np.float32] | None = None,
    select: Select = None,
    mean: bool = False,
    argmax: Literal[True],
    threads: int = 1,
    cancel: _core.CancelToken | None = None,
    checkpoint: Callable[[], object] | None = None,
    isa: str | None = None,
) -> tuple[Scores, npt.NDArray[np.int32]]: ...
def maxsim(
    query: npt.NDArray[np.floating],
    codes: npt.NDArray[Any],
    offsets: Offsets,
    codec: str | None = None,
    *,
    seed: int = 0,
    scales: npt.NDArray[np.float32] | None = None,
    select: Select = None,
    mean: bool = False,
    argmax: bool = False,
    threads: int = 1,
    cancel: _core.CancelToken | None = None,
    checkpoint: Callable[[], object] | None = None,
    isa: str | None = None,
) -> Scores | tuple[Scores, npt.NDArray[np.int32]]:
    """Score documents.

    Args:
        query: Token vectors in their own basis, float32 (or float16, float64) [q, d].
        codes: Packed documents, as in `Encoded`; C-contiguous, may be read-only or memory-mapped.
        offsets: int64 [n + 1]: document i has the tokens offsets[i] to offsets[i + 1].
        codec: None where the dtype says it: uint16 (bf16), float16 (f16), float32 (f32).
        seed: The one the codes were made with.
        scales: float32 [T], where they were kept.
        select: Which documents: None for all; a slice, within the documents and without a step; document
            numbers [m], in any order, repeats allowed; or a mask, bool [n].
        mean: Divide by the number of query tokens.
        argmax: Also return which of the document's tokens is the best for each of the query's.
        threads: How many to use, this one included.
        cancel: Ends the call with `Cancelled` from another thread.
        checkpoint: Called by this thread first and then every few milliseconds; what it raises ends the call.
        isa: Upper limit of the instruction set; None: that of the environment.

    Returns:
        Scores, float32, one per selected document, in the order of `select`; with a mask one per document.
        -inf where a document has no tokens or is left out. With `argmax` also int32 [.., q]: positions within
        the document, the first of equals, -1 where there is none.

    Raises:
        Cancelled: `cancel` was called.
        ValueError: An argument cannot be used.
    """
    scores, best = _scan(
        [check_query("query", query)], codes, offsets, codec, seed, scales, select, mean, argmax, threads,
        cancel, checkpoint, isa,
    )  # fmt: skip
    return scores[0] if best is None else (scores[0], best)


def maxsim_multi(
    queries: Iterable[npt.NDArray[np.floating]],
    codes: npt.NDArray[Any],
    offsets: Offsets,
    codec: str | None = None,
    *,
    seed: int = 0,
    scales: npt.NDArray[np.float32] | None = None,
    select: Select = None,
    mean: bool = False,
    threads: int = 1,
    cancel: _core.CancelToken | None = None,
    checkpoint: Callable[[], object] | None = None,
    isa: str | None = None,
) -> Scores:
    """Score documents for several queries, reading the documents once.

    Args:
        queries: Each as in `maxsim`; their numbers of tokens may differ.
        codes: As in `maxsim`, like all that follow.

    Returns:
        Scores, float32 [queries, ..]: a row for each query, equal to that of `maxsim`.
    """
    try:
        every = list(queries)
    except TypeError:
        raise TypeError(f"queries: a sequence of arrays is needed, got {type(queries).__name__}") from None
    rows = [check_query(f"queries[{i}]", query) for i, query in enumerate(every)]
    return _scan(
        rows, codes, offsets, codec, seed, scales, select, mean, False, threads, cancel, checkpoint, isa
    )[0]


def maxsim_topk(
    query: npt.NDArray[np.floating],
    codes: npt.NDArray[Any],
    offsets: Offsets,
    k: int,
    codec: str | None = None,
    *,
    seed: int = 0,
    scales: npt.NDArray[np.float32] | None = None,
    select: Select = None,
    mean: bool = False,
    threads: int = 1,
    cancel: _core.CancelToken | None = None,
    checkpoint: Callable[[], object] | None = None,
    isa: str | None = None,
) -> tuple[npt.NDArray[np.int64], Scores]:
    """The documents with the highest scores.

    Args:
        query: As in `maxsim`, like all that isn't named here.
        codes: Packed documents.
        offsets: int64 [n + 1].
        k: How many, at least 1.
        select: Which documents come into question; repeats count once.

    Returns:
        Document numbers, int64, and their scores, float32, by score descending and then by number. Fewer
        than k where fewer have tokens.
    """
    k = check_integer("k", k, 1, 2**63 - 1)
    start, numbers = 0, None
    if isinstance(select, slice):
        start = 0 if select.start is None else check_integer("select", select.start, 0, 2**63 - 1)
    elif select is not None and not _is_mask(select):
        # In ascending order, so that equal scores come by number.
        select = numbers = np.unique(check_integers("select", select))
    scores = _scan(
        [check_query("query", query)], codes, offsets, codec, seed, scales, select, mean, False, threads,
        cancel, checkpoint, isa,
    )[0][0]  # fmt: skip
    places = _core.topk(scores, k)
    return (places + start if numbers is None else numbers[places]), scores[places]


def query_errors(query: npt.NDArray[np.floating], codec: str, *, seed: int = 0) -> Scores:
    """How far each of a query's tokens is from what `maxsim` scans with, as codecs round queries too.

    With `Encoded.errors` it bounds what a score may be off by, without the vectors: a dot product of token j
    of the query with a vector x whose code is x' is off by at most |q[j]| |x - x'| + query_errors[j] |x'|.

    Args:
        query: float32 (or float16, float64) [q, d].
        codec: Of the documents.
        seed: The one their codes were made with.

    Returns:
        Euclidean distances, rounded up, float32 [q]; zeros for f16 and f32.
    """
    return _core.query_errors(check_query("query", query), check_codec(codec), check_seed(seed))


def _scan(
    queries: list[npt.NDArray[np.float32]],
    codes: object,
    offsets: object,
    codec: object,
    seed: object,
    scales: object,
    select: Select,
    mean: object,
    argmax: object,
    threads: object,
    cancel: object,
    checkpoint: Callable[[], object] | None,
    isa: object,
) -> tuple[Scores, npt.NDArray[np.int32] | None]:
    packed, name = codes_as_bytes(codes, codec)
    starts = check_offsets(offsets)
    if cancel is not None and not isinstance(cancel, _core.CancelToken):
        raise TypeError(f"cancel: a CancelToken is needed, got {type(cancel).__name__}")
    if checkpoint is not None and not callable(checkpoint):
        raise TypeError(f"checkpoint: a function is needed, got {type(checkpoint).__name__}")
    return _core.maxsim(
        queries,
        packed,
        starts,
        name,
        check_seed(seed),
        check_scales(scales),
        *_selection(select, len(starts) - 1),
        bool(mean),
        bool(argmax),
        check_threads(threads),
        cancel,
        checkpoint,
        isa_limit(isa),
    )


def _is_mask(select: object) -> TypeGuard[npt.NDArray[np.bool_]]:
    return isinstance(select, np.ndarray) and select.dtype == np.bool_


def _selection(
    select: Select, documents: int
) -> tuple[tuple[int, int] | None, npt.NDArray[np.int64] | None, npt.NDArray[np.uint8] | None]:
    """A selection as a range, document numbers or a mask; all None for all documents."""
    if select is None:
        return None, None, None
    if isinstance(select, slice):
        if select.step not in (None, 1):
            raise ValueError(f"select: a slice with step {select.step!r}; give document numbers")
        start = 0 if select.start is None else check_integer("select", select.start, 0, documents)
        stop = documents if select.stop is None else check_integer("select", select.stop, start, documents)
        return (start, stop), None, None
    if _is_mask(select):
        if select.shape != (documents,):
            raise ValueError(f"select: a mask of shape {select.shape} for {documents} documents")
        return None, None, np.ascontiguousarray(select).view(np.uint8)
    if isinstance(select, (str, bytes)) or not isinstance(select, (np.ndarray, Sequence)):
        raise TypeError(f"select: a slice, document numbers or a mask is needed, got {type(select).__name__}")
    return None, check_integers("select", select), None
