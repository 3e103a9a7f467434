"""`phasemesh up`: the whole mesh on this machine, one process per role.

Roles start from the encoder outwards and drain from the gateway inwards, so that nothing that takes requests
runs without what answers them.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from phasemesh.cli.banner import announce
from phasemesh.cli.foreground import terminal_to_ourselves
from phasemesh.cli.process import SETTINGS_FILE, sweep_ray
from phasemesh.cli.report import read_report, report_path
from phasemesh.cli.supervisor import PrefixedOutput, RoleProcess, supervise
from phasemesh.config.settings import ENV_PREFIX, ServerSettings, Settings, SettingsError, dump
from phasemesh.rpc.bind import authority
from phasemesh.telemetry.logs import configure_logging

logger = logging.getLogger(__name__)

#: Drain order: what takes requests first.
ROLES = ("gateway", "encoder")
_POLL_S = 0.1
#: A second Ctrl-C within this time after the first is the same one, seconds.
_IMPATIENT_AFTER_S = 1.0


@contextmanager
def runtime_lock(runtime_dir: Path) -> Iterator[None]:
    """Hold the runtime folder for this process.

    Raises:
        SettingsError: another `phasemesh up` holds it, or it can't be made.
    """
    try:
        runtime_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = (runtime_dir / "up.lock").open("a+")
    except OSError as error:
        raise SettingsError(f"runtime_dir: {runtime_dir}: {error.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SettingsError(
                f"runtime_dir: {runtime_dir} is in use by another `phasemesh up`; stop that one, "
                "or give this one another --runtime-dir and other ports"
            ) from None
        yield


def run_up(settings: Settings, console: Console) -> bool:
    """Run the mesh until SIGTERM or SIGINT, then drain it; False if the drain was cut short.

    Raises:
        MeshFailed: a role can't be kept running.
        SettingsError: another `phasemesh up` uses the same runtime folder.
    """
    runtime_dir = settings.runtime_dir
    with runtime_lock(runtime_dir):
        _check_ports(settings)
        for role in ROLES:
            report_path(runtime_dir, role).unlink(missing_ok=True)
        # The roles read the settings in force from a file and nothing from the environment, so that they
        # can't come to other settings than these. Keys may be among them: the folder is its owner's alone.
        file = runtime_dir / SETTINGS_FILE
        file.unlink(missing_ok=True)
        file.touch(mode=0o600)
        file.write_text(dump(_for_this_terminal(settings)))
        configure_logging(role="up", level=settings.log.level, style=settings.log.format)
        try:
            with terminal_to_ourselves():
                drained = asyncio.run(_run(settings, file, console))
        finally:
            file.unlink(missing_ok=True)
            for role in ROLES:
                report_path(runtime_dir, role).unlink(missing_ok=True)
            sweep_ray(runtime_dir)
        return drained


def _for_this_terminal(settings: Settings) -> Settings:
    """The settings for roles whose output comes through us: they can't see whether a person reads it."""
    if settings.log.format != "auto":
        return settings
    style = "text" if sys.stderr.isatty() else "json"
    return settings.model_copy(update={"log": settings.log.model_copy(update={"format": style})})


def _check_ports(settings: Settings) -> None:
    """Refuse ports that are taken now, rather than after the models are loaded."""
    for role in ROLES:
        server: ServerSettings = getattr(settings, role)
        for name, host, port in (
            ("port", server.host, server.port),
            ("admin_port", server.admin_host, server.admin_port),
        ):
            if not port:
                continue
            try:
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                socket.create_server((host, port), family=family).close()
            except OSError as error:
                raise SettingsError(
                    f"{role}.{name}: {host}:{port} can't be had ({error.strerror}); stop what uses it, "
                    f"or take another with --set {role}.{name}=0"
                ) from None


async def _run(settings: Settings, file: Path, console: Console) -> bool:
    runtime_dir = settings.runtime_dir
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    output = PrefixedOutput(ROLES)
    # Longer than the roles' own limits, so that killing is for those that hang.
    drain_s = settings.rpc.drain_delay_s + 2 * settings.rpc.drain_s + 15

    def role(name: str, *extra: Callable[[], Sequence[str]], after: str | None = None) -> RoleProcess:
        def command() -> list[str]:
            arguments = [argument for part in extra for argument in part()]
            # A role that is started again keeps its ports: others know them.
            if (report := read_report(runtime_dir, name)) is not None:
                arguments += ["--set", f"{name}.port={report.port}"]
                arguments += ["--set", f"{name}.admin_port={report.admin_port}"]
            base = [
                sys.executable,
                "-m",
                "phasemesh.cli.main",
                name,
                "--config",
                str(file),
                "--exit-with-parent",
            ]
            return [*base, *arguments]

        async def listens() -> None:
            while after is not None and read_report(runtime_dir, after) is None:
                await asyncio.sleep(_POLL_S)

        def has_reported(pid: int) -> bool:
            report = read_report(runtime_dir, name)
            return report is not None and report.pid == pid

        return RoleProcess(
            name,
            command,
            listens=has_reported,
            write_line=output,
            environment=environment,
            wait_until=listens,
            drain_s=drain_s,
        )

    def encoder_target() -> list[str]:
        report = read_report(runtime_dir, "encoder")
        assert report is not None  # the gateway waits for it
        return ["--set", f"gateway.encoders=['{authority(settings.encoder.host, report.port)}']"]

    roles = [role("gateway", encoder_target, after="encoder"), role("encoder")]
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    asked_s = 0.0
    killed = False

    def on_interrupt() -> None:
        # Only a second Ctrl-C kills, and not in the same breath: wrappers send a signal to the process and to
        # its group, so that one request to stop arrives twice.
        nonlocal killed
        if not stop.is_set():
            on_terminate()
        elif loop.time() - asked_s > _IMPATIENT_AFTER_S:
            killed = True
            console.print("[bold]killing[/]")
            for process in roles:
                process.kill()

    def on_terminate() -> None:
        nonlocal asked_s
        if not stop.is_set():
            console.print("[bold]draining[/] (Ctrl-C once more to kill)")
            asked_s = loop.time()
            stop.set()

    loop.add_signal_handler(signal.SIGINT, on_interrupt)
    loop.add_signal_handler(signal.SIGTERM, on_terminate)
    await supervise(roles, stop, lambda: announce(settings, console))
    console.print("killed" if killed else "stopped")
    return not killed
