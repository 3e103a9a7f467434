import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phasemesh.index.leaf import LeafQuery, LeafSource, RowState, leaf_score, leaf_search, leaf_searches
from phasemesh.index.overlay import pack_rows, unpack_rows, visible_rows
from phasemesh.index.spec import Codec, Reduction
from phasemesh.retrieval.merge import merge_hits
from tests.unit.index.corpora import Corpus, corpora, random_corpus


def found(hits):
    return [(hit.id, hit.score) for hit in hits]


def assert_ranking(hits, expected):
    assert [hit.id for hit in hits] == [name for name, _ in expected]
    np.testing.assert_allclose(
        [hit.score for hit in hits], [score for _, score in expected], rtol=1e-12, atol=1e-12
    )


@settings(max_examples=300, deadline=None)
@given(
    corpora,
    st.integers(1, 30),
    st.booleans(),
    st.sampled_from([None, *Codec]),
    st.randoms(use_true_random=False),
)
def test_search_equals_float64_brute_force_order_included(corpus, k, mean, codec, random):
    allowed = np.array([random.random() < 0.8 for _ in corpus.ids], bool)
    deleted = np.array([random.random() < 0.2 for _ in corpus.ids], bool)
    segment = corpus.segment(codec=codec)
    result = leaf_search(
        [LeafSource(3, segment, visible_rows(segment.rows, deleted, allowed))],
        corpus.query,
        k,
        Reduction.MEAN if mean else Reduction.SUM,
    )
    seen = np.flatnonzero(allowed & ~deleted)
    expected = corpus.ranking(seen, mean=mean)
    hits = result.hits
    assert [hit.id for hit in hits] == [name for name, _ in expected[:k]]
    scale = max((abs(score) for _, score in expected), default=0.0)
    np.testing.assert_allclose(
        [hit.score for hit in hits], [score for _, score in expected[:k]], rtol=1e-12, atol=1e-12 * scale
    )
    assert all(corpus.ids[hit.row] == hit.id and hit.fragment_id == 3 for hit in hits)
    assert result.documents == len(expected)
    assert result.tokens == sum(len(corpus.documents[row]) for row in seen)
    assert result.rescored >= len(hits)
    assert result.exact


@settings(max_examples=100, deadline=None)
@given(corpora, st.integers(1, 12), st.integers(1, 5), st.randoms(use_true_random=False))
def test_any_split_over_fragments_and_scorers_gives_the_same_bits(corpus, k, parts, random):
    whole = leaf_search([LeafSource(0, corpus.segment())], corpus.query, k, Reduction.SUM)
    homes = [random.randrange(parts) for _ in corpus.ids]
    sources = [
        LeafSource(part, corpus.segment([row for row, home in enumerate(homes) if home == part]))
        for part in range(parts)
    ]
    one = leaf_search(sources, corpus.query, k, Reduction.SUM)
    leaves = [
        leaf_search(group, corpus.query, k, Reduction.SUM).hits
        for group in (sources[::2], sources[1::2])
        if group
    ]
    assert found(one.hits) == found(whole.hits)
    assert found(merge_hits(leaves, k)) == found(whole.hits)


@settings(max_examples=80, deadline=None)
@given(
    corpora,
    st.lists(st.integers(0, 12), min_size=1, max_size=5),
    st.sampled_from([None, *Codec]),
    st.integers(0, 99),
)
def test_searches_that_share_a_scan_find_the_same_bits_as_alone(corpus, ks, codec, seed):
    rng = np.random.default_rng(seed)
    segment = corpus.segment(codec=codec)
    visible = rng.random(segment.rows) < 0.8
    sources = [LeafSource(0, segment, visible), LeafSource(1, corpus.segment(name="b", codec=codec))]
    dim = corpus.query.shape[1]
    queries = [
        LeafQuery(
            rng.normal(size=(int(rng.integers(1, 40)), dim)).astype(np.float32), k, list(Reduction)[k % 2]
        )
        for k in ks
    ]
    for query, result in zip(queries, leaf_searches(sources, queries), strict=True):
        if query.k < 1:
            assert isinstance(result, ValueError)
        else:
            assert result == leaf_search(sources, query.vectors, query.k, query.reduction)


@pytest.mark.parametrize("lengths", [[], [0], [1], [2], [1, 1], [9], [0, 0], [2, 0, 7], [1] * 9])
def test_tiny_collections_are_searched_like_any_other(lengths):
    rng = np.random.default_rng(5)
    documents = [rng.normal(size=(length, 4)).astype(np.float16) for length in lengths]
    corpus = Corpus(
        [f"d{row}" for row in range(len(lengths))],
        documents,
        [[]] * len(lengths),
        rng.normal(size=(3, 4)).astype(np.float32),
    )
    result = leaf_search([LeafSource(0, corpus.segment())], corpus.query, 10, Reduction.SUM)
    assert_ranking(result.hits, corpus.ranking())
    assert len(result.hits) == sum(length > 0 for length in lengths)


def test_k_of_one_call_does_not_stick_to_the_next():
    corpus = random_corpus(11, 1200, longest=4)
    sources = [LeafSource(0, corpus.segment())]
    expected = corpus.ranking()
    assert len(expected) > 900
    assert_ranking(leaf_search(sources, corpus.query, 1, Reduction.SUM).hits, expected[:1])
    assert_ranking(leaf_search(sources, corpus.query, 1000, Reduction.SUM).hits, expected[:1000])
    assert_ranking(leaf_search(sources, corpus.query, 10_000, Reduction.SUM).hits, expected)


def test_near_ties_that_float32_orders_wrongly_are_ordered_by_float64():
    # Scores differ by less than a float32 sum of 256 products is off.
    rng = np.random.default_rng(2)
    base = rng.normal(size=256).astype(np.float16)
    documents = []
    for step in range(200):
        vector = base.copy()
        vector[step % 64] += np.float16(0.01 * step - 1)
        documents.append(vector[None, :])
    query = rng.normal(size=(1, 256)).astype(np.float32)
    query[0, :64] *= np.float32(1e-6)
    corpus = Corpus([f"d{row:03}" for row in range(200)], documents, [[]] * 200, query)
    exact = leaf_search([LeafSource(0, corpus.segment())], query, 200, Reduction.SUM)
    expected = corpus.ranking()
    assert [hit.id for hit in exact.hits] == [name for name, _ in expected]
    # Wherever the cut falls between documents that float32 confuses.
    for k in range(1, 200):
        top = leaf_search([LeafSource(0, corpus.segment())], query, k, Reduction.SUM)
        assert [hit.id for hit in top.hits] == [name for name, _ in expected[:k]]
    rough = np.concatenate(documents).astype(np.float32) @ query[0]
    by_rough = sorted(range(200), key=lambda row: -rough[row])
    swapped = [k for k in range(1, 200) if rough[by_rough[k - 1]] > rough[by_rough[k]]]
    rank = {name: place for place, (name, _) in enumerate(expected)}
    # Some cut by float32 alone would have lost a document that belongs to the best k.
    assert any({rank[corpus.ids[row]] for row in by_rough[:k]} != set(range(k)) for k in swapped)


def test_only_contenders_are_scored_again():
    corpus = random_corpus(4, 3000, dim=32, longest=5)
    result = leaf_search([LeafSource(0, corpus.segment())], corpus.query, 10, Reduction.SUM)
    assert result.documents > 2000
    assert result.rescored < 100


def test_equal_scores_come_by_id_also_at_the_last_place():
    vectors = np.ones((2, 4), np.float16)
    ids = ["b", "é", "a", "z", "Z"]
    corpus = Corpus(ids, [vectors] * 5, [[]] * 5, np.ones((2, 4), np.float32))
    for k in range(1, 6):
        result = leaf_search([LeafSource(0, corpus.segment())], corpus.query, k, Reduction.SUM)
        assert [hit.id for hit in result.hits] == sorted(ids)[:k]


def test_deletions_are_laid_over_a_segment_that_a_later_version_built():
    corpus = random_corpus(9, 3, longest=5)
    corpus = Corpus(["a", "b", "c"], [np.eye(8, dtype=np.float16)[:3]] * 3, [[]] * 3, corpus.query)
    segment = corpus.segment()
    before = leaf_search([LeafSource(0, segment)], corpus.query, 3, Reduction.SUM)
    deleted = np.array([False, True, False])
    after = leaf_search([LeafSource(0, segment, visible_rows(3, deleted))], corpus.query, 3, Reduction.SUM)
    assert [hit.id for hit in before.hits] == ["a", "b", "c"]
    assert after.hits == (before.hits[0], before.hits[2])


def test_a_filter_that_allows_nothing_finds_nothing():
    corpus = random_corpus(6, 20)
    none = np.zeros(20, bool)
    result = leaf_search(
        [LeafSource(0, corpus.segment(), visible_rows(20, None, none))], corpus.query, 5, Reduction.SUM
    )
    assert result.hits == ()
    assert (result.documents, result.tokens) == (0, 0)
    assert leaf_search([], corpus.query, 5, Reduction.SUM).hits == ()


@given(st.lists(st.booleans(), max_size=40))
def test_bitmaps_survive_the_wire(allowed):
    mask = np.array(allowed, bool)
    assert unpack_rows(pack_rows(mask), len(allowed)).tolist() == allowed


def test_the_first_row_is_the_least_significant_bit():
    assert unpack_rows(b"\x05\x01", 9).tolist() == [True, False, True] + [False] * 5 + [True]


@pytest.mark.parametrize(("bitmap", "rows"), [(b"", 1), (b"\x01\x00", 8), (b"\x02", 1), (b"\xff", 0)])
def test_bitmaps_of_another_length_are_refused(bitmap, rows):
    with pytest.raises(ValueError, match=r"^allowed_rows"):
        unpack_rows(bitmap, rows)


def test_masks_of_another_length_are_refused():
    with pytest.raises(ValueError, match=r"^allowed_rows"):
        visible_rows(3, None, np.ones(4, bool))
    with pytest.raises(ValueError, match=r"^deleted"):
        visible_rows(3, np.ones(2, bool))


@settings(max_examples=60, deadline=None)
@given(corpora, st.booleans(), st.randoms(use_true_random=False))
def test_given_rows_are_all_answered_with_the_scores_of_search(corpus, mean, random):
    if not corpus.ids:
        return
    visible = np.array([random.random() < 0.8 for _ in corpus.ids], bool)
    rows = np.array([random.randrange(len(corpus.ids)) for _ in range(12)])
    reduction = Reduction.MEAN if mean else Reduction.SUM
    source = LeafSource(5, corpus.segment(), visible)
    scores = leaf_score(source, rows, corpus.query, reduction)
    by_row = {hit.row: hit.score for hit in leaf_search([source], corpus.query, 100, reduction).hits}
    assert [score.row for score in scores] == rows.tolist()
    for score in scores:
        assert score.id == corpus.ids[score.row]
        if not visible[score.row]:
            assert (score.state, score.score) == (RowState.DELETED, None)
        elif not len(corpus.documents[score.row]):
            assert (score.state, score.score) == (RowState.EMPTY, None)
        else:
            assert score.state is RowState.OK
            assert score.score == by_row[score.row]


def test_alignment_adds_up_to_the_score():
    corpus = random_corpus(8, 5, longest=6)
    corpus = Corpus(corpus.ids, corpus.documents, [[]] * 5, corpus.query)
    row = next(row for row in range(5) if len(corpus.documents[row]))
    source = LeafSource(0, corpus.segment())
    [score] = leaf_score(source, np.array([row]), corpus.query, Reduction.SUM, align=True)
    similarities = corpus.query.astype(np.float64) @ corpus.documents[row].astype(np.float64).T
    assert score.best_tokens.tolist() == similarities.argmax(axis=1).tolist()
    np.testing.assert_allclose(score.best_similarities, similarities.max(axis=1), rtol=1e-14)


def test_bad_arguments_are_named():
    corpus = random_corpus(1, 4)
    source = LeafSource(0, corpus.segment())
    with pytest.raises(ValueError, match=r"^k:"):
        leaf_search([source], corpus.query, 0, Reduction.SUM)
    with pytest.raises(ValueError, match=r"^query:"):
        leaf_search([source], corpus.query[:0], 1, Reduction.SUM)
    with pytest.raises(ValueError, match=r"^query:"):
        leaf_search([source], corpus.query * np.float32(np.nan), 1, Reduction.SUM)
    for row in (-1, 4):
        with pytest.raises(ValueError, match=r"^rows:"):
            leaf_score(source, np.array([row]), corpus.query, Reduction.SUM)
