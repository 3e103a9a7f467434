"""Token matrices on their way in: finite, of the collection's dimension, scaled as its policy says.

Invariant: what passes is what MaxSim may be computed on. A vector without a direction, or one that float16
can't hold, is refused and never stored as zero or infinity.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from phasemesh.errors import InvalidArgument
from phasemesh.index.spec import CollectionSpec, Normalize
from phasemesh.rpc.codec import decode_tensor
from phasemesh.v1.common_pb2 import Tensor

#: How far from 1 the length of a unit vector may be after rounding to bfloat16 (8 bits: 2^-9 relative).
UNIT_TOLERANCE = 2e-3
#: How far from 1 the length of a vector may be to be left alone, by the type it came in. Scaling it again
#: would only change its last bits, and what was read from here must be storable as it is.
_UNIT_AS_IT_IS = {np.dtype(np.float16): 5e-4, np.dtype(np.float32): 1e-6}


def matrix_from_wire(wire: Tensor, spec: CollectionSpec, field: str) -> NDArray[Any]:
    """[rows, d] float16 or float32, as given.

    Raises:
        InvalidArgument: the tensor contradicts itself, or isn't [rows, d] with the collection's d.
    """
    matrix = decode_tensor(wire, field=field)
    if matrix.ndim != 2 or matrix.shape[1] != spec.token_dim:
        raise InvalidArgument(
            f"{field}: has the shape {list(matrix.shape)}; the collection takes [tokens, {spec.token_dim}]",
            reason="DIMENSION_MISMATCH",
            field=f"{field}.shape",
        )
    return matrix


def conditioned(matrix: NDArray[Any], policy: Normalize, field: str, *, scale: bool = True) -> NDArray[Any]:
    """`matrix` checked and, under `AUTO`, with rows of unit length; of the same dtype.

    Args:
        matrix: [rows, d], floating.
        policy: the collection's.
        field: its path in the request, for errors.
        scale: False for vectors of a model, which scales them itself where it is made to.

    Raises:
        InvalidArgument: a row isn't finite, is zero, or isn't of unit length where that is required.
    """
    finite = np.isfinite(matrix).all(axis=1)
    if not finite.all():
        raise _fault(
            field, int(np.argmin(finite)), "holds NaN or infinity; give finite numbers", "NOT_FINITE"
        )
    wide = matrix.astype(np.float64)
    lengths = np.sqrt(np.einsum("rd,rd->r", wide, wide))
    zero = lengths == 0
    if zero.any():
        raise _fault(field, int(np.argmax(zero)), "is zero and has no direction; leave it out", "ZERO_VECTOR")
    deviation = np.abs(lengths - 1)
    if policy is Normalize.REQUIRE and (deviation > UNIT_TOLERANCE).any():
        row = int(np.argmax(deviation > UNIT_TOLERANCE))
        raise _fault(
            field, row, f"has the length {lengths[row]:.6g}; the collection requires unit vectors", "NOT_UNIT"
        )
    if policy is Normalize.AUTO and scale:
        off = deviation > _UNIT_AS_IT_IS[matrix.dtype]
        if off.any():
            scaled = np.array(matrix)
            scaled[off] = wide[off] / lengths[off, None]
            return scaled
    return matrix


def as_float16(matrix: NDArray[Any], field: str) -> NDArray[np.float16]:
    """`matrix` as it is stored, rounded to the nearest.

    Raises:
        InvalidArgument: a number is beyond float16's range, or a row becomes zero by rounding.
    """
    with np.errstate(over="ignore", under="ignore"):
        half = np.ascontiguousarray(matrix, dtype=np.float16)
    finite = np.isfinite(half).all(axis=1)
    if not finite.all():
        raise _fault(
            field, int(np.argmin(finite)), "is beyond float16's range (65504); scale it down", "FLOAT16_RANGE"
        )
    zero = ~half.any(axis=1)
    if zero.any():
        raise _fault(field, int(np.argmax(zero)), "becomes zero as float16; scale it up", "FLOAT16_RANGE")
    return half


def _fault(field: str, row: int, what: str, reason: str) -> InvalidArgument:
    return InvalidArgument(f"{field}: vector {row} {what}", reason=reason, field=field)
