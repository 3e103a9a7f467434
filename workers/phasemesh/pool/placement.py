"""Whether the replicas fit the Ray cluster, asked before any actor is made.

An actor that fits nowhere would otherwise stay pending for ever, without an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phasemesh.pool.settings import PoolConfig, PoolStartError


@dataclass(frozen=True, slots=True)
class Resources:
    """Cores and whole GPUs, of a node or for a replica."""

    cpus: float
    gpus: float

    def __str__(self) -> str:
        return f"{self.cpus:g} CPU and {self.gpus:g} GPU"

    def times(self, need: Resources) -> int:
        """How often `need` fits."""
        by_cpu = int(self.cpus // need.cpus)
        return min(by_cpu, int(self.gpus // need.gpus)) if need.gpus else by_cpu


def need_per_replica(config: PoolConfig, nodes: Sequence[Resources]) -> Resources:
    """What one replica reserves; "auto" holds a GPU where a node has one."""
    has_gpu = any(node.gpus >= 1 for node in nodes)
    on_gpu = config.device in ("cuda", "xpu") or (config.device == "auto" and has_gpu)
    return Resources(config.cpus_per_replica, 1 if on_gpu else 0)


def check_fit(replicas: int, need: Resources, nodes: Sequence[Resources]) -> None:
    """Refuse replicas that the nodes can't hold even when empty.

    Raises:
        PoolStartError: names need and have.
    """
    fitting = sum(node.times(need) for node in nodes)
    if fitting < replicas:
        have = "; ".join(str(node) for node in nodes) or "no node"
        raise PoolStartError(
            f"{replicas} replica(s) need {need} each, but the Ray cluster has {have}, which holds {fitting}. "
            "Lower replicas or cpus_per_replica, choose another device, or give the cluster more."
        )
