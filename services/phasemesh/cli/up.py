"""`phasemesh up`: the whole mesh on this machine, one process per role.

Roles start from the scorers and the encoder outwards and drain from the gateway inwards, so that nothing
that takes requests runs without what answers them. One `phasemesh up` owns its data root, because two of them
would give one scorer's cache folder to two processes.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
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

_POLL_S = 0.1
#: A second Ctrl-C within this time after the first is the same one, seconds.
_IMPATIENT_AFTER_S = 1.0
#: Ports of one scorer after those of the one before; each has a public and an admin port.
_SCORER_PORT_STEP = 2
_MAX_PORT = 65535


def drain_order(settings: Settings, scorers: int) -> tuple[str, ...]:
    """Names of the processes, those that take requests first; the other way round it is the start order.

    Args:
        settings: without `gateway.retrieval` no collections are served, so neither retrieval nor scorers run.
        scorers: how many of them.
    """
    if settings.gateway.retrieval is None:
        return ("gateway", "encoder")
    return ("gateway", "retrieval", "encoder", *scorer_names(scorers))


def scorer_names(scorers: int) -> tuple[str, ...]:
    """Names of the scorers' processes."""
    return tuple(f"scorer-{index}" for index in range(scorers))


def server_of(settings: Settings, name: str) -> ServerSettings:
    """Where the process `name` listens: scorers side by side from the settings' ports on."""
    if not name.startswith("scorer-"):
        server: ServerSettings = getattr(settings, name)
        return server
    step = _SCORER_PORT_STEP * int(name.removeprefix("scorer-"))
    scorer = settings.scorer
    ports = {
        "port": scorer.port and scorer.port + step,
        "admin_port": scorer.admin_port and scorer.admin_port + step,
    }
    if max(ports.values()) > _MAX_PORT:
        raise SettingsError(
            f"scorer.port: {name} would need port {max(ports.values())}; take lower ones, or 0"
        )
    return scorer.model_copy(update=ports)


@contextmanager
def folder_lock(folder: Path, file: str, setting: str, remedy: str) -> Iterator[None]:
    """Hold a folder for this process.

    Args:
        folder: made if missing.
        file: its lock file.
        setting: that names the folder, for errors.
        remedy: what to do if another process holds it.

    Raises:
        SettingsError: another `phasemesh up` holds it, or it can't be made.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = (folder / file).open("a+")
    except OSError as error:
        raise SettingsError(f"{setting}: {folder}: {error.strerror}") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SettingsError(
                f"{setting}: {folder} is in use by another `phasemesh up`; stop that one, or {remedy}"
            ) from None
        yield


def runtime_lock(runtime_dir: Path) -> AbstractContextManager[None]:
    """Hold the runtime folder; see `folder_lock`."""
    return folder_lock(
        runtime_dir, "up.lock", "runtime_dir", "give this one another --runtime-dir and other ports"
    )


def data_lock(data_dir: Path) -> AbstractContextManager[None]:
    """Hold the data root; see `folder_lock`."""
    # No tenant's name begins with a dot.
    return folder_lock(data_dir, ".up.lock", "data_dir", "give this one another --data-dir")


def run_up(settings: Settings, console: Console, *, scorers: int) -> bool:
    """Run the mesh until SIGTERM or SIGINT, then drain it; False if the drain was cut short.

    Args:
        settings: of all roles.
        console: for the banner.
        scorers: how many to run.

    Raises:
        MeshFailed: a role can't be kept running.
        SettingsError: another `phasemesh up` uses the same runtime folder or data root.
    """
    if settings.scorer.cache_dir is not None and scorers > 1:
        raise SettingsError(
            "scorer.cache_dir: is one folder, and each scorer needs its own; leave it out, or use --scorers 1"
        )
    runtime_dir = settings.runtime_dir
    names = drain_order(settings, scorers)
    with runtime_lock(runtime_dir), data_lock(settings.data_dir):
        _check_ports(settings, names)
        for name in names:
            report_path(runtime_dir, name).unlink(missing_ok=True)
        # The roles read the settings in force from a file and nothing from the environment, so that they
        # can't come to other settings than these. Keys may be among them: the folder is its owner's alone.
        file = runtime_dir / SETTINGS_FILE
        file.unlink(missing_ok=True)
        file.touch(mode=0o600)
        file.write_text(dump(_for_this_terminal(settings)))
        configure_logging(role="up", level=settings.log.level, style=settings.log.format)
        try:
            with terminal_to_ourselves():
                drained = asyncio.run(_run(settings, names, file, console))
        finally:
            file.unlink(missing_ok=True)
            for name in names:
                report_path(runtime_dir, name).unlink(missing_ok=True)
            sweep_ray(runtime_dir)
        return drained


def _for_this_terminal(settings: Settings) -> Settings:
    """The settings for roles whose output comes through us: they can't see whether a person reads it."""
    if settings.log.format != "auto":
        return settings
    style = "text" if sys.stderr.isatty() else "json"
    return settings.model_copy(update={"log": settings.log.model_copy(update={"format": style})})


def _check_ports(settings: Settings, names: Sequence[str]) -> None:
    """Refuse ports that are taken now, rather than after the models are loaded."""
    for process in names:
        server = server_of(settings, process)
        role = _role(process)
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


def _role(name: str) -> str:
    return "scorer" if name.startswith("scorer-") else name


def _targets(settings: Settings, names: Sequence[str]) -> list[str]:
    """gRPC targets of processes that have reported."""
    targets = []
    for name in names:
        report = read_report(settings.runtime_dir, name)
        assert report is not None  # whoever asks has waited for it
        targets.append(authority(server_of(settings, name).host, report.port))
    return targets


def role_arguments(settings: Settings, name: str, names: Sequence[str]) -> list[str]:
    """Arguments of one process: its ports, and where those are that it calls.

    A role that is started again keeps its ports: others know them.
    """
    role, server = _role(name), server_of(settings, name)
    report = read_report(settings.runtime_dir, name)
    port, admin_port = (
        (server.port, server.admin_port) if report is None else (report.port, report.admin_port)
    )
    values = {f"{role}.port": str(port), f"{role}.admin_port": str(admin_port)}
    scorers = [other for other in names if _role(other) == "scorer"]
    if role == "retrieval":
        values["retrieval.encoders"] = str(_targets(settings, ["encoder"]))
        values["retrieval.scorers"] = str(_targets(settings, scorers))
    if role == "gateway":
        values["gateway.encoders"] = str(_targets(settings, ["encoder"]))
        if "retrieval" in names:
            values["gateway.retrieval"] = _targets(settings, ["retrieval"])[0]
    arguments = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
    return [*(("--name", name) if role == "scorer" else ()), *arguments]


def needed_by(name: str, names: Sequence[str]) -> list[str]:
    """Processes that have to listen before `name` starts."""
    if name == "gateway":
        return [other for other in ("retrieval", "encoder") if other in names]
    if name == "retrieval":
        return [other for other in names if other == "encoder" or _role(other) == "scorer"]
    return []


async def _run(settings: Settings, names: Sequence[str], file: Path, console: Console) -> bool:
    runtime_dir = settings.runtime_dir
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    output = PrefixedOutput(names)
    # Longer than the roles' own limits, so that killing is for those that hang.
    drain_s = settings.rpc.drain_delay_s + 2 * settings.rpc.drain_s + 15

    def process(name: str) -> RoleProcess:
        def command() -> list[str]:
            base = [sys.executable, "-m", "phasemesh.cli.main", _role(name), "--config", str(file)]
            return [*base, "--exit-with-parent", *role_arguments(settings, name, names)]

        async def needed_listen() -> None:
            for other in needed_by(name, names):
                while read_report(settings.runtime_dir, other) is None:
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
            wait_until=needed_listen,
            drain_s=drain_s,
        )

    roles = [process(name) for name in names]
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
            for role in roles:
                role.kill()

    def on_terminate() -> None:
        nonlocal asked_s
        if not stop.is_set():
            console.print("[bold]draining[/] (Ctrl-C once more to kill)")
            asked_s = loop.time()
            stop.set()

    loop.add_signal_handler(signal.SIGINT, on_interrupt)
    loop.add_signal_handler(signal.SIGTERM, on_terminate)
    await supervise(roles, stop, lambda: announce(settings, names, console))
    console.print("killed" if killed else "stopped")
    return not killed
