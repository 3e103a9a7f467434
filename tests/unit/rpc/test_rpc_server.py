"""The server of every role: one port, health, drain, who serves what, clean contexts, keepalive, age."""

from __future__ import annotations

import asyncio
import contextvars
import re
import time
from collections.abc import Awaitable, Callable

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from phasemesh.config.settings import AccessSettings, RpcSettings, ServerSettings
from phasemesh.errors import DeadlineExceeded, ResourceExhausted, Unavailable, Unimplemented
from phasemesh.rpc.bind import BindError
from phasemesh.rpc.client import channel_options
from phasemesh.rpc.server import MAX_CONCURRENT_RPCS, RpcServer, server_options
from phasemesh.telemetry import tracing
from phasemesh.telemetry.metrics import Metrics
from phasemesh.v1.encoder_pb2 import EmbedRequest, EmbedResponse
from phasemesh.v1.encoder_pb2_grpc import EncoderServiceStub
from phasemesh.v1.retrieval_pb2 import ListCollectionsRequest
from phasemesh.v1.retrieval_pb2_grpc import RetrievalServiceStub
from phasemesh.v1.scorer_pb2 import GetLoadRequest
from phasemesh.v1.scorer_pb2_grpc import ScorerServiceStub
from tests.unit.rpc.harness import SERVICE, Mesh, mesh

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def echo(request: EmbedRequest) -> EmbedResponse:
    return EmbedResponse(model=request.model)


def health(m: Mesh) -> Callable[[str], Awaitable[int]]:
    stub = health_pb2_grpc.HealthStub(m.channel())

    async def check(service: str) -> int:
        reply = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
        return int(reply.status)

    return check


async def test_a_second_server_on_the_port_is_an_error_that_names_it() -> None:
    async with mesh(echo) as m:
        port = int(m.target.rpartition(":")[2])
        second = RpcServer(
            role="encoder",
            server=ServerSettings(port=port, admin_port=0),
            rpc=RpcSettings(),
            access=AccessSettings(),
            metrics=Metrics(),
        )
        with pytest.raises(BindError, match=re.escape(f"127.0.0.1:{port}")):
            await second.start()


async def test_health_per_service() -> None:
    async with mesh(echo) as m:
        check = health(m)
        assert await check("") == SERVING
        assert await check(SERVICE) == SERVING
        m.server.set_serving(SERVICE, False)
        assert await check(SERVICE) == NOT_SERVING
        assert await check("") == NOT_SERVING
        m.server.set_serving(SERVICE, True)
        m.server.set_serving(SERVICE, False)
        m.server.set_serving(SERVICE, True)
        assert await check(SERVICE) == SERVING
        assert await check("") == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await check("no.such.Service")
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND


async def test_not_serving_until_told() -> None:
    server = RpcServer(
        role="encoder",
        server=ServerSettings(port=0, admin_port=0),
        rpc=RpcSettings(drain_s=0),
        access=AccessSettings(),
        metrics=Metrics(),
    )
    server.add(SERVICE, lambda servicer, server: None, object())
    port = await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        reply = await stub.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=5)
        assert reply.status == NOT_SERVING
        with pytest.raises(RuntimeError, match="after the start"):
            server.add("x", lambda servicer, server: None, object())
    await server.drain()


async def test_other_roles_services_say_who_serves_them() -> None:
    async with mesh(echo) as m:
        with pytest.raises(Unimplemented, match=r"RetrievalService is served by the retrieval") as raised:
            await m.client.call(
                m.target, RetrievalServiceStub, "ListCollections", ListCollectionsRequest(), timeout_s=5
            )
        assert raised.value.reason == "NOT_SERVED_HERE"
        with pytest.raises(Unimplemented, match=r"ScorerService is served by the scorer"):
            await m.client.call(m.target, ScorerServiceStub, "GetLoad", GetLoadRequest(), timeout_s=5)
        for path, words in (
            ("/phasemesh.v1.NoService/X", "there is no service phasemesh.v1.NoService"),
            ("/phasemesh.v1.EncoderService/Nope", "has no method Nope; it has Embed"),
            ("/other.Thing/X", "Method not found"),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match=words) as bare:
                await m.bare(path)
            assert bare.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_drain_says_so_first_then_lets_calls_finish() -> None:
    started, go = asyncio.Event(), asyncio.Event()

    async def slow(request: EmbedRequest) -> EmbedResponse:
        started.set()
        await go.wait()
        return EmbedResponse(model="finished")

    rpc = RpcSettings(drain_s=20, drain_delay_s=0.2)
    async with mesh(slow, rpc=rpc) as m:
        check = health(m)
        watch = health_pb2_grpc.HealthStub(m.channel()).Watch(
            health_pb2.HealthCheckRequest(service=SERVICE), timeout=30
        )
        states = aiter(watch)
        assert (await anext(states)).status == SERVING
        call = asyncio.create_task(m.embed())
        await asyncio.wait_for(started.wait(), 5)
        drain = asyncio.create_task(m.server.drain())
        # Within the delay: balancers hear of it, and callers who haven't are still served.
        assert (await anext(states)).status == NOT_SERVING
        assert await check(SERVICE) == NOT_SERVING
        assert await check("") == NOT_SERVING
        m.server.set_serving(SERVICE, True)
        assert await check(SERVICE) == NOT_SERVING
        late = asyncio.create_task(m.embed())
        # The watcher stays connected, and its stream's end is the server's doing, not the time's.
        assert [state async for state in states] == []
        assert not drain.done()
        # Port closed: new connections are refused while the old calls go on.
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await m.raw().Embed(EmbedRequest(), timeout=5)
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        go.set()
        assert (await call).model == "finished"
        assert (await late).model == "finished"
        await asyncio.wait_for(drain, 5)
        await m.server.drain()  # again is fine


async def test_drain_ends_what_takes_too_long() -> None:
    started = asyncio.Event()

    async def stuck(request: EmbedRequest) -> EmbedResponse:
        started.set()
        await asyncio.Event().wait()
        raise AssertionError

    async with mesh(stuck, rpc=RpcSettings(drain_s=0.05)) as m:
        call = asyncio.create_task(m.embed())
        await asyncio.wait_for(started.wait(), 5)
        await asyncio.wait_for(m.server.drain(), 5)
        with pytest.raises(Unavailable):
            await call


async def test_handlers_inherit_nothing_of_the_start(spans: InMemorySpanExporter) -> None:
    mark = contextvars.ContextVar("mark", default="clean")
    seen: list[str] = []

    async def embed(request: EmbedRequest) -> EmbedResponse:
        seen.append(mark.get())
        mark.set(request.model)
        return EmbedResponse()

    mark.set("of the start")
    with tracing.tracer().start_as_current_span("start-up") as start_up:
        manager = mesh(embed)
        m = await manager.__aenter__()
    try:
        # A bare channel: no trace context is sent.
        await m.raw().Embed(EmbedRequest(model="first"), timeout=5)
        await m.raw().Embed(EmbedRequest(model="second"), timeout=5)
    finally:
        await manager.__aexit__(None, None, None)
    assert seen == ["clean", "clean"]
    traces = {span.context.trace_id for span in spans.get_finished_spans() if span.context}
    assert len(traces) == 3
    assert start_up.get_span_context().trace_id in traces


def test_intervals_of_both_sides_fit() -> None:
    for keepalive_s in (0.3, 30.0, 300.0):
        rpc = RpcSettings(keepalive_s=keepalive_s)
        server, client = dict(server_options(rpc)), dict(channel_options(rpc))
        assert server["grpc.http2.min_ping_interval_without_data_ms"] < int(client["grpc.keepalive_time_ms"])
        assert server["grpc.max_connection_age_grace_ms"] > rpc.max_deadline_s * 1000
        assert server["grpc.so_reuseport"] == 0
    assert MAX_CONCURRENT_RPCS > 0


@pytest.mark.slow
async def test_pings_in_a_long_call_are_welcome(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that is several pings long, and the same against gRPC's own minimum of 5 minutes, which ends it.

    gRPC spaces pings by a second or more and hangs up at the third strike, so this takes real time.
    """
    # Without the server's pings, which would make the client's needless.
    left_out = {"grpc.keepalive_time_ms"}

    def options(rpc: RpcSettings) -> list[tuple[str, int]]:
        return [(name, value) for name, value in server_options(rpc) if name not in left_out]

    monkeypatch.setattr("phasemesh.rpc.server.server_options", options)

    async def long(request: EmbedRequest) -> EmbedResponse:
        await asyncio.sleep(6.5)
        return EmbedResponse(model="done")

    rpc = RpcSettings(keepalive_s=1, drain_s=0)
    async with mesh(long, rpc=rpc) as ours:
        left_out |= {"grpc.http2.min_ping_interval_without_data_ms", "grpc.keepalive_permit_without_calls"}
        async with mesh(long, rpc=rpc) as strict:
            welcome, refused = await asyncio.gather(
                ours.embed(timeout_s=20), strict.embed(timeout_s=7), return_exceptions=True
            )
    assert isinstance(welcome, EmbedResponse)
    assert welcome.model == "done"
    assert isinstance(refused, (Unavailable, ResourceExhausted, DeadlineExceeded))


async def test_connections_age_without_a_failed_call() -> None:
    rpc = RpcSettings(connection_age_s=0.2, drain_s=0)
    peers: set[str] = set()

    class Servicer:
        async def Embed(self, request: EmbedRequest, context: grpc.aio.ServicerContext) -> EmbedResponse:  # type: ignore[type-arg]  # generic in the stubs only
            peers.add(context.peer())
            return EmbedResponse()

        def __getattr__(self, name: str) -> object:
            return self.Embed

    async with mesh(servicer=Servicer(), rpc=rpc) as m:
        end_s = time.monotonic() + 10
        while len(peers) < 3 and time.monotonic() < end_s:
            await m.embed()
    assert len(peers) >= 3


async def test_health_answers_while_large_replies_flow() -> None:
    block = bytes(4 * 2**20)

    async def large(request: EmbedRequest) -> EmbedResponse:
        reply = EmbedResponse()
        reply.dense.data = block
        return reply

    async with mesh(large) as m:
        check = health(m)
        await check("")
        stub = EncoderServiceStub(m.channel())

        async def size() -> int:
            return len((await stub.Embed(EmbedRequest(), timeout=30)).dense.data)

        flow = [asyncio.create_task(size()) for _ in range(24)]
        slowest_s = 0.0
        while not all(task.done() for task in flow):
            start_s = time.monotonic()
            await check("")
            slowest_s = max(slowest_s, time.monotonic() - start_s)
        assert {task.result() for task in flow} == {len(block)}
    assert slowest_s < 2.0
