"""Versions: exact, kept, fresh within the interval, and refused when foreign or gone."""

from __future__ import annotations

import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import lance
import pytest

from phasemesh.index.catalogue import Catalogue, dataset_path
from phasemesh.index.errors import VersionGone, VersionNotReached
from phasemesh.index.spec import Version
from phasemesh.index.store import CollectionStore
from tests.unit.index.documents import (
    EVERYTHING,
    FAST,
    SPEC,
    Clock,
    assert_same,
    make_document,
    open_store,
)


def test_the_last_of_a_batch_counts_and_a_later_batch_replaces(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    first = store.upsert([make_document("a", seed=1), make_document("b"), make_document("a", seed=2)])
    assert (first.stored, first.superseded) == (2, (0,))
    second = store.upsert([make_document("a", seed=3)])
    assert store.count(second.version) == 2
    assert_same(store.get(["a"], second.version, EVERYTHING)[0][0], make_document("a", seed=3))
    assert_same(store.get(["a"], first.version, EVERYTHING)[0][0], make_document("a", seed=2))


def test_versions_are_exact_and_foreign_ones_refused(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    version = store.upsert([make_document("a")]).version
    assert store.resolve() == version
    assert store.resolve(at_version=version) == version
    born = Version(store.incarnation, 1)
    assert store.count(store.resolve(at_version=born)) == 0
    assert store.resolve(min_version=born) == version
    for number in (0, -1, version.number + 1, 2**40):
        with pytest.raises(VersionGone):
            store.resolve(at_version=Version(store.incarnation, number))
    with pytest.raises(VersionNotReached):
        store.resolve(min_version=Version(store.incarnation, version.number + 1))
    for foreign in (Version("0" * 32, 1), Version("", version.number)):
        with pytest.raises(VersionGone):
            store.resolve(at_version=foreign)
        with pytest.raises(VersionGone):
            store.resolve(min_version=foreign)
        with pytest.raises(VersionGone):
            store.count(foreign)
    with pytest.raises(VersionGone):
        store.read_tokens(77, version)


def test_a_version_that_was_cleaned_up_is_gone(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    old = store.upsert([make_document("a")]).version
    new = store.upsert([make_document("a", seed=1)]).version
    lance.dataset(str(dataset_path(tmp_path, "acme", store.incarnation))).cleanup_old_versions(timedelta(0))
    entry = Catalogue(tmp_path).get("acme", SPEC.name)
    again = CollectionStore(tmp_path, "acme", entry, FAST)
    with pytest.raises(VersionGone, match="no longer"):
        again.resolve(at_version=old)
    assert again.count(new) == 1


def test_others_commits_are_seen_within_the_refresh_interval(tmp_path: Path) -> None:
    entry = Catalogue(tmp_path).create("acme", SPEC)
    clock = Clock()
    options = replace(FAST, refresh_ms=1000.0)
    ours = CollectionStore(tmp_path, "acme", entry, options, monotonic_s=clock)
    theirs = CollectionStore(tmp_path, "acme", entry, options, monotonic_s=clock)
    born = ours.latest()
    version = ours.upsert([make_document("a")]).version
    assert ours.latest() == version  # our own at once
    clock.now_s = 0.999
    assert theirs.latest() == born
    assert theirs.resolve(min_version=version) == version  # asked for, so looked for
    newer = ours.upsert([make_document("b")]).version
    assert theirs.latest() == version
    clock.now_s = 2.0
    assert theirs.latest() == newer
    exact = ours.upsert([make_document("e")]).version
    assert theirs.latest() == newer
    assert theirs.count(exact) == 3  # an exact version is looked for at once
    last = ours.upsert([make_document("c")]).version
    # A write on a stale base still lands on top of all others.
    assert theirs.upsert([make_document("d")]).version.number == last.number + 1
    assert theirs.count(theirs.latest()) == 5


def test_readers_keep_their_version_while_others_write(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.upsert([make_document(f"d{n}", 2, seed=0) for n in range(5)])
    failures: list[BaseException] = []
    stop = threading.Event()

    def read() -> None:
        try:
            while not stop.is_set():
                version = store.latest()
                found, _ = store.get([f"d{n}" for n in range(5)], version, EVERYTHING)
                # Every version holds all five of one and the same round.
                assert len({document.text.split()[1] for document in found if document.text}) == 1
                assert len(found) == store.count(version) == 5
        except BaseException as error:
            failures.append(error)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for seed in range(1, 15):
        store.upsert([make_document(f"d{n}", 2, seed=seed) for n in range(5)])
    stop.set()
    for reader in readers:
        reader.join()
    assert failures == []


def test_a_restart_finds_everything(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    version = store.upsert([make_document("a"), make_document("b")]).version
    entry = Catalogue(tmp_path).get("acme", SPEC.name)
    again = CollectionStore(tmp_path, "acme", entry, FAST)
    assert again.latest() == version
    assert again.fragments(version) == store.fragments(version)
    assert_same(again.get(["a"], version, EVERYTHING)[0][0], make_document("a"))
