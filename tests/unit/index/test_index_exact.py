"""Exact scores, bit for bit: compiled, in numpy, and by a loop over Python's own floats."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phasemesh.index import native
from phasemesh.index.leaf import LeafSource, leaf_score, leaf_search, score_rows
from phasemesh.index.rescore import exact_maxsim, sum_lanes
from phasemesh.index.segments import Segment, SegmentKey, build_segment
from phasemesh.index.spec import Codec, Reduction

COMPILED = getattr(native.KERNELS, "exact_maxsim", None)
compiled = pytest.mark.skipif(COMPILED is None, reason="the compiled kernels aren't installed, or are older")


def added(values: list[float]) -> float:
    """The documented order of additions, one at a time."""
    lanes = [0.0] * 8
    for position, value in enumerate(values):
        lanes[position % 8] += value
    half = [lanes[one] + lanes[one + 4] for one in range(4)]
    return (half[0] + half[2]) + (half[1] + half[3])


def brute(query: np.ndarray[Any, Any], document: np.ndarray[Any, Any], *, mean: bool = False) -> float:
    """Every pair of vectors, by Python's own floats; no vector is left out."""
    best = [
        max(added([float(a) * float(b) for a, b in zip(row, vector, strict=True)]) for vector in document)
        for row in query
    ]
    return added(best) / len(query) if mean else added(best)


@pytest.fixture
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "numpy":
        monkeypatch.setattr(native, "KERNELS", None)
    elif COMPILED is None:
        pytest.skip("the compiled kernels aren't installed, or are older")
    return str(request.param)


def material(
    seed: int, dim: int, rows: int, *, longest: int = 9, unit: bool = False, near: bool = False
) -> tuple[np.ndarray[Any, Any], list[np.ndarray[Any, Any]]]:
    """A query and ragged documents, some empty; `near`: vectors that scans can't tell apart."""
    rng = np.random.default_rng(seed)
    query = rng.standard_normal((int(rng.integers(1, 40)), dim)).astype(np.float32)
    documents = []
    for _ in range(rows):
        vectors = rng.standard_normal((int(rng.integers(0, longest)), dim))
        if near and len(vectors):
            vectors = vectors[:1] * (1 + rng.choice([0, 2.0**-10, -(2.0**-10)], vectors.shape))
        if unit:
            vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        documents.append(vectors.astype(np.float16))
    return query, documents


def segment_of(
    documents: list[np.ndarray[Any, Any]], dim: int, codec: Codec | None, chunks: Any = None
) -> Segment:
    tokens = np.concatenate([np.zeros((0, dim), np.float16), *documents])
    offsets = np.cumsum([0, *map(len, documents)])
    ids = [f"é{row}" for row in range(len(documents))]
    return build_segment(SegmentKey("0" * 32, "file", codec), ids, tokens, offsets, chunks)


@given(st.integers(0, 40), st.integers(0, 3), st.integers(0, 2**32))
def test_lanes_are_added_as_documented(width: int, rows: int, seed: int) -> None:
    values = np.random.default_rng(seed).standard_normal((rows, width)) * 10.0 ** np.arange(width)
    assert sum_lanes(values).tolist() == [added(row) for row in values.tolist()]


@pytest.mark.parametrize("way", ["kernel", "numpy"], indirect=True)
@pytest.mark.parametrize("dim", [16, 48, 128, 13])
@pytest.mark.parametrize("near", [False, True])
@pytest.mark.parametrize("mean", [False, True])
def test_scores_are_those_of_every_pair_added_one_by_one(way: str, dim: int, near: bool, mean: bool) -> None:
    query, documents = material(dim + near, dim, 12, near=near)
    query = query[:5]
    tokens, offsets = np.concatenate(documents), np.cumsum([0, *map(len, documents)])
    scores = exact_maxsim(query, tokens, offsets, mean=mean)
    expected = [brute(query, one, mean=mean) if len(one) else -math.inf for one in documents]
    assert scores.tolist() == expected


@compiled
@settings(max_examples=120, deadline=None)
@given(
    seed=st.integers(0, 2**32), dim=st.sampled_from([16, 32, 96, 128]), codec=st.sampled_from([None, *Codec]),
    unit=st.booleans(), near=st.booleans(), cut=st.booleans(), mean=st.booleans(),
    scale=st.sampled_from([1.0, 1e-30, 1e30, 1e-42]), shrink=st.sampled_from([1.0, 2.0**-12]),
)  # fmt: skip
def test_the_compiled_kernels_and_numpy_give_the_same_bits(
    seed: int, dim: int, codec: Codec | None, unit: bool, near: bool, cut: bool, mean: bool, scale: float,
    shrink: float,
) -> None:  # fmt: skip
    query, documents = material(seed, dim, 15, longest=40, unit=unit, near=near)
    query *= np.float32(scale)
    documents = [(one * np.float16(shrink)).astype(np.float16) for one in documents]
    # A vector that became zero has no code; its row's bound is infinite.
    chunks = [np.arange(3, len(one), 7) for one in documents] if cut else None
    segment = segment_of(documents, dim, codec, chunks)
    source = LeafSource(0, segment)
    rows = np.random.default_rng(seed).integers(0, 15, 30)
    reduction = Reduction.MEAN if mean else Reduction.SUM
    fast = score_rows(source, rows, query, reduction)
    best = leaf_search([source], query, 5, reduction).hits if codec is not Codec.INT4 else ()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "KERNELS", None)
        slow = score_rows(source, rows, query, reduction)
        every = leaf_score(source, np.arange(15), query, reduction)
    assert fast.tolist() == slow.tolist()
    ranked = sorted(
        ((one.score, one.id) for one in every if one.score is not None), key=lambda x: (-x[0], x[1])
    )
    if codec is not Codec.INT4:
        assert [(hit.score, hit.id) for hit in best] == ranked[:5]


@compiled
@pytest.mark.parametrize("coded", [False, True])
@pytest.mark.parametrize("scales", [False, True])
def test_every_instruction_set_gives_the_same_bits(coded: bool, scales: bool) -> None:
    assert native.KERNELS is not None
    assert COMPILED is not None
    query, documents = material(4, 128, 40, longest=300, unit=not scales)
    segment = segment_of(documents, 128, Codec.INT8)
    assert bool(len(segment.codes.scales)) is scales
    source = LeafSource(0, segment if coded else segment_of(documents, 128, None))
    found = set()
    levels = [*native.KERNELS.capabilities()["levels"], "amx"]
    for level in levels:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native.KERNELS, "exact_maxsim", partial(COMPILED, isa=level))
            found.add(tuple(score_rows(source, np.arange(40), query, Reduction.SUM).tolist()))
    assert len(levels) > 1
    assert len(found) == 1


@compiled
def test_codes_leave_few_vectors_to_be_multiplied_exactly() -> None:
    # The bound decides speed alone, so nothing else would show that it had become useless.
    from phasemesh.index.coded import similarity_bound
    from phasemesh.index.rescore import scale_query

    query, documents = material(9, 128, 50, longest=120, unit=True)
    segment = segment_of(documents, 128, Codec.INT8)
    scaled = scale_query(query)
    spread, reach = similarity_bound(scaled, Codec.INT8, segment.norms, segment.codes.errors)
    bounds = spread.T @ reach
    filled = np.flatnonzero(segment.row_lengths)
    assert bounds[:, filled].max() < 0.04 * np.linalg.norm(scaled, axis=1).max()
    # And that it is one: measured distances from exact.
    for row in filled.tolist():
        exact = scaled.astype(np.float64) @ documents[row].astype(np.float64).T
        codes = native.KERNELS.decode(  # type: ignore[union-attr]
            segment.codes.data[segment.range_offsets[row] : segment.range_offsets[row + 1]], "int8"
        )
        errors = native.KERNELS.query_errors(scaled, "int8")  # type: ignore[union-attr]
        off = np.abs(exact - scaled.astype(np.float64) @ codes.astype(np.float64).T)
        assert (off.max(axis=1) + errors <= bounds[:, row] + 1e-6).all()


@pytest.mark.parametrize("way", ["kernel", "numpy"], indirect=True)
def test_vectors_that_are_not_finite_are_refused(way: str) -> None:
    query, documents = material(2, 16, 3, longest=5)
    documents[0] = np.full((2, 16), np.inf, np.float16)
    with pytest.raises(ValueError, match=r"^tokens:"):
        exact_maxsim(query, np.concatenate(documents), np.cumsum([0, *map(len, documents)]))


@compiled
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"select": np.array([3])}, "select: document 3"),
        ({"select": np.array([-1])}, "select: document -1"),
        ({"spread": np.zeros((1, 2))}, "spread:"),
        ({"reach": np.zeros((2, 2))}, "reach:"),
        ({"offsets": np.array([0, 2, 1, 9])}, "offsets: document 1"),
        ({"query": np.zeros((2, 32), np.float32)}, "query:"),
        ({"query": np.full((2, 16), np.nan, np.float32)}, "query"),
        ({"codes": np.zeros((4, 8), np.uint8), "codec": "int4"}, "codec: int8 or f16"),
        ({"codes": np.zeros((3, 16), np.uint8), "codec": "int8"}, "codes: there are 3"),
        ({"scan_query": np.zeros((1, 16), np.float32)}, "query:"),
    ],
)
def test_wrong_arguments_of_the_compiled_function(change: dict[str, Any], words: str) -> None:
    good: dict[str, Any] = {
        "query": np.ones((2, 16), np.float32), "tokens": np.ones((4, 16), np.float16),
        "offsets": np.array([0, 2, 2, 4]), "select": np.array([0, 1, 2]),
        "spread": np.zeros((2, 2)), "reach": np.zeros((2, 3)),
    }  # fmt: skip
    assert COMPILED is not None
    assert COMPILED(**good).tolist() == [32.0, -math.inf, 32.0]
    asked = {**good, **change}
    if "select" in change:
        asked["reach"] = np.zeros((2, 1))
    elif "offsets" in change:
        asked["select"] = np.array([0, 1, 2])
    with pytest.raises(ValueError, match=words):
        COMPILED(**asked)


@compiled
def test_a_checkpoint_ends_the_work() -> None:
    query, documents = material(3, 128, 300, longest=200, unit=True)
    segment = segment_of(documents, 128, Codec.INT8)
    calls = []

    def stop() -> None:
        calls.append(1)
        raise KeyError("enough")

    with pytest.raises(KeyError):
        score_rows(LeafSource(0, segment), np.arange(300), query, Reduction.SUM, checkpoint=stop)
    assert calls == [1]
