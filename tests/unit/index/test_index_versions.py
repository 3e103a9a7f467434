"""The serving form over the real store: one segment per data file, whatever the version that is asked for."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from phasemesh.index.cache import SegmentCache, SegmentRequest
from phasemesh.index.coded import served_codec
from phasemesh.index.filters import AllOf, Equals
from phasemesh.index.leaf import LeafHit, LeafSource, leaf_search
from phasemesh.index.overlay import pack_rows, unpack_rows, visible_rows
from phasemesh.index.segments import SegmentKey, build_segment
from phasemesh.index.spec import Reduction, StoredDocument, Version
from phasemesh.index.store import CollectionStore
from tests.unit.index.documents import DIM, make_document, open_store

QUERY = np.random.default_rng(0).normal(size=(3, DIM)).astype(np.float32)


def search(
    store: CollectionStore, cache: SegmentCache, version: Version, k: int = 100, **equals: str
) -> tuple[LeafHit, ...]:
    """What a scorer does: lease a segment per fragment, lay version and filter over it, scan."""
    fragments = store.fragments(version)
    conditions = tuple(Equals(name, value) for name, value in equals.items())
    allowed = store.allowed_rows(version, AllOf(conditions)) if equals else None

    def derive_from(fragment_id: int, key: SegmentKey) -> SegmentRequest:
        def derive():
            rows = store.read_tokens(fragment_id, version)
            return build_segment(key, rows.ids, rows.vectors, rows.offsets, rows.chunk_offsets)

        return SegmentRequest(key, derive)

    requests = [
        derive_from(
            ref.fragment_id, SegmentKey(store.incarnation, ref.data_key, served_codec(store.spec.codec, DIM))
        )
        for ref in fragments
    ]
    with cache.lease(requests) as leased:
        sources = []
        for ref, answer in zip(fragments, leased, strict=True):
            assert answer.segment is not None
            assert answer.segment.rows == ref.physical_rows
            assert len(answer.segment.tokens) == ref.tokens
            mask = None
            if allowed is not None:
                nothing = np.zeros(ref.physical_rows, bool)
                mask = unpack_rows(pack_rows(allowed.get(ref.fragment_id, nothing)), ref.physical_rows)
            deleted = store.deleted_rows(version, ref.fragment_id)
            sources.append(
                LeafSource(ref.fragment_id, answer.segment, visible_rows(ref.physical_rows, deleted, mask))
            )
        return leaf_search(sources, QUERY, k, Reduction.SUM).hits


def truth(documents: list[StoredDocument]) -> list[tuple[str, float]]:
    """Float64 MaxSim of each document's best chunk."""
    query = QUERY.T.astype(np.float64)
    scored = []
    for document in documents:
        chunks = np.split(document.tokens.astype(np.float64), document.chunk_offsets)
        scores = [float((chunk @ query).max(0).sum()) for chunk in chunks if len(chunk)]
        if scores:
            scored.append((document.id, max(scores)))
    return sorted(scored, key=lambda hit: (-hit[1], hit[0]))


def assert_truth(hits: tuple[LeafHit, ...], documents: list[StoredDocument]) -> None:
    expected = truth(documents)
    assert [hit.id for hit in hits] == [name for name, _ in expected]
    np.testing.assert_allclose([hit.score for hit in hits], [score for _, score in expected], rtol=1e-12)


def test_a_segment_derived_at_a_later_version_serves_an_earlier_one(tmp_path: Path) -> None:
    store = open_store(tmp_path / "root")
    cache = SegmentCache(tmp_path / "cache", 2**30)
    documents = [make_document(f"d{number}", number % 4) for number in range(12)]
    first = store.upsert(documents).version
    second = store.delete(["d3", "d6"]).version
    renewed = make_document("d5", 2, seed=9)
    third = store.upsert([renewed]).version

    rest = [document for document in documents if document.id not in ("d3", "d6")]
    newest = [document for document in rest if document.id != "d5"] + [renewed]
    assert_truth(search(store, cache, third), newest)
    derivations = cache.counters.derivations
    later = search(store, cache, second)
    assert_truth(later, rest)
    earlier = search(store, cache, first)
    assert_truth(earlier, documents)
    assert cache.counters.derivations == derivations
    # Those that weren't deleted keep their scores bit for bit.
    scores = {hit.id: hit.score for hit in earlier}
    assert all(scores[hit.id] == hit.score for hit in later)
    cache.close()


def test_many_deletions_derive_each_data_file_once(tmp_path: Path) -> None:
    store = open_store(tmp_path / "root")
    cache = SegmentCache(tmp_path / "cache", 2**30)
    documents = [make_document(f"d{number:03}", 2) for number in range(204)]
    version = store.upsert(documents).version
    for count in range(1, 201):
        search(store, cache, version)
        version = store.delete([documents[count - 1].id]).version
        assert_truth(search(store, cache, version, k=300), documents[count:])
    assert cache.counters.derivations == 1
    cache.close()


def test_a_filter_travels_as_a_bitmap_of_physical_rows(tmp_path: Path) -> None:
    store = open_store(tmp_path / "root")
    cache = SegmentCache(tmp_path / "cache", 2**30)
    store.upsert([make_document(f"a{number}", 3, string="x" if number % 2 else "y") for number in range(9)])
    store.upsert([make_document(f"b{number}", 3, string="y") for number in range(5)])
    version = store.delete(["a1", "b2"]).version
    assert {hit.id for hit in search(store, cache, version, string="x")} == {"a3", "a5", "a7"}
    assert search(store, cache, version, string="z") == ()
    cache.close()
