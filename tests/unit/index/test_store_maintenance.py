"""Compaction, cleanup, tags, restore, leases and listing: what they change, and that documents stay the same."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import lance
import numpy as np
import pytest

from phasemesh.index.catalogue import Catalogue, dataset_path
from phasemesh.index.cleanup import replaced_versions
from phasemesh.index.commit import StoreOptions
from phasemesh.index.compaction import FragmentSize, Rewrite, plan_tail, plan_whole
from phasemesh.index.durability import Durability
from phasemesh.index.errors import (
    HeadMoved,
    InvalidTag,
    LeaseHeld,
    TagExists,
    TagNotFound,
    VersionGone,
    WriteConflict,
)
from phasemesh.index.filters import Equals
from phasemesh.index.leases import FileLease
from phasemesh.index.listing import ListPosition
from phasemesh.index.spec import Version
from phasemesh.index.store import CollectionStore
from tests.unit.index.documents import (
    DIM,
    EVERYTHING,
    FAST,
    SPEC,
    Clock,
    SyncLog,
    assert_same,
    by_id,
    make_document,
    open_store,
)

HOUR_S = 3600.0


def fill(store: CollectionStore, batches: int, each: int = 3) -> None:
    for batch in range(batches):
        store.upsert([make_document(f"{batch}-{n}", 1 + n) for n in range(each)])


def all_of(store: CollectionStore, version: Version) -> dict[str, object]:
    listed = store.list_page(version, ListPosition(), 10_000, EVERYTHING)
    return dict(by_id([one.document for one in listed]))


def truth(store: CollectionStore, version: Version, query: np.ndarray) -> list[tuple[str, float]]:
    """Float64 MaxSim over all live rows of the version's fragments, read as scorers read them."""
    scores = []
    for ref in store.fragments(version):
        rows = store.read_tokens(ref.fragment_id, version)
        gone = store.deleted_rows(version, ref.fragment_id)
        for row, document_id in enumerate(rows.ids):
            begin, end = rows.offsets[row], rows.offsets[row + 1]
            if gone[row] or begin == end:
                continue
            tokens = rows.vectors[begin:end].astype(np.float64)
            scores.append((document_id, float((query @ tokens.T).max(axis=1).sum())))
    return sorted(scores, key=lambda one: (-one[1], one[0]))


def size(fragment_id: int, tokens: int, deleted: int = 0) -> FragmentSize:
    return FragmentSize(fragment_id, max(1, tokens // 10), tokens, deleted)


def test_a_tail_is_merged_from_the_smallest_on_while_it_doubles() -> None:
    assert plan_tail([size(n, 100_000) for n in range(4)], 1_000_000, 4) == ()
    assert plan_tail([size(n, 100_000) for n in range(5)], 1_000_000, 4) == (0, 1, 2, 3, 4)
    # The large one waits until those before it weigh as much.
    sizes = [size(9, 400_000), *(size(n, 50_000) for n in range(5))]
    assert plan_tail(sizes, 1_000_000, 4) == (0, 1, 2, 3, 4)
    # What is at least half of the target is no tail.
    assert plan_tail([size(n, 500_000) for n in range(50)], 1_000_000, 4) == ()
    # Never beyond the target, never more fragments than asked for, never one alone.
    assert plan_tail([size(n, 400_000) for n in range(9)], 1_000_000, 4) == (0, 1)
    assert plan_tail([size(n, 10) for n in range(9)], 1_000_000, 4, most=3) == (0, 1, 2)
    assert plan_tail([size(0, 5_000), size(1, 499_000)], 1_000_000, 1) == (0, 1)


def test_a_whole_compaction_groups_small_fragments_and_rewrites_deletions() -> None:
    sizes = [size(0, 900), size(1, 300), size(2, 800, deleted=1), size(3, 400), size(4, 400), size(5, 0)]
    assert plan_whole(sizes, 1000) == [(2,), (1, 3), (4, 5)]
    assert plan_whole([size(0, 300)], 1000) == []
    assert plan_whole([size(0, 300, deleted=2)], 1000) == [(0,)]


def test_compaction_changes_no_document_and_no_score(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fill(store, 9)
    store.upsert([make_document("3-1", 2, seed=7), make_document("empty", 0)])
    before = store.delete(["0-0", "5-2"]).version
    query = np.random.default_rng(5).standard_normal((4, DIM))
    documents, scores = all_of(store, before), truth(store, before, query)

    done = store.maintenance.compact_tail(4)

    assert done.version.number > before.number
    assert (done.before, done.after, done.merged, done.conflicts) == (10, 1, 10, 0)
    assert truth(store, done.version, query) == scores
    for version in (before, done.version):
        found = all_of(store, version)
        assert found.keys() == documents.keys()
        for document_id, document in found.items():
            assert_same(document, documents[document_id])
    assert not store.deleted_rows(done.version, store.fragments(done.version)[0].fragment_id).any()
    assert store.stats(done.version).documents == len(documents)


def test_a_compaction_that_has_nothing_to_do_commits_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fill(store, 3)
    head = store.latest()
    assert store.maintenance.compact_tail(3).version == head
    assert store.maintenance.compact(wait_s=0).after == 1
    head = store.latest()
    assert store.maintenance.compact(wait_s=0).version == head == store.latest(refresh=True)


def test_a_write_to_a_planned_fragment_spoils_the_plan_and_another_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path)
    fill(store, 6)
    commit, groups = Rewrite.commit, []

    def disturbed(self: Rewrite) -> lance.LanceDataset | None:
        groups.append(len(self._result.original_fragments))
        if len(groups) <= 2:
            store.upsert([make_document("0-0", 4, seed=len(groups))])
        return commit(self)

    monkeypatch.setattr(Rewrite, "commit", disturbed)
    done = store.maintenance.compact_tail(2)
    assert done.conflicts == 2
    assert groups[0] < groups[1] or groups[0] == 6
    assert done.after <= 3
    found = all_of(store, done.version)
    assert_same(found["0-0"], make_document("0-0", 4, seed=2))
    assert len(found) == 18
    # What the spoilt plans wrote is gone again: every data file belongs to a version.
    head = lance.dataset(str(dataset_path(tmp_path, "acme", store.incarnation)))
    known = {path for batch in head.tracked_files() for path in batch.column("path").to_pylist()}
    assert {f"data/{path.name}" for path in (Path(head.uri) / "data").iterdir()} <= known

    monkeypatch.setattr(Rewrite, "commit", lambda self: None)
    fill(store, 6)
    with pytest.raises(WriteConflict):
        store.maintenance.compact_tail(2)


def test_writes_during_compaction_lose_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    expected: dict[str, int] = {}
    done = threading.Event()

    def compact() -> None:
        while not done.is_set():
            try:
                store.maintenance.compact_tail(3)
            except WriteConflict:
                continue

    compactor = threading.Thread(target=compact)
    compactor.start()
    random = np.random.default_rng(11)
    try:
        for step in range(60):
            ids = [f"new-{step}", f"d{random.integers(12)}"]
            store.upsert([make_document(one, 2, seed=step) for one in ids])
            expected.update(dict.fromkeys(ids, step))
            if step % 5 == 4:
                victim = f"d{random.integers(12)}"
                assert store.delete([victim]).deleted == int(victim in expected)
                expected.pop(victim, None)
    finally:
        done.set()
        compactor.join()
    found = all_of(store, store.latest())
    assert found.keys() == expected.keys()
    for document_id, step in expected.items():
        assert_same(found[document_id], make_document(document_id, 2, seed=step))
    assert store.maintenance.compact_tail(3).after <= 4


def test_files_of_a_compaction_are_forced_out_before_its_version_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = SyncLog(tmp_path)
    entry = Catalogue(tmp_path).create("acme", SPEC)
    store = CollectionStore(tmp_path, "acme", entry, StoreOptions(durability=Durability.DISK), sync=log)
    fill(store, 5)
    log.paths.clear()
    told = []
    advance = store._history.advance

    def noted(dataset: lance.LanceDataset) -> None:
        told.append((dataset.version, list(log.paths)))
        advance(dataset)

    store._history.advance = noted  # type: ignore[method-assign]
    commit = Rewrite.commit

    def checked(self: Rewrite) -> lance.LanceDataset | None:
        # Before the commit already, or another writer's commit on top of it would wait for these files.
        assert {str(path.relative_to(tmp_path)) for path in self.files} <= set(log.paths)
        return commit(self)

    monkeypatch.setattr(Rewrite, "commit", checked)
    version = store.maintenance.compact_tail(2).version
    synced = next(paths for number, paths in told if number == version.number)
    head = lance.dataset(str(dataset_path(tmp_path, "acme", entry.incarnation)), version=version.number)
    for batch in head.tracked_files(min_version=version.number):
        for path in batch.column("path").to_pylist():
            assert f"acme/{entry.incarnation}.lance/{path}" in synced
    assert synced[-1] == f"acme/{entry.incarnation}.lance"


COMPACT_LOOP = """
import sys
from pathlib import Path
from phasemesh.index.catalogue import Catalogue
from phasemesh.index.store import CollectionStore
from tests.unit.index.documents import FAST, SPEC, make_document

root, start = Path(sys.argv[1]), int(sys.argv[2])
store = CollectionStore(root, "acme", Catalogue(root).get("acme", SPEC.name), FAST)
for number in range(start, start + 100_000):
    store.upsert([make_document(f"{number}", 3)])
    print(number, flush=True)
    store.maintenance.compact_tail(1)
"""


@pytest.mark.slow
def test_a_process_killed_while_it_compacts_leaves_whole_versions_and_no_lease(tmp_path: Path) -> None:
    entry = Catalogue(tmp_path).create("acme", SPEC)
    CollectionStore(tmp_path, "acme", entry, FAST)
    path = str(dataset_path(tmp_path, "acme", entry.incarnation))
    acknowledged = -1
    for kill in range(8):
        process = subprocess.Popen(
            [sys.executable, "-c", COMPACT_LOOP, str(tmp_path), str(acknowledged + 1)],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            acknowledged = int(line)
            if acknowledged % 10 == kill:  # at another moment of the loop each time, by chance
                break
        os.kill(process.pid, signal.SIGKILL)
        acknowledged = max([acknowledged, *(int(line) for line in process.stdout if line.endswith("\n"))])
        process.wait()
        process.stdout.close()
        store = CollectionStore(tmp_path, "acme", entry, FAST)
        found = all_of(store, store.latest())
        wanted = {str(number) for number in range(acknowledged + 1)}
        assert wanted <= found.keys() <= wanted | {str(acknowledged + 1)}
        for document_id, document in found.items():
            assert_same(document, make_document(document_id, 3))
        assert lance.dataset(path).count_rows() == len(found)
        with FileLease(Path(path) / "writer.lease").hold(wait_s=0.0):
            pass


def test_a_lease_has_one_holder_and_is_waited_for(tmp_path: Path) -> None:
    clock, pauses = Clock(), []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        clock.now_s += seconds

    first = FileLease(tmp_path / "lease")
    second = FileLease(tmp_path / "lease", pause=pause, monotonic_s=clock)
    with first.hold(wait_s=0.0):
        with pytest.raises(LeaseHeld), second.hold(wait_s=0.0):
            pass
        assert not pauses
        with pytest.raises(LeaseHeld), second.hold(wait_s=0.1, shared=True):
            pass
        assert sum(pauses) == pytest.approx(0.1, abs=0.01)
    third = FileLease(tmp_path / "lease")
    with (
        first.hold(wait_s=0.0, shared=True),
        second.hold(wait_s=0.0, shared=True),
        pytest.raises(LeaseHeld),
        third.hold(wait_s=0.0),
    ):
        pass
    with second.hold(wait_s=0.0):
        pass


def test_whoever_maintains_a_collection_keeps_others_from_it_but_no_commit(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fill(store, 5)
    head = store.latest()
    with FileLease(dataset_path(tmp_path, "acme", store.incarnation) / "writer.lease").hold(wait_s=0.0):
        for refused in (
            lambda: store.maintenance.compact_tail(1),
            lambda: store.maintenance.compact(wait_s=0.0),
            lambda: store.maintenance.clean(0.0),
            lambda: store.maintenance.tag("t", head, move=False, wait_s=0.0),
            lambda: store.maintenance.restore(head, head, wait_s=0.0),
        ):
            with pytest.raises(LeaseHeld):
                refused()
        assert store.upsert([make_document("x")]).version.number == head.number + 1


def test_a_restored_version_is_a_new_one_over_the_same_files(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fill(store, 3)
    old = store.latest()
    documents, files = all_of(store, old), [ref.data_key for ref in store.fragments(old)]
    store.delete(["0-0"])
    head = store.upsert([make_document("1-1", 2, seed=9), make_document("new")]).version

    for stale in (old, Version(old.incarnation, head.number - 1)):
        with pytest.raises(HeadMoved):
            store.maintenance.restore(old, stale, wait_s=0.0)
        assert store.latest(refresh=True) == head
    restored = store.maintenance.restore(old, head, wait_s=0.0)

    assert restored == Version(head.incarnation, head.number + 1) == store.latest()
    found = all_of(store, restored)
    assert found.keys() == documents.keys()
    for document_id, document in found.items():
        assert_same(document, documents[document_id])
    assert [ref.data_key for ref in store.fragments(restored)] == files
    assert all_of(store, head).keys() == (documents.keys() - {"0-0"}) | {"new"}
    # Writes go on, in fragments that no version before had.
    ids = {ref.fragment_id for ref in store.fragments(head)}
    after = store.upsert([make_document("later")]).version
    assert after.number == restored.number + 1
    assert max(ref.fragment_id for ref in store.fragments(after)) > max(ids)


def test_a_compaction_since_does_not_stand_in_the_way_of_a_restore(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fill(store, 3)
    old = store.latest()
    head = store.delete(["0-0"]).version
    compacted = store.maintenance.compact(wait_s=0.0).version
    assert compacted.number > head.number
    restored = store.maintenance.restore(old, head, wait_s=0.0)
    assert restored.number == compacted.number + 1
    assert store.count(restored) == 9


def test_a_writer_that_missed_a_restore_writes_on_top_of_it(tmp_path: Path) -> None:
    entry = Catalogue(tmp_path).create("acme", SPEC)
    store = CollectionStore(tmp_path, "acme", entry, FAST)
    other = CollectionStore(tmp_path, "acme", entry, replace(FAST, refresh_ms=1e9))
    first = store.upsert([make_document("a")]).version
    head = store.upsert([make_document("b")]).version
    assert other.latest(refresh=True) == head
    restored = store.maintenance.restore(first, head, wait_s=0.0)
    written = other.upsert([make_document("c")]).version
    assert written.number == restored.number + 1
    assert all_of(other, written).keys() == {"a", "c"}
    head = store.latest(refresh=True)
    restored = store.maintenance.restore(first, head, wait_s=0.0)
    assert other.delete(["a"]).version.number == restored.number + 1


def test_tags_name_versions_and_are_checked(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    first = store.upsert([make_document("a")]).version
    head = store.upsert([make_document("b")]).version
    tend = store.maintenance
    tend.tag("v1", first, move=False, wait_s=0.0)
    assert tend.tagged("v1") == first
    for version in (first, head):
        with pytest.raises(TagExists):
            tend.tag("v1", version, move=False, wait_s=0.0)
    tend.tag("v1", head, move=True, wait_s=0.0)
    assert tend.tagged("v1") == head
    assert store.count(tend.restore("v1", head, wait_s=0.0)) == 2
    for bad in ("", ".a", "a.", "a..b", "a/b", "a.lock", "x" * 129, "ä"):
        with pytest.raises(InvalidTag):
            tend.tag(bad, head, move=True, wait_s=0.0)
        with pytest.raises(InvalidTag):
            tend.tagged(bad)
    with pytest.raises(VersionGone):
        tend.tag("v2", Version(head.incarnation, 99), move=False, wait_s=0.0)
    tend.untag("v1", wait_s=0.0)
    for missing in (lambda: tend.untag("v1", wait_s=0.0), lambda: tend.tagged("v1")):
        with pytest.raises(TagNotFound):
            missing()


def test_a_version_is_replaced_when_the_next_one_comes() -> None:
    stamps = [(3, 30.0), (1, 10.0), (2, 20.0), (7, 70.0)]
    assert replaced_versions(stamps, 30.0, []) == [1]
    assert replaced_versions(stamps, 30.1, []) == [1, 2]
    # The newest stays however old it is, and so does what is kept.
    assert replaced_versions(stamps, 1e9, [2]) == [1, 3]


def test_cleanup_keeps_young_and_tagged_versions(tmp_path: Path) -> None:
    clock = Clock()
    store = open_store(tmp_path)
    fill(store, 4)
    tagged = Version(store.incarnation, 3)
    store.maintenance.tag("kept", tagged, move=False, wait_s=0.0)
    head = store.maintenance.compact(wait_s=0.0).version
    everything = range(1, head.number + 1)
    stamps = {found["version"]: found["timestamp"].timestamp() for found in store._history.head().versions()}

    # Nothing was replaced more than an hour ago yet.
    clock.now_s = stamps[2] + HOUR_S - 1.0
    assert store.maintenance.clean(HOUR_S, clock).versions == ()
    clock.now_s = stamps[head.number] + HOUR_S + 1.0
    store.count(Version(store.incarnation, 2))  # a handle that is kept doesn't keep the version
    cleaned = store.maintenance.clean(HOUR_S, clock)
    assert set(cleaned.versions) == set(everything) - {tagged.number, head.number}
    assert cleaned.bytes > 0
    for number in cleaned.versions:
        with pytest.raises(VersionGone):
            store.resolve(at_version=Version(store.incarnation, number))
    assert len(all_of(store, tagged)) == 6
    assert len(all_of(store, head)) == 12
    store.maintenance.untag("kept", wait_s=0.0)
    assert store.maintenance.clean(HOUR_S, clock).versions == (tagged.number,)
    assert len(all_of(store, head)) == 12


def test_another_process_cleanup_is_noticed(tmp_path: Path) -> None:
    entry = Catalogue(tmp_path).create("acme", SPEC)
    clock = Clock()
    reader = CollectionStore(tmp_path, "acme", entry, FAST, monotonic_s=clock)
    store = CollectionStore(tmp_path, "acme", entry, FAST)
    old = store.upsert([make_document("a")]).version
    store.upsert([make_document("a", seed=1)])
    reader.latest(refresh=True)
    assert reader.count(old) == 1
    store.maintenance.clean(-HOUR_S)
    clock.now_s = 61.0
    with pytest.raises(VersionGone):
        reader.count(old)


def test_cleanup_removes_files_of_no_version_once_they_are_old(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    fill(store, 3)
    folder = dataset_path(tmp_path, "acme", store.incarnation)
    left = folder / "data" / "0123456789.lance"
    left.write_bytes(b"half a file")
    now_s = left.stat().st_mtime
    assert store.maintenance.clean(HOUR_S, Clock(now_s + HOUR_S - 1.0)).orphans == 0
    assert left.exists()
    assert store.maintenance.clean(HOUR_S, Clock(now_s + HOUR_S + 1.0)).orphans == 1
    assert not left.exists()
    assert len(all_of(store, store.latest())) == 9


def test_pages_follow_one_another_in_the_order_of_storage(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for batch in range(4):
        store.upsert([make_document(f"{batch}-{n}", string="even" if n % 2 else "odd") for n in range(5)])
    version = store.delete(["0-1", "2-0"]).version
    wanted = [f"{b}-{n}" for b in range(4) for n in range(5) if f"{b}-{n}" not in ("0-1", "2-0")]
    for limit in (1, 2, 3, 7, 18, 100):
        for equals, expected in (
            (None, wanted),
            (Equals("string", "even"), [one for one in wanted if int(one[-1]) % 2]),
            (Equals("string", "none"), []),
        ):
            found: list[str] = []
            start = ListPosition()
            while store.any_from(version, start, equals):
                page = store.list_page(version, start, limit, frozenset(), equals)
                assert 0 < len(page) <= limit
                found.extend(one.document.id for one in page)
                start = page[-1].after
                # Whatever is written meanwhile, the version stays what it was.
                store.upsert([make_document("between", seed=len(found))])
            assert found == expected
    page = store.list_page(version, ListPosition(), 100, EVERYTHING)
    for one in page:
        string = "even" if int(one.document.id[-1]) % 2 else "odd"
        assert_same(one.document, make_document(one.document.id, string=string))


WRITE_LOOP = """
import sys
from pathlib import Path
from phasemesh.index.catalogue import Catalogue
from phasemesh.index.store import CollectionStore
from tests.unit.index.documents import FAST, SPEC, make_document

root, name = Path(sys.argv[1]), sys.argv[2]
store = CollectionStore(root, "acme", Catalogue(root).get("acme", SPEC.name), FAST)
for number in range(40):
    print(store.upsert([make_document(f"{name}-{number}", 2)]).version.number, flush=True)
"""


@pytest.mark.slow
def test_restores_among_writers_of_other_processes_lose_no_later_write(tmp_path: Path) -> None:
    entry = Catalogue(tmp_path).create("acme", SPEC)
    store = CollectionStore(tmp_path, "acme", entry, FAST)
    base = store.upsert([make_document("base")]).version
    command = [sys.executable, "-c", WRITE_LOOP, str(tmp_path)]
    writers = [subprocess.Popen([*command, name], stdout=subprocess.PIPE, text=True) for name in "xy"]
    restored = []
    while any(writer.poll() is None for writer in writers):
        try:
            head = store.latest(refresh=True)
            version = store.maintenance.restore(base, head, wait_s=0.0)
        except HeadMoved:
            continue
        assert version.number == head.number + 1
        restored.append(version.number)
    assert len(restored) >= 3
    written = {}
    for name, writer in zip("xy", writers, strict=True):
        assert writer.returncode == 0
        assert writer.stdout is not None
        written.update({f"{name}-{n}": int(line) for n, line in enumerate(writer.stdout)})
        writer.stdout.close()
    assert len(written) == 80
    # Whatever was acknowledged after a restore, and nothing from before it, is in the versions up to the next.
    head = store.latest(refresh=True)
    for begin, end in zip([base.number, *restored], [*restored, head.number + 1], strict=True):
        found = set(all_of(store, Version(base.incarnation, end - 1)))
        expected = {one for one, number in written.items() if begin < number < end}
        assert found == {"base"} | expected
