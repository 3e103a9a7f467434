"""Segments: the immutable form in which a scorer holds the token vectors of one fragment's data file.

A segment covers the *physical* rows of the file, those deleted since included, so one segment serves every
version that knows the file, and a deletion never rebuilds one. Long documents are cut into kernel ranges, one
per chunk; every row owns at least one range.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from phasemesh.index.coded import Codes, make_codes, no_codes
from phasemesh.index.rescore import vector_norms
from phasemesh.index.spec import Codec
from phasemesh.index.vectors import check_ranges

#: Raised with every change of the layout; a file of another format is never opened.
FORMAT_VERSION = 2
#: Name ending of segments' files.
SUFFIX = ".safetensors"


@dataclass(frozen=True, slots=True)
class SegmentKey:
    """What a segment is derived from; equal keys mean equal bytes.

    Args:
        incarnation: Incarnation of the collection.
        data_key: Name of the write-once data file of the fragment.
        codec: Codes that are kept beside the vectors, the rotation included, which is fixed per codec and
            format; None for none.
        format_version: Layout of the file.
    """

    incarnation: str
    data_key: str
    codec: Codec | None
    format_version: int = FORMAT_VERSION

    @property
    def file_name(self) -> str:
        """Name of the segment's file in a cache folder."""
        parts = (self.incarnation, self.data_key, self._codec_name, str(self.format_version))
        digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
        return digest[:40] + SUFFIX

    def metadata(self) -> dict[str, str]:
        """The key as safetensors metadata, which are strings."""
        return {
            "incarnation": self.incarnation,
            "data_key": self.data_key,
            "codec": self._codec_name,
            "format_version": str(self.format_version),
        }

    @property
    def _codec_name(self) -> str:
        return "none" if self.codec is None else self.codec.value


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """Token vectors and ids of all physical rows of a fragment's data file, in memory or mapped.

    Args:
        key: What it was derived from.
        tokens: All vectors, float16 [tokens, d].
        range_offsets: Range i owns tokens range_offsets[i] to range_offsets[i + 1].
        row_ranges: Row i owns ranges row_ranges[i] to row_ranges[i + 1], at least one.
        norms: Upper bound of the norms of each row's vectors, float32 [rows].
        codes: The vectors in the form that is scanned; empty where the key names no codec.
        id_offsets: Row i's id is ids[id_offsets[i] : id_offsets[i + 1]].
        ids: All ids in UTF-8, uint8.
        mapped: Whether the arrays are views of a file.
    """

    key: SegmentKey
    tokens: npt.NDArray[np.float16]
    range_offsets: npt.NDArray[np.int64]
    row_ranges: npt.NDArray[np.int64]
    norms: npt.NDArray[np.float32]
    codes: Codes
    id_offsets: npt.NDArray[np.int64]
    ids: npt.NDArray[np.uint8]
    mapped: bool = False

    @property
    def rows(self) -> int:
        """Physical rows, deleted and empty ones included."""
        return len(self.row_ranges) - 1

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        codes = (self.codes.data, self.codes.scales, self.codes.errors)
        arrays = (self.tokens, self.range_offsets, self.row_ranges, self.norms, self.id_offsets, self.ids)
        return sum(array.nbytes for array in arrays + codes)

    @property
    def resident_bytes(self) -> int:
        """Bytes that searches keep in memory: all but the vectors of a mapped file that has codes.

        Of those a search reads a few rows.
        """
        seldom_read = self.mapped and self.key.codec is not None
        return self.nbytes - (self.tokens.nbytes if seldom_read else 0)

    @property
    def row_lengths(self) -> npt.NDArray[np.int64]:
        """Token vectors of each row, int64 [rows]."""
        return np.diff(self.range_offsets[self.row_ranges])

    @property
    def range_to_row(self) -> npt.NDArray[np.int64] | None:
        """Row of each range, int64 [ranges]; None where each row is one range."""
        if len(self.range_offsets) == len(self.row_ranges):
            return None
        return np.repeat(np.arange(self.rows), np.diff(self.row_ranges))

    def row_id(self, row: int) -> str:
        """A row's document id."""
        return self.ids[self.id_offsets[row] : self.id_offsets[row + 1]].tobytes().decode()

    def row_ids(self, rows: npt.NDArray[np.int64]) -> list[str]:
        """Document ids of rows, [m]."""
        blob = memoryview(self.ids)
        begins, stops = self.id_offsets[rows].tolist(), self.id_offsets[rows + 1].tolist()
        return [str(blob[begin:stop], "utf-8") for begin, stop in zip(begins, stops, strict=True)]

    def row_tokens(self, row: int) -> npt.NDArray[np.float16]:
        """A row's token vectors, all chunks one after another, float16 [t, d]."""
        begin, stop = self.range_offsets[self.row_ranges[row]], self.range_offsets[self.row_ranges[row + 1]]
        return self.tokens[begin:stop]


def build_segment(
    key: SegmentKey,
    ids: Sequence[str],
    tokens: npt.NDArray[np.float16],
    row_offsets: npt.NDArray[np.int64],
    chunk_offsets: Sequence[npt.NDArray[np.integer[Any]]] | None = None,
) -> Segment:
    """Makes a segment in memory from a fragment's physical rows.

    Args:
        key: What it is derived from.
        ids: Each row's document id, [rows].
        tokens: All rows' vectors, float16 [tokens, d]; kept, not copied, where they are contiguous.
        row_offsets: Row i owns tokens row_offsets[i] to row_offsets[i + 1], [rows + 1], all of `tokens`.
        chunk_offsets: For each row the first positions, within the row, of its second and later chunks;
            None where no row has any.

    Raises:
        ValueError: The arrays don't fit together, or a vector isn't finite (names the row's id).
    """
    if tokens.dtype != np.float16 or tokens.ndim != 2:
        raise ValueError(f"tokens: is {tokens.dtype} {tokens.shape}, expected float16 [tokens, dimension]")
    if len(row_offsets) != len(ids) + 1:
        raise ValueError(f"row_offsets: has {len(row_offsets)} entries for {len(ids)} rows")
    check_ranges(row_offsets, len(tokens))
    if row_offsets[0] != 0 or row_offsets[-1] != len(tokens):
        raise ValueError(f"row_offsets: cover {row_offsets[0]} to {row_offsets[-1]} of {len(tokens)} tokens")
    row_offsets = row_offsets.astype(np.int64, copy=False)
    if chunk_offsets is None or not any(len(chunks) for chunks in chunk_offsets):
        range_offsets = row_offsets
        row_ranges = np.arange(len(ids) + 1, dtype=np.int64)
    else:
        range_offsets, row_ranges = _cut_chunks(ids, row_offsets, chunk_offsets)

    encoded = [name.encode() for name in ids]
    id_offsets = np.zeros(len(ids) + 1, np.int64)
    np.cumsum([len(name) for name in encoded], out=id_offsets[1:])
    tokens = np.ascontiguousarray(tokens)
    return Segment(
        key=key,
        tokens=tokens,
        range_offsets=range_offsets,
        row_ranges=row_ranges,
        norms=_row_norms(ids, tokens, row_offsets),
        codes=no_codes(len(ids)) if key.codec is None else make_codes(tokens, row_offsets, key.codec),
        id_offsets=id_offsets,
        ids=np.frombuffer(b"".join(encoded), np.uint8),
    )


def _row_norms(
    ids: Sequence[str], tokens: npt.NDArray[np.float16], row_offsets: npt.NDArray[np.int64]
) -> npt.NDArray[np.float32]:
    bounds = np.zeros(len(ids), np.float64)
    step = max(1, (1 << 20) // tokens.shape[1]) if tokens.shape[1] else 1
    norms = np.empty(len(tokens), np.float64)
    for begin in range(0, len(tokens), step):
        norms[begin : begin + step] = vector_norms(tokens[begin : begin + step])
    if not np.isfinite(norms).all():
        row = int(np.searchsorted(row_offsets, np.argmin(np.isfinite(norms)), side="right")) - 1
        raise ValueError(f"tokens: document {ids[row]!r} has a vector that isn't finite")
    filled = np.flatnonzero(np.diff(row_offsets))
    if len(filled):
        bounds[filled] = np.maximum.reduceat(norms, row_offsets[filled])
    # Rounded up, since a bound that is too small would be none.
    return np.nextafter(bounds.astype(np.float32), np.float32(np.inf))


def _cut_chunks(
    ids: Sequence[str],
    row_offsets: npt.NDArray[np.int64],
    chunk_offsets: Sequence[npt.NDArray[np.integer[Any]]],
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    if len(chunk_offsets) != len(ids):
        raise ValueError(f"chunk_offsets: has {len(chunk_offsets)} entries for {len(ids)} rows")
    pieces = [np.zeros(1, np.int64)]
    row_ranges = np.zeros(len(ids) + 1, np.int64)
    for row, chunks in enumerate(chunk_offsets):
        begin, stop = int(row_offsets[row]), int(row_offsets[row + 1])
        ends = np.append(begin + np.asarray(chunks, np.int64), stop)
        if np.any(np.diff(ends, prepend=begin) < 0):
            raise ValueError(
                f"chunk_offsets: document {ids[row]!r} has {stop - begin} tokens, cut at {chunks}"
            )
        pieces.append(ends)
        row_ranges[row + 1] = row_ranges[row] + len(ends)
    return np.concatenate(pieces), row_ranges
