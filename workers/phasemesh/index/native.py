"""The compiled kernels, where they are installed and fit.

They come as a distribution of their own, which needs a C++ compiler where there is no wheel. Without it
everything works and gives the same results, scanned by numpy: many times slower. `KERNELS` is the one place
that knows which it is.
"""

from __future__ import annotations

from types import ModuleType

_why = ""
KERNELS: ModuleType | None
try:
    import phasemesh_kernels as _found
except (ImportError, ValueError) as error:  # ValueError: PHASEMESH_KERNELS_ISA names no instruction set
    KERNELS, _why = None, str(error)
else:
    KERNELS = _found

#: Dimensions that the kernels take: multiples of this, up to ...
DIM_STEP = 16
#: ... this.
MAX_DIM = 4096
#: Most query tokens they take at once.
MAX_QUERY_TOKENS = 4096


def slow_kernel() -> str:
    """Why numpy scans instead of the compiled kernels, and the remedy; empty if they do."""
    if KERNELS is not None:
        return ""
    return (
        f"the compiled MaxSim kernels can't be loaded ({_why}), so numpy scans, many times slower; "
        "install them where there is a C++ compiler: pip install ./workers/kernels"
    )


def kernel_name() -> str:
    """What scans: "numpy", or the compiled path for the default codec, as in "amx-int8"."""
    if KERNELS is None:
        return "numpy"
    return str(KERNELS.capabilities()["paths"]["int8"])


def takes(dim: int, query_tokens: int = 1) -> bool:
    """Whether the compiled kernels can score vectors of this dimension with this many query tokens."""
    return (
        KERNELS is not None
        and dim % DIM_STEP == 0
        and DIM_STEP <= dim <= MAX_DIM
        and query_tokens <= MAX_QUERY_TOKENS
    )
