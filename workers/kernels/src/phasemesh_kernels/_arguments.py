"""Brings arguments into the form that the extension module takes, or says which one cannot be used and why.

Large arrays (tokens, codes, scales) are never copied: they have to be right as they are. Small ones (queries,
offsets of another integer type, document numbers) are converted.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import numpy.typing as npt

#: Codec: dtype of its codes.
CODECS: dict[str, np.dtype[Any]] = {
    "int8": np.dtype(np.uint8),
    "int4": np.dtype(np.uint8),
    "bf16": np.dtype(np.uint16),
    "f16": np.dtype(np.float16),
    "f32": np.dtype(np.float32),
}
_BY_DTYPE = {dtype: codec for codec, dtype in CODECS.items() if dtype != np.uint8}


def check_codec(codec: object) -> str:
    """A codec's name."""
    if not isinstance(codec, str):
        raise TypeError(f"codec: a name is needed, got {type(codec).__name__}")
    if codec not in CODECS:
        raise ValueError(f"codec: {codec!r} is none of {', '.join(CODECS)}")
    return codec


def codes_as_bytes(codes: object, codec: object) -> tuple[npt.NDArray[np.uint8], str]:
    """Codes [T, ...] of a codec's dtype → a view of their bytes, uint8 [T, b], and the codec's name."""
    array = check_array("codes", codes, 2, tuple(dict.fromkeys(CODECS.values())), aligned=False)
    if codec is None:
        if array.dtype not in _BY_DTYPE:
            raise ValueError("codec: uint8 codes are int8 or int4; say which")
        codec = _BY_DTYPE[array.dtype]
    name = check_codec(codec)
    if array.dtype != CODECS[name]:
        raise ValueError(f"codes: {name} codes are {CODECS[name]}, got {array.dtype}")
    return array.view(np.uint8), name


def check_array(
    name: str, value: object, ndim: int, dtypes: tuple[np.dtype[Any], ...], *, aligned: bool = True
) -> npt.NDArray[Any]:
    """An array as it is, without a copy and without its subclass."""
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{name}: a numpy array is needed, got {type(value).__name__}")
    array = np.asarray(value)
    if array.dtype not in dtypes:
        raise ValueError(f"{name}: dtype {_either(dtypes)} is needed, got {array.dtype}")
    if array.ndim != ndim:
        raise ValueError(f"{name}: {ndim} dimensions are needed, got shape {array.shape}")
    if not array.flags.c_contiguous:
        raise ValueError(
            f"{name}: rows have to lie one after the other (C-contiguous); see ascontiguousarray"
        )
    if aligned and not array.flags.aligned:
        raise ValueError(f"{name}: elements have to be aligned in memory; copy the array")
    return array


def check_scales(value: object) -> npt.NDArray[np.float32] | None:
    """Scales, float32 [T], or None."""
    return None if value is None else check_array("scales", value, 1, (np.dtype(np.float32),))


def check_tokens(value: object) -> npt.NDArray[np.floating]:
    """Token vectors, float16, float32 or float64 [T, d]."""
    return check_array("tokens", value, 2, tuple(np.dtype(t) for t in (np.float16, np.float32, np.float64)))


def check_query(name: str, value: object) -> npt.NDArray[np.float32]:
    """A query's vectors, [q, d] of any float dtype → float32, converted where needed."""
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{name}: a numpy array is needed, got {type(value).__name__}")
    if value.dtype.kind != "f":
        raise ValueError(f"{name}: dtype float32 (or float16, float64) is needed, got {value.dtype}")
    if value.ndim != 2:
        raise ValueError(f"{name}: shape [tokens, dim] is needed, got {value.shape}")
    # What overflows to infinity is refused as such.
    with np.errstate(over="ignore"):
        return np.require(value, np.float32, ["C", "A"])


def check_integers(name: str, value: object) -> npt.NDArray[np.int64]:
    """Integers [n] of any integer dtype, or a sequence of them → int64, converted where needed."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name}: {error}") from None
    if array.ndim != 1:
        raise ValueError(f"{name}: one dimension is needed, got shape {array.shape}")
    if array.dtype.kind not in "iu" and (isinstance(value, np.ndarray) or array.size):
        raise ValueError(f"{name}: integers are needed, got {array.dtype}")
    # uint64 beyond int64 turn negative, which is out of range as well.
    return np.require(array, np.int64, ["C", "A"])


def check_offsets(value: object) -> npt.NDArray[np.int64]:
    """Offsets, int64 [n + 1], n ≥ 0."""
    offsets = check_integers("offsets", value)
    if not len(offsets):
        raise ValueError("offsets: empty; n documents have n + 1 offsets")
    return offsets


def check_integer(name: str, value: object, low: int, high: int) -> int:
    """An integer from low to high."""
    if isinstance(value, bool):
        raise TypeError(f"{name}: an integer is needed, got a bool")
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name}: an integer is needed, got {type(value).__name__}") from None
    if number < low:
        raise ValueError(f"{name}: {number} is below {low}")
    if number > high:
        raise ValueError(f"{name}: {number} is above {high}")
    return number


def check_seed(value: object) -> int:
    """A seed of the rotation, 64 bits."""
    return check_integer("seed", value, 0, 2**64 - 1)


def check_threads(value: object) -> int:
    """Number of threads."""
    return check_integer("threads", value, 1, 2**31 - 1)


def _either(dtypes: tuple[np.dtype[Any], ...]) -> str:
    names = [str(dtype) for dtype in dtypes]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
