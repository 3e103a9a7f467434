"""MaxSim of ad-hoc documents against sums and maxima in float64, by the kernels and by torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from phasemesh.engine import late_interaction


@pytest.fixture(params=["kernels", "torch"])
def maxsim_scores(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(late_interaction, "_kernels", None)
    elif late_interaction._kernels is None:
        pytest.skip("the compiled kernels aren't installed")
    return late_interaction.maxsim_scores


def brute_force(rows, counts, query):
    ends = np.cumsum(counts)
    documents = np.split(rows.numpy().astype(np.float64), ends[:-1])
    q = query.numpy().astype(np.float64)
    return [(d @ q.T).max(axis=0).sum() if len(d) else 0.0 for d in documents]


@pytest.mark.parametrize("dim", [8, 16, 48, 128])
@pytest.mark.parametrize("sign", [1, -1])
def test_scores_equal_float64_brute_force(maxsim_scores, dim, sign):
    generator = torch.Generator().manual_seed(dim)
    counts = np.array([3, 0, 1, 40, 0, 17])
    rows = torch.nn.functional.normalize(torch.rand(int(counts.sum()), dim, generator=generator), dim=1)
    query = sign * torch.nn.functional.normalize(torch.rand(5, dim, generator=generator), dim=1)
    expected = brute_force(rows, counts, query)
    scores = maxsim_scores(rows, counts, query, mean=False)
    assert scores.dtype == torch.float32
    np.testing.assert_allclose(scores.numpy(), expected, rtol=1e-5)
    np.testing.assert_allclose(
        maxsim_scores(rows, counts, query, mean=True).numpy(), np.array(expected) / 5, rtol=1e-5
    )


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
def test_a_value_that_cannot_be_scored_spoils_its_own_document_alone(maxsim_scores, value):
    counts = np.array([2, 3, 2])
    rows = torch.ones(7, 16)
    rows[3] = value
    scores = maxsim_scores(rows, counts, torch.full((2, 16), 4.0), mean=False)
    assert torch.isfinite(scores).tolist() == [True, False, True]
    assert scores[[0, 2]].tolist() == [128.0, 128.0]


def test_no_documents_give_no_scores(maxsim_scores):
    scores = maxsim_scores(torch.zeros(0, 16), np.zeros(0, np.int64), torch.ones(1, 16), mean=False)
    assert scores.shape == (0,)
