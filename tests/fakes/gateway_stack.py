"""A gateway on a real port, over a real gRPC server with the fake encoder, all on the test's loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn

from phasemesh.config.settings import ServerSettings, Settings, load_settings
from phasemesh.gateway.app import create_app
from phasemesh.gateway.health import Readiness
from phasemesh.gateway.serve import listen
from phasemesh.rpc.client import RpcClient
from phasemesh.rpc.directory import ModelDirectory
from phasemesh.rpc.server import RpcServer
from phasemesh.telemetry.metrics import Metrics
from phasemesh.v1.encoder_pb2_grpc import add_EncoderServiceServicer_to_server
from tests.fakes.encoder_service import FakeEncoder

SERVICE = "phasemesh.v1.EncoderService"


@dataclass(frozen=True)
class Stack:
    url: str
    port: int
    http: httpx.AsyncClient
    encoder: FakeEncoder
    metrics: Metrics
    readiness: Readiness
    directory: ModelDirectory


@asynccontextmanager
async def running_encoder(encoder: FakeEncoder, settings: Settings, *, port: int = 0) -> AsyncIterator[str]:
    """The fake behind a real server; gives its target."""
    server = RpcServer(
        role="encoder",
        server=ServerSettings(port=port, admin_port=0),
        rpc=settings.rpc,
        access=settings.access,
        metrics=Metrics(),
    )
    server.add(SERVICE, add_EncoderServiceServicer_to_server, encoder)
    bound = await server.start()
    server.set_serving(SERVICE, True)
    try:
        yield f"127.0.0.1:{bound}"
    finally:
        await server.drain()


@asynccontextmanager
async def running_gateway(flags: Mapping[str, Any] | None = None) -> AsyncIterator[Stack]:
    """Everything, with settings changed by dotted names."""
    settings = load_settings(flags={"rpc.drain_s": 1, **(flags or {})})
    encoder, metrics = FakeEncoder(), Metrics()
    async with running_encoder(encoder, settings) as target:
        client = RpcClient(rpc=settings.rpc, key=settings.access.mesh_key())
        directory = ModelDirectory(client, (target,), refresh_s=3600)
        await directory.start()
        readiness = Readiness(directory)
        app = create_app(settings, client=client, directory=directory, metrics=metrics, readiness=readiness)
        listener = listen("127.0.0.1", 0)
        port = listener.getsockname()[1]
        server = uvicorn.Server(
            uvicorn.Config(app, lifespan="off", ws="none", log_config=None, access_log=False, loop="none")
        )
        serving = asyncio.create_task(server._serve([listener]))
        url = f"http://127.0.0.1:{port}"
        try:
            async with httpx.AsyncClient(base_url=url) as http:
                yield Stack(url, port, http, encoder, metrics, readiness, directory)
        finally:
            server.should_exit = True
            await serving
            listener.close()
            await directory.close()
            await client.close()
