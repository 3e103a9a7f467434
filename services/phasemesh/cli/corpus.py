"""Text files to documents: paragraphs with ids that stay the same from run to run.

Invariant: a document's id depends on its file's path and its place in it alone, so indexing a folder again
replaces what is there instead of doubling it, and a run that was broken off can be repeated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phasemesh.config.settings import SettingsError

#: Files that a folder is searched for.
SUFFIXES = (".txt", ".md", ".jsonl")
#: Field of every document that names its file.
PATH_FIELD = "path"
_BLANK_LINES = re.compile(r"\n[^\S\n]*\n\s*")


@dataclass(frozen=True, slots=True)
class SourceDocument:
    """One paragraph of a file, or one line of a .jsonl file.

    Attributes:
        id: "path#n", counted from 1; a .jsonl line's own `id` where it has one.
        text: without blanks at its ends; never empty.
        fields: `path`, and the further values of a .jsonl line.
        file: name of the file that it is of.
    """

    id: str
    text: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    file: str = field(default="", compare=False)


def corpus_files(folder: Path | None, files: Iterable[Path]) -> list[tuple[Path, str]]:
    """Files to read, each with the path that its documents' ids begin with.

    Files of the folder come in order of their paths below it, those named one by one after them under the
    path that was given.

    Raises:
        SettingsError: nothing is named, something isn't there, or the folder has no text files.
    """
    found: list[tuple[Path, str]] = []
    if folder is not None:
        if not folder.is_dir():
            raise SettingsError(f"{folder}: is no folder; name single files with --file")
        inside = sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES and path.is_file())
        if not inside:
            raise SettingsError(f"{folder}: has no files of the kinds {', '.join(SUFFIXES)}")
        found += [(path, path.relative_to(folder).as_posix()) for path in inside]
    for path in files:
        if not path.is_file():
            raise SettingsError(f"--file {path}: is no file")
        found.append((path, path.as_posix()))
    if not found:
        raise SettingsError("there is nothing to index; name a folder, or files with --file")
    return found


def paragraphs(text: str) -> list[str]:
    """Parts of `text` between blank lines, without blanks at their ends; none is empty."""
    unified = text.replace("\r\n", "\n").replace("\r", "\n")
    return [part.strip() for part in _BLANK_LINES.split(unified) if part.strip()]


def read_documents(file: Path, name: str) -> Iterator[SourceDocument]:
    """Documents of one file.

    Args:
        file: .jsonl has one JSON object with `text` per line; anything else is paragraphs.
        name: what their ids begin with.

    Raises:
        SettingsError: it can't be read, isn't UTF-8, or a line isn't such an object.
    """
    try:
        text = file.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise SettingsError(f"{file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise SettingsError(f"{file}: is not UTF-8 at byte {error.start}") from None
    if file.suffix == ".jsonl":
        yield from _json_lines(text, file, name)
        return
    for number, part in enumerate(paragraphs(text), start=1):
        yield SourceDocument(f"{name}#{number}", part, {PATH_FIELD: name}, name)


def _json_lines(text: str, file: Path, name: str) -> Iterator[SourceDocument]:
    # Not splitlines: JSON texts may hold other line separators.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise SettingsError(f"{file}: line {number} is not JSON: {error}") from None
        if not isinstance(row, dict) or not isinstance(row.get("text"), str):
            raise SettingsError(f"{file}: line {number} has to be an object with a string `text`")
        if not row["text"].strip():
            continue
        given = row.get("id", f"{name}#{number}")
        if not isinstance(given, str | int) or isinstance(given, bool):
            raise SettingsError(f"{file}: line {number}: `id` has to be a string or an integer")
        others = {key: value for key, value in row.items() if key not in ("id", "text")}
        yield SourceDocument(str(given), row["text"].strip(), {PATH_FIELD: name, **others}, name)


def batches(
    documents: Iterable[SourceDocument], *, size: int, max_bytes: int
) -> Iterator[list[SourceDocument]]:
    """`documents` in lists of at most `size`, and of about `max_bytes` of text unless one alone has more."""
    batch: list[SourceDocument] = []
    held = 0
    for document in documents:
        length = len(document.text.encode())
        if batch and (len(batch) == size or held + length > max_bytes):
            yield batch
            batch, held = [], 0
        batch.append(document)
        held += length
    if batch:
        yield batch
