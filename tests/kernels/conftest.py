"""The tests of `phasemesh_kernels`, a distribution of its own: they run where it is installed."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def isas() -> list[str]:
    """Every instruction set that runs here, and the model of the AMX instructions where that does."""
    import phasemesh_kernels as pk

    levels: list[str] = pk.capabilities()["levels"]
    return [*levels, "amx-model"] if "avx512" in levels else levels
