"""Reading one exact version of a dataset: rows, masks over physical rows, data files as written.

Every function takes a handle at one version and names the columns it reads, because a column that isn't
wanted costs as much as one that is. Masks are over *physical* rows: offsets in the fragment's data file,
which never change, so they fit segments that were derived at any version.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from lance.file import LanceFileReader

from phasemesh.index.errors import VersionGone
from phasemesh.index.schema import TOKENS

#: One truth value per physical row of a fragment, bool [physical_rows].
RowMask: TypeAlias = npt.NDArray[np.bool_]

#: A row address is the fragment in the upper 32 bits, the physical offset in the lower.
_OFFSET_BITS = 32


def fragment(dataset: lance.LanceDataset, fragment_id: int) -> lance.LanceFragment:
    """One fragment of this version.

    Raises:
        VersionGone: The version has no such fragment.
    """
    found = dataset.get_fragment(fragment_id)
    if found is None:
        raise VersionGone(f"version {dataset.version} has no fragment {fragment_id}")
    return found


def data_file(dataset: lance.LanceDataset, of: lance.LanceFragment, column: str) -> str:
    """Name of the fragment's data file that holds a column; one file may hold several."""
    wanted: set[int] = set()
    pending = [field for field in dataset.lance_schema.fields() if field.name() == column]
    while pending:
        part = pending.pop()
        wanted.add(part.id())
        pending.extend(part.children())
    for file in of.data_files():
        if wanted & set(file.fields):
            return str(file.path)
    raise VersionGone(f"fragment {of.fragment_id} of version {dataset.version} has no column {column}")


def token_file(dataset: lance.LanceDataset, of: lance.LanceFragment) -> str:
    """Name of the fragment's data file that holds its token vectors."""
    return data_file(dataset, of, TOKENS)


def physical_columns(dataset: lance.LanceDataset, of: lance.LanceFragment, columns: list[str]) -> pa.Table:
    """Read columns of all physical rows, deleted ones included, straight from the data files."""
    files: dict[str, list[str]] = {}
    for column in columns:
        files.setdefault(data_file(dataset, of, column), []).append(column)
    read: dict[str, pa.ChunkedArray] = {}
    for name, held in files.items():
        reader = LanceFileReader(str(Path(dataset.uri) / "data" / name), columns=held)
        table = reader.read_all().to_table()
        read.update({column: table.column(column) for column in held})
    return pa.table([read[column] for column in columns], names=columns)


def deleted_rows(of: lance.LanceFragment) -> RowMask:
    """Which physical rows of the fragment are deleted in its version."""
    deleted = np.zeros(of.physical_rows, bool)
    if of.num_deletions:
        addresses = of.scanner(columns=[], with_row_address=True).to_table().column("_rowaddr").to_numpy()
        deleted[:] = True
        deleted[addresses & ((1 << _OFFSET_BITS) - 1)] = False
    return deleted


def matching_rows(
    dataset: lance.LanceDataset, columns: list[str], meets: Callable[[pa.RecordBatch], RowMask]
) -> dict[int, RowMask]:
    """Which physical rows of each fragment are live and meet a condition; those with none are absent.

    Args:
        dataset: At the version that is read.
        columns: That `meets` looks at.
        meets: Which rows of a batch do, bool [rows].
    """
    masks: dict[int, RowMask] = {}
    for batch in dataset.scanner(columns=columns, with_row_address=True).to_batches():
        addresses = batch.column("_rowaddr").to_numpy()[meets(batch)]
        owners = addresses >> _OFFSET_BITS
        for owner in np.unique(owners).tolist():
            if owner not in masks:
                masks[owner] = np.zeros(fragment(dataset, owner).physical_rows, bool)
            masks[owner][addresses[owners == owner] & ((1 << _OFFSET_BITS) - 1)] = True
    return masks


def row_addresses(dataset: lance.LanceDataset, predicate: str, columns: list[str]) -> pa.Table:
    """Columns of the live rows that meet the predicate, with `fragment` and `row`: where each lies."""
    table = dataset.scanner(columns=columns, with_row_address=True, filter=predicate).to_table()
    addresses = table.column("_rowaddr").to_numpy()
    return (
        table.select(columns)
        .append_column("fragment", pa.array(addresses >> _OFFSET_BITS))
        .append_column("row", pa.array(addresses & ((1 << _OFFSET_BITS) - 1)))
    )


def referenced_files(dataset: lance.LanceDataset) -> list[Path]:
    """Every file that this version can't be read without, its manifest last."""
    root = Path(dataset.uri)
    manifests: list[Path] = []
    others: list[Path] = []
    for batch in dataset.tracked_files(min_version=dataset.version):
        for row in batch.select(["version", "path", "type"]).to_pylist():
            if row["version"] == dataset.version:
                (manifests if row["type"] == "manifest" else others).append(root / row["path"])
    return others + manifests
