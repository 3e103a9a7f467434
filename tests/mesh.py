"""Starts the real mesh as a user would, `phasemesh up` in a process of its own, for tests and benchmarks."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from phasemesh.cli.report import RoleReport, read_report


@dataclass
class Mesh:
    """A running mesh.

    Attributes:
        process: the supervisor.
        runtime_dir: its runtime folder.
        lines: what it printed so far.
    """

    process: subprocess.Popen[str]
    runtime_dir: Path
    lines: list[str] = field(default_factory=list)

    def report(self, role: str) -> RoleReport:
        """Where `role` listens."""
        report = read_report(self.runtime_dir, role)
        assert report is not None, self.output
        return report

    @property
    def output(self) -> str:
        """Everything printed so far."""
        return "\n".join(self.lines)

    @property
    def rest(self) -> str:
        """Base URL of the gateway."""
        return f"http://127.0.0.1:{self.report('gateway').port}"

    @property
    def grpc(self) -> str:
        """Target of the encoder."""
        return f"127.0.0.1:{self.report('encoder').port}"

    @property
    def retrieval(self) -> str:
        """Target of the retrieval service."""
        return f"127.0.0.1:{self.report('retrieval').port}"

    def scorer(self, index: int) -> str:
        """Target of a scorer."""
        return f"127.0.0.1:{self.report(f'scorer-{index}').port}"

    def admin(self, role: str, path: str) -> tuple[int, str]:
        """Status and body of an admin page."""
        url = f"http://127.0.0.1:{self.report(role).admin_port}{path}"
        try:
            with urllib.request.urlopen(url, timeout=5) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def wait_for_line(self, text: str, timeout_s: float = 60.0) -> str:
        """The first line that holds `text`; fails with the output if none comes."""
        return self.wait_until(
            lambda: next((line for line in self.lines if text in line), ""), timeout_s, text
        )

    def wait_until(self, probe, timeout_s: float = 60.0, what: str = "a condition"):  # type: ignore[no-untyped-def]  # any truthy value
        """What `probe` returns once that is true; polls, since other processes can't be awaited."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if value := probe():
                return value
            time.sleep(0.05)
        raise AssertionError(f"waited {timeout_s:.0f} s for {what}; the mesh printed:\n{self.output}")

    def stop(self, number: int = signal.SIGINT, timeout_s: float = 60.0) -> int:
        """Send a signal and wait; the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(timeout_s)


@contextmanager
def running_mesh(
    *arguments: str,
    environment: Mapping[str, str] | None = None,
    wait: bool = True,
    start_timeout_s: float = 180.0,
    data_dir: Path | None = None,
) -> Iterator[Mesh]:
    """`phasemesh up` with free ports and folders of its own; stopped, or killed, at the end.

    Args:
        arguments: of `phasemesh up`.
        environment: added to this process's.
        wait: return only when the mesh says that it is ready.
        start_timeout_s: longest wait for that.
        data_dir: root of collections, e.g. of a mesh that ran before; default: a new one, gone at the end.
            Scorers are known by their targets, so a second start finds the segments of the first where it
            finds its ports: give `--set scorer.port=…` (see `free_scorer_ports`) to both.
    """
    roles = ("gateway", "encoder", "retrieval", "scorer")
    ports: Sequence[str] = [f"{role}.{name}=0" for role in roles for name in ("port", "admin_port")]
    with (
        tempfile.TemporaryDirectory(prefix="pm-") as folder,
        tempfile.TemporaryDirectory(prefix="pm-data-") as own_data,
    ):
        command = [sys.executable, "-m", "phasemesh.cli.main", "up", "--runtime-dir", folder]
        command += ["--data-dir", str(data_dir or own_data)]
        for port in ports:
            command += ["--set", port]
        # Last, so that they count where they name one of these ports.
        command += arguments
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        mesh = Mesh(process, Path(folder))

        def collect() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                mesh.lines.append(line.rstrip("\n"))

        reader = threading.Thread(target=collect, daemon=True)
        reader.start()
        try:
            if wait:
                mesh.wait_until(
                    lambda: "phasemesh is ready" in mesh.output or process.poll() is not None,
                    start_timeout_s,
                    "the mesh to be ready",
                )
                assert process.poll() is None, f"the mesh exited with {process.returncode}:\n{mesh.output}"
            yield mesh
        finally:
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(60)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            reader.join(10)
            assert process.stdout is not None
            process.stdout.close()


def free_scorer_ports(scorers: int = 2) -> list[str]:
    """Arguments that give scorers ports which are free now, for meshes that follow each other."""
    for _ in range(100):
        with socket.create_server(("127.0.0.1", 0)) as probe:
            first = probe.getsockname()[1]
        try:
            # A public and an admin port each, side by side.
            for port in range(first, first + 2 * scorers):
                socket.create_server(("127.0.0.1", port)).close()
        except (OSError, OverflowError):
            continue
        return ["--set", f"scorer.port={first}", "--set", f"scorer.admin_port={first + 1}"]
    raise AssertionError("no free ports side by side")
