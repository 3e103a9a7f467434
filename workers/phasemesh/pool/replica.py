"""One replica as the supervisor sees it: its state, its process, its restarts.

    READY ⇄ RESTARTING → FAILED

A replica leaves READY at the first sign of trouble, and comes back only by answering a ping. A restart is
counted when a new incarnation answers, so that a lost connection isn't mistaken for one. One that a suspected
batch has caused isn't held against the replica.
"""

from __future__ import annotations

import asyncio
from typing import Any

from phasemesh.pool.breaker import CrashLoopBreaker
from phasemesh.pool.protocol import ReplicaState, ReplicaStats
from phasemesh.pool.settings import PoolConfig
from phasemesh.pool.worker import WorkerReport


class Replica:
    """Mutable, for the event loop's thread only.

    Attributes:
        handle: the Ray actor's handle.
        alarm: set to have the replica pinged at once.
        breaker: counts restarts.
    """

    def __init__(self, replica_id: str, handle: Any, config: PoolConfig) -> None:
        self.replica_id = replica_id
        self.handle = handle
        self.state = ReplicaState.STARTING
        self.alarm = asyncio.Event()
        self.breaker = CrashLoopBreaker(config.crash_limit, config.crash_window_s, config.clock)
        self._clock = config.clock
        self._report: WorkerReport | None = None
        self._restarts = 0
        self._away_since: float | None = None
        self._excused = False

    @property
    def incarnation(self) -> str:
        """The process last heard of, "" before the first."""
        return self._report.incarnation if self._report else ""

    @property
    def alive(self) -> bool:
        """Whether there is anyone to talk to."""
        return self.state is not ReplicaState.FAILED

    @property
    def away_s(self) -> float:
        """Seconds since the trouble began, 0 where there is none."""
        return 0.0 if self._away_since is None else self._clock() - self._away_since

    def answered(self, report: WorkerReport) -> bool:
        """Take a ping's answer; True if it came from a new process."""
        restarted = self.incarnation not in ("", report.incarnation)
        if restarted:
            self._restarts += 1
            if not self._excused:
                self.breaker.record()
        self._excused = False
        self._report = report
        self._away_since = None
        self.state = ReplicaState.READY
        return restarted

    def quarantine(self) -> bool:
        """Leave READY; True if that is news."""
        if self.state is not ReplicaState.READY:
            return False
        self.state = ReplicaState.RESTARTING
        self._away_since = self._clock()
        return True

    def excuse(self) -> None:
        """Don't hold the restart to come against it: the batch that it ran is to blame."""
        self._excused = True

    def fail(self) -> None:
        """Give up for good."""
        self.state = ReplicaState.FAILED

    def stats(self, in_flight: int, *, draining: bool) -> ReplicaStats:
        """What the service may know; a draining pool's healthy replicas are DRAINING."""
        report = self._report
        shown = ReplicaState.DRAINING if draining and self.state is ReplicaState.READY else self.state
        return ReplicaStats(
            replica_id=self.replica_id,
            state=shown,
            pid=report.pid if report else 0,
            device=report.device if report else "",
            accelerator_ids=report.accelerator_ids if report else (),
            threads=report.threads if report else 0,
            in_flight=in_flight,
            restarts=self._restarts,
            last_ok_unix_ns=report.last_ok_unix_ns if report else 0,
        )
