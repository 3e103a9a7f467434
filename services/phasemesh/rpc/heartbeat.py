"""Whether the event loop still turns, as another thread sees it.

The loop stamps a time at every beat; a stamp that is old means that something blocks it, which no probe that
runs on the loop itself could tell.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextvars import Context

from phasemesh.rpc.admin import Health

#: Time between stamps, seconds.
INTERVAL_S = 0.5
#: Age at which the loop counts as stuck, seconds. Long: a restart loses every call in flight.
STUCK_AFTER_S = 30.0


class LoopHeartbeat:
    """Stamps the time from the running loop.

    Args:
        stuck_after_s: age of the last stamp at which the loop counts as stuck, seconds.
        interval_s: time between stamps, seconds.
        now_s: monotonic clock.
    """

    def __init__(
        self,
        *,
        stuck_after_s: float = STUCK_AFTER_S,
        interval_s: float = INTERVAL_S,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stuck_after_s = stuck_after_s
        self._interval_s = interval_s
        self._now_s = now_s
        self._stamp_s = now_s()
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to beat on the running loop."""
        self._beat(asyncio.get_running_loop())

    def stop(self) -> None:
        """Beat no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        self._stamp_s = self._now_s()
        self._timer = loop.call_later(self._interval_s, self._beat, loop, context=Context())

    def age_s(self) -> float:
        """Seconds since the last beat; from any thread."""
        return self._now_s() - self._stamp_s

    def health(self) -> Health:
        """The answer to a liveness probe; from any thread."""
        age_s = self.age_s()
        return Health(age_s < self._stuck_after_s, {"loop_age_s": round(age_s, 3)})
