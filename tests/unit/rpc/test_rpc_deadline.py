"""Every call ends."""

from __future__ import annotations

import asyncio
import time

import grpc
import pytest

from phasemesh.config.settings import RpcSettings
from phasemesh.errors import DeadlineExceeded, Internal
from phasemesh.rpc.context import current_call
from phasemesh.v1.encoder_pb2 import EmbedRequest, EmbedResponse
from tests.unit.rpc.harness import mesh


class Remaining:
    """A handler that notes how long it has."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    async def __call__(self, request: EmbedRequest) -> EmbedResponse:
        call = current_call()
        assert abs(call.remaining_s() - (call.deadline_s - time.monotonic())) < 0.1
        self.seconds.append(call.remaining_s())
        return EmbedResponse()


async def test_default_own_and_longest() -> None:
    seen = Remaining()
    rpc = RpcSettings(default_deadline_s=7, max_deadline_s=20, drain_s=0)
    async with mesh(seen, rpc=rpc) as m:
        stub = m.raw()
        await stub.Embed(EmbedRequest())
        await stub.Embed(EmbedRequest(), timeout=3)
        await stub.Embed(EmbedRequest(), timeout=100_000)
    assert seen.seconds == [pytest.approx(7, abs=0.2), pytest.approx(3, abs=0.2), pytest.approx(20, abs=0.2)]


@pytest.mark.parametrize("asked_s", [None, 1000], ids=["default", "longest"])
async def test_handler_is_cancelled_when_the_servers_own_limit_passes(asked_s: float | None) -> None:
    cancelled = asyncio.Event()

    async def embed(request: EmbedRequest) -> EmbedResponse:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        raise AssertionError

    rpc = RpcSettings(default_deadline_s=0.05, max_deadline_s=0.05, drain_s=0)
    async with mesh(embed, rpc=rpc) as m:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await asyncio.wait_for(m.raw().Embed(EmbedRequest(), timeout=asked_s), 5)
        assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "took longer than its 0.05 s" in str(raised.value.details())
        assert cancelled.is_set()


async def test_a_handlers_own_timeout_error_is_a_bug() -> None:
    async def embed(request: EmbedRequest) -> EmbedResponse:
        raise TimeoutError("something else took too long")

    async with mesh(embed) as m:
        with pytest.raises(Internal):
            await m.embed()


async def test_calls_made_by_a_handler_end_with_it() -> None:
    seen = Remaining()
    async with mesh(seen) as leaf:

        async def relay(request: EmbedRequest) -> EmbedResponse:
            await leaf.embed(timeout_s=50)
            return EmbedResponse()

        async with mesh(relay) as root:
            await root.embed(timeout_s=2)
            # Not its own 50; gRPC rounds what it sends up by a percent or less.
            assert seen.seconds.pop() <= 2.05

    # And one without time left isn't sent at all.
    async def embed(request: EmbedRequest) -> EmbedResponse:
        raise AssertionError("was sent")

    async with mesh(embed) as m:
        with pytest.raises(DeadlineExceeded):
            await m.embed(timeout_s=0)
