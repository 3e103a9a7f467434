"""A real server and client in one process, with handlers that a test writes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from phasemesh.config.settings import AccessSettings, RpcSettings, ServerSettings
from phasemesh.rpc.client import RpcClient, channel_options
from phasemesh.rpc.server import RpcServer
from phasemesh.telemetry.metrics import Metrics
from phasemesh.v1.encoder_pb2 import EmbedRequest, EmbedResponse, ListModelsResponse, ModelInfo
from phasemesh.v1.encoder_pb2_grpc import (
    EncoderServiceServicer,
    EncoderServiceStub,
    add_EncoderServiceServicer_to_server,
)

SERVICE = "phasemesh.v1.EncoderService"
EMBED = f"{SERVICE}/Embed"

Handler = Callable[[EmbedRequest], Awaitable[EmbedResponse]]


# The rest of the service is left out on purpose, which only the stubs mind.
_Partial: Any = EncoderServiceServicer


class Servicer(_Partial):  # type: ignore[misc]  # see above
    """`Embed` does what the test says; `ListModels` lists what it says."""

    def __init__(self, embed: Handler | None = None, models: list[ModelInfo] | None = None) -> None:
        self.embed = embed
        self.models = models or []

    async def Embed(self, request: EmbedRequest, context: Any) -> EmbedResponse:
        assert self.embed is not None
        return await self.embed(request)

    async def ListModels(self, request: Any, context: Any) -> ListModelsResponse:
        return ListModelsResponse(models=self.models)


@dataclass
class Mesh:
    """One server, one client."""

    server: RpcServer
    client: RpcClient
    target: str
    rpc: RpcSettings
    metrics: Metrics
    channels: list[grpc.aio.Channel] = field(default_factory=list)

    async def embed(self, request: EmbedRequest | None = None, **options: Any) -> EmbedResponse:
        options.setdefault("timeout_s", 10.0)
        reply: EmbedResponse = await self.client.call(
            self.target, EncoderServiceStub, "Embed", request or EmbedRequest(model="m"), **options
        )
        return reply

    def channel(self) -> grpc.aio.Channel:
        """A channel without anything of ours in it, but for the limits."""
        channel = grpc.aio.insecure_channel(self.target, options=channel_options(self.rpc))
        self.channels.append(channel)
        return channel

    async def bare(self, path: str) -> Any:
        """Call `path` with an empty message, without any stub."""
        channel: Any = self.channel()
        return await channel.unary_unary(path)(b"", timeout=5)

    def raw(self) -> Any:
        """gRPC's own stub."""
        return EncoderServiceStub(self.channel())

    def samples(self, name: str) -> dict[tuple[str, ...], float]:
        """Samples of a metric by the values of their labels."""
        return {
            tuple(sample.labels.values()): sample.value
            for family in self.metrics.registry.collect()
            for sample in family.samples
            if sample.name == name
        }


@asynccontextmanager
async def mesh(
    embed: Handler | None = None,
    *,
    servicer: object | None = None,
    rpc: RpcSettings | None = None,
    access: AccessSettings | None = None,
    key: str | None = None,
    port: int = 0,
) -> AsyncIterator[Mesh]:
    rpc = rpc or RpcSettings(drain_s=0.0)
    metrics = Metrics()
    server = RpcServer(
        role="encoder",
        server=ServerSettings(port=port, admin_port=0),
        rpc=rpc,
        access=access or AccessSettings(),
        metrics=metrics,
    )
    server.add(SERVICE, add_EncoderServiceServicer_to_server, servicer or Servicer(embed))
    bound = await server.start()
    server.set_serving(SERVICE, True)
    made = Mesh(server, RpcClient(rpc=rpc, key=key), f"127.0.0.1:{bound}", rpc, metrics)
    try:
        yield made
    finally:
        await made.client.close()
        for channel in made.channels:
            await channel.close(None)
        await server.drain()
