"""Objects: whole or absent, one winner of a race, nothing outside the root."""

from __future__ import annotations

import errno
import threading
from pathlib import Path

import pytest

from phasemesh.index.objects import LocalObjects


@pytest.fixture
def objects(tmp_path: Path) -> LocalObjects:
    return LocalObjects(tmp_path / "root")


def test_an_object_is_read_replaced_found_and_deleted(objects: LocalObjects, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"from a file")
    objects.put("a/one", b"first")
    objects.put("a/one", b"second")
    objects.put("b/two", source)
    assert objects.read("a/one") == b"second"
    assert objects.read("b/two") == b"from a file"
    assert {(found.name, found.size) for found in objects.find()} == {("a/one", 6), ("b/two", 11)}
    assert [found.name for found in objects.find("a/")] == ["a/one"]
    objects.download("b/two", tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == b"from a file"
    objects.delete("a/one")
    objects.delete("a/one")
    with pytest.raises(FileNotFoundError):
        objects.read("a/one")
    with pytest.raises(FileNotFoundError):
        objects.download("a/one", tmp_path / "none")
    assert not (tmp_path / "none").exists()
    assert list(LocalObjects(tmp_path / "never").find()) == []


def test_of_many_writers_one_makes_the_object(objects: LocalObjects) -> None:
    won: list[int] = []
    gate = threading.Barrier(8)

    def write(number: int) -> None:
        gate.wait()
        try:
            objects.put_if_absent("the/one", str(number).encode())
        except FileExistsError:
            return
        won.append(number)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert objects.read("the/one") == str(won[0]).encode()


def test_a_medium_that_refuses_leaves_what_was_there(tmp_path: Path) -> None:
    full = False

    def sync(path: Path) -> None:
        if full:
            raise OSError(errno.ENOSPC, "no space")

    objects = LocalObjects(tmp_path, sync=sync)
    objects.put("kept", b"old")
    full = True
    with pytest.raises(OSError, match="no space"):
        objects.put("kept", b"new")
    with pytest.raises(OSError, match="no space"):
        objects.put_if_absent("made", b"new")
    assert objects.read("kept") == b"old"
    assert [found.name for found in objects.find()] == ["kept"]
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


@pytest.mark.parametrize("name", ["", "/etc/passwd", "../up", "a/../../b", "a//b", ".", "a/./b", "a\0b"])
def test_nothing_outside_the_root_can_be_named(objects: LocalObjects, name: str) -> None:
    with pytest.raises(ValueError, match="isn't the name"):
        objects.put(name, b"x")
    with pytest.raises(ValueError, match="isn't the name"):
        objects.read(name)
