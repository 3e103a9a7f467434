"""The first look at every vector of a segment: the seam behind which a CPU or another device does it.

A scan gives each row a score in low precision together with a proven bound on how far that is from exact.
What is decided by it is only which rows need no closer look, so scanners may differ in speed and in how much
they rule out, and never in what a search returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from phasemesh.index import native
from phasemesh.index.coded import scan
from phasemesh.index.kernel import maxsim
from phasemesh.index.rescore import error_bound
from phasemesh.index.segments import Segment
from phasemesh.index.spec import Codec


@dataclass(frozen=True, slots=True, eq=False)
class Scanned:
    """What a scan found for one query.

    Args:
        scores: Sum over the query's tokens of their best similarities, float32 [rows]; -inf for rows without
            token vectors and rows that weren't to be scanned.
        errors: How far each score can be from exact, float64 [rows].
        coarse: The bounds are too wide to rule much out, so that rows are dropped by their scores instead.
    """

    scores: npt.NDArray[np.float32]
    errors: npt.NDArray[np.float64]
    coarse: bool = False


class Scanner(Protocol):
    """Scans segments. Safe for several threads."""

    def scan(
        self,
        segment: Segment,
        queries: Sequence[npt.NDArray[np.float32]],
        visible: npt.NDArray[np.bool_] | None,
        checkpoint: Callable[[], None] | None,
    ) -> list[Scanned]:
        """Scores a segment's rows for several queries.

        Args:
            segment: Its vectors.
            queries: Each from `rescore.scale_query`, float32 [q, d]; at least one.
            visible: Rows to scan, bool [rows]; None for all.
            checkpoint: Called between blocks; what it raises ends the scan.

        Returns:
            One answer per query, which doesn't depend on the other queries.
        """
        ...

    @property
    def name(self) -> str:
        """What scans, for people: the instruction-set path or the device."""
        ...

    @property
    def warning(self) -> str:
        """Why it is slower than it should be, and the remedy; empty if it isn't."""
        ...


class CpuScanner:
    """Scans codes by the compiled kernels, or float16 vectors where there are none."""

    def scan(
        self,
        segment: Segment,
        queries: Sequence[npt.NDArray[np.float32]],
        visible: npt.NDArray[np.bool_] | None,
        checkpoint: Callable[[], None] | None,
    ) -> list[Scanned]:
        """See `Scanner`."""
        codec = segment.key.codec
        if codec is None:
            return [scan_vectors(segment, query, visible, checkpoint) for query in queries]
        found = scan(
            queries,
            segment.codes,
            codec,
            segment.range_offsets,
            segment.norms,
            mask=visible,
            range_to_row=segment.range_to_row,
            checkpoint=checkpoint,
        )
        return [Scanned(scores, errors, codec is Codec.INT4) for scores, errors in found]

    @property
    def name(self) -> str:
        """See `Scanner`."""
        return native.kernel_name()

    @property
    def warning(self) -> str:
        """See `Scanner`."""
        return native.slow_kernel()


def scan_vectors(
    segment: Segment,
    scaled: npt.NDArray[np.float32],
    mask: npt.NDArray[np.bool_] | None,
    checkpoint: Callable[[], None] | None,
) -> Scanned:
    """Scans a segment's float16 vectors in float32.

    Args:
        segment: Its vectors.
        scaled: The query from `rescore.scale_query`, float32 [q, d].
        mask: Rows to scan, bool [rows]; None for all.
        checkpoint: Called between blocks; what it raises ends the scan.
    """
    scores = maxsim(
        scaled,
        segment.tokens,
        segment.range_offsets,
        mask=mask,
        range_to_row=segment.range_to_row,
        rows=segment.rows,
        checkpoint=checkpoint,
    )
    return Scanned(scores, error_bound(scaled, segment.norms, scores))


#: The scanner that every machine has.
CPU = CpuScanner()
