"""Filters against plain Python, and inputs that must never make one vanish."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phasemesh.index import store as store_module
from phasemesh.index.catalogue import Catalogue
from phasemesh.index.errors import FilterError
from phasemesh.index.filters import (
    MAX_DEPTH,
    MAX_SIZE,
    AllOf,
    AnyOf,
    Condition,
    Equals,
    Exists,
    IdIn,
    In,
    Not,
    Prefix,
    Range,
)
from phasemesh.index.spec import StoredDocument, Version
from phasemesh.index.store import CollectionStore
from tests.unit.index.documents import FAST, SPEC, make_document, open_store

WHEN = datetime(2024, 2, 3, 4, 5, 6, 789012, tzinfo=timezone(timedelta(hours=2)))
VALUES: dict[str, list[Any]] = {
    "string": ["a", "A", "ab", "o'x\\", "", "é", "e\u0301", "' OR 1=1 --", "\U0001d518", "\uffee", None],
    "int64": [0, -1, 2**63 - 1, -(2**63), 2**53 + 1, 2**53, None],
    "double": [0.0, -0.0, 0.1, 5e-324, 1.7976931348623157e308, -2.5, 3, None],
    "bool": [True, False, None],
    "timestamp": [WHEN, WHEN.astimezone(UTC), WHEN + timedelta(microseconds=1),
                  datetime(1, 1, 1, tzinfo=UTC), datetime.max.replace(tzinfo=UTC), None],
    "string_list": [(), ("a",), ("a", "b"), ("b'", "a"), ("", "A"), ("abc", "é"), None],
}  # fmt: skip
#: What a list is asked for.
ELEMENTS = ["a", "ab", "b'", "", "z", "é"]


def meets(condition: Condition, document: StoredDocument) -> bool:
    """The rules, one document at a time."""
    match condition:
        case AllOf(conditions):
            return all(meets(one, document) for one in conditions)
        case AnyOf(conditions):
            return any(meets(one, document) for one in conditions)
        case Not(inner):
            return not meets(inner, document)
        case IdIn(ids):
            return document.id in ids
    value = document.fields.get(condition.field)
    if value is None:
        return False
    some = value if isinstance(value, tuple) else (value,)
    match condition:
        case Exists():
            return True
        case Equals(_, wanted):
            return wanted in some
        case In(_, wanted):
            return any(one in wanted for one in some)
        case Prefix(_, prefix):
            return any(str(one).startswith(prefix) for one in some)
        case Range():

            def key(one: Any) -> Any:
                return one.encode() if isinstance(one, str) else one

            return all(
                holds(key(value), key(end))
                for end, holds in (
                    (condition.at_least, lambda a, b: a >= b),
                    (condition.at_most, lambda a, b: a <= b),
                    (condition.above, lambda a, b: a > b),
                    (condition.below, lambda a, b: a < b),
                )
                if end is not None
            )  # fmt: skip


def probes(name: str) -> st.SearchStrategy[Any]:
    some = ELEMENTS if name == "string_list" else [value for value in VALUES[name] if value is not None]
    return st.sampled_from(some)


names = st.sampled_from(list(VALUES))
ordered = st.sampled_from(["string", "int64", "double", "timestamp"])
leaves: st.SearchStrategy[Condition] = st.one_of(
    names.flatmap(lambda name: st.builds(Equals, st.just(name), probes(name))),
    names.flatmap(lambda name: st.builds(In, st.just(name), st.lists(probes(name), max_size=3).map(tuple))),
    ordered.flatmap(lambda name: st.builds(Range, st.just(name), at_least=probes(name), below=probes(name))),
    ordered.flatmap(lambda name: st.builds(Range, st.just(name), at_most=probes(name))),
    ordered.flatmap(lambda name: st.builds(Range, st.just(name), above=probes(name))),
    st.builds(Exists, names),
    st.builds(Prefix, st.sampled_from(["string", "string_list"]), st.sampled_from(ELEMENTS)),
    st.builds(IdIn, st.lists(st.sampled_from(["d1", "d2", "d7", "nobody"]), max_size=3).map(tuple)),
)
conditions: st.SearchStrategy[Condition] = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(Not, inner),
        st.builds(AllOf, st.lists(inner, min_size=1, max_size=3).map(tuple)),
        st.builds(AnyOf, st.lists(inner, min_size=1, max_size=3).map(tuple)),
    ),
    max_leaves=6,
)


class Material:
    """Documents with all kinds of values in several fragments, some of them deleted."""

    def __init__(self, root: Path) -> None:
        self.store = open_store(root, options=replace(FAST, target_tokens=20))
        random = np.random.default_rng(0)
        documents = []
        for n in range(80):
            fields = {name: some[random.integers(len(some))] for name, some in VALUES.items()}
            if n % 3 == 0:
                del fields["string"]
            documents.append(make_document(f"d{n}", 2, **fields))
        self.store.upsert(documents)
        self.version = self.store.delete([f"d{n}" for n in range(0, 80, 7)]).version
        self.live = [document for n, document in enumerate(documents) if n % 7]


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return Material(tmp_path_factory.mktemp("filters"))


def filtered(store: CollectionStore, version: Version, condition: Condition) -> set[str]:
    ids = set()
    for fragment_id, mask in store.allowed_rows(version, condition).items():
        assert mask.any()
        rows = store.read_tokens(fragment_id, version).ids
        assert len(mask) == len(rows)
        ids |= {rows[row] for row in np.flatnonzero(mask)}
    assert store.count(version, condition) == len(ids)
    return ids


@settings(max_examples=250, deadline=None)
@given(condition=conditions)
def test_filters_find_what_plain_python_finds(material: Material, condition: Condition) -> None:
    expected = {document.id for document in material.live if meets(condition, document)}
    assert filtered(material.store, material.version, condition) == expected


@settings(max_examples=50, deadline=None)
@given(condition=conditions)
def test_a_filter_and_its_negation_split_the_documents(material: Material, condition: Condition) -> None:
    one = filtered(material.store, material.version, condition)
    other = filtered(material.store, material.version, Not(condition))
    assert not one & other
    assert one | other == {document.id for document in material.live}


def test_no_values_match_nothing(material: Material) -> None:
    assert filtered(material.store, material.version, In("int64", ())) == set()
    assert filtered(material.store, material.version, IdIn(())) == set()


def test_token_vectors_are_not_read_for_a_filter(material: Material, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    dataset = type(material.store._history.at(material.version))
    scanner = dataset.scanner

    def noted(self: Any, *args: Any, **options: Any) -> Any:
        asked.append(options["columns"])
        return scanner(self, *args, **options)

    monkeypatch.setattr(dataset, "scanner", noted)
    material.store.count(material.version, AllOf((Equals("bool", True), Not(IdIn(("d1",))))))
    assert sorted(asked[0]) == ["field_bool", "id"]


@settings(max_examples=20, deadline=None)
@given(condition=conditions)
def test_deletion_by_filter_deletes_what_meets_it_and_nothing_else(condition: Condition) -> None:
    with tempfile.TemporaryDirectory() as root:
        own = Material(Path(root))
        gone = {document.id for document in own.live if meets(condition, document)}
        deleted = own.store.delete_where(condition)
        assert (deleted.deleted, deleted.missing) == (len(gone), ())
        assert filtered(own.store, deleted.version, condition) == set()
        kept = {document.id for document in own.live} - gone
        assert filtered(own.store, deleted.version, Not(condition)) == kept
        assert len(filtered(own.store, own.version, condition)) == len(
            gone
        )  # the version before still has them
        assert (deleted.version == own.version) == (not gone)


def test_deletion_by_filter_is_one_commit(tmp_path: Path) -> None:
    own = Material(tmp_path)
    deleted = own.store.delete_where(Exists("bool"))
    assert deleted.deleted == sum(document.fields["bool"] is not None for document in own.live) > 20
    assert deleted.version.number == own.version.number + 1


def test_a_document_that_is_replaced_while_it_is_to_go_is_judged_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    store.upsert([make_document("stays", int64=1), make_document("goes", int64=1)])
    other = CollectionStore(tmp_path, "acme", Catalogue(tmp_path).get("acme", SPEC.name), FAST)
    judged = []
    honest = store_module.evaluate

    def meddled(*args: Any) -> Any:
        mask = honest(*args)
        judged.append(int(mask.sum()))
        if len(judged) == 1:  # between the look and the commit
            other.upsert([make_document("stays", int64=2), make_document("new", int64=1)])
        return mask

    monkeypatch.setattr(store_module, "evaluate", meddled)
    deleted = store.delete_where(Equals("int64", 1))
    left, _ = store.get(["stays", "goes", "new"], deleted.version)
    assert [document.id for document in left][:1] == ["stays"]
    assert "goes" not in [document.id for document in left]
    assert left[0].fields["int64"] == 2
    assert len(judged) >= 2


def nested(depth: int) -> Condition:
    condition: Condition = Exists("string")
    for _ in range(depth - 1):
        condition = Not(condition)
    return condition


@pytest.mark.parametrize(
    ("condition", "named"),
    [
        (Equals("colour", "red"), "filter.equals: 'colour'"),
        (Equals("id", "a"), "'id'"),
        (Equals("field_string", "x"), "field_string"),
        (Equals("String", "x"), "String"),
        (Equals("string` = 'x' OR 1=1 --", 1), "declared"),
        (Equals("string", None), "filter.equals.string"),
        (Equals("string", 1), "filter.equals.string"),
        (Equals("int64", "1"), "filter.equals.int64"),
        (Equals("int64", True), "int64"),
        (Equals("int64", 1.5), "int64"),
        (Equals("int64", 2**63), "int64"),
        (Equals("double", float("nan")), "double"),
        (Equals("double", float("inf")), "double"),
        (Equals("bool", "true"), "bool"),
        (Equals("timestamp", "2024-01-01"), "timestamp"),
        (Equals("string_list", ("a",)), "string_list"),
        (Equals("string", "\ud800"), "string"),
        (In("int64", (1, "2")), r"filter.in.int64\[1\]"),
        (Range("int64"), "filter.range.int64: has no end"),
        (Range("int64", above="1"), "filter.range.int64.above"),
        (Range("bool", above=True), "has no order"),
        (Range("string_list", above="a"), "has no order"),
        (Prefix("int64", "1"), "filter.prefix.int64: is no text"),
        (Prefix("string", "\ud800"), "filter.prefix.string"),
        (Exists("nope"), "filter.exists: 'nope'"),
        (IdIn(("a", 1)), r"filter.id_in\[1\]"),  # type: ignore[arg-type]  # on purpose
        (AllOf(()), "filter.all: lists no conditions"),
        (AnyOf(()), "filter.any: lists no conditions"),
        (AllOf((Exists("string"), Not(Exists("x")))), r"filter.all\[1\].not.exists: 'x'"),
        (nested(MAX_DEPTH + 1), "nest deeper"),
        (IdIn(("a",) * MAX_SIZE), "at most"),
    ],
)
def test_a_filter_that_does_not_fit_is_refused_by_name(
    material: Material, condition: Condition, named: str
) -> None:
    for refuse in (material.store.allowed_rows, material.store.count):
        with pytest.raises(FilterError, match=named):
            refuse(material.version, condition)
    with pytest.raises(FilterError, match=named):
        material.store.delete_where(condition)


def test_the_deepest_and_the_largest_filter_work(material: Material) -> None:
    exists = {document.id for document in material.live if document.fields.get("string") is not None}
    found = filtered(material.store, material.version, nested(MAX_DEPTH - 1))
    assert found == (exists if MAX_DEPTH % 2 == 0 else {one.id for one in material.live} - exists)
    many = tuple(f"d{n}" for n in range(MAX_SIZE - 1))
    assert filtered(material.store, material.version, IdIn(many)) == {one.id for one in material.live}
