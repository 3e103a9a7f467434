"""The gRPC server of every role: ports, limits, interceptors, health, reflection and drain in one place.

Invariants: a port belongs to one process (a second bind is an error, not a silent share); nothing of the
start-up's context (its trace, its call) reaches a handler; at drain health says NOT_SERVING before the port
closes, so that balancers turn away while calls still succeed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import Context
from typing import Any

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import FileDescriptor
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from opentelemetry.instrumentation.grpc import aio_server_interceptor

from phasemesh.config.settings import AccessSettings, RpcSettings, ServerSettings
from phasemesh.errors import Unimplemented
from phasemesh.rpc.access import AccessInterceptor
from phasemesh.rpc.bind import BindError, authority
from phasemesh.rpc.catalogue import CHANNELZ, HEALTH, PACKAGE, REFLECTION, SERVICES, split_method
from phasemesh.rpc.deadline import DeadlineInterceptor
from phasemesh.rpc.decode import DecodeInterceptor
from phasemesh.rpc.interceptor import Handler
from phasemesh.rpc.status import RetryableInterceptor, StatusInterceptor
from phasemesh.telemetry.metrics import Metrics
from phasemesh.telemetry.tracing import tracer_provider

#: Calls in flight after which gRPC itself refuses; admission refuses long before with better words.
MAX_CONCURRENT_RPCS = 4096

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_UNTRACED = frozenset({HEALTH, REFLECTION, CHANNELZ})


class RpcServer:
    """One gRPC server; made, filled with `add`, started and drained on one event loop.

    Args:
        role: "encoder", "retrieval", ...; callers of other services are told it.
        server: where to listen.
        rpc: limits and times.
        access: keys.
        metrics: of the process.
    """

    def __init__(
        self,
        *,
        role: str,
        server: ServerSettings,
        rpc: RpcSettings,
        access: AccessSettings,
        metrics: Metrics,
    ) -> None:
        self._role = role
        self._settings = server
        self._rpc = rpc
        self._access = access
        self._metrics = metrics
        self._services: list[tuple[str, Callable[[Any, Any], None], Any]] = []
        self._serving: dict[str, bool] = {}
        self._health = _Health()
        self._server: grpc.aio.Server | None = None
        self._draining: asyncio.Task[None] | None = None
        self._updates: set[asyncio.Task[None]] = set()

    def add(
        self, descriptor_full_name: str, add_to_server: Callable[[Any, Any], None], servicer: object
    ) -> None:
        """Serve `servicer`; before `start`. Its health is NOT_SERVING until `set_serving` says otherwise.

        Args:
            descriptor_full_name: e.g. "phasemesh.v1.EncoderService".
            add_to_server: the generated `add_..._to_server`.
            servicer: its methods raise `phasemesh.errors` and nothing else.
        """
        if self._server is not None:
            raise RuntimeError(f"{descriptor_full_name} was added after the start")
        self._services.append((descriptor_full_name, add_to_server, servicer))
        self._serving.setdefault(descriptor_full_name, False)

    async def start(self) -> int:
        """Listen; returns the port.

        Raises:
            BindError: the port can't be had.
        """
        if self._server is not None:
            raise RuntimeError("the server was started before")
        # Made here, not in __init__: the interceptor keeps the tracer provider of this moment.
        self._server = server = grpc.aio.server(
            interceptors=[
                RetryableInterceptor(),
                aio_server_interceptor(
                    tracer_provider=tracer_provider(),
                    filter_=lambda details: split_method(details.method)[0] not in _UNTRACED,
                ),
                StatusInterceptor(self._metrics),
                AccessInterceptor(self._access),
                DeadlineInterceptor(self._rpc),
                DecodeInterceptor(),
            ],
            options=server_options(self._rpc),
            maximum_concurrent_rpcs=MAX_CONCURRENT_RPCS,
        )
        for _, add_to_server, servicer in self._services:
            add_to_server(servicer, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        for service in self._serving:
            await self._publish(service)
        if self._rpc.channelz:
            _add_channelz(server)
        if self._rpc.reflection:
            names = [name for name, _, _ in self._services]
            pool: Any = _MemberPool()
            reflection.enable_server_reflection([*names, HEALTH, REFLECTION], server, pool=pool)
        server.add_generic_rpc_handlers((_NotServedHere(self._role),))
        host, port = self._settings.host, self._settings.port
        try:
            bound = server.add_insecure_port(authority(host, port))
        except RuntimeError as error:
            raise BindError("the gRPC server", host, port, str(error).split(";")[0]) from None
        # gRPC runs handlers in tasks made below this one, which inherit its context for good.
        await asyncio.get_running_loop().create_task(server.start(), context=Context())
        return bound

    def set_serving(self, service: str, serving: bool) -> None:
        """Say in health whether `service` can serve now; on the server's loop. At drain it has no effect."""
        self._serving[service] = serving
        if self._server is None:
            return
        task = asyncio.get_running_loop().create_task(self._publish(service), context=Context())
        self._updates.add(task)
        task.add_done_callback(self._updates.discard)

    async def _publish(self, service: str) -> None:
        # Reads what is wanted now, so that the order in which these tasks run doesn't matter.
        await self._health.set(service, _SERVING if self._serving[service] else _NOT_SERVING)
        # Who names no service means all of them; whether the process lives is the admin port's to say.
        await self._health.set("", _SERVING if all(self._serving.values()) else _NOT_SERVING)

    async def drain(self) -> None:
        """Turn callers away, let calls in flight finish, stop. Calling again waits for the same drain.

        Takes `drain_delay_s` and at most `drain_s`; calls that are still in flight then are cancelled.
        """
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self._drain(), context=Context())
        await asyncio.shield(self._draining)

    async def _drain(self) -> None:
        await self._health.enter_graceful_shutdown()
        if self._server is None:
            return
        await asyncio.sleep(self._rpc.drain_delay_s)
        self._health.end_watches()
        await self._server.stop(self._rpc.drain_s)


def server_options(rpc: RpcSettings) -> list[tuple[str, int]]:
    """Channel arguments of our servers; see `client.channel_options` for the other side."""
    keepalive_ms = round(rpc.keepalive_s * 1e3)
    return [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", rpc.max_message_bytes),
        ("grpc.max_send_message_length", rpc.max_message_bytes),
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", min(20_000, keepalive_ms)),
        ("grpc.keepalive_permit_without_calls", 1),
        # Strictly below the clients' interval: the default of 5 minutes answers the pings of a long call
        # by GOAWAY "too_many_pings".
        ("grpc.http2.min_ping_interval_without_data_ms", keepalive_ms // 3),
        # gRPC resolves names again only when a connection ends, so without an age new replicas stay idle.
        ("grpc.max_connection_age_ms", round(rpc.connection_age_s * 1e3)),
        ("grpc.max_connection_age_grace_ms", round((rpc.max_deadline_s + 5) * 1e3)),
    ]


class _Health(health.aio.HealthServicer):  # type: ignore[misc, name-defined]  # not in the stubs
    """grpc.health.v1, whose watch streams end at drain instead of holding it up."""

    def __init__(self) -> None:
        super().__init__()
        self._ended = asyncio.Event()

    def end_watches(self) -> None:
        self._ended.set()

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Any) -> None:  # noqa: N802  # gRPC's name
        watch = asyncio.ensure_future(super().Watch(request, context))
        ended = asyncio.ensure_future(self._ended.wait())
        try:
            await asyncio.wait({watch, ended}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            watch.cancel()
            ended.cancel()
            await asyncio.wait({watch, ended})


class _NotServedHere(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in the stubs only
    """Answers what this process doesn't serve by saying who does; asked after every real service."""

    def __init__(self, role: str) -> None:
        self._role = role

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        path: str = handler_call_details.method
        if not path.startswith(f"/{PACKAGE}."):
            return None

        async def refuse(request: bytes, context: object) -> bytes:
            raise Unimplemented(self._why(path), reason="NOT_SERVED_HERE")

        return grpc.unary_unary_rpc_method_handler(refuse)

    def _why(self, path: str) -> str:
        service, method = split_method(path)
        if service not in SERVICES:
            return f"there is no service {service}; there are {', '.join(SERVICES)}"
        descriptor, role = SERVICES[service]
        if method not in descriptor.methods_by_name:
            return f"{service} has no method {method}; it has {', '.join(descriptor.methods_by_name)}"
        return f"this is the {self._role}, {service} is served by the {role}; call that"


class _MemberPool:
    """The default descriptor pool, which also finds the file of a method or field.

    protobuf's own only knows top-level names, so `grpcurl describe` of a method would fail.
    """

    def FindFileContainingSymbol(self, symbol: str) -> FileDescriptor:  # noqa: N802  # protobuf's name
        pool = descriptor_pool.Default()
        try:
            return pool.FindFileContainingSymbol(symbol)
        except KeyError:
            return pool.FindFileContainingSymbol(symbol.rpartition(".")[0])

    def __getattr__(self, name: str) -> Any:
        return getattr(descriptor_pool.Default(), name)


def _add_channelz(server: grpc.aio.Server) -> None:
    try:
        from grpc_channelz.v1 import channelz
    except ImportError:
        raise RuntimeError("rpc.channelz needs the package grpcio-channelz; install it or unset it") from None
    channelz.add_channelz_servicer(server)  # type: ignore[arg-type]  # the stub knows only the sync server
