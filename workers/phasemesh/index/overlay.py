"""Which rows of a segment a search may see: the version's deletions and the request's filter, as one mask.

Segments know nothing of versions. What a version has deleted, and what a filter allows, is laid over them
when they are scanned. Absence means "no restriction"; an empty selection means "nothing", never "everything".
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def pack_rows(allowed: npt.NDArray[np.bool_]) -> bytes:
    """Packs a mask over physical rows, bool [rows], into a bitmap, least significant bit first."""
    return np.packbits(allowed, bitorder="little").tobytes()


def unpack_rows(bitmap: bytes, rows: int) -> npt.NDArray[np.bool_]:
    """Unpacks a bitmap over physical rows, least significant bit first, to bool [rows].

    Raises:
        ValueError: It isn't exactly as long as `rows` need, or a bit beyond them is set.
    """
    if len(bitmap) != (rows + 7) // 8:
        raise ValueError(f"allowed_rows: has {len(bitmap)} bytes, but {rows} rows need {(rows + 7) // 8}")
    bits = np.unpackbits(np.frombuffer(bitmap, np.uint8), bitorder="little").view(np.bool_)
    if bits[rows:].any():
        raise ValueError(f"allowed_rows: a bit beyond the {rows} rows of the fragment is set")
    return bits[:rows]


def visible_rows(
    rows: int,
    deleted: npt.NDArray[np.bool_] | None = None,
    allowed: npt.NDArray[np.bool_] | None = None,
) -> npt.NDArray[np.bool_] | None:
    """Combines what a version deleted with what a filter allows.

    Args:
        rows: Physical rows of the segment.
        deleted: Rows that the version has deleted, bool [rows]; None for none.
        allowed: Rows that may be seen, bool [rows]; None for all.

    Returns:
        Rows that may be seen, bool [rows]; None for all of them.

    Raises:
        ValueError: A mask has another length.
    """
    for name, mask in (("deleted", deleted), ("allowed_rows", allowed)):
        if mask is not None and mask.shape != (rows,):
            raise ValueError(f"{name}: covers {mask.shape} rows, but the fragment has {rows}")
    if deleted is None or not deleted.any():
        return allowed
    return ~deleted if allowed is None else allowed & ~deleted
