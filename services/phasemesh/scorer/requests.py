"""Requests as the wire has them to what is searched: every field checked, each fault named with its path.

Invariant: what passes here can be scored. Query vectors are finite, none is zero, and no score that they can
give overflows float32.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from phasemesh.errors import InvalidArgument, PermissionDenied, Unimplemented
from phasemesh.index.spec import MAX_DIM, Codec, Reduction, Version
from phasemesh.rpc.codec import decode_tensor
from phasemesh.rpc.context import current_call_or_none
from phasemesh.v1 import retrieval_pb2, scorer_pb2
from phasemesh.v1.common_pb2 import Tensor

#: Most documents of one search: beyond it the reply nears the limit of a message.
MAX_K = 100_000
#: Most vectors of one query: far beyond any model's window, small enough for a block of similarities.
MAX_QUERY_TOKENS = 65_536
#: Vectors of a query times their longest possible dot product; below float32's largest number.
_MAX_SCORE = 3.0e38
_LARGEST_FLOAT16 = 65_504.0

_TENANT = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}", re.ASCII)
_INCARNATION = re.compile(r"[0-9a-f]{32}", re.ASCII)

_CODECS = {
    retrieval_pb2.CODEC_UNSPECIFIED: Codec.INT8,
    retrieval_pb2.CODEC_BF16: Codec.BF16,
    retrieval_pb2.CODEC_INT8: Codec.INT8,
    retrieval_pb2.CODEC_INT4: Codec.INT4,
}
_REDUCTIONS = {
    retrieval_pb2.MAX_SIM_REDUCTION_UNSPECIFIED: Reduction.SUM,
    retrieval_pb2.MAX_SIM_REDUCTION_SUM: Reduction.SUM,
    retrieval_pb2.MAX_SIM_REDUCTION_MEAN: Reduction.MEAN,
}


@dataclass(frozen=True, slots=True)
class Index:
    """One version of one collection.

    Attributes:
        tenant: owner.
        version: incarnation and number.
        codec: representation to score from.
        dim: of token vectors.
        reduction: how similarities are combined.
    """

    tenant: str
    version: Version
    codec: Codec
    dim: int
    reduction: Reduction


def index_of(ref: scorer_pb2.IndexRef) -> Index:
    """The checked form of a request's `index`.

    Raises:
        InvalidArgument: a part is missing or malformed.
        PermissionDenied: the caller's key doesn't speak for the tenant.
    """
    tenant = _tenant(ref.tenant)
    version = ref.version
    if not _INCARNATION.fullmatch(version.incarnation):
        raise InvalidArgument(
            "index.version.incarnation: isn't 32 hexadecimal digits; take the version that the retrieval"
            " service returned",
            reason="BAD_VERSION",
            field="index.version.incarnation",
        )
    if not 1 <= version.number < 2**63:
        raise InvalidArgument(
            "index.version.number: versions begin with 1", reason="BAD_VERSION", field="index.version.number"
        )
    if not 1 <= ref.token_dimension <= MAX_DIM:
        raise InvalidArgument(
            f"index.token_dimension: {ref.token_dimension} isn't between 1 and {MAX_DIM}",
            reason="BAD_DIMENSION",
            field="index.token_dimension",
        )
    if ref.codec not in _CODECS:
        raise InvalidArgument(
            f"index.codec: there is no codec {ref.codec}; use one of {', '.join(retrieval_pb2.Codec.keys())}",
            reason="UNKNOWN_CODEC",
            field="index.codec",
        )
    return Index(
        tenant,
        Version(version.incarnation, version.number),
        _CODECS[ref.codec],
        ref.token_dimension,
        reduction_of(ref.reduction, "index.reduction"),
    )


def reduction_of(reduction: retrieval_pb2.MaxSimReduction.ValueType, field: str) -> Reduction:
    """How similarities are combined; a sum where it isn't stated.

    Raises:
        InvalidArgument: there is no such reduction.
    """
    if reduction not in _REDUCTIONS:
        raise InvalidArgument(
            f"{field}: there is no reduction {reduction};"
            f" use one of {', '.join(retrieval_pb2.MaxSimReduction.keys())}",
            reason="UNKNOWN_REDUCTION",
            field=field,
        )
    return _REDUCTIONS[reduction]


def k_of(request: scorer_pb2.LeafSearchRequest) -> int:
    """Documents wanted.

    Raises:
        InvalidArgument: none or too many, or fewer are to be scored exactly.
    """
    if not 1 <= request.k <= MAX_K:
        raise InvalidArgument(f"k: {request.k} isn't between 1 and {MAX_K}", reason="BAD_K", field="k")
    if request.HasField("candidate_limit") and request.candidate_limit < request.k:
        raise InvalidArgument(
            f"candidate_limit: {request.candidate_limit} candidates can't give {request.k} documents;"
            " raise it to k or leave it out",
            reason="BAD_CANDIDATE_LIMIT",
            field="candidate_limit",
        )
    return request.k


def check_candidates(candidates: retrieval_pb2.CandidateSource.ValueType) -> None:
    """Refuse tiers that aren't there.

    Raises:
        InvalidArgument: there is no such source of candidates.
        Unimplemented: a later release will have it.
    """
    if candidates not in retrieval_pb2.CandidateSource.values():
        raise InvalidArgument(
            f"candidates: there is no source {candidates};"
            f" use one of {', '.join(retrieval_pb2.CandidateSource.keys())}",
            reason="UNKNOWN_CANDIDATE_SOURCE",
            field="candidates",
        )
    if candidates not in (
        retrieval_pb2.CANDIDATE_SOURCE_UNSPECIFIED,
        retrieval_pb2.CANDIDATE_SOURCE_EXHAUSTIVE,
    ):
        raise Unimplemented(
            f"candidates: {retrieval_pb2.CandidateSource.Name(candidates)} comes with a later release; use"
            " CANDIDATE_SOURCE_EXHAUSTIVE"
        )


def check_distinct(fragment_ids: Sequence[int], field: str) -> None:
    """Refuse a fragment that is named twice: its documents would be found twice.

    Args:
        fragment_ids: in the request's order.
        field: path of one of them, with `{}` for its position.

    Raises:
        InvalidArgument: one is.
    """
    seen: set[int] = set()
    for position, fragment_id in enumerate(fragment_ids):
        if fragment_id in seen:
            path = field.format(position)
            raise InvalidArgument(
                f"{path}: fragment {fragment_id} is named twice", reason="DUPLICATE_FRAGMENT", field=path
            )
        seen.add(fragment_id)


def query_of(tensor: Tensor | None, dim: int) -> npt.NDArray[np.float32]:
    """Query token vectors, float32 [tokens, dim].

    Args:
        tensor: None where the request has none.
        dim: that the documents have.

    Raises:
        InvalidArgument: there is none, its shape is wrong, a value isn't finite, or a vector is zero.
    """
    if tensor is None:
        raise _query_fault("EMPTY_QUERY", "there is no query; give its token vectors")
    if len(tensor.shape) == 2 and tensor.shape[0] == 0:
        raise _query_fault("EMPTY_QUERY", "the query has no token vectors; give at least one")
    query = decode_tensor(tensor, field="query")
    if query.ndim != 2 or query.shape[1] != dim:
        raise _query_fault(
            "WRONG_DIMENSION",
            f"has shape {list(query.shape)}; what it is compared with needs [tokens, {dim}]",
        )
    if len(query) > MAX_QUERY_TOKENS:
        raise _query_fault(
            "QUERY_TOO_LONG", f"has {len(query)} token vectors and {MAX_QUERY_TOKENS} are the most"
        )
    for row, (reason, problem) in vector_problems(query).items():
        raise _query_fault(reason, f"token vector {row} {problem}")
    if score_bound(query) * _LARGEST_FLOAT16 * np.sqrt(dim) > _MAX_SCORE:
        raise _query_fault("VALUE_TOO_LARGE", "values are so large that scores would overflow; scale them")
    return np.ascontiguousarray(query, np.float32)


def vector_problems(vectors: npt.NDArray[Any]) -> dict[int, tuple[str, str]]:
    """Rows that can't be scored, in order, each with a reason and words for it.

    Args:
        vectors: floating [rows, dim].
    """
    finite = np.isfinite(vectors).all(axis=1)
    usable = finite & vectors.any(axis=1)
    return {
        int(row): ("ZERO_VECTOR", "is all zeros, which has no direction to compare")
        if finite[row]
        else ("NOT_FINITE", "holds NaN or infinity")
        for row in np.flatnonzero(~usable)
    }


def score_bound(query: npt.NDArray[Any]) -> float:
    """Largest score that a document vector of length one can give: the sum of the query vectors' lengths."""
    wide = query.astype(np.float64)
    return float(np.sqrt(np.einsum("nd,nd->n", wide, wide)).sum())


def overflows(bound: float, norms: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
    """Which document vectors of these lengths could, with a query of this `score_bound`, overflow float32."""
    too_large: npt.NDArray[np.bool_] = bound * norms > _MAX_SCORE
    return too_large


def _tenant(tenant: str) -> str:
    call = current_call_or_none()
    if call is not None:
        tenant = tenant or call.caller.tenant
        # A mesh key may speak for any tenant; whoever calls a scorer past the mesh reads only its own.
        if call.caller.role != "mesh" and tenant != call.caller.tenant:
            raise PermissionDenied(
                "index.tenant: the caller's key doesn't speak for this tenant", field="index.tenant"
            )
    if not _TENANT.fullmatch(tenant):
        raise InvalidArgument(
            "index.tenant: use 1 to 128 of a-z, A-Z, 0-9, dot, underscore and hyphen, no dot first",
            reason="BAD_TENANT",
            field="index.tenant",
        )
    return tenant


def _query_fault(reason: str, problem: str) -> InvalidArgument:
    return InvalidArgument(f"query: {problem}", reason=reason, field="query")
