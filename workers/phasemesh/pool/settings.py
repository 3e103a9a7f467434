"""What a pool is told at its start, and the error that says why it could not start.

Nothing here imports ray, so that the in-process pool runs where Ray isn't installed.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from phasemesh.telemetry.tracing import TracingSettings

Device = Literal["auto", "cuda", "xpu", "mps", "cpu"]

#: The torch engine, named by path because only the worker process may import torch.
DEFAULT_ENGINE = "phasemesh.engine.engine:Engine"


class PoolStartError(Exception):
    """The pool cannot start; the message names what is needed, what there is, and the setting to change."""


@dataclass(frozen=True, slots=True)
class PoolConfig:
    """How many replicas to run, on what, and how patiently to supervise them.

    Attributes:
        replicas: workers, each the owner of one device and a host of all models.
        device: where replicas run. On Ray "auto" is CUDA where the cluster has a GPU, else CPU; "cuda" and
            "xpu" replicas hold a GPU each.
        engine_device: what the engine is told where that differs from `device`, e.g. to run a replica that
            holds a GPU on the CPU; None follows `device`.
        cpus_per_replica: cores that a replica reserves in Ray. It must be at least 1: for an actor without
            a reservation Ray forces `OMP_NUM_THREADS=1`.
        threads: torch's intra-op threads per replica; None takes `cpus_per_replica`.
        engine_factory: `module:class` of the engine, imported in the worker. The module, or `errors` beside
            it, defines `DeviceLost`, the exception after which the worker's process is of no more use.
        tracing: for the worker's own tracer; None leaves spans off (in-process: the process's own tracer).
        log_level: of an actor's own log, which Ray keeps among its session's files.
        start_timeout_s: for placement and loading of all models.
        ping_interval_s: between two pings of a healthy replica.
        ping_timeout_s: without an answer for so long, a replica is quarantined until it answers.
        restart_timeout_s: a replica that stays away for so long has failed for good.
        crash_limit: restarts within `crash_window_s` at which a replica has failed for good.
        crash_window_s: see `crash_limit`.
        seed: breaks ties between equally busy replicas.
        clock: monotonic seconds.
    """

    replicas: int = 1
    device: Device = "auto"
    engine_device: str | None = None
    cpus_per_replica: int = 1
    threads: int | None = None
    engine_factory: str = DEFAULT_ENGINE
    tracing: TracingSettings | None = None
    log_level: str = "info"
    start_timeout_s: float = 300.0
    ping_interval_s: float = 1.0
    ping_timeout_s: float = 10.0
    restart_timeout_s: float = 300.0
    crash_limit: int = 5
    crash_window_s: float = 120.0
    seed: int = 0
    clock: Callable[[], float] = field(default=time.monotonic, repr=False)

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ValueError(f"replicas is {self.replicas}; it must be at least 1")
        if self.cpus_per_replica < 1:
            raise ValueError(f"cpus_per_replica is {self.cpus_per_replica}; it must be at least 1")
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads is {self.threads}; it must be at least 1, or unset")
        if self.crash_limit < 1:
            raise ValueError(f"crash_limit is {self.crash_limit}; it must be at least 1")

    @property
    def engine_threads(self) -> int:
        """Threads each engine is told to use."""
        return self.cpus_per_replica if self.threads is None else self.threads

    def random(self) -> random.Random:
        """A generator for tie breaks; not for secrets."""
        return random.Random(self.seed)  # noqa: S311  (spreads load, protects nothing)
