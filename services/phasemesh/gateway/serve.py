"""The gateway as a process: start, serve, drain.

Invariants: the port belongs to one process; a signal first makes readiness say no, then closes the port, then
lets requests in flight finish; uvicorn handles no signals, because the drain is ours.

What uvicorn has against slow clients is the keep-alive timeout between requests; a body has to arrive within
the request's timeout (`bodies`). It has no limit for slow headers: put a proxy in front on the open internet.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import uvicorn
import uvloop

from phasemesh.config.settings import Settings
from phasemesh.gateway.app import create_app
from phasemesh.gateway.health import Readiness
from phasemesh.rpc.admin import AdminServer, Health
from phasemesh.rpc.bind import BindError
from phasemesh.rpc.client import RpcClient
from phasemesh.rpc.directory import ModelDirectory
from phasemesh.rpc.heartbeat import LoopHeartbeat
from phasemesh.rpc.lifecycle import wait_for_signal
from phasemesh.rpc.watch import PeerWatch
from phasemesh.telemetry import names
from phasemesh.telemetry.metrics import Metrics

_log = logging.getLogger(__name__)

#: Idle connections are kept longer than load balancers keep theirs (60 s is common), so that it is never we
#: who close one that a balancer is about to use.
KEEP_ALIVE_S = 75
#: Connections that wait to be accepted.
BACKLOG = 2048


@dataclass(frozen=True, slots=True)
class Ports:
    """Where the gateway listens.

    Attributes:
        http: the public port.
        admin: the port of /livez, /readyz and /metrics.
    """

    http: int
    admin: int


async def serve_gateway(
    settings: Settings,
    *,
    on_started: Callable[[Ports], None] | None = None,
    until: Callable[[], Awaitable[object]] = wait_for_signal,
) -> None:
    """Serve until `until` returns, then drain; returns when all is closed.

    Args:
        settings: `gateway`, `rpc` and `access` are read.
        on_started: told the ports, once they answer.
        until: awaited for the end; default: SIGTERM or SIGINT.

    Raises:
        BindError: a port can't be had.
    """
    metrics = Metrics()
    client = RpcClient(rpc=settings.rpc, key=settings.access.mesh_key())
    directory = ModelDirectory(
        client, settings.gateway.encoders, refresh_s=settings.gateway.directory_refresh_s
    )
    watch = None
    if settings.gateway.retrieval is not None:
        watch = PeerWatch(
            client,
            settings.gateway.retrieval,
            "phasemesh.v1.RetrievalService",
            refresh_s=settings.gateway.directory_refresh_s,
        )
    readiness = Readiness(directory, watch)
    app = create_app(settings, client=client, directory=directory, metrics=metrics, readiness=readiness)
    listener = listen(settings.gateway.host, settings.gateway.port)
    server = _Server(_config(app, settings))
    heartbeat = LoopHeartbeat()
    admin = AdminServer(
        host=settings.gateway.admin_host,
        port=settings.gateway.admin_port,
        metrics=metrics,
        live=heartbeat.health,
        ready=lambda: Health(readiness.ready, readiness.describe()),
    )
    # Before the first poll, which may take seconds: a signal must not find Python's default handler.
    ending = asyncio.ensure_future(until())
    try:
        admin_port = admin.start()
        heartbeat.start()
        await directory.start()
        if watch is not None:
            watch.start()
        for info in directory.models():
            for phase in names.GATEWAY_PHASES:
                metrics.phase_duration.labels(phase, info.name)
        await _serve_until(server, listener, ending, readiness, settings, on_started, admin_port)
    finally:
        ending.cancel()
        listener.close()
        if watch is not None:
            await watch.close()
        await directory.close()
        await client.close()
        heartbeat.stop()
        admin.close()


def run_gateway(
    settings: Settings,
    *,
    on_started: Callable[[Ports], None] | None = None,
    until: Callable[[], Awaitable[object]] = wait_for_signal,
) -> None:
    """`serve_gateway` on a uvloop of its own; for a process's main thread."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve_gateway(settings, on_started=on_started, until=until))


async def _serve_until(
    server: _Server,
    listener: socket.socket,
    ending: asyncio.Future[object],
    readiness: Readiness,
    settings: Settings,
    on_started: Callable[[Ports], None] | None,
    admin_port: int,
) -> None:
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await server.wait_accepting(serving)
        ports = Ports(listener.getsockname()[1], admin_port)
        _log.info("gateway serves", extra={"port": ports.http, "admin_port": ports.admin})
        if on_started is not None:
            on_started(ports)
        await asyncio.wait((serving, ending), return_when=asyncio.FIRST_COMPLETED)
        readiness.draining = True
        if not serving.done():
            _log.info("gateway drains")
            await asyncio.sleep(settings.rpc.drain_delay_s)
    finally:
        server.should_exit = True
        await serving
    _log.info("gateway stopped")


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket of this process alone; port 0 takes a free one.

    Raises:
        BindError: the port can't be had.
    """
    # The protocol is stated, as `socket.create_server` does not: asyncio sets TCP_NODELAY only on sockets
    # that say TCP, and without it every reply waits 40 ms for the client's delayed acknowledgement.
    listener = socket.socket(
        socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP
    )
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise BindError("the gateway", host, port, error.strerror or str(error)) from None
    return listener


def _config(app: object, settings: Settings) -> uvicorn.Config:
    return uvicorn.Config(
        app,  # type: ignore[arg-type]  # uvicorn's own ASGI type is narrower than Starlette's
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(settings.rpc.drain_s)),
    )


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers, saying when it accepts."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._accepting = asyncio.Event()

    async def wait_accepting(self, serving: asyncio.Task[None]) -> None:
        """Wait until the port answers; raises what ended `serving` if that came first."""
        accepting = asyncio.create_task(self._accepting.wait())
        await asyncio.wait((serving, accepting), return_when=asyncio.FIRST_COMPLETED)
        accepting.cancel()
        if serving.done():
            serving.result()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `until`."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """See `uvicorn.Server.startup`."""
        await super().startup(sockets)
        self._accepting.set()
