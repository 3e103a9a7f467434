"""Scanning segments from a GPU's memory: the first look of a late-interaction search, by torch.

Invariants: the float16 vectors are scored as they are, in float32 and with a proven bound on the error, so a
search returns the same as one on a CPU, bit for bit; and a device that is full, or fails, costs speed and
never an answer: the CPU scans instead.

Segments stay on the device while there is room. One that finds none doesn't push out what is in use (a corpus
larger than the device's memory would otherwise be copied anew by every search) but is scanned by the CPU;
what nothing has asked for in a while makes room for it.
"""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from phasemesh.engine.device import free_cached_memory, pick_device, translate
from phasemesh.engine.errors import DeviceLost
from phasemesh.index.kernel import ranges_of
from phasemesh.index.rescore import error_bound, vector_norms
from phasemesh.index.scanner import CPU, Scanned, Scanner
from phasemesh.index.segments import Segment, SegmentKey
from phasemesh.index.vectors import fold_ranges
from phasemesh.pool.protocol import ComputeFailed

_log = logging.getLogger(__name__)

#: Most similarities in memory at a time; 256 MiB as float32.
_MAX_CELLS = 1 << 26
#: Most elements of vectors in one call of a fused kernel, which addresses them with 32 bits.
_MAX_ELEMENTS = (1 << 31) - 1
#: Share of the device's free memory that vectors take unless told otherwise.
_SHARE = 0.8
#: Seconds after which a segment that nothing asked for may leave for another.
_IDLE_S = 60.0
#: Tensor cores add float16 products in float32, but truncate and align them as they like: each addition is
#: allowed four times the error of a rounded one.
_TENSOR_CORE_ROUNDING = 4 * 2.0**-23


@dataclass(slots=True, eq=False)
class _Placed:
    """A segment's vectors on the device, float16 [tokens, d]."""

    tokens: Tensor
    used_s: float

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes


class DeviceScanner:
    """Scans float16 vectors on a torch device.

    Args:
        device: "cuda", "cuda:1", or "cpu", which is for tests: the codes are faster there.
        capacity_bytes: Most bytes of vectors on it; None takes 80 % of what is free on a CUDA device.
        otherwise: Scans what the device can't.
        now_s: Monotonic seconds.

    Raises:
        ModelLoadError: torch doesn't know the device or can't reach it.
    """

    def __init__(
        self,
        device: str,
        capacity_bytes: int | None = None,
        *,
        otherwise: Scanner = CPU,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._device = pick_device(device)
        if capacity_bytes is None:
            capacity_bytes = 4 << 30
            if self._device.type == "cuda":
                capacity_bytes = int(_SHARE * torch.cuda.mem_get_info(self._device)[0])
        self._capacity = capacity_bytes
        self._otherwise = otherwise
        self._now_s = now_s
        # The bounds are of float32; a faster, coarser format would make them wrong.
        torch.set_float32_matmul_precision("highest")
        self._fused = _fused_kernel(self._device)
        # One at a time: the device works on one anyway, and each may take memory of its own.
        self._turn = threading.Lock()
        self._placed: OrderedDict[SegmentKey, _Placed] = OrderedDict()
        self._bytes = 0
        self._lost = ""

    @property
    def name(self) -> str:
        """See `Scanner`."""
        if self._lost:
            return self._otherwise.name
        return f"{self._device}-{'fused' if self._fused else 'torch'}-float16"

    @property
    def warning(self) -> str:
        """See `Scanner`."""
        if self._lost:
            return f"{self._device} failed ({self._lost}), so the CPU scans; start the scorer again"
        return ""

    @property
    def resident_bytes(self) -> int:
        """Bytes of vectors on the device."""
        return self._bytes

    def scan(
        self,
        segment: Segment,
        queries: Sequence[npt.NDArray[np.float32]],
        visible: npt.NDArray[np.bool_] | None,
        checkpoint: Callable[[], None] | None,
    ) -> list[Scanned]:
        """See `Scanner`."""
        if not self._lost and len(segment.tokens):
            with self._turn:
                try:
                    placed = self._place(segment)
                    if placed is not None:
                        return self._scan(segment, placed, queries, visible, checkpoint)
                except (torch.AcceleratorError, torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
                    self._failed(error)
        return self._otherwise.scan(segment, queries, visible, checkpoint)

    def _failed(self, error: Exception) -> None:
        fault = translate(error)
        if isinstance(fault, DeviceLost):
            self._lost = str(fault).splitlines()[0][:200]
            _log.error("the device %s failed and isn't used any more: %s", self._device, fault)
        elif isinstance(fault, ComputeFailed) and fault.out_of_memory:
            _log.warning("the device %s is out of memory and is emptied; the CPU scans instead", self._device)
        else:
            # No fault of the device's: a checkpoint that ends the search, or a bug.
            raise error
        self._placed.clear()
        self._bytes = 0
        if not self._lost:
            free_cached_memory(self._device)

    def _place(self, segment: Segment) -> _Placed | None:
        """A segment's vectors on the device; None if there is no room."""
        now_s = self._now_s()
        placed = self._placed.get(segment.key)
        if placed is None:
            if not self._make_room(segment.tokens.nbytes, now_s):
                return None
            # A copy, because torch doesn't take a read-only map.
            tokens = torch.from_numpy(np.array(segment.tokens)).to(self._device)
            placed = self._placed[segment.key] = _Placed(tokens, now_s)
            self._bytes += placed.nbytes
        placed.used_s = now_s
        self._placed.move_to_end(segment.key)
        return placed

    def _make_room(self, nbytes: int, now_s: float) -> bool:
        missing = self._bytes + nbytes - self._capacity
        victims = []
        for key, placed in self._placed.items():
            if missing <= 0 or now_s - placed.used_s < _IDLE_S:
                break
            victims.append(key)
            missing -= placed.nbytes
        if missing > 0:
            return False
        for key in victims:
            self._bytes -= self._placed.pop(key).nbytes
        return True

    def _scan(
        self,
        segment: Segment,
        placed: _Placed,
        queries: Sequence[npt.NDArray[np.float32]],
        visible: npt.NDArray[np.bool_] | None,
        checkpoint: Callable[[], None] | None,
    ) -> list[Scanned]:
        offsets = np.asarray(segment.range_offsets, np.int64)
        range_to_row = segment.range_to_row
        wanted = np.diff(offsets) > 0
        mask = ranges_of(visible, range_to_row)
        if mask is not None:
            wanted &= mask
        ranges = np.flatnonzero(wanted)
        sums = np.full((len(queries), len(offsets) - 1), -np.inf, np.float32)
        score = self._fused_sums if self._fused else self._torch_sums
        columns = sum(len(query) for query in queries)
        with torch.inference_mode():
            for chunk in _chunks(ranges, offsets, self._block(columns, segment.tokens.shape[1])):
                if checkpoint is not None:
                    checkpoint()
                tokens = _gather(placed.tokens, chunk, offsets)
                sums[:, chunk] = score(tokens, np.diff(offsets)[chunk], queries)
        results = []
        for query, found in zip(queries, sums, strict=True):
            scores = fold_ranges(found, range_to_row, segment.rows)
            errors = error_bound(query, segment.norms, scores)
            if self._fused:
                errors += fused_error(query, segment.norms)
            results.append(Scanned(scores, errors))
        return results

    def _block(self, columns: int, dim: int) -> int:
        """Token vectors of one step."""
        return max(1, _MAX_ELEMENTS // dim if self._fused else _MAX_CELLS // max(columns, dim))

    def _torch_sums(
        self, tokens: Tensor, lengths: npt.NDArray[np.int64], queries: Sequence[npt.NDArray[np.float32]]
    ) -> npt.NDArray[np.float32]:
        """Sums of maxima, float32 [queries, ranges], of ranges with at least one token each."""
        columns = torch.from_numpy(np.concatenate(queries)).to(self._device)
        similarities = tokens.float() @ columns.T
        best = torch.segment_reduce(
            similarities, "max", lengths=torch.from_numpy(lengths).to(self._device), axis=0, unsafe=True
        )
        stops = np.cumsum([len(query) for query in queries])[:-1].tolist()
        # In float64 on the CPU, which every device can: of each range that is one number per query token.
        parts = np.split(best.cpu().numpy().astype(np.float64), stops, axis=1)
        return np.stack([part.sum(axis=1) for part in parts]).astype(np.float32)

    def _fused_sums(
        self, tokens: Tensor, lengths: npt.NDArray[np.int64], queries: Sequence[npt.NDArray[np.float32]]
    ) -> npt.NDArray[np.float32]:
        """As `_torch_sums`, without writing similarities to memory."""
        assert self._fused is not None
        columns = torch.from_numpy(np.concatenate(queries)).to(self._device).half()
        of_queries = _offsets([len(query) for query in queries]).to(self._device)
        sums = self._fused(columns, tokens, of_queries, _offsets(lengths.tolist()).to(self._device))
        found: npt.NDArray[np.float32] = sums.cpu().numpy()
        return found


def _chunks(
    ranges: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64], block: int
) -> list[npt.NDArray[np.int64]]:
    """Ranges in groups of up to `block` tokens, or of one range that has more."""
    if not len(ranges):
        return []
    stops = np.cumsum(offsets[ranges + 1] - offsets[ranges])
    groups, begin, done = [], 0, 0
    while begin < len(ranges):
        stop = max(begin + 1, int(np.searchsorted(stops, done + block, side="right")))
        groups.append(ranges[begin:stop])
        begin, done = stop, int(stops[stop - 1])
    return groups


def _gather(tokens: Tensor, ranges: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64]) -> Tensor:
    """The token vectors of ranges, one range after another; a view where they lie so."""
    begins, stops = offsets[ranges], offsets[ranges + 1]
    if np.array_equal(begins[1:], stops[:-1]):
        return tokens[int(begins[0]) : int(stops[-1])]
    lengths = stops - begins
    shift = begins - (np.cumsum(lengths) - lengths)
    rows = np.arange(int(lengths.sum())) + np.repeat(shift, lengths)
    return tokens.index_select(0, torch.from_numpy(rows).to(tokens.device))


def _offsets(lengths: Sequence[int]) -> Tensor:
    return torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))


def _fused_kernel(device: torch.device) -> Any:
    """`late-interaction-kernels`' packed MaxSim where it can run; None elsewhere."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0):
        return None
    try:
        return importlib.import_module("late_interaction_kernels").maxsim_varlen
    except ImportError:
        return None


def fused_error(scaled: npt.NDArray[np.float32], norms: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """What the fused kernel adds to a float32 scan's error: a float16 query, tensor cores, a float32 sum.

    Args:
        scaled: The query from `rescore.scale_query`, float32 [q, d].
        norms: Upper bound of each row's vector norms, float32 [rows].

    Returns:
        Bounds, float64 [rows].
    """
    tokens, dim = scaled.shape
    rounded = scaled.astype(np.float16).astype(np.float64)
    distances = np.linalg.norm(scaled.astype(np.float64) - rounded, axis=1)
    lengths = vector_norms(scaled) + distances
    rounding = dim * _TENSOR_CORE_ROUNDING + tokens * 2.0**-23
    total = float(distances.sum() + rounding * lengths.sum()) * (1 + 2.0**-40)
    return total * norms.astype(np.float64)
