"""Searches through the fused kernel, run by Triton's interpreter on a CPU, beside float64 brute force.

Its tuner measures candidates on a GPU; without one it is taken off, and one of its configurations is used.
"""

from __future__ import annotations

from typing import Any

import late_interaction_kernels.varlen as varlen
import numpy as np

from phasemesh.engine.device_scan import DeviceScanner
from phasemesh.index.leaf import LeafSource, leaf_search
from phasemesh.index.spec import Reduction
from tests.unit.index.corpora import random_corpus


class Untuned:
    """A kernel with fixed block sizes."""

    def __init__(self, tuned: Any) -> None:
        self._kernel = tuned.fn

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **options: Any) -> Any:
            return self._kernel[grid](*args, BLOCK_Q=16, BLOCK_D=16, **options)

        return launch


def main() -> None:
    """Raises AssertionError where results differ."""
    varlen._varlen_fwd_kernel = Untuned(varlen._varlen_fwd_kernel)
    scanner = DeviceScanner("cpu", 1 << 30)
    scanner._fused = varlen.maxsim_varlen
    for seed, style in enumerate(["normal", "negative", "grid", "wild"]):
        corpus = random_corpus(seed, 25, dim=16, longest=40, style=style)
        segment = corpus.segment(name=style)
        visible = np.arange(segment.rows) % 4 > 0
        source = LeafSource(0, segment, visible)
        found = leaf_search([source], corpus.query, 6, Reduction.SUM, scanner=scanner)
        expected = corpus.ranking(np.flatnonzero(visible))[:6]
        assert [hit.id for hit in found.hits] == [name for name, _ in expected], style
        assert scanner.name.endswith("fused-float16")


if __name__ == "__main__":
    main()
