from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message

from phasemesh.errors import Cancelled
from phasemesh.gateway.cancel import unless_disconnected


class Connection:
    """What an ASGI server brings after the body."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()
        self.listening = asyncio.Event()
        self.stopped = False

    async def receive(self) -> Message:
        self.listening.set()
        try:
            await self.gone.wait()
        except asyncio.CancelledError:
            self.stopped = True
            raise
        return {"type": "http.disconnect"}


async def test_result_and_error_pass_and_the_listener_ends() -> None:
    async def work() -> int:
        await connection.listening.wait()
        return 7

    async def broken() -> int:
        raise ValueError("from the work")

    connection = Connection()
    assert await unless_disconnected(connection.receive, work()) == 7
    assert connection.stopped
    with pytest.raises(ValueError, match="from the work"):
        await unless_disconnected(Connection().receive, broken())


async def test_disconnect_cancels_and_waits_for_the_clean_up() -> None:
    seen: list[str] = []

    async def work() -> None:
        connection.gone.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            seen.append("cleaned up")
            raise

    connection = Connection()
    with pytest.raises(Cancelled):
        await unless_disconnected(connection.receive, work())
    assert seen == ["cleaned up"]


async def test_cancelling_the_request_cancels_the_work() -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    request = asyncio.create_task(unless_disconnected(Connection().receive, work()))
    await started.wait()
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert ended.is_set()
