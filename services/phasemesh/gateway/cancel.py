"""A caller who goes away takes its work along.

Invariant: when the HTTP connection closes, the awaited work is cancelled at once and has ended before the
request does, so that the gRPC call and the queued item behind it end too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from phasemesh.errors import Cancelled

T = TypeVar("T")


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`, and cancel it when the client disconnects.

    The request's body must have been read: what `receive` brings after that is the disconnect.

    Raises:
        Cancelled: the client went away first.
    """
    task = asyncio.create_task(work)
    listener = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((task, listener), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Cancelled("the client closed the connection")
    finally:
        # Waited for, not only asked: a cancelled task still runs its own clean-up.
        for pending in (task, listener):
            pending.cancel()
        await asyncio.gather(task, listener, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
