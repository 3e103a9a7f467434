from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasemesh.retrieval.merge import merge_hits


@dataclass(frozen=True)
class Hit:
    id: str
    score: float
    leaf: int = 0


hits = st.lists(
    st.builds(Hit, st.text(max_size=3), st.sampled_from([-1.0, 0.0, 0.5, 1.5])),
    max_size=20,
    unique_by=lambda hit: hit.id,
)


@given(hits, st.integers(1, 25), st.integers(1, 4), st.randoms(use_true_random=False))
def test_merging_any_split_equals_ranking_everything(everything, k, leaves, random):
    parts: list[list[Hit]] = [[] for _ in range(leaves)]
    for hit in everything:
        parts[random.randrange(leaves)].append(hit)
    expected = sorted(sorted(everything, key=lambda hit: hit.id), key=lambda hit: hit.score, reverse=True)[:k]
    assert merge_hits(parts, k) == expected
    # Each leaf's own best k are enough.
    assert merge_hits([merge_hits([part], k) for part in parts], k) == expected


def test_a_row_that_two_replicas_answered_counts_once():
    assert merge_hits([[Hit("a", 2.0), Hit("b", 1.0)], [Hit("a", 2.0, 1)]], 2) == [
        Hit("a", 2.0),
        Hit("b", 1.0),
    ]


def test_nothing_merges_to_nothing_and_k_is_positive():
    assert merge_hits([], 3) == []
    with pytest.raises(ValueError, match="k:"):
        merge_hits([], 0)
