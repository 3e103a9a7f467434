"""Documents in the store against what was put in: parts, fragments, physical rows, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import lance
import numpy as np
import pytest

from phasemesh.index.catalogue import dataset_path
from phasemesh.index.errors import InvalidDocument
from phasemesh.index.filters import IdIn, Not
from phasemesh.index.schema import Part
from phasemesh.index.spec import CollectionSpec, StoredDocument
from tests.unit.index.documents import (
    DIM,
    EVERYTHING,
    FAST,
    assert_same,
    make_document,
    open_store,
)

WHEN = datetime(2024, 2, 3, 4, 5, 6, 789012, tzinfo=timezone(timedelta(hours=2)))


def test_every_part_comes_back_bit_for_bit(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    documents = [
        make_document("full", 5, string="a'b", int64=-(2**63), double=0.1, bool=True, timestamp=WHEN,
                      string_list=("x", "", "x")),
        make_document("empty", 0, string_list=()),
        StoredDocument("bare", None, {"string": None}, make_document("bare", 2).tokens),
        make_document("long", 3000, double=5),
    ]  # fmt: skip
    done = store.upsert(documents)
    assert (done.stored, done.superseded) == (4, ())
    ids = ["long", "empty", "nobody", "full", "bare", "nobody"]
    found, missing = store.get(ids, done.version, EVERYTHING)
    assert [document.id for document in found] == ["long", "empty", "full", "bare"]
    assert missing == ["nobody"]
    expected = {document.id: document for document in documents}
    for document in found:
        assert_same(document, expected[document.id])


def test_only_the_parts_asked_for_are_read(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    version = store.upsert([make_document("a", 5, string="x")]).version
    [document], _ = store.get(["a"], version)
    assert (document.text, dict(document.fields)) == ("text 0 of a", {"string": "x"})
    assert document.tokens.shape == (0, DIM)
    assert document.dense is None
    [document], _ = store.get(["a"], version, frozenset({Part.TOKENS}))
    assert document.text is None
    assert document.tokens.shape == (5, DIM)
    assert document.token_spans is None


def test_the_schema_is_marked_and_typed(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    dataset = lance.dataset(str(dataset_path(tmp_path, "acme", store.incarnation)))
    assert [field.name() for field in dataset.lance_schema.unenforced_primary_key()] == ["id"]
    assert dataset.has_stable_row_ids
    assert not dataset.schema.field("id").nullable
    assert str(dataset.schema.field("tokens").type).startswith(
        "list<item: fixed_size_list<item: halffloat>[8]"
    )
    assert str(dataset.schema.field("field_timestamp").type) == "timestamp[us, tz=UTC]"


def test_deleting_one_leaves_the_others_and_names_what_was_not_there(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    before = store.upsert([make_document(name) for name in "abc"]).version
    done = store.delete(["b", "x", "b", "y"])
    assert (done.deleted, done.missing) == (1, ("x", "y"))
    found, missing = store.get(["a", "b", "c"], done.version, EVERYTHING)
    assert missing == ["b"]
    for document in found:
        assert_same(document, make_document(document.id))
    assert store.count(before) == 3
    assert_same(store.get(["b"], before, EVERYTHING)[0][0], make_document("b"))
    nothing = store.delete(["b", "zz"])
    assert (nothing.version, nothing.deleted, nothing.missing) == (done.version, 0, ("b", "zz"))
    assert store.delete([]).version == done.version


def test_everything_deleted_then_added_again(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.upsert([make_document(name) for name in "abc"])
    empty = store.delete(["a", "b", "c"]).version
    assert (store.count(empty), store.fragments(empty), store.allowed_rows(empty, Not(IdIn(())))) == (
        0,
        [],
        {},
    )
    version = store.upsert([make_document("b", seed=9)]).version
    assert store.count(version) == 1
    assert_same(store.get(["b"], version, EVERYTHING)[0][0], make_document("b", seed=9))


ODD_IDS = ["a'b", "''", "\\", "\\'", "nul\0z", "new\nline", "%", "--", "/*", "é", "e\u0301", "\U0001d518", '"', "`", ";",
           "x" * 512, " ", "NULL", "1"]  # fmt: skip


def test_ids_are_bytes_and_never_language(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    version = store.upsert([make_document(name, 1) for name in ODD_IDS]).version
    for name in ODD_IDS:
        found, _ = store.get([name], version)
        assert [document.id for document in found] == [name]
    for left, name in enumerate(ODD_IDS, start=1):
        done = store.delete([name])
        assert done.deleted == 1
        assert store.count(done.version) == len(ODD_IDS) - left


def test_thousands_of_ids_in_one_call(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    ids = [f"n{number}" for number in range(20_000)]
    version = store.upsert([make_document(name, 0) for name in ids[::100]]).version
    found, missing = store.get(ids, version)
    assert (len(found), len(missing)) == (200, 19_800)
    assert store.delete(ids).deleted == 200


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"id": ""}, "id"),
        ({"id": "x" * 513}, "id"),
        ({"id": "é" * 257}, "id"),
        ({"id": "\ud800"}, "id"),
        ({"text": "\udfff"}, "text"),
        ({"tokens": np.zeros((3, DIM + 1), np.float16)}, "tokens"),
        ({"tokens": np.zeros(DIM, np.float16)}, "tokens"),
        ({"tokens": np.zeros((3, DIM), np.float32)}, "tokens"),
        ({"tokens": np.full((3, DIM), np.nan, np.float16)}, "tokens"),
        ({"tokens": np.full((3, DIM), np.inf, np.float16)}, "tokens"),
        ({"tokens": np.zeros((101, DIM), np.float16), "token_spans": None}, "tokens"),
        ({"token_spans": np.zeros((2, 2), np.int32)}, "token_spans"),
        ({"token_spans": np.zeros((3, 2), np.int64)}, "token_spans"),
        ({"chunk_offsets": np.array([0], np.int32)}, "chunk_offsets"),
        ({"chunk_offsets": np.array([3], np.int32)}, "chunk_offsets"),
        ({"chunk_offsets": np.array([2, 1], np.int32)}, "chunk_offsets"),
        ({"chunk_offsets": np.array([1], np.int64)}, "chunk_offsets"),
        ({"dense": np.zeros(5, np.float32)}, "dense"),
        ({"dense": np.full(4, np.nan, np.float32)}, "dense"),
        ({"fields": {"unknown": 1}}, "fields"),
        ({"fields": {"int64": 2**63}}, r"fields\.int64"),
        ({"fields": {"int64": True}}, r"fields\.int64"),
        ({"fields": {"int64": 1.0}}, r"fields\.int64"),
        ({"fields": {"double": float("nan")}}, r"fields\.double"),
        ({"fields": {"double": 10**400}}, r"fields\.double"),
        ({"fields": {"string": 1}}, r"fields\.string"),
        ({"fields": {"bool": 1}}, r"fields\.bool"),
        ({"fields": {"timestamp": datetime(2024, 1, 1)}}, r"fields\.timestamp"),
        ({"fields": {"timestamp": datetime(1, 1, 1, tzinfo=WHEN.tzinfo)}}, r"fields\.timestamp"),
        ({"fields": {"string_list": ["a"]}}, r"fields\.string_list"),
        ({"fields": {"string_list": ("a", None)}}, r"fields\.string_list"),
    ],
)
def test_a_document_that_does_not_fit_is_refused_by_name(
    tmp_path: Path, change: dict[str, object], names: str
) -> None:
    store = open_store(tmp_path, options=replace(FAST, target_tokens=50, limit_tokens=100))
    before = store.latest()
    bad = replace(make_document("a"), **change)  # type: ignore[arg-type]  # any part may be wrong
    with pytest.raises(InvalidDocument, match=f"^{names}: "):
        store.check(bad)
    with pytest.raises(InvalidDocument):
        store.upsert([make_document("good"), bad])
    assert store.latest(refresh=True) == before


def test_a_collection_without_dense_vectors_takes_none(tmp_path: Path) -> None:
    store = open_store(tmp_path, CollectionSpec("plain", "", "", DIM))
    with pytest.raises(InvalidDocument, match=r"^dense: "):
        store.check(make_document("a"))
    document = replace(make_document("a"), dense=None)
    version = store.upsert([document]).version
    assert_same(store.get(["a"], version, EVERYTHING)[0][0], document)


def test_fragments_are_cut_by_tokens(tmp_path: Path) -> None:
    store = open_store(tmp_path, options=replace(FAST, target_tokens=10, limit_tokens=25))
    sizes = [4, 6, 1, 0, 25, 0, 9, 1, 1]
    version = store.upsert([make_document(f"d{n}", size) for n, size in enumerate(sizes)]).version
    refs = store.fragments(version)
    assert [ref.tokens for ref in refs] == [10, 1, 25, 10, 1]
    assert [ref.physical_rows for ref in refs] == [2, 2, 1, 3, 1]
    assert len({ref.data_key for ref in refs}) == len(refs)
    stats = store.stats(version)
    assert (stats.documents, stats.tokens, stats.fragments) == (9, 47, 5)


def test_a_fragment_is_its_data_file_whatever_was_deleted(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    documents = [make_document(f"d{n}", n % 4) for n in range(12)]
    first = store.upsert(documents).version
    [ref] = store.fragments(first)
    third = store.delete(["d3", "d11"]).version
    fourth = store.upsert([make_document("d5", 7, seed=1)]).version
    assert store.fragments(third) == [ref]
    assert store.fragments(fourth)[0] == ref
    for version, deleted in ((first, set()), (third, {3, 11}), (fourth, {3, 5, 11})):
        rows = store.read_tokens(ref.fragment_id, version)
        assert rows.ids == [document.id for document in documents]
        assert rows.offsets.tolist() == np.cumsum([0] + [n % 4 for n in range(12)]).tolist()
        assert rows.vectors.tobytes() == b"".join(document.tokens.tobytes() for document in documents)
        assert [chunks.tolist() for chunks in rows.chunk_offsets] == [
            document.chunk_offsets.tolist() for document in documents
        ]
        mask = store.deleted_rows(version, ref.fragment_id)
        assert mask.dtype == bool
        assert set(np.flatnonzero(mask)) == deleted
        assert len(mask) == 12
    assert store.stats(fourth).tokens == sum(n % 4 for n in range(12)) - 3 - 3 - 1 + 7


def test_many_deletions_change_no_data_file(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    version = store.upsert([make_document(f"d{n}", 1) for n in range(60)]).version
    [ref] = store.fragments(version)
    for n in range(50):
        version = store.delete([f"d{n}"]).version
        assert store.fragments(version) == [ref]
    assert np.flatnonzero(~store.deleted_rows(version, ref.fragment_id)).tolist() == list(range(50, 60))
