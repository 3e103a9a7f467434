"""Every call ends: the caller's deadline, the default where there is none, and never later than the longest.

gRPC itself cancels a handler whose caller's deadline passed; this interceptor does it for the deadlines that
only this server knows of, and tells handlers how long they have.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from phasemesh.config.settings import RpcSettings
from phasemesh.errors import DeadlineExceeded
from phasemesh.rpc.context import current_call, enter_call
from phasemesh.rpc.interceptor import AroundInterceptor, Context


class DeadlineInterceptor(AroundInterceptor):
    """Sets `Call.deadline_s`, and cancels the handler when it passes."""

    def __init__(self, rpc: RpcSettings) -> None:
        self._default_s = min(rpc.default_deadline_s, rpc.max_deadline_s)
        self._max_s = rpc.max_deadline_s

    @asynccontextmanager
    async def around(self, method: str, context: Context) -> AsyncIterator[None]:
        """See `AroundInterceptor`."""
        asked_s: float | None = context.time_remaining()
        allowed_s = self._default_s if asked_s is None else min(asked_s, self._max_s)
        enter_call(replace(current_call(), deadline_s=time.monotonic() + allowed_s))
        try:
            async with asyncio.timeout(allowed_s) as timeout:
                yield
        except TimeoutError:
            # A TimeoutError of the handler's own is a bug like any other.
            if not timeout.expired():
                raise
            raise DeadlineExceeded(f"the call took longer than its {allowed_s:g} s") from None
