"""Runs the gateway role in this process until a signal."""

from __future__ import annotations

import os

from phasemesh.cli.process import configure_process, role_folder, stop_requested
from phasemesh.cli.report import RoleReport, write_report
from phasemesh.config.settings import Settings
from phasemesh.gateway import serve
from phasemesh.telemetry.tracing import shutdown_tracing

ROLE = "gateway"


def run_gateway(settings: Settings, *, exit_with_parent: bool = False) -> None:
    """Serve until SIGTERM, SIGINT or, on request, the parent's death; then drain."""
    configure_process(settings, ROLE)

    def report(ports: serve.Ports) -> None:
        write_report(settings.runtime_dir, RoleReport(ROLE, os.getpid(), ports.http, ports.admin))

    with role_folder(settings, ROLE, supervised=exit_with_parent):
        try:
            serve.run_gateway(
                settings,
                on_started=report,
                until=lambda: stop_requested(settings, exit_with_parent=exit_with_parent),
            )
        finally:
            shutdown_tracing()
