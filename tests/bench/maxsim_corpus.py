"""What the MaxSim benchmark scores, and how it times: the same documents and the same cold caches for everybody.

Documents have 40 to 200 tokens, 120 on average. Their codes are real ones, of random unit vectors, but a pool of
vectors is encoded once and repeated: the speed of a scan doesn't depend on values, and the vectors of the largest
corpus would not fit beside its codes.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import phasemesh_kernels as kernels

BYTES_PER_ELEMENT = {"int8": 1.0, "int4": 0.5, "bf16": 2.0}
#: Vectors that are encoded; the rest of a corpus repeats them.
POOL_BYTES = 64 << 20


@dataclass(frozen=True)
class Documents:
    """Codes of one corpus."""

    offsets: npt.NDArray[np.int64]
    codes: npt.NDArray[Any]
    codec: str
    dim: int

    @property
    def tokens(self) -> int:
        """All of them."""
        return int(self.offsets[-1])

    def head(self, count: int) -> Documents:
        """The first `count` documents, on the same pages."""
        stop = int(self.offsets[count])
        return Documents(self.offsets[: count + 1], self.codes[:stop], self.codec, self.dim)

    def scan(self, queries: Sequence[npt.NDArray[np.float32]], threads: int, isa: str | None = None) -> Any:
        """Score all documents for all queries in one scan: float32 [queries, documents]."""
        return kernels.maxsim_multi(queries, self.codes, self.offsets, self.codec, threads=threads, isa=isa)


def offsets_of(count: int) -> npt.NDArray[np.int64]:
    """Offsets of `count` documents, int64 [count + 1]; a smaller corpus is the head of a larger one."""
    lengths = np.random.default_rng(3).integers(40, 201, size=count)
    return np.concatenate([[0], np.cumsum(lengths)])


def unit(rng: np.random.Generator, rows: int, dim: int) -> npt.NDArray[np.float32]:
    """float32 [rows, dim], unit rows."""
    matrix = rng.standard_normal((rows, dim), dtype=np.float32)
    matrix /= np.linalg.norm(matrix, axis=1, keepdims=True)
    return matrix


def make(count: int, dim: int, codec: str) -> Documents:
    """A corpus of `count` documents."""
    offsets = offsets_of(count)
    tokens = int(offsets[-1])
    step = min(tokens, max(1, POOL_BYTES // (4 * dim)))
    vectors = unit(np.random.default_rng(dim), step, dim).astype(np.float16)
    pool = kernels.encode(vectors, codec, threads=2).codes
    parts = [pool[: min(step, tokens - begin)] for begin in range(0, tokens, step)]
    return Documents(offsets, np.concatenate(parts), codec, dim)


@cache
def _larger_than_caches() -> npt.NDArray[np.uint8]:
    """Twice the last-level cache where the system tells its size, and at least 96 MiB."""
    largest = 0
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text().strip()
        largest = max(largest, int(text[:-1]) << {"K": 10, "M": 20}.get(text[-1], 0))
    return np.ones(max(96 << 20, 2 * largest), np.uint8)


def evict() -> None:
    """Leave nothing of anybody's in the caches."""
    kernels.read_bandwidth(_larger_than_caches(), threads=1, repeats=1)


def medians(contenders: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each, interleaved and from cold caches, after one call of each that doesn't count."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, work in contenders.items():
            evict()
            began = time.perf_counter()
            work()
            took = time.perf_counter() - began
            if number:
                times[name].append(took)
    return {name: statistics.median(values) for name, values in times.items()}


def available_gib() -> float:
    """Memory for codes that leaves room for making them."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30 * 0.7


class Neighbours:
    """How much of the machine somebody else had meanwhile.

    Figures of two threads on a busy machine are no figures: a peer that waits for its slowest thread after every
    block loses more by it than one that does not, so that not even ratios hold.
    """

    def __init__(self) -> None:
        self._before = self._now()

    @staticmethod
    def _now() -> tuple[float, float, float] | None:
        """Seconds of all CPUs: spent by anybody, spent by us and our children, there were."""
        try:
            fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        except OSError:
            return None
        ticks = os.sysconf("SC_CLK_TCK")
        return (sum(fields) - fields[3] - fields[4]) / ticks, sum(os.times()[:4]), sum(fields) / ticks

    def share(self) -> float | None:
        """CPU time that others used, of all there was since the beginning; None where the system doesn't tell."""
        now = self._now()
        if now is None or self._before is None:
            return None
        busy, own, all_of_it = (after - before for after, before in zip(now, self._before, strict=True))
        return round(max(0.0, busy - own) / max(all_of_it, 1e-9), 3)


def say(what: str) -> None:
    """Progress."""
    print(what, file=sys.stderr, flush=True)
