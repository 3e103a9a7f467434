"""A gateway on a real port, over real gRPC servers with the fake services, all on the test's loop."""

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
from phasemesh.rpc.watch import PeerWatch
from phasemesh.telemetry.metrics import Metrics
from phasemesh.v1.encoder_pb2_grpc import add_EncoderServiceServicer_to_server
from phasemesh.v1.retrieval_pb2_grpc import add_RetrievalServiceServicer_to_server
from tests.fakes.encoder_service import FakeEncoder
from tests.fakes.retrieval_service import FakeRetrieval

SERVICE = "phasemesh.v1.EncoderService"
RETRIEVAL_SERVICE = "phasemesh.v1.RetrievalService"


@dataclass(frozen=True)
class Stack:
    url: str
    port: int
    http: httpx.AsyncClient
    encoder: FakeEncoder
    retrieval: FakeRetrieval
    metrics: Metrics
    readiness: Readiness
    directory: ModelDirectory


@asynccontextmanager
async def running_encoder(encoder: FakeEncoder, settings: Settings, *, port: int = 0) -> AsyncIterator[str]:
    """The fake behind a real server; gives its target."""
    async with _served(
        "encoder", SERVICE, add_EncoderServiceServicer_to_server, encoder, settings, port
    ) as at:
        yield at


@asynccontextmanager
async def running_retrieval(
    retrieval: FakeRetrieval, settings: Settings, *, port: int = 0
) -> AsyncIterator[str]:
    """As `running_encoder`, for collections."""
    add = add_RetrievalServiceServicer_to_server
    async with _served("retrieval", RETRIEVAL_SERVICE, add, retrieval, settings, port) as at:
        yield at


@asynccontextmanager
async def _served(
    role: str, service: str, add: Any, servicer: object, settings: Settings, port: int
) -> AsyncIterator[str]:
    server = RpcServer(
        role=role,
        server=ServerSettings(port=port, admin_port=0),
        rpc=settings.rpc,
        access=settings.access,
        metrics=Metrics(),
    )
    server.add(service, add, servicer)
    bound = await server.start()
    server.set_serving(service, True)
    try:
        yield f"127.0.0.1:{bound}"
    finally:
        await server.drain()


@asynccontextmanager
async def running_gateway(flags: Mapping[str, Any] | None = None) -> AsyncIterator[Stack]:
    """Everything, with settings changed by dotted names."""
    settings = load_settings(flags={"rpc.drain_s": 1, **(flags or {})})
    encoder, retrieval, metrics = FakeEncoder(), FakeRetrieval(), Metrics()
    async with (
        running_encoder(encoder, settings) as target,
        running_retrieval(retrieval, settings) as retrieval_target,
    ):
        if settings.gateway.retrieval is not None:
            gateway = settings.gateway.model_copy(update={"retrieval": retrieval_target})
            settings = settings.model_copy(update={"gateway": gateway})
        client = RpcClient(rpc=settings.rpc, key=settings.access.mesh_key())
        directory = ModelDirectory(client, (target,), refresh_s=3600)
        await directory.start()
        watch = None
        if settings.gateway.retrieval is not None:
            watch = PeerWatch(client, settings.gateway.retrieval, RETRIEVAL_SERVICE, refresh_s=3600)
            await watch.refresh()
        readiness = Readiness(directory, watch)
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
                yield Stack(url, port, http, encoder, retrieval, metrics, readiness, directory)
        finally:
            server.should_exit = True
            await serving
            listener.close()
            await directory.close()
            await client.close()
