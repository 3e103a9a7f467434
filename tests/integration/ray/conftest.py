import os
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from phasemesh.pool.protocol import ModelSpec
from phasemesh.pool.ray_cluster import RayCluster, RayClusterConfig
from phasemesh.pool.ray_pool import RayPool
from phasemesh.pool.settings import PoolConfig

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    """One Ray for all tests; it believes that it has two GPUs."""
    # Workers import the tests' engine.
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), before)))
    cluster = RayCluster.start(
        RayClusterConfig(
            runtime_dir=tmp_path_factory.mktemp("run"),
            num_cpus=4,
            num_gpus=2,
            object_store_memory_bytes=256 * 2**20,
            memory_monitor=False,
        )
    )
    yield cluster
    cluster.stop()
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


@pytest.fixture
async def start_pool(cluster: RayCluster) -> AsyncIterator[Callable[..., Any]]:
    """Starts pools of the tests' engine, and closes them after the test."""
    pools: list[RayPool] = []

    async def start(*, source: str = "hash", **settings: Any) -> RayPool:
        defaults = {
            "device": "cpu",
            "engine_factory": "tests.fakes.engine:HashEngine",
            "start_timeout_s": 30.0,
            "ping_interval_s": 0.2,
        }
        pool = await RayPool.start(PoolConfig(**{**defaults, **settings}), (ModelSpec("hash", source),))
        pools.append(pool)
        return pool

    yield start
    for pool in pools:
        await pool.close()
