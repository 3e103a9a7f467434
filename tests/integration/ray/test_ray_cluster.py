"""A local Ray of our own: who may talk to it, how it ends, what it leaves behind."""

import os
import signal
import stat
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from phasemesh.pool.ray_cluster import RayCluster, RayClusterConfig
from phasemesh.pool.settings import PoolStartError

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parents[3]

CLIENT = """
import sys
import ray
ray.init(address=sys.argv[1], log_to_driver=False)
print("answer", ray.get(ray.remote(num_cpus=0)(lambda: 6 * 7).remote(), timeout=20))
"""

SERVER = """
import asyncio, signal, sys
from pathlib import Path
from phasemesh.pool.protocol import ModelSpec
from phasemesh.pool.ray_cluster import RayCluster, RayClusterConfig
from phasemesh.pool.ray_pool import RayPool
from phasemesh.pool.settings import PoolConfig
from tests.fakes.engine import SLEEP, batch_of, expected_dense

async def main():
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    config = PoolConfig(device="cpu", engine_factory="tests.fakes.engine:HashEngine")
    pool = await RayPool.start(config, (ModelSpec("hash", "hash"),))
    running = asyncio.create_task(pool.submit(batch_of([[SLEEP]])))
    await asyncio.sleep(0.2)
    print("ready", pool.stats().replicas[0].pid, flush=True)
    await stop.wait()
    assert await pool.drain(10)
    assert (running.result().dense == expected_dense([[SLEEP]])).all()
    await pool.close()

cluster = RayCluster.start(
    RayClusterConfig(Path(sys.argv[1]), object_store_memory_bytes=100 * 2**20, memory_monitor=False)
)
asyncio.run(main())
cluster.stop()
print("stopped", flush=True)
"""


def client_environment(**extra: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {**kept, "RAY_USAGE_STATS_ENABLED": "0", **extra}


def processes_naming(text: str) -> list[str]:
    """Command lines of processes that name `text` in their arguments or their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            args, environ = ((folder / name).read_bytes() for name in ("cmdline", "environ"))
        except OSError:
            continue
        if text.encode() in args + environ and int(folder.name) != os.getpid():
            found.append(args.replace(b"\0", b" ").decode(errors="replace"))
    return found


def test_only_the_token_opens_the_cluster(cluster: RayCluster, tmp_path: Path):
    def client(**environment: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", CLIENT, cluster.address],
            env=client_environment(HOME=str(tmp_path), **environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    wrong = tmp_path / "wrong"
    wrong.write_text("0" * 64)
    clients = {
        "right": client(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(cluster.token_path)),
        "none": client(),
        "wrong": client(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(wrong)),
    }
    output = {name: process.communicate(timeout=60)[0] for name, process in clients.items()}
    assert clients["right"].returncode == 0, output["right"]
    assert "answer 42" in output["right"]
    for name in ("none", "wrong"):
        assert clients[name].returncode != 0, output[name]
        assert "InvalidAuthToken" in output[name] or "Unauthenticated" in output[name], output[name]
        assert "answer" not in output[name]


def test_the_token_is_for_its_owner_only(cluster: RayCluster):
    assert cluster.token_path is not None
    assert stat.S_IMODE(cluster.token_path.stat().st_mode) == 0o600
    assert len(cluster.token_path.read_text()) == 64


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose path leaves room for Ray's sockets, as pytest's own doesn't."""
    with tempfile.TemporaryDirectory(prefix="p") as folder:
        yield Path(folder)


def test_sigterm_drains_exits_zero_and_leaves_nothing(short_path: Path):
    run = short_path / ("too-long-for-a-socket" * 4)
    run.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, str(run)],
        env=client_environment(PYTHONPATH=str(ROOT), TMPDIR=str(short_path)),
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        try:
            assert server.stdout is not None
            assert server.stdout.readline().startswith("ready")
            assert processes_naming(str(short_path))
            server.send_signal(signal.SIGTERM)
            output, _ = server.communicate(timeout=30)
        finally:
            server.kill()
    assert (server.returncode, output.splitlines()[-1:]) == (0, ["stopped"])
    assert processes_naming(str(short_path)) == []
    assert [p for p in short_path.rglob("*") if p != run] == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"address": "ray://head:10001"}, "can't go through Ray Client"),
        ({"runtime_dir": Path("/nonexistent")}, "runtime folder /nonexistent doesn't exist"),
    ],
)
def test_start_says_what_is_wrong(tmp_path: Path, settings: dict[str, object], message: str):
    # In a process of its own: this one may hold the tests' cluster already.
    code = textwrap.dedent(
        f"""
        from pathlib import Path, PosixPath
        from phasemesh.pool.ray_cluster import RayCluster, RayClusterConfig
        RayCluster.start(RayClusterConfig(**{ {"runtime_dir": tmp_path, **settings}!r}))
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=client_environment(), capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert message in done.stderr.splitlines()[-1]


def test_a_second_start_in_one_process_is_refused(cluster: RayCluster, tmp_path: Path):
    with pytest.raises(PoolStartError, match="already initialised"):
        RayCluster.start(RayClusterConfig(tmp_path))
