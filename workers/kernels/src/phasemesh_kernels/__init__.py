"""MaxSim over packed, quantised token vectors, at the speed of memory.

`encode` packs token vectors (int8, int4, bf16, f16 or f32), `maxsim` scores documents of them against a
query's token vectors, `maxsim_topk` keeps the best, `maxsim_multi` scores many queries in one scan, `decode`
gives the vectors back. The code for the processor at hand is chosen at run time; the GIL is released while it
runs.

Every argument that cannot be used is a `ValueError` (a wrong Python type a `TypeError`) that starts with the
argument's name. Arrays must not be written to while a call reads them.
"""

from __future__ import annotations

from phasemesh_kernels._codec import Encoded, EncodeError, Refused, decode, encode
from phasemesh_kernels._core import Cancelled, CancelToken
from phasemesh_kernels._core import version as __version__
from phasemesh_kernels._exact import exact_maxsim
from phasemesh_kernels._machine import capabilities, multiply_rate, read_bandwidth
from phasemesh_kernels._search import maxsim, maxsim_multi, maxsim_topk, query_errors

# Where to find them, for messages and for pickle.
Cancelled.__module__ = CancelToken.__module__ = __name__

__all__ = [
    "CancelToken",
    "Cancelled",
    "EncodeError",
    "Encoded",
    "Refused",
    "__version__",
    "capabilities",
    "decode",
    "encode",
    "exact_maxsim",
    "maxsim",
    "maxsim_multi",
    "maxsim_topk",
    "multiply_rate",
    "query_errors",
    "read_bandwidth",
]
