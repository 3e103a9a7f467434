"""Vectors in JSON: nested lists of numbers for people, base64 of little-endian bytes for programs.

Invariant: what is read has one shape, stated or counted, and passes on every number as it was; whether the
numbers are finite is for the retrieval service to say, document by document.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any

import numpy as np
from numpy.typing import NDArray

from phasemesh.gateway.dialects.native.objects import JsonObject, checked_integer, enum_name, enum_names
from phasemesh.gateway.fields import invalid, json_type
from phasemesh.rpc.codec import decode_tensor, encode_tensor
from phasemesh.v1.common_pb2 import VECTOR_ENCODING_FLOAT32, Dtype, Tensor

_NUMBERS = {int, float}
_DTYPES = ("float32", "float16", "bfloat16")


def read_matrix(value: Any, path: str) -> Tensor:
    """Token vectors [tokens, dimension]: a list of lists of numbers, or an object of base64.

    Raises:
        InvalidArgument: it is something else, or rows differ in length; the field names the place.
    """
    if isinstance(value, list):
        if not value:
            raise invalid(path, "is an empty list; give at least one token vector", reason="EMPTY_INPUT")
        rows = [_numbers(row, f"{path}[{index}]") for index, row in enumerate(value)]
        for index, row in enumerate(rows):
            if len(row) != len(rows[0]):
                raise invalid(
                    f"{path}[{index}]", f"has {len(row)} numbers and {path}[0] has {len(rows[0])}; "
                    "token vectors are of one dimension", reason="RAGGED_MATRIX",
                )  # fmt: skip
        return _packed(rows)
    return _from_base64(value, path, dimensions=2)


def read_vector(value: Any, path: str) -> Tensor:
    """One vector [dimension]: a list of numbers, or an object of base64.

    Raises:
        InvalidArgument: it is something else.
    """
    if isinstance(value, list):
        return _packed(_numbers(value, path))
    return _from_base64(value, path, dimensions=1)


def _numbers(row: Any, path: str) -> list[Any]:
    if not isinstance(row, list):
        raise invalid(path, f"has to be a list of numbers, not {json_type(row)}")
    if not row:
        raise invalid(path, "is an empty list; give the numbers of a vector", reason="EMPTY_INPUT")
    # numpy would take "1", true and null for numbers.
    if not set(map(type, row)) <= _NUMBERS:
        index, odd = next((index, item) for index, item in enumerate(row) if type(item) not in _NUMBERS)
        raise invalid(f"{path}[{index}]", f"has to be a number, not {json_type(odd)}")
    return row


def _packed(numbers: list[Any]) -> Tensor:
    # A number beyond float32 becomes infinite and is refused with its document.
    with np.errstate(over="ignore"):
        array = np.array(numbers, dtype=np.float64).astype(np.float32)
    return encode_tensor(array, VECTOR_ENCODING_FLOAT32)


def _from_base64(value: Any, path: str, *, dimensions: int) -> Tensor:
    if not isinstance(value, dict):
        raise invalid(
            path,
            'has to be lists of numbers or an object {"dtype", "shape", "data"} of base64, '
            f"not {json_type(value)}",
        )
    given = JsonObject.of(value, path, "dtype", "shape", "data")
    dtype = given.required_text("dtype", f"one of {', '.join(_DTYPES)}")
    if dtype not in _DTYPES:
        raise invalid(given.at("dtype"), f"has to be one of {', '.join(map(repr, _DTYPES))}")
    given.required("shape", "the sizes, e.g. [12, 128]")
    shape = [
        checked_integer(size, f"{given.at('shape')}[{index}]", least=1)
        for index, size in enumerate(given.items("shape"))
    ]
    if len(shape) != dimensions:
        wanted = "[tokens, dimension]" if dimensions == 2 else "[dimension]"
        raise invalid(given.at("shape"), f"has to be {wanted}, not {len(shape)} sizes")
    text = given.required_text("data", "base64 of the numbers, little-endian, row by row")
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise invalid(given.at("data"), "is not base64", reason="BAD_TENSOR") from None
    tensor = Tensor(dtype=enum_names(Dtype, "DTYPE_")[dtype], shape=shape, data=data)
    decode_tensor(tensor, field=path)  # that content and shape agree
    return tensor


def shown(tensor: Tensor, field: str, *, packed: bool) -> object:
    """`tensor` for a reply: nested numbers, or base64 in the dtype that it came in."""
    if packed:
        return {
            "dtype": enum_name(Dtype, "DTYPE_", tensor.dtype),
            "shape": list(tensor.shape),
            "data": base64.b64encode(tensor.data).decode("ascii"),
        }
    array: NDArray[Any] = decode_tensor(tensor, field=field)
    # orjson writes a float32 by its shortest digits.
    return np.ascontiguousarray(array, dtype=np.float32)
