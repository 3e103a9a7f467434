"""The gateway's calls to the retrieval service: a message in, a message out.

Invariant: every call has what is left of the request's time as its deadline, and speaks for the caller.
"""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import Message

from phasemesh.config.settings import Settings
from phasemesh.gateway.exchange import Exchange
from phasemesh.gateway.peer_faults import not_the_callers
from phasemesh.rpc.client import RpcClient
from phasemesh.v1.retrieval_pb2_grpc import RetrievalServiceStub

R = TypeVar("R", bound=Message)


class Retrieval:
    """Calls one retrieval service."""

    def __init__(self, settings: Settings, client: RpcClient, target: str) -> None:
        """Nothing is called yet.

        Args:
            settings: `gateway.request_timeout_s` bounds calls.
            client: makes them.
            target: the service.
        """
        self._timeout_s = settings.gateway.request_timeout_s
        self._client = client
        self._target = target

    async def call(self, exchange: Exchange, method: str, request: Message, kind: type[R]) -> R:
        """The reply, of type `kind`.

        Raises:
            PhasemeshError: the call failed; `field` is a path of the request message.
        """
        elapsed_s = exchange.clock.total_ns() / 1e9
        with not_the_callers("the retrieval service"):
            reply = await self._client.call(
                self._target,
                RetrievalServiceStub,
                method,
                request,
                timeout_s=max(self._timeout_s - elapsed_s, 0.001),
                request_id=exchange.request_id,
                caller=exchange.caller,
            )
        assert isinstance(reply, kind)
        return reply
