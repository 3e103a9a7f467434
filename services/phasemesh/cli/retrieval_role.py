"""Runs the retrieval role in this process: collections, ingestion, search over scorers."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from phasemesh.cli.grpc_role import GrpcRole, serve_role
from phasemesh.cli.process import configure_process, role_folder
from phasemesh.config.settings import Settings, SettingsError
from phasemesh.retrieval.service import RetrievalRuntime, RetrievalStartError
from phasemesh.rpc.client import RpcClient
from phasemesh.rpc.directory import ModelDirectory
from phasemesh.telemetry.metrics import Metrics
from phasemesh.telemetry.tracing import shutdown_tracing
from phasemesh.v1.retrieval_pb2_grpc import add_RetrievalServiceServicer_to_server

ROLE = "retrieval"
SERVICE = "phasemesh.v1.RetrievalService"


def run_retrieval(settings: Settings, *, exit_with_parent: bool = False) -> None:
    """Serve until SIGTERM, SIGINT or, on request, the parent's death; then drain.

    Raises:
        SettingsError: the data folder can't be used.
        BindError: a port can't be had.
    """
    configure_process(settings, ROLE)
    with role_folder(settings, ROLE, supervised=exit_with_parent):
        try:
            asyncio.run(_serve(settings, exit_with_parent))
        except RetrievalStartError as error:
            raise SettingsError(str(error)) from error
        finally:
            shutdown_tracing()


async def _serve(settings: Settings, exit_with_parent: bool) -> None:
    retrieval = settings.retrieval
    metrics = Metrics()
    client = RpcClient(rpc=settings.rpc, key=settings.access.mesh_key())
    directory = None
    async with AsyncExitStack() as outer:
        outer.push_async_callback(client.close)
        if retrieval.encoders:
            directory = ModelDirectory(client, retrieval.encoders, refresh_s=retrieval.directory_refresh_s)
            # Its first poll may take seconds where no encoder answers yet; collections don't wait for it.
            polling = asyncio.ensure_future(directory.start())
            outer.push_async_callback(directory.close)
            outer.callback(polling.cancel)

        def runtime() -> RetrievalRuntime:
            return RetrievalRuntime(settings, client, directory, metrics)

        role = GrpcRole(ROLE, ROLE, SERVICE, add_RetrievalServiceServicer_to_server, retrieval)
        await serve_role(settings, role, metrics, runtime, exit_with_parent=exit_with_parent)
