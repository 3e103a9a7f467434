"""Commits: what is durable before the acknowledgement, shared commits, and conflicts."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from phasemesh.index.catalogue import Catalogue
from phasemesh.index.commit import StoreOptions
from phasemesh.index.durability import Durability
from phasemesh.index.errors import WriteConflict
from phasemesh.index.spec import Version
from phasemesh.index.store import CollectionStore
from tests.unit.index.documents import (
    EVERYTHING,
    FAST,
    SPEC,
    SyncLog,
    assert_same,
    make_document,
)


def test_a_write_that_keeps_losing_is_a_conflict(tmp_path: Path) -> None:
    entry = Catalogue(tmp_path).create("acme", SPEC)
    patient = CollectionStore(tmp_path, "acme", entry, FAST)
    hasty = CollectionStore(tmp_path, "acme", entry, replace(FAST, conflict_retries=0, refresh_ms=1e9))
    patient.upsert([make_document("a", seed=1)])
    with pytest.raises(WriteConflict):
        hasty.upsert([make_document("a", seed=2)])
    assert_same(
        patient.get(["a"], patient.latest(refresh=True), EVERYTHING)[0][0], make_document("a", seed=1)
    )
    hasty.latest(refresh=True)
    assert hasty.count(hasty.upsert([make_document("a", seed=3)]).version) == 1


def test_what_is_synced_before_a_write_is_acknowledged(tmp_path: Path) -> None:
    log = SyncLog(tmp_path)
    entry = Catalogue(tmp_path).create("acme", SPEC)
    options = StoreOptions(durability=Durability.DISK)
    store = CollectionStore(tmp_path, "acme", entry, options, sync=log)
    other = CollectionStore(tmp_path, "acme", entry, FAST)
    base = f"acme/{entry.incarnation}.lance"
    folders = {f"{base}/_versions", f"{base}/_transactions", base}
    kinds = ("data/", "_deletions/", "_transactions/", "_versions/")

    def synced() -> list[str]:
        """Synced since the last call: files by the kind of their folder, folders by name; none twice."""
        paths, log.paths[:] = list(log.paths), []
        assert len(set(paths)) == len(paths)
        names = [path.removeprefix(f"{base}/") for path in paths]
        return [next((kind for kind in kinds if name.startswith(kind)), name) for name in names]

    assert set(log.paths) >= folders
    log.paths.clear()

    store.upsert([make_document("a"), make_document("b")])
    on_disk = {str(path.relative_to(tmp_path)) for path in (tmp_path / base / "data").iterdir()}
    assert set(log.paths) >= on_disk
    assert synced() == ["_transactions/", "data/", "_versions/", "_transactions", "data", "_versions", base]
    store.delete(["a"])
    assert sorted(synced()) == sorted(
        ["_transactions/", "_deletions/", "_versions/", "_transactions", "_deletions", "_versions", base]
    )
    # Another process's commit that isn't durable yet: ours stands on it, so its data is forced out as well.
    other.upsert([make_document("c")])
    assert synced() == []
    store.upsert([make_document("d")])
    paths = synced()
    assert paths.count("data/") == 2
    assert paths.index("_versions/") > max(position for position, kind in enumerate(paths) if kind == "data/")


def test_writers_that_wait_share_one_commit(tmp_path: Path) -> None:
    slow, release = threading.Event(), threading.Event()

    def sync(path: Path) -> None:
        if armed and path.suffix == ".manifest" and not release.is_set():
            slow.set()
            assert release.wait(30.0)

    armed: list[int] = []
    entry = Catalogue(tmp_path).create("acme", SPEC)
    options = StoreOptions(target_tokens=20)
    store = CollectionStore(tmp_path, "acme", entry, options, sync=sync)
    armed.append(1)
    versions: dict[str, int] = {}

    def write(name: str, tokens: int) -> None:
        done = store.upsert([make_document(name, tokens), make_document("hot", 0, seed=tokens)])
        versions[name] = done.version.number

    threads = [threading.Thread(target=write, args=("first", 1))]
    threads[0].start()
    assert slow.wait(30.0)  # the first commit is under way and can't end
    # 3 + 5 + 6 fit one fragment, 9 begins the next
    for waiting, (name, tokens) in enumerate([("b", 3), ("c", 5), ("d", 6), ("e", 9)], start=1):
        threads.append(threading.Thread(target=write, args=(name, tokens)))
        threads[-1].start()
        while store.waiting_upserts < waiting:
            threading.Event().wait(0.001)
    release.set()
    for thread in threads:
        thread.join()
    born = versions["first"]
    assert versions == {"first": born, "b": born + 1, "c": born + 1, "d": born + 1, "e": born + 2}
    latest = store.latest()
    assert latest.number == born + 2
    assert store.count(latest) == 6
    for number, seed in ((born, 1), (born + 1, 6), (born + 2, 9)):  # the one that came last
        [hot] = store.get(["hot"], Version(entry.incarnation, number), EVERYTHING)[0]
        assert_same(hot, make_document("hot", 0, seed=seed))


def test_a_failed_sync_is_not_acknowledged(tmp_path: Path) -> None:
    def refuse(path: Path) -> None:
        if path.suffix == ".manifest" and armed:
            raise OSError(5, "Input/output error", str(path))

    armed: list[int] = []
    entry = Catalogue(tmp_path).create("acme", SPEC)
    store = CollectionStore(tmp_path, "acme", entry, StoreOptions(), sync=refuse)
    before = store.latest()
    armed.append(1)
    with pytest.raises(OSError, match="Input/output"):
        store.upsert([make_document("a")])
    assert store.latest() == before
