"""Runs one scorer in this process: segments of its own cache folder, searched exactly."""

from __future__ import annotations

import asyncio
from pathlib import Path

from phasemesh.cli.grpc_role import GrpcRole, serve_role
from phasemesh.cli.process import configure_process, role_folder
from phasemesh.config.settings import ScorerSettings, Settings, SettingsError
from phasemesh.index.scanner import CPU, Scanner
from phasemesh.scorer.service import ScorerRuntime, ScorerStartError
from phasemesh.telemetry.metrics import Metrics
from phasemesh.telemetry.tracing import shutdown_tracing
from phasemesh.v1.scorer_pb2_grpc import add_ScorerServiceServicer_to_server

ROLE = "scorer"
SERVICE = "phasemesh.v1.ScorerService"


def cache_folder(settings: Settings, name: str) -> Path:
    """Where the scorer `name` keeps its segments: the settings' folder, else its own in the data root."""
    return settings.scorer.cache_dir or settings.data_dir / "cache" / name


def scanner_of(settings: ScorerSettings) -> Scanner:
    """What has the first look at vectors.

    Raises:
        SettingsError: the device can't be used.
    """
    if settings.device == "cpu":
        return CPU
    try:
        # Only here: a scorer on CPUs has no torch.
        from phasemesh.engine.device_scan import DeviceScanner
        from phasemesh.engine.errors import ModelLoadError
    except ImportError as error:
        raise SettingsError(
            f"scorer.device: {settings.device} needs torch ({error}); install the extra scorer-cuda"
        ) from None
    try:
        return DeviceScanner(settings.device, settings.device_bytes)
    except (ModelLoadError, RuntimeError) as error:
        raise SettingsError(f"scorer.{error}") from None


def run_scorer(settings: Settings, *, name: str = ROLE, exit_with_parent: bool = False) -> None:
    """Serve until SIGTERM, SIGINT or, on request, the parent's death; then drain.

    Args:
        settings: of all roles.
        name: of this scorer among those of its machine; names its report and its cache folder.
        exit_with_parent: end with the parent.

    Raises:
        SettingsError: the cache folder can't be used.
        BindError: a port can't be had.
    """
    configure_process(settings, ROLE)
    with role_folder(settings, name, supervised=exit_with_parent):
        try:
            asyncio.run(_serve(settings, name, exit_with_parent))
        except ScorerStartError as error:
            raise SettingsError(str(error)) from error
        finally:
            shutdown_tracing()


async def _serve(settings: Settings, name: str, exit_with_parent: bool) -> None:
    metrics = Metrics()
    scanner = scanner_of(settings.scorer)

    def runtime() -> ScorerRuntime:
        return ScorerRuntime(
            settings.scorer,
            settings.data_dir,
            cache_folder(settings, name),
            metrics,
            max_message_bytes=settings.rpc.max_message_bytes,
            scanner=scanner,
        )

    role = GrpcRole(ROLE, name, SERVICE, add_ScorerServiceServicer_to_server, settings.scorer)
    await serve_role(settings, role, metrics, runtime, exit_with_parent=exit_with_parent)
