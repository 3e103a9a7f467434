"""Segments as files: safetensors that any reader of the format can open, with a checksum, mapped not read.

The metadata carry the key that a segment was made for and a SHA-256 over header and data. A file is written
aside, forced to the medium and renamed, so under its final name it is whole, or was damaged afterwards; and
damage is noticed when it is opened. Tensors are views of a memory map.

Layout: `range_offsets` int64 [ranges + 1], tokens of each kernel range; `row_ranges` int64 [rows + 1], ranges
of each row; `id_offsets` int64 [rows + 1] into `ids`; `norms` float32 [rows], an upper bound of each row's
vector norms; `code_errors` float32 [rows] and `code_scales` float32 [tokens] or [0], see `coded.Codes`;
`padding`, so that `codes` uint8 [tokens, bytes per token] begins on a cache line; `tokens` float16
[tokens, d]; `ids` uint8, all ids in UTF-8. Without a codec there are no codes.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from phasemesh.index.coded import Codes, codes_shape
from phasemesh.index.durability import sync_path
from phasemesh.index.errors import IndexFailure
from phasemesh.index.segments import Segment, SegmentKey
from phasemesh.index.vectors import check_ranges

_CACHE_LINE = 64
_MAX_HEADER = 1 << 20
_DTYPES: dict[str, type[np.generic]] = {
    "I64": np.int64,
    "F32": np.float32,
    "F16": np.float16,
    "U8": np.uint8,
}
_LAYOUT = {
    "range_offsets": "I64",
    "row_ranges": "I64",
    "id_offsets": "I64",
    "norms": "F32",
    "code_errors": "F32",
    "code_scales": "F32",
    "padding": "U8",
    "codes": "U8",
    "tokens": "F16",
    "ids": "U8",
}


class SegmentDamaged(IndexFailure):
    """A segment file is truncated, altered, of another format, or made for another key."""


def write_segment(segment: Segment, folder: Path) -> Path:
    """Writes a segment's file: whole under its final name, or not at all.

    Returns:
        Its path.

    Raises:
        OSError: The folder is full, read-only or gone; nothing is left behind.
    """
    arrays = {
        "range_offsets": segment.range_offsets,
        "row_ranges": segment.row_ranges,
        "id_offsets": segment.id_offsets,
        "norms": segment.norms,
        "code_errors": segment.codes.errors,
        "code_scales": segment.codes.scales,
    }
    before = sum(array.nbytes for array in arrays.values())
    arrays["padding"] = np.zeros(-before % _CACHE_LINE, np.uint8)
    arrays |= {"codes": segment.codes.data, "tokens": segment.tokens, "ids": segment.ids}
    header: dict[str, Any] = {"__metadata__": segment.key.metadata()}
    position = 0
    for name, dtype in _LAYOUT.items():
        stop = position + arrays[name].nbytes
        header[name] = {"dtype": dtype, "shape": list(arrays[name].shape), "data_offsets": [position, stop]}
        position = stop
    data = _bytes_of(arrays)
    header["__metadata__"]["sha256"] = _checksum(header, data)
    encoded = json.dumps(header, sort_keys=True).encode()
    encoded += b" " * (-(8 + len(encoded)) % _CACHE_LINE)

    path = folder / segment.key.file_name
    temporary = folder / f"{segment.key.file_name}.{secrets.token_hex(4)}.tmp"
    try:
        with open(temporary, "xb") as file:
            file.write(len(encoded).to_bytes(8, "little"))
            file.write(encoded)
            for part in data:
                file.write(part)
        sync_path(temporary)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_path(folder)
    return path


def open_segment(path: Path, key: SegmentKey, *, verify: bool = True) -> Segment:
    """Maps a segment's file into memory; nothing is copied.

    Args:
        path: The file.
        key: What it must have been made for.
        verify: Read all of it and compare the checksum. Structure and key are always checked.

    Raises:
        SegmentDamaged: It isn't a whole segment of this key.
        OSError: It can't be read; FileNotFoundError where there is none.
    """
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(_MAX_HEADER, size - 8):
            raise SegmentDamaged(f"{path.name}: has no header")
        encoded = file.read(length)
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        header = json.loads(encoded)
        arrays = _views(header, np.frombuffer(mapped, np.uint8)[8 + length :])
        found = dict(header["__metadata__"])
        expected = found.pop("sha256")
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise SegmentDamaged(f"{path.name}: its header makes no sense ({error})") from error
    if found != key.metadata():
        raise SegmentDamaged(f"{path.name}: was made for {found}, not {key.metadata()}")
    if verify and _checksum(header, _bytes_of(arrays)) != expected:
        raise SegmentDamaged(f"{path.name}: its checksum doesn't match its content")
    del arrays["padding"]
    codes = Codes(arrays.pop("codes"), arrays.pop("code_scales"), arrays.pop("code_errors"))
    if codes.data.shape != codes_shape(key.codec, *arrays["tokens"].shape):
        raise SegmentDamaged(f"{path.name}: has codes of shape {codes.data.shape}")
    if key.codec is not None:
        _seldom_read(mapped, 8 + length + header["tokens"]["data_offsets"][0], arrays["tokens"].nbytes)
    return Segment(key=key, codes=codes, mapped=True, **arrays)


def _seldom_read(mapped: mmap.mmap, begin: int, count: int) -> None:
    """Gives up the pages of a part of which few rows are ever read, and asks for no neighbours with them."""
    first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
    whole = (begin + count - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if whole > 0 and hasattr(mapped, "madvise"):
        mapped.madvise(mmap.MADV_RANDOM, first, whole)
        mapped.madvise(mmap.MADV_DONTNEED, first, whole)


def _views(header: dict[str, Any], data: npt.NDArray[np.uint8]) -> dict[str, Any]:
    """Arrays of a mapped file in the order of the layout; ValueError where they don't fill it exactly."""
    arrays = {}
    position = 0
    for name, dtype in _LAYOUT.items():
        entry = header[name]
        begin, stop = entry["data_offsets"]
        if entry["dtype"] != dtype or begin != position or not begin <= stop <= len(data):
            raise ValueError(f"tensor {name} is {entry}, and {len(data)} bytes follow the header")
        arrays[name] = data[begin:stop].view(_DTYPES[dtype]).reshape(entry["shape"])
        position = stop
    if position != len(data):
        raise ValueError(f"{len(data)} bytes follow the header, but its tensors take {position}")
    if any(array.ndim != (2 if name in ("tokens", "codes") else 1) for name, array in arrays.items()):
        raise ValueError("a tensor has the wrong number of axes")
    rows = len(arrays["norms"])
    # Offsets that fit are what keeps a scan inside the map, so they are checked even without a checksum.
    check_ranges(arrays["range_offsets"], len(arrays["tokens"]))
    check_ranges(arrays["row_ranges"], len(arrays["range_offsets"]) - 1)
    check_ranges(arrays["id_offsets"], len(arrays["ids"]))
    if {len(arrays["row_ranges"]), len(arrays["id_offsets"]), len(arrays["code_errors"]) + 1} != {rows + 1}:
        raise ValueError("its tensors disagree on the number of rows")
    tokens = len(arrays["tokens"])
    if len(arrays["codes"]) not in (0, tokens) or len(arrays["code_scales"]) not in (0, tokens):
        raise ValueError("its tensors disagree on the number of tokens")
    return arrays


def _bytes_of(arrays: dict[str, Any]) -> list[memoryview]:
    """Each array's bytes, in the order of the layout."""
    return [memoryview(arrays[name].reshape(-1).view(np.uint8)) for name in _LAYOUT]


def _checksum(header: dict[str, Any], data: Sequence[memoryview]) -> str:
    """SHA-256 of the header (without the checksum itself) and the data, in hexadecimal."""
    metadata = {name: value for name, value in header["__metadata__"].items() if name != "sha256"}
    digest = hashlib.sha256(json.dumps({**header, "__metadata__": metadata}, sort_keys=True).encode())
    for part in data:
        digest.update(part)
    return digest.hexdigest()
