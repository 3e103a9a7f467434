import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phasemesh.index import kernel, portable
from phasemesh.index.coded import scan
from phasemesh.index.portable import blocks
from phasemesh.index.rescore import best_tokens, error_bound, exact_maxsim, scale_query
from phasemesh.index.spec import Codec
from tests.unit.index.corpora import corpora, random_corpus

#: The compiled kernels where they are installed and take the dimension, and numpy.
both = pytest.mark.parametrize("maxsim", [kernel.maxsim, portable.maxsim], ids=["kernel", "portable"])


def ranges_of(corpus):
    segment = corpus.segment()
    return segment.range_offsets, segment.range_to_row


@both
@settings(max_examples=150, deadline=None)
@given(corpora, st.booleans(), st.randoms(use_true_random=False), st.sampled_from([1, 7, 1 << 20]))
def test_scores_are_within_the_bound_of_float64_brute_force(maxsim, corpus, mean, random, cells):
    query = scale_query(corpus.query)
    mask = np.array([random.random() < 0.6 for _ in corpus.ids], bool)
    offsets, fold = ranges_of(corpus)
    with pytest.MonkeyPatch.context() as patch:
        # Blocks of a token or a few: every border between blocks is met.
        patch.setattr(portable, "MAX_CELLS", cells)
        scores = maxsim(
            query, corpus.tokens, offsets, mask=mask, range_to_row=fold, rows=len(corpus.ids), mean=mean
        )
    assert scores.dtype == np.float32
    assert scores.shape == (len(corpus.ids),)
    scaled = type(corpus)(corpus.ids, corpus.documents, corpus.chunks, query)
    norms = corpus.segment().norms
    bounds = error_bound(query, norms, scores)
    for row in range(len(corpus.ids)):
        expected = scaled.score(row, mean=mean) if mask[row] else -np.inf
        if expected == -np.inf:
            assert scores[row] == -np.inf
        else:
            assert abs(float(scores[row]) - expected) <= bounds[row] + 1e-12 * abs(expected)


@both
def test_the_error_bound_is_not_vacuous(maxsim):
    corpus = random_corpus(1, 200, dim=128, longest=40)
    query = corpus.query / np.linalg.norm(corpus.query, axis=1, keepdims=True)
    tokens = corpus.tokens.astype(np.float32)
    tokens = (tokens / np.linalg.norm(tokens, axis=1, keepdims=True)).astype(np.float16)
    scaled = scale_query(query)
    scores = maxsim(scaled, tokens, corpus.offsets)
    bound = error_bound(scaled, np.full(len(scores), 1.001), scores)
    assert bound[np.isfinite(scores)].max() < 1e-4 * len(query)


@settings(max_examples=100, deadline=None)
@given(corpora, st.sampled_from([1, 5, 1 << 20]))
def test_exact_scores_equal_float64_brute_force(corpus, cells):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(portable, "MAX_CELLS", cells)
        scores = exact_maxsim(corpus.query, corpus.tokens, corpus.offsets)
    whole = type(corpus)(corpus.ids, corpus.documents, [[]] * len(corpus.ids), corpus.query)
    expected = [whole.score(row) for row in range(len(corpus.ids))]
    longest = max((np.linalg.norm(vector.astype(float)) for vector in corpus.tokens), default=0.0)
    size = np.linalg.norm(corpus.query.astype(float), axis=1).sum() * longest
    np.testing.assert_allclose(scores, expected, rtol=1e-14, atol=1e-14 * size)


def test_an_exact_score_does_not_depend_on_what_is_scored_beside_it():
    corpus = random_corpus(7, 300, dim=48, longest=30)
    together = exact_maxsim(corpus.query, corpus.tokens, corpus.offsets)
    rng = np.random.default_rng(0)
    for row in np.flatnonzero(together > -np.inf)[:100]:
        document = corpus.documents[row]
        shuffled = document[rng.permutation(len(document))]
        alone = exact_maxsim(corpus.query, shuffled, np.array([0, len(document)]))
        assert alone[0] == together[row]


def test_the_best_vector_is_found_where_float32_confuses_it_with_others():
    rng = np.random.default_rng(3)
    base = rng.normal(size=256).astype(np.float16)
    document = np.repeat(base[None], 64, axis=0)
    # Differences far below the rounding of a float32 sum of 256 products.
    query = rng.normal(size=(8, 256)).astype(np.float32)
    query[:, :64] *= np.float32(1e-6)
    for row in range(64):
        document[row, row] += np.float16(0.5) * (1 if row % 3 else -1)
    similarities = query.astype(np.float64) @ document.astype(np.float64).T
    rough = query @ document.astype(np.float32).T
    assert (rough.argmax(axis=1) != similarities.argmax(axis=1)).any()
    matched, best = best_tokens(query, document)
    assert matched.tolist() == similarities.argmax(axis=1).tolist()
    np.testing.assert_allclose(best, similarities.max(axis=1), rtol=1e-14)
    [score] = exact_maxsim(query, document, np.array([0, 64]))
    assert score == pytest.approx(similarities.max(axis=1).sum(), rel=1e-14)


def test_selected_ranges_come_in_the_order_asked_for():
    corpus = random_corpus(3, 40)
    every = exact_maxsim(corpus.query, corpus.tokens, corpus.offsets)
    wanted = np.array([39, 0, 7, 7, 12])
    scores = exact_maxsim(corpus.query, corpus.tokens, corpus.offsets, ranges=wanted)
    assert scores.tolist() == every[wanted].tolist()


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=12),
    st.integers(1, 10),
    st.randoms(use_true_random=False),
)
def test_blocks_cover_each_selected_token_once_and_keep_their_limit(lengths, limit, random):
    offsets = np.cumsum([0, *lengths])
    ranges = np.array([number for number in range(len(lengths)) if random.random() < 0.7], np.int64)
    random.shuffle(order := ranges.tolist())
    ranges = np.array(order, np.int64)
    seen = {position: [] for position in range(len(ranges))}
    everything = np.arange(offsets[-1])
    for block in blocks(offsets, ranges, limit):
        tokens = everything[block.tokens]
        assert 1 <= len(tokens) <= limit
        for position, part in zip(
            range(block.first, block.stop), np.split(tokens, block.starts[1:]), strict=True
        ):
            seen[position] += part.tolist()
    for position, number in enumerate(ranges):
        assert seen[position] == list(range(offsets[number], offsets[number + 1]))


@both
def test_tokens_outside_the_mask_are_not_read(maxsim):
    tokens = np.ones((6, 16), np.float16)
    tokens[2:4] = np.nan
    scores = maxsim(
        np.ones((1, 16), np.float32), tokens, np.array([0, 2, 4, 6]), mask=np.array([True, False, True])
    )
    assert scores.tolist() == [16.0, -np.inf, 16.0]


@both
def test_the_checkpoint_ends_the_scoring(maxsim):
    def stop() -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        maxsim(np.ones((1, 16), np.float32), np.ones((4, 16), np.float16), np.array([0, 4]), checkpoint=stop)


@both
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_vectors_that_are_not_finite_never_give_a_score(maxsim, value):
    tokens = np.ones((4, 16), np.float16)
    tokens[3, 1] = value
    query = np.ones((1, 16), np.float32)
    with pytest.raises(ValueError, match=r"tokens: range 1"):
        maxsim(query, tokens, np.array([0, 2, 4]))
    with pytest.raises(ValueError, match="tokens"):
        exact_maxsim(query, tokens, np.array([0, 2, 4]))
    query[0, 0] = value
    with pytest.raises(ValueError, match=r"query: token 0"):
        maxsim(query, tokens, np.array([0, 2]))


@both
def test_overflow_of_float32_is_an_error_and_exact_scores_have_none(maxsim):
    query = np.full((2, 16), 3e38, np.float32)
    tokens = np.full((1, 16), 6e4, np.float16)
    with pytest.raises(ValueError, match=r"range 0 has no finite score"):
        maxsim(query, tokens, np.array([0, 1]))
    expected = 2 * 16 * float(query[0, 0]) * float(tokens[0, 0])
    assert exact_maxsim(query, tokens, np.array([0, 1]))[0] == pytest.approx(expected, rel=1e-15)


@both
@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"query": np.ones((0, 16), np.float32)}, "query"),
        ({"query": np.ones((1, 32), np.float32)}, "query"),
        ({"query": np.ones((1, 16), np.int64)}, "query"),
        ({"offsets": np.array([0, 5])}, "offsets"),
        ({"offsets": np.array([-1, 4])}, "offsets"),
        ({"offsets": np.array([0, 3, 2])}, "offsets"),
        ({"offsets": np.array([0.0, 4.0])}, "offsets"),
        ({"mask": np.array([True, True])}, "mask"),
        ({"range_to_row": np.array([0, 0]), "rows": 1}, "range_to_row"),
        ({"range_to_row": np.array([1]), "rows": 1}, "range_to_row"),
        ({"rows": 2}, "rows"),
    ],
)
def test_arguments_that_do_not_fit_are_named(maxsim, changes, field):
    good = {"query": np.ones((1, 16), np.float32), "tokens": np.ones((4, 16), np.float16)}
    with pytest.raises(ValueError, match=f"^{field}"):
        maxsim(**({**good, "offsets": np.array([0, 4])} | changes))


def test_alignment_names_the_first_of_equally_good_vectors():
    document = np.array([[1, 0], [0, 2], [0, 2], [-1, -1]], np.float16)
    query = np.array([[0, 1], [1, 0], [-1, -1]], np.float32)
    matched, similarities = best_tokens(query, document)
    assert matched.tolist() == [1, 0, 3]
    assert similarities.tolist() == [2.0, 1.0, 2.0]


@pytest.mark.parametrize("codec", list(Codec))
@settings(max_examples=100, deadline=None)
@given(corpora, st.randoms(use_true_random=False))
def test_scores_of_codes_are_within_their_bound_of_float64_brute_force(codec, corpus, random):
    segment = corpus.segment(codec=codec)
    if segment.key.codec is None:
        return  # vectors of this dimension have no codes
    query = scale_query(corpus.query)
    mask = np.array([random.random() < 0.7 for _ in corpus.ids], bool)
    [(scores, bounds)] = scan(
        [query],
        segment.codes,
        codec,
        segment.range_offsets,
        segment.norms,
        mask=mask,
        range_to_row=segment.range_to_row,
    )
    scaled = type(corpus)(corpus.ids, corpus.documents, corpus.chunks, query)
    for row in range(len(corpus.ids)):
        expected = scaled.score(row) if mask[row] else -np.inf
        if expected == -np.inf:
            assert scores[row] == -np.inf
        else:
            assert abs(float(scores[row]) - expected) <= bounds[row]


@pytest.mark.parametrize(("codec", "most"), [(Codec.BF16, 0.005), (Codec.INT8, 0.025), (Codec.INT4, 0.25)])
def test_the_bounds_of_codes_are_not_vacuous(codec, most):
    corpus = random_corpus(1, 200, dim=128, longest=40)
    unit = [
        (d / np.linalg.norm(d.astype(float), axis=1, keepdims=True)).astype(np.float16)
        for d in corpus.documents
    ]
    query = corpus.query / np.linalg.norm(corpus.query, axis=1, keepdims=True)
    corpus = type(corpus)(corpus.ids, unit, [[]] * len(unit), query)
    segment = corpus.segment(codec=codec)
    if segment.key.codec is None:
        pytest.skip("the compiled kernels aren't installed")
    scaled = scale_query(query)
    [(_, bounds)] = scan([scaled], segment.codes, codec, segment.range_offsets, segment.norms)
    assert not len(segment.codes.scales)
    per_token = bounds / np.linalg.norm(scaled, axis=1).sum()
    assert per_token[segment.row_lengths > 0].max() < most
