"""What every role's process does: logs, traces, and knowing when to stop."""

from __future__ import annotations

import asyncio
import os
import sys

from phasemesh.config.settings import Settings
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


async def stop_requested(*, exit_with_parent: bool) -> None:
    """Return on SIGTERM or SIGINT, or when the parent's end of stdin closes."""
    waits: list[asyncio.Future[object]] = [asyncio.ensure_future(wait_for_signal())]
    if exit_with_parent:
        waits.append(asyncio.ensure_future(_parent_gone()))
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


async def _parent_gone() -> None:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while await reader.read(4096):
        pass


def cpus() -> int:
    """CPUs that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
