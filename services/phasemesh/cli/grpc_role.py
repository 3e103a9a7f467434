"""Serves one gRPC role in this process: admin port, runtime, public port, report; then drains.

For roles whose runtime starts by itself. The encoder has a pool of workers to start and stop around its own
and stays apart.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from phasemesh.cli.process import stop_requested
from phasemesh.cli.report import RoleReport, write_report
from phasemesh.config.settings import ServerSettings, Settings
from phasemesh.rpc.admin import AdminServer, Health
from phasemesh.rpc.heartbeat import LoopHeartbeat
from phasemesh.rpc.server import RpcServer
from phasemesh.telemetry.metrics import Metrics

logger = logging.getLogger(__name__)

#: Interval at which gRPC health follows the runtime's own.
_FOLLOW_S = 1.0


class Runtime(Protocol):
    """A service that is ready to be put behind a port."""

    @property
    def servicer(self) -> object:
        """Answers the calls."""

    async def start(self) -> None:
        """Begin to work."""

    async def drain(self) -> None:
        """Finish what was begun."""

    async def close(self) -> None:
        """Stop at once."""

    def health(self) -> Health:
        """Whether requests can be answered now; from any thread."""


@dataclass(frozen=True, slots=True)
class GrpcRole:
    """What distinguishes a role.

    Attributes:
        role: "retrieval" or "scorer".
        name: of this process, for its report; the role's unless several of it run.
        service: full name of its gRPC service.
        add_to_server: the generated function.
        server: where to listen.
    """

    role: str
    name: str
    service: str
    add_to_server: Callable[[Any, Any], None]
    server: ServerSettings


async def serve_role(
    settings: Settings,
    role: GrpcRole,
    metrics: Metrics,
    make_runtime: Callable[[], Runtime],
    *,
    exit_with_parent: bool,
) -> None:
    """Serve until a signal or, on request, the parent's death; then drain.

    Args:
        settings: `rpc`, `access` and `runtime_dir` are read.
        role: what to serve.
        metrics: of the process.
        make_runtime: makes the runtime, on this loop.
        exit_with_parent: end with the parent.

    Raises:
        BindError: a port can't be had.
    """
    heartbeat = LoopHeartbeat()
    runtime: Runtime | None = None
    stop = asyncio.ensure_future(stop_requested(settings, exit_with_parent=exit_with_parent))

    def health() -> Health:
        if stop.done():
            return Health(ok=False, detail={"state": "draining"})
        if runtime is None:
            return Health(ok=False, detail={"state": "starting"})
        return runtime.health()

    admin = AdminServer(
        host=role.server.admin_host,
        port=role.server.admin_port,
        metrics=metrics,
        live=heartbeat.health,
        ready=health,
    )
    async with AsyncExitStack() as stack:
        heartbeat.start()
        stack.callback(heartbeat.stop)
        # First of all: probes get an answer while the runtime starts.
        admin_port = admin.start()
        stack.callback(admin.close)
        starting = make_runtime()
        stack.push_async_callback(starting.close)
        await starting.start()
        runtime = starting
        server = RpcServer(
            role=role.role, server=role.server, rpc=settings.rpc, access=settings.access, metrics=metrics
        )
        server.add(role.service, role.add_to_server, runtime.servicer)
        port = await server.start()
        following = asyncio.ensure_future(_follow(server, role.service, health))
        stack.callback(following.cancel)
        write_report(settings.runtime_dir, RoleReport(role.name, os.getpid(), port, admin_port))
        logger.info(f"{role.role} ready", extra={"port": port, "admin_port": admin_port})
        await stop
        logger.info(f"{role.role} draining")
        following.cancel()
        await server.drain()
        await runtime.drain()
    logger.info(f"{role.role} stopped")


async def _follow(server: RpcServer, service: str, health: Callable[[], Health]) -> None:
    while True:
        server.set_serving(service, health().ok)
        await asyncio.sleep(_FOLLOW_S)
