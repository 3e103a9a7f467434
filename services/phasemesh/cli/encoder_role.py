"""Runs the encoder role in this process: Ray, workers, the service, the two ports; drains on a signal.

This is where the encoder's concrete parts meet; everything else takes its collaborators as arguments.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from contextlib import AsyncExitStack, ExitStack

from phasemesh.cli.process import configure_process, cpus, role_folder, stop_requested, tracing_settings
from phasemesh.cli.report import RoleReport, write_report
from phasemesh.config.settings import ModelSettings, Settings, SettingsError
from phasemesh.encoder.service import EncoderRuntime
from phasemesh.pool.inprocess import InProcessPool
from phasemesh.pool.protocol import ModelSpec
from phasemesh.pool.ray_cluster import RayCluster, RayClusterConfig
from phasemesh.pool.ray_pool import RayPool
from phasemesh.pool.settings import PoolConfig
from phasemesh.rpc.admin import AdminServer, Health
from phasemesh.rpc.heartbeat import LoopHeartbeat
from phasemesh.rpc.server import RpcServer
from phasemesh.telemetry.metrics import Metrics
from phasemesh.telemetry.names import ENCODE_PHASES
from phasemesh.telemetry.tracing import shutdown_tracing
from phasemesh.v1.encoder_pb2_grpc import add_EncoderServiceServicer_to_server

logger = logging.getLogger(__name__)

#: Exit status when no worker is left and none will come (EX_UNAVAILABLE of sysexits.h): whoever keeps this
#: process running starts a new one, with new workers.
EXIT_LOST = 69

ROLE = "encoder"
SERVICE = "phasemesh.v1.EncoderService"


def model_specs(models: tuple[ModelSettings, ...]) -> tuple[ModelSpec, ...]:
    """The configuration's models as workers take them."""
    return tuple(
        ModelSpec(
            name=model.name,
            source=model.source,
            revision=model.revision,
            dtype=model.dtype,
            max_tokens=model.max_tokens,
            matryoshka_dims=model.matryoshka_dims,
        )
        for model in models
    )


def pool_config(settings: Settings) -> PoolConfig:
    """How many workers, on what, from the encoder's settings and this machine's CPUs."""
    encoder = settings.encoder
    share = max(1, cpus() // encoder.replicas)
    return PoolConfig(
        replicas=encoder.replicas,
        device=encoder.device,
        cpus_per_replica=encoder.cpus_per_replica or share,
        threads=encoder.threads,
        tracing=tracing_settings(settings),
        start_timeout_s=encoder.start_timeout_s,
        log_level=settings.log.level,
    )


def run_encoder(settings: Settings, *, exit_with_parent: bool = False) -> None:
    """Serve until SIGTERM, SIGINT or, on request, the parent's death; then drain.

    Raises:
        SystemExit: nothing can be computed here any more (`EXIT_LOST`).
        SettingsError: no models are configured.
        PoolStartError: Ray or the workers can't start.
        EncoderStartError: a model doesn't answer.
    """
    if not settings.encoder.models:
        raise SettingsError(
            "encoder.models: names no model; give --model [NAME=]SOURCE or set it in --config"
        )
    configure_process(settings, ROLE)
    # Until the event loop has handlers of its own, a signal ends us by an exception, so that what has been
    # started of Ray is stopped.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with role_folder(settings, ROLE, supervised=exit_with_parent), ExitStack() as stack:
        stack.callback(shutdown_tracing)
        if settings.encoder.ray:
            # Before the event loop runs and before gRPC starts: Ray forks, and takes the signal handlers.
            cluster = RayCluster.start(
                RayClusterConfig(
                    runtime_dir=settings.runtime_dir,
                    address=settings.encoder.ray_address,
                    num_cpus=cpus(),
                    num_gpus=0 if settings.encoder.device == "cpu" else None,
                )
            )
            stack.callback(cluster.stop)
        lost = asyncio.run(_serve(settings, exit_with_parent))
    if lost:
        sys.exit(EXIT_LOST)


async def _start_pool(settings: Settings) -> RayPool | InProcessPool:
    start = RayPool.start if settings.encoder.ray else InProcessPool.start
    pool: RayPool | InProcessPool = await start(pool_config(settings), model_specs(settings.encoder.models))
    return pool


async def _serve(settings: Settings, exit_with_parent: bool) -> str:
    """Serve; returns why the service was lost, "" where it was told to stop."""
    encoder = settings.encoder
    metrics = Metrics()
    metrics.start_at_zero(ENCODE_PHASES, [model.name for model in encoder.models])
    heartbeat = LoopHeartbeat()
    runtime: EncoderRuntime | None = None
    stop = asyncio.ensure_future(stop_requested(settings, exit_with_parent=exit_with_parent))

    def health() -> Health:
        if stop.done():
            return Health(ok=False, detail={"state": "draining"})
        if runtime is None:
            return Health(ok=False, detail={"state": "loading models"})
        return runtime.health()

    admin = AdminServer(
        host=encoder.admin_host, port=encoder.admin_port, metrics=metrics, live=heartbeat.health, ready=health
    )
    async with AsyncExitStack() as stack:
        heartbeat.start()
        stack.callback(heartbeat.stop)
        # First of all: probes get an answer while models load.
        admin_port = admin.start()
        stack.callback(admin.close)

        starting = asyncio.ensure_future(_start_pool(settings))
        await asyncio.wait({starting, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.wait({starting})
            return ""
        pool = starting.result()
        stack.push_async_callback(pool.close)

        aliases = {model.name: model.aliases for model in encoder.models}
        runtime = EncoderRuntime(
            encoder, pool.models, aliases, pool, metrics, max_message_bytes=settings.rpc.max_message_bytes
        )
        stack.push_async_callback(runtime.close)
        await runtime.start()
        server = RpcServer(
            role=ROLE, server=encoder, rpc=settings.rpc, access=settings.access, metrics=metrics
        )
        server.add(SERVICE, add_EncoderServiceServicer_to_server, runtime.servicer)
        port = await server.start()

        def follow_health() -> None:
            server.set_serving(SERVICE, health().ok)

        stack.callback(pool.add_listener(follow_health))
        follow_health()
        write_report(settings.runtime_dir, RoleReport(ROLE, os.getpid(), port, admin_port))
        logger.info(
            "encoder ready",
            extra={"port": port, "admin_port": admin_port, "models": [model.name for model in pool.models]},
        )
        losing = asyncio.ensure_future(runtime.wait_lost())
        await asyncio.wait({stop, losing}, return_when=asyncio.FIRST_COMPLETED)
        lost = losing.result() if losing.done() else ""
        losing.cancel()
        if stop.done():
            stop.result()
        if lost:
            follow_health()
            logger.error("encoder is lost and exits, to be started again", extra={"why": lost})
        logger.info("encoder draining")
        await server.drain()
        await runtime.drain()
        await pool.drain(settings.rpc.drain_s)
    logger.info("encoder stopped")
    return lost
