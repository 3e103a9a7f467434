"""Every path of MaxSim against brute force on random ragged documents, and what may not change a score: the number
of threads, the path, the order of documents, the company of other queries, where the arrays lie."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kernels import brute

pk = pytest.importorskip(
    "phasemesh_kernels", reason="phasemesh-kernels isn't installed (pip install ./workers/kernels)"
)

relaxed = settings(
    deadline=None,
    max_examples=50,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    print_blob=True,
)


@dataclass
class Case:
    query: brute.Floats
    codes: brute.Array
    offsets: brute.Array
    codec: str
    seed: int
    scales: brute.Floats | None

    @property
    def n(self) -> int:
        return len(self.offsets) - 1

    def truth(self, *, mean: bool = False) -> tuple[brute.Doubles, brute.Array, brute.Doubles]:
        return brute.maxsim(
            self.query, self.codes, self.offsets, self.codec, seed=self.seed, scales=self.scales, mean=mean
        )

    def run(self, function: Callable[..., Any], *more: object, query: Any = None, **options: Any) -> Any:
        options = {"codec": self.codec, "seed": self.seed, "scales": self.scales, **options}
        query = self.query if query is None else query
        return function(query, self.codes, self.offsets, *more, **options)


def ragged(
    seed: int, lengths: list[int], q: int, dim: int, codec: str, *, scaled: bool = False, gap: int = 0
) -> Case:
    """Codes at random over their whole range, some tokens repeated, some documents' scores negative."""
    rng = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64) + gap
    tokens = int(offsets[-1]) + gap
    if codec in brute.INTEGER:
        codes = rng.integers(0, 256, (tokens, dim if codec == "int8" else dim // 2), np.uint8)
    else:
        codes = brute.encode(rng.standard_normal((tokens, dim), dtype=np.float32), codec)
    if tokens:
        copies = rng.integers(0, tokens, (2, tokens // 4))
        codes[copies[0]] = codes[copies[1]]
    query = rng.standard_normal((q, dim), dtype=np.float32)
    if codec not in brute.INTEGER and lengths and lengths[0]:
        # The first document is the opposite of the query: all its similarities are negative.
        codes[offsets[0] : offsets[1]] = brute.encode(-query[:1].repeat(lengths[0], axis=0), codec)
    scales = (rng.random(tokens, dtype=np.float32) + 0.1) * 3 if scaled else None
    return Case(query, codes, offsets, codec, int(rng.integers(0, 2**63)), scales)


@st.composite
def cases(draw: st.DrawFn, codecs: tuple[str, ...] = brute.CODECS) -> Case:
    codec = draw(st.sampled_from(codecs))
    return ragged(
        draw(st.integers(0, 2**32)),
        draw(st.lists(st.one_of(st.sampled_from([0, 1]), st.integers(0, 60)), min_size=0, max_size=12)),
        draw(st.one_of(st.integers(1, 70), st.sampled_from([15, 16, 17, 31, 32, 33, 64]))),
        draw(st.sampled_from([16, 32, 48, 64, 80, 96, 112, 128, 160, 272, 384])),
        codec,
        scaled=codec in brute.INTEGER and draw(st.booleans()),
        gap=draw(st.sampled_from([0, 1, 3])),
    )


@relaxed
@given(case=cases())
def test_every_path_gives_what_brute_force_gives(case: Case, isas: list[str]) -> None:
    scores, best, bounds = case.truth()
    means = case.truth(mean=True)
    for isa in isas:
        found, at = case.run(pk.maxsim, argmax=True, isa=isa)
        brute.assert_scores(found, scores, bounds)
        assert at.dtype == np.int32
        assert at.shape == best.shape
        if case.codec in brute.INTEGER:
            np.testing.assert_array_equal(at, best)
        else:
            assert_best(case, at)
        np.testing.assert_array_equal(case.run(pk.maxsim, isa=isa), found)
        brute.assert_scores(case.run(pk.maxsim, mean=True, isa=isa), means[0], means[2])


def assert_best(case: Case, at: brute.Array) -> None:
    """Positions of tokens that are best as far as binary32 can tell, and the first among their copies."""
    off = 1e-4 * case.query.shape[1]
    rows = brute.decode(case.codes, case.codec).astype(np.float64)
    similarity = rows @ case.query.astype(np.float64).T
    similarity = similarity if case.codec != "bf16" else rows @ bf16(case.query).T
    for i in range(case.n):
        begin, end = case.offsets[i], case.offsets[i + 1]
        if begin == end:
            assert (at[i] == -1).all()
            continue
        part = similarity[begin:end]
        assert (at[i] >= 0).all()
        assert (np.take_along_axis(part, at[i][None], axis=0)[0] >= part.max(axis=0) - off).all()
        codes = case.codes[begin:end]
        for position in set(at[i].tolist()):
            assert not (codes[:position] == codes[position]).all(axis=1).any()


def bf16(values: brute.Floats) -> brute.Doubles:
    return brute.from_bf16(brute.to_bf16(values)).astype(np.float64)


@relaxed
@given(case=cases(), order=st.randoms(use_true_random=False))
def test_neither_order_nor_selection_changes_a_score(case: Case, order: Any) -> None:
    scores, best = case.run(pk.maxsim, argmax=True)
    numbers = [order.randrange(case.n) for _ in range(2 * case.n)]
    for some in (numbers, np.array(numbers, np.int32), np.array(numbers, np.uint64)):
        few, at = case.run(pk.maxsim, argmax=True, select=some)
        np.testing.assert_array_equal(few, scores[numbers])
        np.testing.assert_array_equal(at, best[numbers])
    # Laid out in another order.
    permutation = list(range(case.n))
    order.shuffle(permutation)
    parts = [np.arange(case.offsets[i], case.offsets[i + 1]) for i in permutation]
    rows = np.concatenate([np.zeros(0, np.int64), *parts]).astype(np.int64)
    moved = Case(
        case.query,
        case.codes[rows],
        np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64),
        case.codec,
        case.seed,
        None if case.scales is None else case.scales[rows],
    )
    np.testing.assert_array_equal(moved.run(pk.maxsim), scores[permutation])
    # A part, and a mask.
    start = order.randrange(case.n + 1)
    stop = order.randrange(start, case.n + 1)
    np.testing.assert_array_equal(case.run(pk.maxsim, select=slice(start, stop)), scores[start:stop])
    np.testing.assert_array_equal(case.run(pk.maxsim, select=slice(None, stop)), scores[:stop])
    mask = np.array([order.random() < 0.5 for _ in range(case.n)], bool)
    masked, at = case.run(pk.maxsim, argmax=True, select=mask)
    np.testing.assert_array_equal(masked, np.where(mask, scores, -np.inf))
    np.testing.assert_array_equal(at, np.where(mask[:, None], best, -1))


@relaxed
@given(case=cases(), lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5))
def test_many_queries_score_as_each_alone(case: Case, lengths: list[int], isas: list[str]) -> None:
    rng = np.random.default_rng(len(lengths))
    queries = [rng.standard_normal((q, case.query.shape[1]), dtype=np.float32) for q in lengths]
    for isa in isas:
        together = case.run(pk.maxsim_multi, query=queries, isa=isa)
        assert together.shape == (len(queries), case.n)
        for row, query in zip(together, queries, strict=True):
            np.testing.assert_array_equal(row, case.run(pk.maxsim, query=query, isa=isa))


@relaxed
@given(case=cases(("int8", "f32")), extra=st.integers(-2, 2), data=st.data())
def test_the_best_k_come_by_score_and_then_by_number(case: Case, extra: int, data: st.DataObject) -> None:
    scores = case.run(pk.maxsim)
    k = max(1, case.n + extra)
    for select, allowed in [
        (None, range(case.n)),
        (slice(case.n // 3, case.n), range(case.n // 3, case.n)),
        (
            some := data.draw(st.lists(st.integers(0, case.n - 1), max_size=9)) if case.n else [],
            sorted(set(some)),
        ),
        (np.arange(case.n) % 2 == 0, range(0, case.n, 2)),
    ]:
        expected = sorted((i for i in allowed if scores[i] > -np.inf), key=lambda i: (-scores[i], i))
        for top in {1, k}:
            numbers, found = case.run(pk.maxsim_topk, top, select=select)
            assert numbers.dtype == np.int64
            assert numbers.tolist() == expected[:top]
            np.testing.assert_array_equal(found, scores[expected[:top]])


@pytest.mark.parametrize("codec", brute.CODECS)
def test_equal_scores_come_by_number(codec: str) -> None:
    case = ragged(1, [3] * 200, 4, 32, codec)
    case.codes[:] = np.tile(case.codes[:3], (200, 1))
    numbers, scores = case.run(pk.maxsim_topk, 50)
    assert numbers.tolist() == list(range(50))
    assert len(set(scores.tolist())) == 1
    numbers, _ = case.run(pk.maxsim_topk, 3, select=[190, 7, 7, 100, 12])
    assert numbers.tolist() == [7, 12, 100]


@pytest.mark.parametrize("codec", brute.CODECS)
def test_the_first_of_equal_tokens_is_the_best(codec: str, isas: list[str]) -> None:
    for length in (2, 16, 17, 40, 700):
        case = ragged(2, [5, length], 33, 64, codec)
        case.codes[5:] = case.codes[6]
        for isa in isas:
            _, best = case.run(pk.maxsim, argmax=True, isa=isa)
            assert (best[1] == 0).all()


@pytest.mark.parametrize("codec", brute.CODECS)
@pytest.mark.parametrize("scaled", [False, True])
def test_threads_change_nothing(codec: str, scaled: bool) -> None:
    # 1024 x 1024 products a token: enough that several threads have work.
    case = ragged(3, [7, 0, 1, 30, 64] * 6, 1024, 1024, codec, scaled=scaled and codec in brute.INTEGER)
    one = case.run(pk.maxsim, argmax=True)
    for threads in (2, 5, 2**31 - 1):
        many = case.run(pk.maxsim, argmax=True, threads=threads)
        np.testing.assert_array_equal(many[0], one[0])
        np.testing.assert_array_equal(many[1], one[1])


@pytest.mark.parametrize("codec", brute.CODECS)
def test_codes_may_lie_at_any_address(codec: str) -> None:
    case = ragged(4, [1, 20, 0, 33], 17, 80, codec)
    expected = case.run(pk.maxsim)
    for shift in range(1, 64):
        memory = np.zeros(case.codes.nbytes + 64, np.uint8)
        codes = memory[shift : shift + case.codes.nbytes].view(case.codes.dtype).reshape(case.codes.shape)
        codes[:] = case.codes
        codes.flags.writeable = False
        moved = Case(case.query, codes, case.offsets, codec, case.seed, case.scales)
        np.testing.assert_array_equal(moved.run(pk.maxsim), expected)


def test_queries_of_other_dtypes_and_layouts_are_converted() -> None:
    case = ragged(5, [3, 4], 6, 32, "int8")
    query = np.round(case.query, 2).astype(np.float16)
    expected = case.run(pk.maxsim, query=query.astype(np.float32))
    for other in (
        query,
        query.astype(np.float64),
        np.asfortranarray(query.astype(np.float32)),
        query[::-1][::-1],
    ):
        np.testing.assert_array_equal(case.run(pk.maxsim, query=other), expected)


def test_offsets_may_be_any_integers() -> None:
    case = ragged(6, [3, 0, 4], 6, 32, "f16")
    expected = case.run(pk.maxsim)
    for offsets in (case.offsets.tolist(), tuple(case.offsets.tolist()), case.offsets.astype(np.uint16)):
        np.testing.assert_array_equal(pk.maxsim(case.query, case.codes, offsets), expected)


def test_the_codec_is_told_by_the_dtype_where_it_can_be() -> None:
    for codec in ("bf16", "f16", "f32"):
        case = ragged(7, [3, 4], 6, 32, codec)
        np.testing.assert_array_equal(case.run(pk.maxsim, codec=None), case.run(pk.maxsim))


@pytest.mark.parametrize("dim", [16, 4096])
@pytest.mark.parametrize("codec", brute.CODECS)
def test_the_smallest_and_the_largest_dimension(codec: str, dim: int, isas: list[str]) -> None:
    case = ragged(8, [1, 0, 18, 3], 35, dim, codec)
    scores, _, bounds = case.truth()
    for isa in isas:
        brute.assert_scores(case.run(pk.maxsim, isa=isa), scores, bounds)


def test_many_python_threads_at_once() -> None:
    case = ragged(9, [30] * 40, 64, 256, "int8")
    expected = case.run(pk.maxsim)
    failures: list[object] = []

    def work() -> None:
        for _ in range(20):
            if not np.array_equal(case.run(pk.maxsim, threads=2), expected):
                failures.append("other scores")
            encoded = pk.encode(case.query, threads=2)
            if not np.array_equal(encoded.codes, codes):
                failures.append("other codes")

    codes = pk.encode(case.query).codes
    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_nothing_to_score() -> None:
    query = np.ones((2, 32), np.float32)
    none = np.zeros((0, 32), np.uint8)
    assert pk.maxsim(query, none, [0], "int8").shape == (0,)
    assert pk.maxsim_multi([query, query], none, [0], "int8").shape == (2, 0)
    scores, best = pk.maxsim(query, none, [0, 0, 0], "int8", argmax=True)
    assert scores.tolist() == [-np.inf] * 2
    assert best.tolist() == [[-1, -1]] * 2
    numbers, scores = pk.maxsim_topk(query, none, [0, 0, 0], 5, "int8")
    assert numbers.shape == scores.shape == (0,)
    assert pk.maxsim(query, none, [0, 0], "int8", select=[]).shape == (0,)
    assert pk.maxsim(query, none, [0, 0], "int8", select=np.zeros(1, bool)).tolist() == [-np.inf]
