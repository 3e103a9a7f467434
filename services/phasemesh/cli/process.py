"""What every role's process does: logs, traces, and knowing when to stop."""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from phasemesh.cli.report import report_path
from phasemesh.config.settings import Settings, SettingsError
from phasemesh.rpc.lifecycle import wait_for_signal
from phasemesh.telemetry.logs import configure_logging
from phasemesh.telemetry.tracing import TracingSettings, configure_tracing


def configure_process(settings: Settings, role: str) -> None:
    """Logs and traces of this process, before anything else says or does something."""
    configure_logging(role=role, level=settings.log.level, style=settings.log.format)
    configure_tracing(tracing_settings(settings), role=role)


def tracing_settings(settings: Settings) -> TracingSettings:
    """The tracing section, in the form that crosses to worker processes."""
    return TracingSettings(**settings.tracing.model_dump())


#: The supervisor's settings for its roles; keys may be in it.
SETTINGS_FILE = "settings.yaml"


@contextmanager
def role_folder(settings: Settings, role: str, *, supervised: bool) -> Iterator[None]:
    """Hold the role's place in the runtime folder, swept of what a killed predecessor left there.

    A supervised role leaves its report behind, from which its supervisor gives the next one the same ports.

    Raises:
        SettingsError: the folder can't be used, or another process of the same role uses it.
    """
    folder = settings.runtime_dir
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = (folder / f"{role}.lock").open("a")
    except OSError as error:
        raise SettingsError(f"runtime_dir: {folder}: {error.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SettingsError(
                f"runtime_dir: {folder} is in use by another {role}; give this one another --runtime-dir"
            ) from None
        if role == "encoder":
            sweep_ray(folder)
        try:
            yield
        finally:
            if not supervised:
                report_path(folder, role).unlink(missing_ok=True)


def sweep_ray(folder: Path) -> None:
    """Remove the session folders and tokens of Ray clusters whose encoder was killed."""
    for path in folder.glob("ray-*"):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


async def stop_requested(settings: Settings, *, exit_with_parent: bool) -> None:
    """Return on SIGTERM or SIGINT, or when the parent's end of stdin closes."""
    waits: list[asyncio.Future[object]] = [asyncio.ensure_future(wait_for_signal())]
    if exit_with_parent:
        waits.append(asyncio.ensure_future(_parent_gone(settings)))
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


async def _parent_gone(settings: Settings) -> None:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while await reader.read(4096):
        pass
    # A supervisor that was killed couldn't remove it.
    (settings.runtime_dir / SETTINGS_FILE).unlink(missing_ok=True)


def cpus() -> int:
    """CPUs that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
