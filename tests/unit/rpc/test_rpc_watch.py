"""A peer's health as it is seen from here: unknown, serving, not serving, gone."""

from __future__ import annotations

from phasemesh.config.settings import ServerSettings, load_settings
from phasemesh.rpc.client import RpcClient
from phasemesh.rpc.server import RpcServer
from phasemesh.rpc.watch import PeerWatch
from phasemesh.telemetry.metrics import Metrics
from phasemesh.v1.retrieval_pb2_grpc import RetrievalServiceServicer, add_RetrievalServiceServicer_to_server

SERVICE = "phasemesh.v1.RetrievalService"


async def test_the_watch_follows_the_peer() -> None:
    settings = load_settings(flags={"rpc.drain_s": 0})
    server = RpcServer(
        role="retrieval",
        server=ServerSettings(port=0, admin_port=0),
        rpc=settings.rpc,
        access=settings.access,
        metrics=Metrics(),
    )
    server.add(SERVICE, add_RetrievalServiceServicer_to_server, RetrievalServiceServicer())
    port = await server.start()
    client = RpcClient(rpc=settings.rpc, key=None)
    watch = PeerWatch(client, f"127.0.0.1:{port}", SERVICE, refresh_s=3600)
    other = PeerWatch(client, f"127.0.0.1:{port}", "phasemesh.v1.Nothing", refresh_s=3600)
    try:
        assert not watch.serving
        await watch.refresh()
        assert not watch.serving  # it answers that it doesn't serve
        server.set_serving(SERVICE, True)
        await watch.refresh()
        assert watch.serving
        await other.refresh()
        assert not other.serving
        await server.drain()
        await watch.refresh()
        assert not watch.serving
    finally:
        await client.close()
        await server.drain()


async def test_a_started_watch_polls_and_ends() -> None:
    client = RpcClient(rpc=load_settings().rpc, key=None)
    watch = PeerWatch(client, "127.0.0.1:1", SERVICE, refresh_s=3600)
    watch.start()
    await watch.close()
    assert not watch.serving
    await client.close()
