"""Arrays to `Tensor` messages and back.

Invariant: what is decoded has exactly the shape that the message states, whatever a peer sent; bytes are
little-endian and row-major on every machine.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phasemesh.errors import InvalidArgument
from phasemesh.v1.common_pb2 import (
    DTYPE_BFLOAT16,
    DTYPE_FLOAT16,
    DTYPE_FLOAT32,
    DTYPE_UNSPECIFIED,
    VECTOR_ENCODING_BFLOAT16,
    VECTOR_ENCODING_FLOAT16,
    VECTOR_ENCODING_FLOAT32,
    VECTOR_ENCODING_UNSPECIFIED,
    Dtype,
    Tensor,
    VectorEncoding,
)

#: More dimensions than anything here has.
MAX_DIMENSIONS = 8

#: More items in a row than any message can carry.
MAX_ROW_ITEMS = 2**31

_FLOAT32 = np.dtype("<f4")
_FLOAT16 = np.dtype("<f2")
_UINT16 = np.dtype("<u2")
_ITEM_BYTES = {DTYPE_FLOAT32: 4, DTYPE_FLOAT16: 2, DTYPE_BFLOAT16: 2}

# Key of `repeated float values` as a packed field: field number, wire type 2 (length-delimited).
_VALUES_KEY = bytes([Tensor.VALUES_FIELD_NUMBER << 3 | 2])


def encode_tensor(array: NDArray[Any], encoding: VectorEncoding.ValueType) -> Tensor:
    """`array` as a message.

    Args:
        array: floating, at least one dimension; every size but the first above zero.
        encoding: UNSPECIFIED gives readable `values`; the others pack `data`. bfloat16 and float16 round to
            the nearest, ties to even.

    Raises:
        InvalidArgument: the encoding is unknown, or a value doesn't fit float16 (field "encoding").
        ValueError: the array has no dimensions, too many, or an inner one of size zero.
    """
    if not 1 <= array.ndim <= MAX_DIMENSIONS or 0 in array.shape[1:]:
        raise ValueError(f"an array of shape {array.shape} has no tensor")
    if encoding == VECTOR_ENCODING_UNSPECIFIED:
        tensor = Tensor(dtype=DTYPE_FLOAT32, shape=array.shape)
        if array.size:
            # A list of Python floats takes seven times as long, and the array itself forty times
            # (protobuf converts element by element); parsing a hand-framed packed field is a memcpy.
            packed = _contiguous(array, _FLOAT32).tobytes()
            tensor.MergeFromString(b"".join((_VALUES_KEY, _varint(len(packed)), packed)))
        return tensor
    if encoding == VECTOR_ENCODING_FLOAT32:
        data, dtype = _contiguous(array, _FLOAT32).tobytes(), DTYPE_FLOAT32
    elif encoding == VECTOR_ENCODING_FLOAT16:
        data, dtype = _to_float16(array).tobytes(), DTYPE_FLOAT16
    elif encoding == VECTOR_ENCODING_BFLOAT16:
        data, dtype = _to_bfloat16(array).tobytes(), DTYPE_BFLOAT16
    else:
        raise InvalidArgument(
            f"there is no vector encoding {encoding}; use one of {', '.join(VectorEncoding.keys())}",
            reason="UNKNOWN_ENCODING",
            field="encoding",
        )
    return Tensor(dtype=dtype, shape=array.shape, data=data)


def decode_tensor(tensor: Tensor, *, field: str) -> NDArray[Any]:
    """The array that `tensor` holds: float16 for float16, else float32.

    The array may be read-only and may share the message's memory. Whether its numbers are finite is not
    checked.

    Args:
        tensor: from a peer.
        field: its path in the request, for errors.

    Raises:
        InvalidArgument: dtype, shape and content don't agree; the field names the part at fault.
    """
    shape = _checked_shape(tensor, field)
    count = math.prod(shape)
    if tensor.values:
        if tensor.data:
            raise _fault("both `data` and `values` are filled; fill one", field)
        if tensor.dtype not in (DTYPE_UNSPECIFIED, DTYPE_FLOAT32):
            raise _fault("with `values` the dtype is DTYPE_FLOAT32, or is left out", f"{field}.dtype")
        if len(tensor.values) != count:
            raise _fault(
                f"shape {list(shape)} needs {count} values, there are {len(tensor.values)}", f"{field}.values"
            )
        return np.asarray(tensor.values, dtype=_FLOAT32).reshape(shape)
    if count and not tensor.data:
        raise _fault(f"shape {list(shape)} needs content; fill `data` or `values`", field)
    dtype = tensor.dtype
    if not count and dtype == DTYPE_UNSPECIFIED:
        dtype = DTYPE_FLOAT32
    item_bytes = _ITEM_BYTES.get(dtype)
    if item_bytes is None:
        name = Dtype.Name(dtype) if dtype in Dtype.values() else str(dtype)
        raise _fault(
            f"dtype {name} isn't taken here; use DTYPE_FLOAT32, DTYPE_FLOAT16 or DTYPE_BFLOAT16",
            f"{field}.dtype",
        )
    if len(tensor.data) != count * item_bytes:
        raise _fault(
            f"shape {list(shape)} of {Dtype.Name(dtype)} needs {count * item_bytes} bytes, "
            f"there are {len(tensor.data)}",
            f"{field}.data",
        )
    if dtype == DTYPE_FLOAT32:
        return np.frombuffer(tensor.data, _FLOAT32).reshape(shape)
    if dtype == DTYPE_FLOAT16:
        return np.frombuffer(tensor.data, _FLOAT16).reshape(shape)
    return _from_bfloat16(np.frombuffer(tensor.data, _UINT16)).reshape(shape)


def _checked_shape(tensor: Tensor, field: str) -> tuple[int, ...]:
    if not tensor.shape:
        raise _fault("a tensor needs a shape", f"{field}.shape")
    if len(tensor.shape) > MAX_DIMENSIONS:
        raise _fault(
            f"{len(tensor.shape)} dimensions are too many; the most is {MAX_DIMENSIONS}", f"{field}.shape"
        )
    shape = tuple(tensor.shape)
    if 0 in shape[1:]:
        raise _fault(f"shape {list(shape)} has a size of zero; only the first may be", f"{field}.shape")
    # Matters where there are no rows: no content is missing, yet numpy can't make such an array.
    if math.prod(shape[1:]) > MAX_ROW_ITEMS:
        raise _fault(f"shape {list(shape)} has rows of more than {MAX_ROW_ITEMS} items", f"{field}.shape")
    return shape


def _fault(message: str, field: str) -> InvalidArgument:
    return InvalidArgument(f"{field}: {message}", reason="BAD_TENSOR", field=field)


def _contiguous(array: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
    return np.ascontiguousarray(array, dtype=dtype)


def _to_float16(array: NDArray[Any]) -> NDArray[Any]:
    try:
        with np.errstate(over="raise"):
            return _contiguous(array, _FLOAT16)
    except FloatingPointError:
        raise InvalidArgument(
            "a value is beyond float16's range (65504); ask for VECTOR_ENCODING_BFLOAT16 or _FLOAT32",
            reason="FLOAT16_OVERFLOW",
            field="encoding",
        ) from None


def _to_bfloat16(array: NDArray[Any]) -> NDArray[Any]:
    bits = _contiguous(array, _FLOAT32).view("<u4")
    # Round half to even: add just under half of the dropped part, one more if the kept part is odd.
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    # The addition would carry a NaN into infinity or beyond; keep its sign and make it quiet instead.
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    if is_nan.any():
        rounded = np.where(is_nan, (bits >> np.uint32(16)) | np.uint32(0x40), rounded)
    return rounded.astype(_UINT16)


def _from_bfloat16(halves: NDArray[Any]) -> NDArray[Any]:
    return (halves.astype("<u4") << np.uint32(16)).view(_FLOAT32)


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
