"""How fast the pool computes, as measured: tokens per second of the time in which it had all it could take.

Invariant: neither idle time nor small batches count, so that the figure is a capacity and not a load. A batch
of one short text takes about as long as one of ten; a rate learned from such would make the next large
request look like minutes of work, and refuse it.
"""

from __future__ import annotations

import math
from collections.abc import Callable


class BusyMeter:
    """An exponentially weighted average over busy time.

    Args:
        now_s: monotonic seconds.
        memory_s: busy seconds after which a measurement counts for 1/e.
    """

    def __init__(self, now_s: Callable[[], float], memory_s: float = 10.0) -> None:
        self._now_s = now_s
        self._memory_s = memory_s
        self._tokens = 0.0
        self._busy_s = 0.0
        self._outstanding = 0
        self._since_s = 0.0

    def began(self) -> None:
        """A batch was handed to the pool."""
        if self._outstanding == 0:
            self._since_s = self._now_s()
        self._outstanding += 1

    def ended(self, tokens: int, *, full: bool) -> None:
        """A batch came back with `tokens` computed; 0 for one that failed.

        Args:
            tokens: real ones, without padding.
            full: the batch was as large as the pool could take it, or more work waited behind it.
        """
        now_s = self._now_s()
        elapsed_s, self._since_s = now_s - self._since_s, now_s
        self._outstanding -= 1
        if not full:
            return
        decay = math.exp(-elapsed_s / self._memory_s)
        self._tokens = self._tokens * decay + tokens
        self._busy_s = self._busy_s * decay + elapsed_s

    @property
    def tokens_per_second(self) -> float:
        """The average; 0 before the first measurement."""
        return self._tokens / self._busy_s if self._busy_s > 0 else 0.0
