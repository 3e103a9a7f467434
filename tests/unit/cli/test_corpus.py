"""Files to documents: ids that stay the same, every text once, faults that name file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from phasemesh.cli.corpus import SourceDocument, batches, corpus_files, paragraphs, read_documents
from phasemesh.config.settings import SettingsError


def test_a_folder_is_read_recursively_in_order(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name in ("z.txt", "b/a.md", "a.jsonl", "c.py", "b/d.TXT"):
        (tmp_path / name).write_text("x")
    single = tmp_path / "c.py"
    found = corpus_files(tmp_path, [single])
    assert [name for _, name in found] == ["a.jsonl", "b/a.md", "z.txt", single.as_posix()]
    assert all(path.is_file() for path, _ in found)


@pytest.mark.parametrize(
    ("folder", "files", "words"),
    [
        (None, [], "there is nothing to index"),
        ("missing", [], "is no folder"),
        (".", [], "has no files of the kinds .txt, .md, .jsonl"),
        (None, ["missing.txt"], "is no file"),
    ],
)
def test_what_is_not_there(tmp_path: Path, folder: str | None, files: list[str], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        corpus_files(None if folder is None else tmp_path / folder, [tmp_path / file for file in files])


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", []),
        (" \n\n\t\n", []),
        ("one", ["one"]),
        ("one\ntwo\n\nthree\n", ["one\ntwo", "three"]),
        ("one\r\n\r\ntwo\r\rthree", ["one", "two", "three"]),
        ("\n\n one \n \t \n\n  two\n", ["one", "two"]),
    ],
)
def test_paragraphs(text: str, parts: list[str]) -> None:
    assert paragraphs(text) == parts


def test_ids_are_path_and_place(tmp_path: Path) -> None:
    file = tmp_path / "f.md"
    file.write_bytes("\ufeffEins.\n\nzwei äöü".encode())
    assert list(read_documents(file, "sub/f.md")) == [
        SourceDocument("sub/f.md#1", "Eins.", {"path": "sub/f.md"}),
        SourceDocument("sub/f.md#2", "zwei äöü", {"path": "sub/f.md"}),
    ]


def test_json_lines(tmp_path: Path) -> None:
    file = tmp_path / "f.jsonl"
    file.write_text(
        '{"text": "a\u2028b", "id": 7, "year": 2000}\n\n{"text": " "}\n{"text": " c ", "id": "x"}\n{"text": "d"}\n'
    )
    assert list(read_documents(file, "f.jsonl")) == [
        SourceDocument("7", "a\u2028b", {"path": "f.jsonl", "year": 2000}),
        SourceDocument("x", "c", {"path": "f.jsonl"}),
        SourceDocument("f.jsonl#5", "d", {"path": "f.jsonl"}),
    ]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{"text": "a"}\nnope', "line 2 is not JSON"),
        (b"[1]", "line 1 has to be an object with a string `text`"),
        (b'{"text": 3}', "line 1 has to be an object with a string `text`"),
        (b'{"text": "a", "id": true}', "line 1: `id` has to be a string or an integer"),
        (b"\xff\xfe", "is not UTF-8 at byte 0"),
    ],
)
def test_bad_files(tmp_path: Path, content: bytes, words: str) -> None:
    file = tmp_path / "f.jsonl"
    file.write_bytes(content)
    with pytest.raises(SettingsError, match=words) as fault:
        list(read_documents(file, "f.jsonl"))
    assert str(file) in str(fault.value)


def test_batches_bound_count_and_bytes() -> None:
    documents = [
        SourceDocument(str(index), text) for index, text in enumerate(["aa", "ää", "b", "c" * 9, "d"])
    ]
    made = list(batches(documents, size=2, max_bytes=6))
    assert [[document.id for document in batch] for batch in made] == [["0", "1"], ["2"], ["3"], ["4"]]
    assert list(batches([], size=2, max_bytes=6)) == []
