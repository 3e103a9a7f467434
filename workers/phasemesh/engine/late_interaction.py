"""MaxSim of ad-hoc documents, where their vectors are born: by compiled kernels on a CPU, else by torch.

Invariant: both give a document without rows 0, and neither lets a row that isn't finite touch the score of
another document.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from phasemesh.engine.pooling import max_sim

try:
    import phasemesh_kernels as _kernels
except (ImportError, ValueError):  # ValueError: PHASEMESH_KERNELS_ISA names no instruction set
    _kernels = None

#: Dimensions and query tokens that the kernels take.
_DIM_STEP, _MAX_DIM, _MAX_QUERY_TOKENS = 16, 4096, 4096


def maxsim_scores(rows: Tensor, counts: npt.NDArray[np.integer], query: Tensor, *, mean: bool) -> Tensor:
    """Scores documents against one query.

    Args:
        rows: All documents' token rows, one document after another, float32 [sum of counts, d].
        counts: Rows of each document, [n].
        query: float32 [q, d].
        mean: Divide by the number of query tokens.

    Returns:
        float32 [n] on the device of `rows`; 0 for documents without rows, not finite for those with a row
        that isn't.
    """
    if _takes(rows, query):
        offsets = np.zeros(len(counts) + 1, np.int64)
        np.cumsum(counts, out=offsets[1:])
        threads = max(1, torch.get_num_threads())
        try:
            scores = _kernels.maxsim(query.numpy(), rows.numpy(), offsets, mean=mean, threads=threads)
        except ValueError:
            # A value that isn't finite, or overflows: the kernels refuse the call, torch lets it spoil the
            # score of its own document alone.
            pass
        else:
            scores[np.asarray(counts) == 0] = 0.0
            return torch.from_numpy(scores)
    owner = torch.from_numpy(np.repeat(np.arange(len(counts)), counts)).to(rows.device)
    return max_sim(rows, owner, len(counts), query, mean=mean)


def _takes(rows: Tensor, query: Tensor) -> bool:
    """Whether the kernels are there and score such vectors."""
    if (
        _kernels is None
        or rows.device.type != "cpu"
        or rows.dtype != torch.float32
        or not rows.is_contiguous()
    ):
        return False
    dim, tokens = rows.shape[1], len(query)
    return dim % _DIM_STEP == 0 and 0 < dim <= _MAX_DIM and 1 <= tokens <= _MAX_QUERY_TOKENS
