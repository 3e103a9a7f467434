"""Whether a peer's service says that it serves: its gRPC health, polled.

For a process that tells its own probes about a peer which it can do without; nothing waits for the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from grpc_health.v1 import health_pb2, health_pb2_grpc

from phasemesh.errors import PhasemeshError
from phasemesh.rpc.client import RpcClient

_log = logging.getLogger(__name__)

_LONGEST_CALL_S = 2.0


class PeerWatch:
    """Polls the health of one service of one target.

    Args:
        client: makes the calls.
        target: of the peer.
        service: full name of its service.
        refresh_s: pause between two polls, seconds.
    """

    def __init__(self, client: RpcClient, target: str, service: str, *, refresh_s: float) -> None:
        self._client = client
        self._target = target
        self._service = service
        self._refresh_s = refresh_s
        self._serving = False
        self._polling: asyncio.Task[None] | None = None

    @property
    def serving(self) -> bool:
        """Whether the last poll was answered SERVING; False before the first."""
        return self._serving

    def start(self) -> None:
        """Begin to poll, on the running loop."""
        self._polling = asyncio.get_running_loop().create_task(self._poll())

    async def close(self) -> None:
        """Stop polling."""
        if self._polling is not None:
            self._polling.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._polling

    async def refresh(self) -> None:
        """Poll once, now."""
        try:
            reply = await self._client.call(
                self._target,
                health_pb2_grpc.HealthStub,
                "Check",
                health_pb2.HealthCheckRequest(service=self._service),
                timeout_s=_LONGEST_CALL_S,
                traced=False,
            )
            serving = reply.status == health_pb2.HealthCheckResponse.SERVING
        except PhasemeshError:
            serving = False
        if serving != self._serving:
            _log.info("peer's health changed", extra={"service": self._service, "serving": serving})
        self._serving = serving

    async def _poll(self) -> None:
        while True:
            await self.refresh()
            await asyncio.sleep(self._refresh_s)
