"""The catalogue: put-if-absent, hostile names, incarnations, paging, and data that outlives its entry."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from phasemesh.index.catalogue import Catalogue, dataset_path
from phasemesh.index.errors import (
    CatalogueCorrupt,
    CollectionExists,
    CollectionNotFound,
    DataMissing,
    InvalidName,
    InvalidSpec,
    StorageFailure,
    VersionGone,
)
from phasemesh.index.spec import (
    MAX_FIELDS,
    Codec,
    CollectionSpec,
    FieldDeclaration,
    FieldType,
    Normalize,
    Reduction,
)
from phasemesh.index.store import CollectionStore
from tests.unit.index.documents import FAST, SPEC, SyncLog, make_document

HOSTILE = [
    "", ".", "..", "../other", "a/b", "/etc/passwd", "a\\b/..", "nul\0", "new\nline", "x" * 129, "x" * 100_000,
    "café", "\ufb01", "\u0430", "a b", "a\u202eb", "%2e%2e", "~root", "*", "\ud800",
]  # fmt: skip


def plain(name: str) -> CollectionSpec:
    return CollectionSpec(name, "", "", 8)


def test_what_was_created_comes_back_whole(tmp_path: Path) -> None:
    spec = CollectionSpec(
        "all-of.it_1", "colbert", "ab" * 32, 128, Codec.INT4,
        tuple(FieldDeclaration(f"f_{t}", t) for t in FieldType), Normalize.REQUIRE, Reduction.MEAN, 384,
    )  # fmt: skip
    created = Catalogue(tmp_path, now_unix_ns=lambda: 123).create("acme", spec)
    assert created.spec == spec
    assert created.created_unix_ns == 123
    assert Catalogue(tmp_path).get("acme", "all-of.it_1") == created
    assert Catalogue(tmp_path).list_collections("acme") == ([created], None)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_name_is_refused_everywhere(tmp_path: Path, name: str) -> None:
    root = tmp_path / "root"
    catalogue = Catalogue(root)
    for call in (
        lambda: catalogue.create("acme", plain(name)),
        lambda: catalogue.get("acme", name),
        lambda: catalogue.delete("acme", name),
        lambda: catalogue.create(name, plain("ok")),
        lambda: catalogue.get(name, "ok"),
        lambda: catalogue.list_collections(name),
        lambda: catalogue.delete(name, "ok"),
        lambda: dataset_path(root, name, "0" * 32),
    ):
        with pytest.raises(InvalidName, match=r"^(tenant|collection): "):
            call()
    assert not root.exists()


@pytest.mark.parametrize("name", ["...", ".hidden", "-rf", "a.json", "a.tmp", "x" * 128, "_catalogue"])
def test_an_odd_but_harmless_name_works(tmp_path: Path, name: str) -> None:
    catalogue = Catalogue(tmp_path)
    entry = catalogue.create("acme", plain(name))
    assert catalogue.get("acme", name) == entry
    assert catalogue.list_collections("acme")[0] == [entry]
    assert catalogue.delete("acme", name) == entry


def test_tenants_do_not_see_each_other(tmp_path: Path) -> None:
    catalogue = Catalogue(tmp_path)
    ours, theirs = catalogue.create("acme", plain("c")), catalogue.create("umbrella", plain("c"))
    assert ours.incarnation != theirs.incarnation
    catalogue.delete("acme", "c")
    assert catalogue.list_collections("acme") == ([], None)
    assert catalogue.get("umbrella", "c") == theirs
    with pytest.raises(CollectionNotFound):
        catalogue.get("nobody", "c")
    assert catalogue.list_collections("nobody") == ([], None)


def test_of_many_creators_one_wins_and_the_entry_stays_its(tmp_path: Path) -> None:
    barrier = threading.Barrier(8)
    created, refused = [], []

    def create() -> None:
        barrier.wait()
        try:
            created.append(Catalogue(tmp_path).create("acme", plain("c")))
        except CollectionExists:
            refused.append(1)

    threads = [threading.Thread(target=create) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(created), len(refused)) == (1, 7)
    assert Catalogue(tmp_path).get("acme", "c") == created[0]
    assert [path.name for path in (tmp_path / "acme" / "_catalogue").iterdir()] == ["c.json"]


def test_pages_are_in_order_and_complete(tmp_path: Path) -> None:
    catalogue = Catalogue(tmp_path)
    names = ["b", "a", "B", "10", "9", "a.b", "a-b"]
    for name in names:
        catalogue.create("acme", plain(name))
    seen: list[str] = []
    after: str | None = ""
    pages = 0
    while after is not None:
        entries, after = catalogue.list_collections("acme", page_size=3, after=after)
        seen += [entry.spec.name for entry in entries]
        pages += 1
        if pages == 1:  # neither disturbs the pages to come
            catalogue.delete("acme", "10")
            catalogue.create("acme", plain("0"))
    assert seen == sorted(names)
    assert pages == 3


def test_a_collection_made_anew_has_nothing_of_the_old_one(tmp_path: Path) -> None:
    catalogue = Catalogue(tmp_path)
    old = catalogue.create("acme", SPEC)
    store = CollectionStore(tmp_path, "acme", old, FAST)
    token = store.upsert([make_document("a")]).version
    assert catalogue.delete("acme", SPEC.name) == old
    with pytest.raises(CollectionNotFound):
        catalogue.get("acme", SPEC.name)
    with pytest.raises(CollectionNotFound):
        catalogue.delete("acme", SPEC.name)

    new = catalogue.create("acme", SPEC)
    assert new.incarnation != old.incarnation
    anew = CollectionStore(tmp_path, "acme", new, FAST)
    assert anew.count(anew.latest()) == 0
    for read in (
        lambda: anew.resolve(at_version=token),
        lambda: anew.resolve(min_version=token),
        lambda: anew.get(["a"], token),
        lambda: anew.fragments(token),
    ):
        with pytest.raises(VersionGone):
            read()


def test_data_outlives_its_entry_by_the_grace_period(tmp_path: Path) -> None:
    now_ns = [10**18]
    catalogue = Catalogue(tmp_path, grace_s=60.0, now_unix_ns=lambda: now_ns[0])
    kept, gone = catalogue.create("acme", plain("kept")), catalogue.create("acme", plain("gone"))
    for entry in (kept, gone):
        CollectionStore(tmp_path, "acme", entry, FAST)
    catalogue.delete("acme", "gone")
    data = dataset_path(tmp_path, "acme", gone.incarnation)
    assert catalogue.sweep() == []
    now_ns[0] += 60 * 10**9 - 1
    assert catalogue.sweep() == []
    assert data.exists()
    now_ns[0] += 1
    assert catalogue.sweep() == [gone.incarnation]
    assert not data.exists()
    assert catalogue.sweep() == []
    assert dataset_path(tmp_path, "acme", kept.incarnation).exists()
    assert catalogue.get("acme", "kept") == kept


def test_a_sweep_takes_data_that_nothing_names(tmp_path: Path) -> None:
    catalogue = Catalogue(tmp_path, grace_s=60.0)
    live = catalogue.create("acme", SPEC)
    CollectionStore(tmp_path, "acme", live, FAST)
    orphan = dataset_path(tmp_path, "acme", "f" * 32)
    orphan.mkdir()
    stranger = tmp_path / "acme" / "notes.lance"
    stranger.mkdir()
    made_ns = orphan.stat().st_mtime_ns
    assert catalogue.sweep(made_ns + 59 * 10**9) == []
    assert catalogue.sweep(made_ns + 61 * 10**9) == ["f" * 32]
    assert not orphan.exists()
    assert stranger.exists()
    assert dataset_path(tmp_path, "acme", live.incarnation).exists()


def test_create_and_delete_are_durable_before_they_return(tmp_path: Path) -> None:
    log = SyncLog(tmp_path)
    catalogue = Catalogue(tmp_path, sync=log)
    catalogue.create("acme", plain("c"))
    assert log.paths[:2] == [".", "acme"]  # the folders on the way, each through its parent
    *data, folder, tenant, content, name = log.paths[2:]
    assert any("/_versions/" in path for path in data)  # the empty dataset, before anything names it
    assert folder.endswith(".lance")
    assert all(path.startswith(f"{folder}/") for path in data)
    assert tenant == "acme"
    assert content.endswith(".tmp")  # the content, before it has its name
    assert name == "acme/_catalogue"
    log.paths.clear()
    catalogue.delete("acme", "c")
    assert log.paths == ["acme", "acme/_deleted", "acme/_catalogue"]


def test_a_damaged_entry_is_named_and_leaves_the_data_alone(tmp_path: Path) -> None:
    catalogue = Catalogue(tmp_path, grace_s=0.0)
    entry = catalogue.create("acme", SPEC)
    CollectionStore(tmp_path, "acme", entry, FAST)
    path = tmp_path / "acme" / "_catalogue" / f"{SPEC.name}.json"
    for damage in (b"", b"{}", b"[1]", path.read_bytes().replace(b'"format": 1', b'"format": 2')):
        path.write_bytes(damage)
        with pytest.raises(CatalogueCorrupt, match=path.name):
            catalogue.get("acme", SPEC.name)
        assert catalogue.sweep(2**62) == []
    assert dataset_path(tmp_path, "acme", entry.incarnation).exists()


DAMAGE: dict[str, bytes] = {
    "empty": b"",
    "cut": b'{"format": 1, "spec": {"name"',
    "zeros": bytes(100),
    "deep": b"[" * 100_000,
    "number": b"1",
    "later": b'{"format": 2}',
}


@pytest.mark.parametrize("damage", list(DAMAGE))
def test_a_damaged_entry_hides_no_other_collection(tmp_path: Path, damage: str) -> None:
    catalogue = Catalogue(tmp_path, grace_s=0.0)
    for name in ("a", "bad", "c"):
        catalogue.create("acme", plain(name))
    folder = tmp_path / "acme" / "_catalogue"
    (folder / "bad.json").write_bytes(DAMAGE[damage])
    (folder / "a b.json").write_bytes(b"{}")  # nobody's name
    (folder / "copy.json").write_bytes((folder / "a.json").read_bytes())
    (folder / "folder.json").mkdir()
    names = [entry.spec.name for entry in catalogue.list_collections("acme")[0]]
    assert names == ["a", "c"]
    for name in ("bad", "copy", "folder"):
        with pytest.raises(CatalogueCorrupt, match=name):
            catalogue.get("acme", name)


def test_a_collection_whose_entry_is_damaged_can_be_deleted(tmp_path: Path) -> None:
    catalogue = Catalogue(tmp_path, grace_s=0.0)
    kept = catalogue.create("acme", plain("a"))
    lost = catalogue.create("acme", plain("bad"))
    (tmp_path / "acme" / "_catalogue" / "bad.json").write_bytes(b"?")
    assert catalogue.delete("acme", "bad") is None
    with pytest.raises(CollectionNotFound):
        catalogue.get("acme", "bad")
    assert catalogue.sweep(2**62) == [lost.incarnation]  # nobody's, now
    assert dataset_path(tmp_path, "acme", kept.incarnation).exists()
    assert list((tmp_path / "acme" / "_deleted").iterdir()) == []


def test_young_data_without_an_entry_is_left_alone(tmp_path: Path) -> None:
    # What another process is about to name.
    catalogue = Catalogue(tmp_path, grace_s=0.0)
    entry = catalogue.create("acme", plain("a"))
    (tmp_path / "acme" / "_catalogue" / "a.json").unlink()
    data = dataset_path(tmp_path, "acme", entry.incarnation)
    assert catalogue.sweep(data.stat().st_mtime_ns + 59 * 10**9) == []
    assert catalogue.sweep(data.stat().st_mtime_ns + 61 * 10**9) == [entry.incarnation]


def test_a_collection_that_cannot_be_made_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalogue = Catalogue(tmp_path)

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    for step in ("create_dataset", "put_if_absent"):
        with monkeypatch.context() as patch:
            patch.setattr(f"phasemesh.index.catalogue.{step}", full)
            with pytest.raises(OSError, match="No space"):
                catalogue.create("acme", plain("a"))
        assert catalogue.list_collections("acme")[0] == []
        assert list((tmp_path / "acme").glob("*.lance")) == []
    catalogue.create("acme", plain("a"))
    with pytest.raises(CollectionExists):
        catalogue.create("acme", plain("a"))
    assert len(list((tmp_path / "acme").glob("*.lance"))) == 1


def test_data_that_is_gone_is_missing_and_never_made_anew(tmp_path: Path) -> None:
    entry = Catalogue(tmp_path).create("acme", SPEC)
    data = dataset_path(tmp_path, "acme", entry.incarnation)
    data.rename(tmp_path / "elsewhere")
    with pytest.raises(DataMissing, match="moved or removed"):
        CollectionStore(tmp_path, "acme", entry, FAST)
    assert not data.exists()
    (tmp_path / "elsewhere").rename(data)
    assert CollectionStore(tmp_path, "acme", entry, FAST).latest().number == 1
    for manifest in (data / "_versions").iterdir():
        manifest.write_bytes(b"")
    with pytest.raises(StorageFailure, match="can't be opened"):
        CollectionStore(tmp_path, "acme", entry, FAST)


def test_a_root_that_is_taken_away_is_no_empty_database(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    catalogue = Catalogue(root)
    catalogue.create("acme", plain("a"))
    root.rename(tmp_path / "unmounted")
    for work in (
        lambda: catalogue.list_collections("acme"),
        lambda: catalogue.get("acme", "a"),
        lambda: catalogue.create("acme", plain("b")),
    ):
        with pytest.raises(StorageFailure, match="data_dir is gone"):
            work()
    assert not root.exists()
    root.mkdir()  # the bare mount point
    for work in (lambda: catalogue.list_collections("acme"), lambda: catalogue.create("acme", plain("b"))):
        with pytest.raises(StorageFailure, match="another folder"):
            work()
    root.rmdir()
    (tmp_path / "unmounted").rename(root)
    assert [entry.spec.name for entry in catalogue.list_collections("acme")[0]] == ["a"]


def test_so_many_fields_are_refused() -> None:
    fields = tuple(FieldDeclaration(f"f{n}", FieldType.INT64) for n in range(MAX_FIELDS + 1))
    CollectionSpec("c", "", "", 8, fields=fields[1:])
    with pytest.raises(InvalidSpec, match="at most 256"):
        CollectionSpec("c", "", "", 8, fields=fields)


@pytest.mark.parametrize("name", ["", "1st", "a-b", "a.b", "é", "a" * 129, "_x", "a\n"])
def test_a_field_needs_a_plain_name(name: str) -> None:
    with pytest.raises(InvalidSpec, match="fields"):
        FieldDeclaration(name, FieldType.STRING)


def test_a_spec_that_contradicts_itself_is_refused() -> None:
    twice = (FieldDeclaration("year", FieldType.INT64), FieldDeclaration("Year", FieldType.INT64))
    with pytest.raises(InvalidSpec, match="twice"):
        CollectionSpec("c", "", "", 8, fields=twice)
    for dim in (0, -1, 10**6):
        with pytest.raises(InvalidSpec, match="token_dim"):
            CollectionSpec("c", "", "", dim)
