"""Times a batch's phases on the host's clock, or on the device's where work is asynchronous.

Invariant: timing adds no synchronisation of its own; device events are read after the results are.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from phasemesh.pool.protocol import WorkerTimings


@dataclass(frozen=True, slots=True)
class Clocks:
    """Where time comes from.

    Attributes:
        unix_ns: wall clock, nanoseconds since 1970.
        elapsed_ns: monotonic clock, nanoseconds.
    """

    unix_ns: Callable[[], int] = time.time_ns
    elapsed_ns: Callable[[], int] = time.perf_counter_ns


class Stopwatch:
    """One batch's times. Call `ready`, `computed` once per block, in that order, and `timings` at the end."""

    def __init__(self, clocks: Clocks, device: torch.device) -> None:
        self._clocks = clocks
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] | None = (
            [] if device.type == "cuda" else None
        )
        self._unix_ns = clocks.unix_ns()
        self._start_ns = self._mark_ns = clocks.elapsed_ns()
        self._transfer_ns = self._compute_ns = 0

    def begin(self) -> None:
        """A block's padding and transfer begin."""
        self._mark_ns = self._clocks.elapsed_ns()

    def ready(self) -> None:
        """The block's inputs are on the device; its forward pass begins."""
        now = self._clocks.elapsed_ns()
        self._transfer_ns += now - self._mark_ns
        self._mark_ns = now
        if self._events is not None:
            self._events.append((torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)))
            self._events[-1][0].record()

    def computed(self) -> None:
        """The block's forward pass has run, or on CUDA been queued."""
        if self._events is not None:
            self._events[-1][1].record()
        else:
            self._compute_ns += self._clocks.elapsed_ns() - self._mark_ns

    def timings(self, padded_tokens: int) -> WorkerTimings:
        """The batch's times; its results must have been read."""
        total_ns = self._clocks.elapsed_ns() - self._start_ns
        compute_ns = self._compute_ns
        if self._events is not None:
            compute_ns = sum(int(first.elapsed_time(last) * 1e6) for first, last in self._events)
        return WorkerTimings(
            started_unix_ns=self._unix_ns,
            transfer_ns=self._transfer_ns,
            compute_ns=compute_ns,
            pool_ns=max(0, total_ns - self._transfer_ns - compute_ns),
            padded_tokens=padded_tokens,
        )
