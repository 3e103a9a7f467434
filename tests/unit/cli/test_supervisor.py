"""The supervisor against real processes: restarts, giving up, draining in order, killing."""

import asyncio
import os
import signal
import sys
from collections.abc import Awaitable, Callable

import pytest

from phasemesh.cli.supervisor import (
    EXIT_CONFIG,
    CrashCounter,
    MeshFailed,
    RestartPolicy,
    RoleProcess,
    supervise,
)

FAST = RestartPolicy(first_pause_s=0.0, crash_limit=3)
#: Says that it runs, and exits 0 on SIGTERM after saying so.
WELL_BEHAVED = """
import signal, sys, time
def leave(*_):
    print("drained", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
print("running", flush=True)
while True: time.sleep(60)
"""
DEAF = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('running', flush=True)\ntime.sleep(600)"


class Lines:
    """Collects (role, line) and lets a test wait for one."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []
        self._changed = asyncio.Event()

    def __call__(self, role: str, line: str) -> None:
        self.seen.append((role, line))
        self._changed.set()

    async def wait_for(self, role: str, line: str, times: int = 1) -> None:
        async with asyncio.timeout(20):
            while self.seen.count((role, line)) < times:
                self._changed.clear()
                await self._changed.wait()


def role(
    name: str, program: str, lines: Lines, *, policy: RestartPolicy = FAST, drain_s: float = 20.0
) -> RoleProcess:
    return RoleProcess(
        name, lambda: [sys.executable, "-c", program], write_line=lines, policy=policy, drain_s=drain_s
    )


async def nothing() -> None:
    return None


POLICY = RestartPolicy(first_pause_s=1, longest_pause_s=3, crash_limit=5, steady_s=60)


def test_pauses_double_up_to_a_limit() -> None:
    counter = CrashCounter(POLICY, jitter=lambda: 0.0)
    assert [counter.pause_s(lived_s=1, listened=True) for _ in range(5)] == [1, 2, 3, 3, None]


def test_a_steady_life_starts_the_count_anew() -> None:
    counter = CrashCounter(POLICY, jitter=lambda: 0.0)
    for _ in range(4):
        counter.pause_s(lived_s=1, listened=True)
    assert counter.pause_s(lived_s=60, listened=True) == 1


def test_a_long_start_that_never_listens_is_no_steady_life() -> None:
    counter = CrashCounter(POLICY, jitter=lambda: 0.0)
    assert [counter.pause_s(lived_s=600, listened=False) for _ in range(5)] == [1, 2, 3, 3, None]


def test_jitter_only_lengthens() -> None:
    counter = CrashCounter(RestartPolicy(first_pause_s=1), jitter=lambda: 1.0)
    assert counter.pause_s(lived_s=1, listened=True) == pytest.approx(1.2)


async def test_a_killed_role_comes_back_and_others_stay() -> None:
    lines = Lines()
    a, b = role("a", WELL_BEHAVED, lines), role("b", WELL_BEHAVED, lines)
    stop = asyncio.Event()
    mesh = asyncio.create_task(supervise([a, b], stop, nothing))
    await lines.wait_for("a", "running")
    await lines.wait_for("b", "running")
    first, other = a.pid, b.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    await lines.wait_for("a", "running", times=2)
    assert a.pid not in (None, first)
    assert b.pid == other
    stop.set()
    await mesh
    # In the order given: what takes requests first.
    assert lines.seen[-2:] == [("a", "drained"), ("b", "drained")]
    assert (a.pid, b.pid) == (None, None)


async def test_a_crash_loop_ends_the_mesh_and_drains_the_rest() -> None:
    lines = Lines()
    crashing = role("bad", "import sys; sys.exit(3)", lines)
    good = role("good", WELL_BEHAVED, lines)
    with pytest.raises(MeshFailed, match=r"bad: failed 3 times in a row, last with status 3"):
        await supervise([good, crashing], asyncio.Event(), lambda: lines.wait_for("good", "running"))
    assert good.pid is None


async def test_a_wrong_configuration_is_not_tried_again() -> None:
    lines = Lines()
    wrong = role("bad", f"import sys; print('why', flush=True); sys.exit({EXIT_CONFIG})", lines)
    with pytest.raises(MeshFailed, match="configuration is wrong"):
        await supervise([wrong], asyncio.Event(), nothing)
    assert lines.seen == [("bad", "why")]


async def test_a_role_that_does_not_drain_is_killed() -> None:
    lines = Lines()
    deaf = role("deaf", DEAF, lines, drain_s=0.2)
    stop = asyncio.Event()
    mesh = asyncio.create_task(supervise([deaf], stop, nothing))
    await lines.wait_for("deaf", "running")
    stop.set()
    await asyncio.wait_for(mesh, 20)
    assert deaf.pid is None


async def test_kill_ends_a_drain_at_once() -> None:
    lines = Lines()
    deaf = role("deaf", DEAF, lines, drain_s=600)
    stop = asyncio.Event()
    mesh = asyncio.create_task(supervise([deaf], stop, nothing))
    await lines.wait_for("deaf", "running")
    stop.set()
    await asyncio.sleep(0)
    deaf.kill()
    await asyncio.wait_for(mesh, 20)
    assert deaf.pid is None


async def test_a_role_waits_for_the_one_it_needs() -> None:
    lines = Lines()
    needed = asyncio.Event()

    async def wait() -> None:
        await needed.wait()

    later = RoleProcess(
        "later", lambda: [sys.executable, "-c", WELL_BEHAVED], write_line=lines, wait_until=wait, policy=FAST
    )
    stop = asyncio.Event()
    mesh = asyncio.create_task(supervise([later, role("first", WELL_BEHAVED, lines)], stop, nothing))
    await lines.wait_for("first", "running")
    assert later.pid is None
    needed.set()
    await lines.wait_for("later", "running")
    stop.set()
    await mesh


async def test_long_lines_and_odd_bytes_do_not_stop_the_copying() -> None:
    lines = Lines()
    program = (
        "import sys\nsys.stdout.buffer.write(b'x' * 3_000_000 + b'\\n' + b'\\xff\\n' + b'after\\n')\n"
        "sys.stdout.flush()\n" + WELL_BEHAVED
    )
    stop = asyncio.Event()
    mesh = asyncio.create_task(supervise([role("a", program, lines)], stop, nothing))
    await lines.wait_for("a", "running")
    assert ("a", "after") in lines.seen
    assert ("a", "\ufffd") in lines.seen
    stop.set()
    await mesh


async def test_a_failing_announcement_drains_the_mesh() -> None:
    lines = Lines()
    good = role("good", WELL_BEHAVED, lines)

    async def fail() -> None:
        await lines.wait_for("good", "running")
        raise MeshFailed("no port")

    announce: Callable[[], Awaitable[None]] = fail
    with pytest.raises(MeshFailed, match="no port"):
        await supervise([good], asyncio.Event(), announce)
    assert good.pid is None
