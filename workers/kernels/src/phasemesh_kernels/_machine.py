"""What this machine can run, what may be used of it, and how fast it reads memory.

The environment variable `PHASEMESH_KERNELS_ISA` is read once, at import, and limits every call that names no
instruction set itself.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import numpy.typing as npt

from phasemesh_kernels import _core
from phasemesh_kernels._arguments import CODECS, check_array, check_integer, check_threads

VARIABLE = "PHASEMESH_KERNELS_ISA"
_LIMITS = ("portable", "neon", "avx2", "avxvnni", "avx512", "amx")


def _forced() -> str | None:
    value = os.environ.get(VARIABLE)
    if not value:
        return None
    if value not in _LIMITS:
        raise ValueError(f"{VARIABLE}: {value!r} is none of {', '.join(_LIMITS)}")
    return value


_FORCED = _forced()


def isa_limit(isa: object) -> str:
    """The instruction set that an `isa` argument allows; None stands for the environment's."""
    if isa is None:
        return _FORCED or _LIMITS[-1]
    if not isinstance(isa, str):
        raise TypeError(f"isa: a name is needed, got {type(isa).__name__}")
    return isa


def capabilities() -> dict[str, Any]:
    """What runs here.

    Returns:
        "version": of this library; "isa": instruction-set level in use; "levels": those that run here,
        lowest first; "forced": value of PHASEMESH_KERNELS_ISA or None; "paths": codec → name of the code that
        scans it; "cpu": feature → whether processor, operating system and compiler have it.
    """
    level = _core.resolve(isa_limit(None))
    return {
        "version": _core.version,
        "isa": level,
        "levels": _core.levels(),
        "forced": _FORCED,
        "paths": {codec: _core.path(codec, level) for codec in CODECS},
        "cpu": _core.features(),
    }


def read_bandwidth(array: npt.NDArray[Any], *, threads: int = 1, repeats: int = 7) -> float:
    """How fast this machine reads an array and does nothing else: what a scan can at best reach.

    Args:
        array: Any C-contiguous array, much larger than the caches, written to before.
        threads: At least 1.
        repeats: How often it is read; the fastest counts.

    Returns:
        Bytes per second.
    """
    if not isinstance(array, np.ndarray):
        raise TypeError(f"array: a numpy array is needed, got {type(array).__name__}")
    if not array.nbytes or array.dtype.hasobject:
        raise ValueError(f"array: holds no bytes to read (dtype {array.dtype}, shape {array.shape})")
    flat = check_array("array", array, array.ndim, (array.dtype,), aligned=False).reshape(-1).view(np.uint8)
    threads = check_threads(threads)
    seconds = _core.stream_read(
        flat, threads, check_integer("repeats", repeats, 1, 2**31 - 1), isa_limit(None)
    )
    return array.nbytes / seconds


def multiply_rate(*, threads: int = 1, repeats: int = 5, isa: str | None = None) -> float:
    """How fast this machine multiplies 8-bit integers and does nothing else: the other limit of a scan.

    A scan of int8 codes does q * d products per token.

    Args:
        threads: At least 1.
        repeats: How often it is tried; the fastest counts.
        isa: Upper limit of the instruction set; None: that of the environment.

    Returns:
        Products per second of the dot-product instruction in use; 0 where there is no measure for it (only
        AVX-512 and AMX have one).
    """
    return _core.multiply_rate(
        check_threads(threads), check_integer("repeats", repeats, 1, 2**31 - 1), isa_limit(isa)
    )
