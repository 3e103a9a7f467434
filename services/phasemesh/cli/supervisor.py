"""Keeps one operating-system process per role running on this machine.

A role that exits is started again after a growing pause; one that exits too often, or says that its
configuration is wrong, ends the whole mesh, because a mesh without one of its roles only looks alive.
Children run in sessions of their own, so that Ctrl-C reaches the supervisor alone and it can drain them in
order, and they hold the read end of a pipe, so that they drain by themselves if the supervisor is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

logger = logging.getLogger(__name__)

#: Exit status of a role whose configuration is wrong (EX_CONFIG of sysexits.h): trying again can't help.
EXIT_CONFIG = 78


class MeshFailed(Exception):
    """A role can't be kept running; the message says which and why.

    Attributes:
        status: exit status for the supervisor.
    """

    def __init__(self, message: str, *, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When a role that exits is started again.

    Attributes:
        first_pause_s: pause before the first restart; doubles with each further one.
        longest_pause_s: the pause grows no longer than this.
        crash_limit: failed lives in a row that end the mesh. A life has failed if the role never listened, or
            ended within `steady_s`.
        steady_s: see `crash_limit`; a longer life starts the count anew.
    """

    first_pause_s: float = 0.5
    longest_pause_s: float = 10.0
    crash_limit: int = 5
    steady_s: float = 60.0


@dataclass(slots=True)
class CrashCounter:
    """Decides, exit by exit, how long to wait before a restart and when to give up."""

    policy: RestartPolicy
    jitter: Callable[[], float] = random.random
    _failed_lives: int = 0

    def pause_s(self, *, lived_s: float, listened: bool) -> float | None:
        """Note an exit; seconds to wait before the restart, or None to give up."""
        if listened and lived_s >= self.policy.steady_s:
            self._failed_lives = 0
        self._failed_lives += 1
        if self._failed_lives >= self.policy.crash_limit:
            return None
        doubled: float = self.policy.first_pause_s * 2 ** (self._failed_lives - 1)
        # Up to a fifth longer, so that roles that fell together don't come back in step.
        return min(self.policy.longest_pause_s, doubled) * (1 + self.jitter() / 5)


class RoleProcess:
    """One role's process, started again whenever it exits."""

    def __init__(
        self,
        role: str,
        command: Callable[[], Sequence[str]],
        *,
        write_line: Callable[[str, str], None],
        environment: Mapping[str, str] | None = None,
        wait_until: Callable[[], Awaitable[None]] | None = None,
        listens: Callable[[int], bool] = lambda pid: True,
        policy: RestartPolicy = RestartPolicy(),
        drain_s: float = 40.0,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nothing is started yet.

        Args:
            role: name, for logs.
            command: called before each start, so that a restart can use the ports of the first one.
            write_line: gets (role, line) for every line of the process's output.
            environment: of the process; None for this one's.
            wait_until: awaited before the first start, e.g. until a role that this one needs listens.
            listens: whether the process with this id has said where it listens.
            policy: when to start it again.
            drain_s: how long it may take to exit after SIGTERM before it is killed.
            sleep: a test's clock.
            now: monotonic seconds.
        """
        self.role = role
        self._command = command
        self._write_line = write_line
        self._environment = environment
        self._wait_until = wait_until
        self._listens = listens
        self._crashes = CrashCounter(policy)
        self._policy = policy
        self._drain_s = drain_s
        self._sleep = sleep
        self._now = now
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False

    @property
    def pid(self) -> int | None:
        """The process, if one runs."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    async def run(self) -> None:
        """Start the process and keep it running until `stop`.

        Raises:
            MeshFailed: it exits too often, or says that its configuration is wrong.
        """
        if self._wait_until is not None:
            await self._wait_until()
        while not self._stopping:
            began = self._now()
            status = await self._run_once()
            if self._stopping:
                return
            process = self._process
            assert process is not None  # it has just ended
            if status == EXIT_CONFIG:
                raise MeshFailed(
                    f"{self.role}: the configuration is wrong; its last lines above say how",
                    status=EXIT_CONFIG,
                )
            pause = self._crashes.pause_s(lived_s=self._now() - began, listened=self._listens(process.pid))
            if pause is None:
                raise MeshFailed(
                    f"{self.role}: failed {self._policy.crash_limit} times in a row, "
                    f"last with {_describe_status(status)}; giving up"
                )
            logger.warning(
                "role exited, starting it again",
                extra={
                    "role_name": self.role,
                    "status": _describe_status(status),
                    "pause_s": round(pause, 2),
                },
            )
            await self._sleep(pause)

    async def _run_once(self) -> int:
        process = await asyncio.create_subprocess_exec(
            *self._command(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            env=self._environment,
            limit=2**20,
        )
        self._process = process
        if self._stopping:  # `stop` came while the process was being made
            process.terminate()
        await self._copy_output(process)
        return await process.wait()

    async def _copy_output(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        # A grandchild may hold the pipe open after the role is gone, so the role's exit ends the copying too.
        copying = asyncio.ensure_future(self._copy_lines(process.stdout))
        exited = asyncio.ensure_future(process.wait())
        await asyncio.wait({copying, exited}, return_when=asyncio.FIRST_COMPLETED)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(copying, timeout=1.0)
        await exited

    async def _copy_lines(self, stream: asyncio.StreamReader) -> None:
        while True:
            try:
                line = await stream.readline()
            except ValueError:  # a line over the limit; the reader has dropped it
                continue
            if not line:
                return
            self._write_line(self.role, line.decode(errors="replace").rstrip("\n"))

    async def stop(self) -> None:
        """Ask the process to drain, wait, and kill it if it doesn't exit in time. Safe to call twice."""
        self._stopping = True
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), timeout=self._drain_s)
        except TimeoutError:
            logger.error("role did not drain in time, killing it", extra={"role_name": self.role})
            self.kill()
            await process.wait()

    def kill(self) -> None:
        """Kill the process and everything in its session."""
        self._stopping = True
        if (pid := self.pid) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)


def _describe_status(status: int) -> str:
    if status < 0:
        try:
            return signal.Signals(-status).name
        except ValueError:
            return f"signal {-status}"
    return f"status {status}"


class PrefixedOutput:
    """Writes lines of several processes to one stream, each behind its role's name."""

    def __init__(self, roles: Sequence[str]) -> None:
        self._width = max(map(len, roles))

    def __call__(self, role: str, line: str) -> None:
        """Write one line."""
        sys.stderr.write(f"{role:<{self._width}} | {line}\n")
        sys.stderr.flush()


async def supervise(
    roles: Sequence[RoleProcess],
    stop: asyncio.Event,
    started: Callable[[], Awaitable[None]],
) -> None:
    """Run `roles` until `stop` is set, then drain them in the order given.

    Args:
        roles: in the order in which they are drained: those that take requests first.
        stop: set by a signal handler.
        started: awaited beside the roles once; it waits for them to be ready and says so.

    Raises:
        MeshFailed: a role can't be kept running; the others have been drained by then.
    """
    running = [asyncio.ensure_future(role.run()) for role in roles]
    announcing = asyncio.ensure_future(started())
    stopping = asyncio.ensure_future(stop.wait())
    waiting: set[asyncio.Future[object]] = {*running, stopping, announcing}  # type: ignore[arg-type]  # results unused
    try:
        while not stopping.done():
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            waiting -= done
            for finished in done:
                finished.result()
    finally:
        announcing.cancel()
        stopping.cancel()
        for role in roles:
            await role.stop()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, announcing, stopping, return_exceptions=True)
