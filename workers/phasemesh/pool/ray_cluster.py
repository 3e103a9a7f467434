"""Ray's life in this process: start a pod-local cluster, or join one, and leave nothing behind.

A local cluster belongs to the process that starts it. It listens with token authentication on, a new random
token per start, kept in a file that only its owner can read. `stop` ends its processes and removes its files.

Ray replaces the process's SIGTERM handler in `ray.init`: install your own *after* `RayCluster.start`, and
don't call `stop` from within a signal handler (Ray aborts there); set an event instead.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from phasemesh.pool.settings import PoolStartError

logger = logging.getLogger(__name__)

NAMESPACE = "phasemesh"

#: Longest path of an AF_UNIX socket on Linux, without the closing NUL (`sun_path` in unix(7)).
_SUN_PATH_MAX = 107

#: What Ray puts below its temporary folder: `session_<date>_<time>_<µs>_<pid>/sockets/plasma_store`.
_SOCKET_SUFFIX = len("/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store")


@dataclass(frozen=True, slots=True)
class RayClusterConfig:
    """How to come by a Ray cluster.

    Attributes:
        runtime_dir: an existing folder for the token file and, where its path is short enough for a socket,
            for Ray's temporary files; else those go to the system's temporary folder.
        address: `host:port` of a running cluster, or "auto"; None takes the environment's `RAY_ADDRESS`, and
            without one starts a local cluster. Never `ray://`.
        num_cpus: cores of the local cluster.
        num_gpus: GPUs of the local cluster; None leaves it to Ray to find them.
        object_store_memory_bytes: shared memory for batches and results over 100 KiB; batches in flight must
            fit.
        memory_monitor: let Ray end workers before the machine runs out of memory.
    """

    runtime_dir: Path
    address: str | None = None
    num_cpus: int = 1
    num_gpus: int | None = 0
    object_store_memory_bytes: int = 512 * 2**20
    memory_monitor: bool = True


class RayCluster:
    """A connection to Ray; made by `start`."""

    def __init__(self, address: str, *, local: bool, token_path: Path | None, cleanup: contextlib.ExitStack):
        self.address = address
        self.local = local
        self.token_path = token_path
        self._cleanup = cleanup

    @classmethod
    def start(cls, config: RayClusterConfig) -> RayCluster:
        """Start or join a cluster; takes seconds, so call it before the event loop runs.

        Raises:
            PoolStartError: Ray is already running in this process, the address is a `ray://` one, the
                runtime folder is missing, or Ray refuses; the message says which.
        """
        if ray.is_initialized():
            raise PoolStartError("ray is already initialised in this process; stop it first")
        address = config.address or os.environ.get("RAY_ADDRESS")
        with contextlib.ExitStack() as cleanup:
            token_path = _join(address, cleanup) if address else _start_local(config, cleanup)
            return cls(
                ray.get_runtime_context().gcs_address,
                local=not address,
                token_path=token_path,
                cleanup=cleanup.pop_all(),
            )

    def stop(self) -> None:
        """Leave the cluster; end a local one's processes and remove its files. Safe to call twice."""
        self._cleanup.close()


def _join(address: str, cleanup: contextlib.ExitStack) -> Path | None:
    if "://" in address:
        raise PoolStartError(
            f"the Ray address is {address!r}; batches can't go through Ray Client (0.16 GB/s). "
            "Run inside a node of the cluster and give its 'host:port', or 'auto'."
        )
    mode = os.environ.get("RAY_AUTH_MODE", "token")
    cleanup.enter_context(_environment({"RAY_AUTH_MODE": mode, "TOKENIZERS_PARALLELISM": "false"}))
    _init(cleanup, address=address)
    path = os.environ.get("RAY_AUTH_TOKEN_PATH")
    return Path(path) if path else None


def _start_local(config: RayClusterConfig, cleanup: contextlib.ExitStack) -> Path:
    if not config.runtime_dir.is_dir():
        raise PoolStartError(f"the runtime folder {config.runtime_dir} doesn't exist; create it first")
    temp_dir = _temp_dir(config.runtime_dir)
    cleanup.callback(shutil.rmtree, temp_dir.parent, ignore_errors=True)
    token_path = _write_token(config.runtime_dir)
    cleanup.callback(token_path.unlink, missing_ok=True)
    cleanup.enter_context(
        _environment(
            {
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN": None,  # would win over the file
                "RAY_AUTH_TOKEN_PATH": str(token_path),
                "RAY_ADDRESS": None,
                # Else an actor that holds no GPU keeps the inherited CUDA_VISIBLE_DEVICES, and sees them all.
                "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1",
                "RAY_USAGE_STATS_ENABLED": "0",
                # Ray would run workers at niceness 15, behind every other process of the machine: a forward
                # pass that shares its cores with the service took 10 instead of 6 ms.
                "RAY_worker_niceness": "0",
                "TOKENIZERS_PARALLELISM": "false",
                **({} if config.memory_monitor else {"RAY_memory_monitor_refresh_ms": "0"}),
            }
        )
    )
    _init(
        cleanup,
        address="local",
        num_cpus=config.num_cpus,
        num_gpus=config.num_gpus,
        object_store_memory=config.object_store_memory_bytes,
        include_dashboard=False,
        _temp_dir=str(temp_dir),
    )
    return token_path


def _init(cleanup: contextlib.ExitStack, **arguments: object) -> None:
    # On the way out first, also when ray.init itself fails with half of its processes up.
    cleanup.callback(ray.shutdown, wait_for_processes=True)
    try:
        ray.init(
            **arguments,
            namespace=NAMESPACE,
            log_to_driver=False,
            configure_logging=False,
            logging_level=logging.WARNING,
        )
    except (RuntimeError, ValueError, OSError, ray.exceptions.RayError) as error:
        raise PoolStartError(f"Ray did not start: {error}") from error


def _temp_dir(runtime_dir: Path) -> Path:
    """A folder for Ray's files inside one that only its owner can enter: Ray makes its own world-writable."""
    parent = runtime_dir.resolve()
    if len(os.fsencode(parent)) + len("/ray-XXXXXXXX/r") + _SOCKET_SUFFIX > _SUN_PATH_MAX:
        parent = Path(tempfile.gettempdir())
    return Path(tempfile.mkdtemp(prefix="ray-", dir=parent)) / "r"


def _write_token(runtime_dir: Path) -> Path:
    descriptor, name = tempfile.mkstemp(prefix="ray-token-", dir=runtime_dir.resolve())  # mode 0600
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32))
    return Path(name)


@contextlib.contextmanager
def _environment(values: dict[str, str | None]) -> Iterator[None]:
    """Set variables for Ray's processes, which inherit them, and put the old ones back in the end."""
    before = {name: os.environ.get(name) for name in values}
    _set_environment(values)
    try:
        yield
    finally:
        _set_environment(before)


def _set_environment(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    # Ray reads its settings once, when it is imported, and keeps the token it first saw. It has no public way
    # to read them again (its own `_private/authentication` does the same).
    raylet: Any = importlib.import_module("ray._raylet")
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()
