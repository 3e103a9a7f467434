"""Keys, roles, and what a peer may say about itself."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from pydantic import SecretStr

from phasemesh.config.settings import AccessSettings, KeySettings
from phasemesh.errors import InvalidArgument, Unauthenticated
from phasemesh.rpc.access import bearer_key
from phasemesh.rpc.catalogue import HEALTH
from phasemesh.rpc.context import Caller, current_call
from phasemesh.v1.encoder_pb2 import EmbedRequest, EmbedResponse
from tests.unit.rpc.harness import mesh

CALLER_KEY, MESH_KEY = "caller-key-1234", "mesh-key-5678"
ACCESS = AccessSettings(
    keys=(
        KeySettings(name="app", key=SecretStr(CALLER_KEY), tenant="acme"),
        KeySettings(name="gateway", key=SecretStr(MESH_KEY), role="mesh"),
    )
)


class Recorder:
    """A handler that notes who called."""

    def __init__(self) -> None:
        self.callers: list[Caller] = []

    async def __call__(self, request: EmbedRequest) -> EmbedResponse:
        self.callers.append(current_call().caller)
        return EmbedResponse()


async def refused(stub: Any, metadata: list[tuple[str, str]]) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stub.Embed(EmbedRequest(), timeout=5, metadata=metadata)
    return raised.value


async def test_no_key_or_a_wrong_one_is_refused_before_the_handler(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    seen = Recorder()
    async with mesh(seen, access=ACCESS) as m:
        stub = m.raw()
        for metadata in (
            [],
            [("authorization", CALLER_KEY)],
            [("authorization", "Bearer ")],
            [("authorization", "Basic " + CALLER_KEY)],
            [("authorization", "Bearer wrong-key-999")],
            [("authorization", f"Bearer {CALLER_KEY}x")],
            [("authorization", f"Bearer {CALLER_KEY[:-1]}")],
            [("x-api-key", "")],
            [("x-phasemesh-caller", "gateway"), ("x-phasemesh-tenant", "acme")],
        ):
            call = await refused(stub, metadata)
            assert call.code() is grpc.StatusCode.UNAUTHENTICATED
        assert seen.callers == []
        with pytest.raises(Unauthenticated) as ours:
            await m.embed()
        assert ours.value.reason == "KEY_MISSING"
    lines = [vars(record) for record in caplog.records if record.name == "phasemesh.access"]
    assert {line["caller"] for line in lines} == {None}
    assert "key" not in " ".join(str(value) for line in lines for value in line.values())


async def test_key_tells_caller_and_tenant() -> None:
    seen = Recorder()
    async with mesh(seen, access=ACCESS) as m:
        stub = m.raw()
        await stub.Embed(EmbedRequest(), timeout=5, metadata=[("authorization", f"Bearer {CALLER_KEY}")])
        await stub.Embed(EmbedRequest(), timeout=5, metadata=[("authorization", f"bearer  {CALLER_KEY}")])
        await stub.Embed(EmbedRequest(), timeout=5, metadata=[("x-api-key", CALLER_KEY)])
    assert seen.callers == [Caller("app", "acme", "caller")] * 3


async def test_only_mesh_speaks_for_others() -> None:
    seen = Recorder()
    claims = [("x-phasemesh-tenant", "victim"), ("x-phasemesh-caller", "boss")]
    async with mesh(seen, access=ACCESS) as m:
        stub = m.raw()
        await stub.Embed(EmbedRequest(), timeout=5, metadata=[("x-api-key", CALLER_KEY), *claims])
        await stub.Embed(EmbedRequest(), timeout=5, metadata=[("x-api-key", MESH_KEY), *claims])
        await stub.Embed(EmbedRequest(), timeout=5, metadata=[("x-api-key", MESH_KEY)])
        call = await refused(stub, [("x-api-key", MESH_KEY), ("x-phasemesh-tenant", "../etc")])
        assert call.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert seen.callers == [
        Caller("app", "acme", "caller"),
        Caller("boss", "victim", "mesh"),
        Caller("gateway", "default", "mesh"),
    ]


async def test_without_keys_everybody_is_anonymous_whatever_they_say() -> None:
    seen = Recorder()
    async with mesh(seen) as m:
        await m.raw().Embed(EmbedRequest(), timeout=5, metadata=[("x-phasemesh-tenant", "victim")])
    assert seen.callers == [Caller("anonymous", "default", "caller")]


async def test_client_sends_its_key_and_who_it_speaks_for() -> None:
    seen = Recorder()
    async with mesh(seen, access=ACCESS, key=MESH_KEY) as m:
        await m.embed(caller=Caller("alice", "acme", "caller"))
        with pytest.raises(InvalidArgument) as raised:
            await m.embed(caller=Caller("alice", "not/valid", "caller"))
        assert raised.value.field == "x-phasemesh-tenant"
    assert seen.callers == [Caller("alice", "acme", "mesh")]


async def test_health_needs_no_key_and_reflection_does() -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    async with mesh(Recorder(), access=ACCESS) as m:
        channel = m.channel()
        reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        info = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            async for _ in info(iter([ask]), timeout=5):
                pass
        assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
        metadata = [("x-api-key", CALLER_KEY)]
        replies = [reply async for reply in info(iter([ask]), timeout=5, metadata=metadata)]
        names = [service.name for service in replies[0].list_services_response.service]
        assert "phasemesh.v1.EncoderService" in names
        assert HEALTH in names


def test_bearer_key() -> None:
    assert bearer_key("Bearer abc", "other") == "abc"
    assert bearer_key("Basic abc", "other") == "other"
    assert bearer_key(None, None) is None
    assert bearer_key("Bearer", "") is None
