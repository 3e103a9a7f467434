"""Filters against brute force, and inputs that must never make one vanish."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import numpy as np
import pytest

from phasemesh.index.errors import FilterError
from phasemesh.index.spec import Version
from phasemesh.index.store import CollectionStore
from tests.unit.index.documents import (
    FAST,
    make_document,
    open_store,
)

WHEN = datetime(2024, 2, 3, 4, 5, 6, 789012, tzinfo=timezone(timedelta(hours=2)))


def _meets(value: object, probe: object) -> bool:
    return probe in value if isinstance(value, tuple) else value is not None and value == probe


def _filtered(store: CollectionStore, version: Version, equals: dict[str, object]) -> set[str]:
    ids = set()
    masks = store.allowed_rows(version, equals)  # type: ignore[arg-type]  # wrong types are tried too
    for fragment_id, mask in masks.items():
        assert mask.any()
        names = store.read_tokens(fragment_id, version).ids
        assert len(mask) == len(names)
        ids |= {names[row] for row in np.flatnonzero(mask)}
    assert store.count(version, equals) == len(ids)  # type: ignore[arg-type]  # as above
    return ids


def test_filters_find_what_brute_force_finds(tmp_path: Path) -> None:
    store = open_store(tmp_path, options=replace(FAST, target_tokens=20))
    values: dict[str, list[object]] = {
        "string": ["a", "A", "o'x\\", "", "é", "e\u0301", "' OR 1=1 --", None],
        "int64": [0, -1, 2**63 - 1, -(2**63), 2**53 + 1, 2**53, None],
        "double": [0.0, -0.0, 0.1, 5e-324, 1.7976931348623157e308, -2.5, 3, None],
        "bool": [True, False, None],
        "timestamp": [WHEN, WHEN.astimezone(UTC), WHEN + timedelta(microseconds=1),
                      datetime(1, 1, 1, tzinfo=UTC), datetime.max.replace(tzinfo=UTC), None],
        "string_list": [(), ("a",), ("a", "b"), ("b'", "a"), ("", "A"), None],
    }  # fmt: skip
    random = np.random.default_rng(0)
    documents = {}
    for n in range(80):
        fields = {name: some[random.integers(len(some))] for name, some in values.items()}
        document = make_document(f"d{n}", 2, **fields)  # type: ignore[arg-type]  # from the lists above
        documents[document.id] = document
    store.upsert(list(documents.values()))
    version = store.delete([f"d{n}" for n in range(0, 80, 7)]).version
    live = [document for n, document in enumerate(documents.values()) if n % 7]
    tried = 0
    for name, some in values.items():
        # A list is asked for one of its elements.
        probes: list[object] = ["a", "b'", "", "z"] if name == "string_list" else some
        for probe in (probe for probe in probes if probe is not None):
            expected = {document.id for document in live if _meets(document.fields[name], probe)}
            assert _filtered(store, version, {name: probe}) == expected, (name, probe)
            both = {document.id for document in live if document.id in expected and document.fields["bool"]}
            if name != "bool":
                assert _filtered(store, version, {name: probe, "bool": True}) == both
            tried += bool(expected)
    assert tried >= 20
    assert _filtered(store, version, {}) == {document.id for document in live}


def test_a_filter_never_vanishes(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    version = store.upsert([make_document("a", string="x", int64=1)]).version
    assert store.allowed_rows(version, {"string": "nothing like it"}) == {}
    assert store.count(version, {"string": "nothing like it"}) == 0
    bad: list[tuple[dict[str, object], str]] = [
        ({"colour": "red"}, "colour"),
        ({"id": "a"}, "id"),
        ({"field_string": "x"}, "field_string"),
        ({"String": "x"}, "String"),
        ({"string": "x", "": 1}, "''"),
        ({"string` = 'x' OR 1=1 --": 1}, "declared"),
        ({"string": None}, "string"),
        ({"string": 1}, "string"),
        ({"int64": "1"}, "int64"),
        ({"int64": True}, "int64"),
        ({"int64": 1.5}, "int64"),
        ({"int64": 2**63}, "int64"),
        ({"double": float("nan")}, "double"),
        ({"double": float("inf")}, "double"),
        ({"bool": "true"}, "bool"),
        ({"timestamp": "2024-01-01"}, "timestamp"),
        ({"string_list": ("a",)}, "string_list"),
        ({"string": "\ud800"}, "string"),
    ]
    for equals, named in bad:
        for read in (store.allowed_rows, store.count):
            with pytest.raises(FilterError, match=named):
                read(version, equals)  # type: ignore[arg-type]  # wrong types on purpose
