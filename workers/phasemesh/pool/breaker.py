"""The crash-loop breaker: a replica that keeps dying is given up instead of restarted for ever.

Ray restarts an actor without limit, so that one crash a day never uses up a budget; this breaker counts
restarts in a sliding window instead. Once tripped it stays tripped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class CrashLoopBreaker:
    """Trips at the `limit`-th restart within `window_s` seconds of `clock`."""

    def __init__(self, limit: int, window_s: float, clock: Callable[[], float]) -> None:
        self._limit = limit
        self._window_s = window_s
        self._clock = clock
        self._times: deque[float] = deque()
        self._tripped = False

    @property
    def tripped(self) -> bool:
        """Whether the limit was ever reached."""
        return self._tripped

    def record(self) -> bool:
        """Count one restart now; True if the breaker is tripped."""
        now = self._clock()
        self._times.append(now)
        while self._times[0] <= now - self._window_s:
            self._times.popleft()
        self._tripped = self._tripped or len(self._times) >= self._limit
        return self._tripped
