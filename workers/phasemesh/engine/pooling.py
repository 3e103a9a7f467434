"""Token states to vectors and scores, all in float32.

Invariant: what comes out for a sequence depends on its own rows alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from phasemesh.recipe.model import Pooling

Projection = tuple[Tensor, Tensor | None]


def pool(states: Tensor, mask: Tensor, modes: Sequence[Pooling]) -> Tensor:
    """Concatenate the poolings of `states` [b, l, h] under `mask` bool[b, l]: float32[b, len(modes) * h].

    As sentence-transformers' Pooling: first or last position of the mask, or the mean over it; a mask that is
    empty gives zeros for the mean.
    """
    return torch.cat([_pool(states, mask, mode) for mode in modes], dim=-1)


def _pool(states: Tensor, mask: Tensor, mode: Pooling) -> Tensor:
    if mode is Pooling.MEAN:
        # where(), not a product: a NaN at a padded position must not spread.
        kept = torch.where(mask.unsqueeze(-1), states.float(), 0.0)
        return kept.sum(dim=1) / mask.sum(dim=1, keepdim=True).clamp(min=1)
    positions = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    index = (mask * positions if mode is Pooling.LAST else mask.int()).argmax(dim=1)
    return states[torch.arange(len(states), device=states.device), index].float()


def token_rows(states: Tensor, index: Tensor, projections: Sequence[Projection]) -> Tensor:
    """Rows `index` of the flattened `states` [b, l, h], float32; projected to unit rows if there are
    projections."""
    rows = states.reshape(-1, states.shape[-1]).index_select(0, index).float()
    for weight, bias in projections:
        rows = functional.linear(rows, weight, bias)
    return functional.normalize(rows, dim=-1) if projections else rows


def max_sim(rows: Tensor, owner: Tensor, count: int, query: Tensor, *, mean: bool) -> Tensor:
    """MaxSim of `query` [q, d] with each of `count` documents: float32[count].

    `rows` [r, d] are the documents' token rows, `owner` int64[r] says whose they are. A document without rows
    scores 0: sentence-transformers gives it -1e9, which no client can tell from a score.
    """
    similarity = rows @ query.T
    best = similarity.new_zeros((count, len(query)))
    best = best.scatter_reduce(
        0, owner.unsqueeze(-1).expand_as(similarity), similarity, "amax", include_self=False
    )
    total = best.sum(dim=1)
    return total / max(len(query), 1) if mean else total
