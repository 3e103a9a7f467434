"""The store against a dictionary: any sequence of writes and maintenance, and every version ever made stays as it was."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from phasemesh.index.cleanup import Cleaned
from phasemesh.index.filters import Equals
from phasemesh.index.listing import ListPosition
from phasemesh.index.spec import StoredDocument, Version
from tests.unit.index.documents import EVERYTHING, assert_same, by_id, make_document, open_store

IDS = st.sampled_from(["a", "b", "c", "d'", "\\e", "f\0", "g" * 512])
BATCHES = st.lists(st.tuples(IDS, st.integers(0, 4), st.integers(0, 9)), max_size=5)


class StoreAgainstDict(RuleBasedStateMachine):
    """Runs the same steps on both and keeps a copy of the dictionary per version."""

    @initialize()
    def begin(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.store = open_store(Path(self.folder.name))
        self.model: dict[str, StoredDocument] = {}
        self.history: dict[Version, dict[str, StoredDocument]] = {self.store.latest(): {}}

    @rule(batch=BATCHES)
    def upsert(self, batch: list[tuple[str, int, int]]) -> None:
        documents = [make_document(name, tokens, seed, int64=seed) for name, tokens, seed in batch]
        done = self.store.upsert(documents)
        distinct = {document.id for document in documents}
        assert done.stored == len(distinct)
        assert len(done.superseded) == len(documents) - len(distinct)
        self.model |= by_id(documents)
        self.history[done.version] = dict(self.model)

    @rule(ids=st.lists(IDS, max_size=4))
    def delete(self, ids: list[str]) -> None:
        done = self.store.delete(ids)
        assert done.deleted == len(set(ids) & set(self.model))
        assert set(done.missing) == set(ids) - set(self.model)
        for name in ids:
            self.model.pop(name, None)
        self.history[done.version] = dict(self.model)

    @rule(small=st.integers(1, 3))
    def compact_tail(self, small: int) -> None:
        done = self.store.maintenance.compact_tail(small)
        assert done.after <= small
        self.history[done.version] = dict(self.model)

    @rule()
    def compact(self) -> None:
        done = self.store.maintenance.compact(wait_s=0.0)
        assert done.after <= 1
        self.history[done.version] = dict(self.model)
        for ref in self.store.fragments(done.version):
            assert not self.store.deleted_rows(done.version, ref.fragment_id).any()

    @rule(pick=st.integers(0, 1000))
    def restore(self, pick: int) -> None:
        version, documents = list(self.history.items())[pick % len(self.history)]
        restored = self.store.maintenance.restore(version, self.store.latest(), wait_s=0.0)
        assert restored.number == max(one.number for one in self.history) + 1
        self.model = dict(documents)
        self.history[restored] = dict(self.model)

    @rule()
    def clean(self) -> None:
        # Everything is younger than an hour.
        assert self.store.maintenance.clean(3600.0) == Cleaned()

    @rule(limit=st.integers(1, 4))
    def list_page_by_page(self, limit: int) -> None:
        version = self.store.latest()
        found: list[StoredDocument] = []
        start = ListPosition()
        while page := self.store.list_page(version, start, limit, EVERYTHING):
            found.extend(one.document for one in page)
            start = page[-1].after
            assert self.store.any_from(version, start) == (len(found) < len(self.model))
        assert len(found) == len(self.model)
        for document in found:
            assert_same(document, self.model[document.id])

    @rule(pick=st.integers(0, 1000), seed=st.integers(0, 9))
    def read_some_version(self, pick: int, seed: int) -> None:
        version, expected = list(self.history.items())[pick % len(self.history)]
        self._compare(version, expected)
        wanted = {name for name, document in expected.items() if document.fields["int64"] == seed}
        assert self.store.count(version, Equals("int64", seed)) == len(wanted)
        allowed = set()
        for ref in self.store.fragments(version):
            rows = self.store.read_tokens(ref.fragment_id, version)
            assert (len(rows.ids), len(rows.vectors)) == (ref.physical_rows, ref.tokens)
            mask = self.store.allowed_rows(version, Equals("int64", seed)).get(ref.fragment_id)
            allowed |= {rows.ids[row] for row in np.flatnonzero(mask)} if mask is not None else set()
            live = np.flatnonzero(~self.store.deleted_rows(version, ref.fragment_id))
            for row in live:
                stored = rows.vectors[rows.offsets[row] : rows.offsets[row + 1]]
                assert stored.tobytes() == expected[rows.ids[row]].tokens.tobytes()
        assert allowed == wanted

    @invariant()
    def newest_is_the_model(self) -> None:
        self._compare(self.store.latest(), self.model)

    def _compare(self, version: Version, expected: dict[str, StoredDocument]) -> None:
        found, missing = self.store.get(["nobody", *expected], version, EVERYTHING)
        assert missing == ["nobody"]
        assert [document.id for document in found] == list(expected)
        for document in found:
            assert_same(document, expected[document.id])
        assert self.store.count(version) == len(expected)

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.folder.cleanup()


TestStoreAgainstDict = StoreAgainstDict.TestCase
TestStoreAgainstDict.settings = settings(
    max_examples=15, stateful_step_count=12, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
