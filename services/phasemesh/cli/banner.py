"""What `phasemesh up` tells a person once the mesh answers: ports, models, commands to try."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from rich.console import Console

from phasemesh.cli.report import RoleReport, read_report
from phasemesh.config.settings import Settings
from phasemesh.errors import PhasemeshError
from phasemesh.rpc.bind import authority
from phasemesh.rpc.client import RpcClient
from phasemesh.v1 import common_pb2 as common
from phasemesh.v1 import encoder_pb2 as pb
from phasemesh.v1.encoder_pb2_grpc import EncoderServiceStub

_POLL_S = 0.2


async def announce(settings: Settings, console: Console) -> None:
    """Wait until the gateway is ready, then print what there is and how to use it.

    What goes wrong here is only said: the roles run, whether or not their models could be listed.
    """
    began = time.monotonic()
    loading = [model.name for model in settings.encoder.models]
    console.print(f"starting phasemesh; loading {', '.join(loading)}")
    while (gateway := read_report(settings.runtime_dir, "gateway")) is None or not await _ready(
        settings, gateway
    ):
        await asyncio.sleep(_POLL_S)
    encoder = read_report(settings.runtime_dir, "encoder")
    assert encoder is not None  # the gateway is ready, so it has found one
    client = RpcClient(rpc=settings.rpc, key=settings.access.mesh_key())
    models: list[pb.ModelInfo] = []
    try:
        target = authority(settings.encoder.host, encoder.port)
        listed = await client.call(
            target, EncoderServiceStub, "ListModels", pb.ListModelsRequest(), timeout_s=10
        )
        models = list(listed.models)
    except PhasemeshError as error:
        console.print(
            f"the models can't be listed: {error.message}", style="red", markup=False, soft_wrap=True
        )
    finally:
        await client.close()
    seconds = time.monotonic() - began
    console.print(banner(settings, gateway, encoder, models, seconds), markup=False, soft_wrap=True)


async def _ready(settings: Settings, gateway: RoleReport) -> bool:
    # A wildcard address can't be called; the loopback is part of it.
    host = settings.gateway.admin_host
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 -- compared, not bound
    url = f"http://{authority(host, gateway.admin_port)}/readyz"

    def probe() -> bool:
        try:
            with urllib.request.urlopen(url, timeout=1) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    return await asyncio.to_thread(probe)


def _admin(role: str, host: str, port: int) -> str:
    return f"{role} http://{authority(host, port)}"


def grpcurl_command() -> str:
    """How to call grpcurl: the one in this environment's folder of programs, or the one in PATH."""
    beside = Path(sys.executable).parent / "grpcurl"
    if beside.exists():
        return os.path.relpath(beside) if beside.is_relative_to(Path.cwd()) else str(beside)
    return shutil.which("grpcurl") or "grpcurl"


def banner(
    settings: Settings, gateway: RoleReport, encoder: RoleReport, models: list[pb.ModelInfo], seconds: float
) -> str:
    """The text; commands in it work as they stand."""
    rest = f"http://{authority(settings.gateway.host, gateway.port)}"
    grpc = authority(settings.encoder.host, encoder.port)
    key = "" if not settings.access.keys else " -H 'Authorization: Bearer KEY'"
    embedder = next((model for model in models if pb.TASK_EMBED in model.tasks), None)
    scorers = [model for model in models if pb.TASK_SCORE in model.tasks]
    # A cross-encoder is what reranks best, where there is one.
    scorers.sort(key=lambda model: common.SCORE_TYPE_CROSS_ENCODER not in model.score_types)
    scorer = scorers[0] if scorers else None
    lines = [
        "",
        f"phasemesh is ready ({seconds:.1f} s)",
        "",
        f"  REST    {rest}  (API page: {rest}/docs)",
        f"  gRPC    {grpc}  phasemesh.v1.EncoderService",
        f"  admin   {_admin('gateway', settings.gateway.admin_host, gateway.admin_port)}"
        f"   {_admin('encoder', settings.encoder.admin_host, encoder.admin_port)}  (/livez /readyz /metrics)",
        "",
    ]
    for model in models:
        kinds = [pb.VectorKind.Name(kind).removeprefix("VECTOR_KIND_").lower() for kind in model.vector_kinds]
        size = model.dense_dimension or model.token_dimension
        offers = f"{'+'.join(kinds)} vectors of {size}" if kinds else "scores"
        lines.append(
            f"  model   {model.name}: {model.architecture}, {offers}, up to {model.max_tokens} tokens, "
            f"{model.dtype}, {model.ready_replicas} worker(s)"
        )
    if embedder is not None:
        lines += [
            "",
            "Try an embedding over REST, as any OpenAI client would:",
            "",
            f"  curl -s {rest}/v1/embeddings{key} -H 'Content-Type: application/json' \\",
            f"""    -d '{{"model": "{embedder.name}", "input": "Hello, mesh!"}}'""",
            "",
            "The same over gRPC:",
            "",
            f"  {grpcurl_command()} -plaintext{key} \\",
            f"""    -d '{{"model": "{embedder.name}", "inputs": [{{"text": "Hello, mesh!"}}]}}' \\""",
            f"    {grpc} phasemesh.v1.EncoderService/Embed",
        ]
    if scorer is not None:
        lines += [
            "",
            "A rerank:",
            "",
            f"  curl -s {rest}/v1/rerank{key} -H 'Content-Type: application/json' \\",
            f"""    -d '{{"model": "{scorer.name}", "query": "What is a mesh?", "documents":""",
            """         ["Bread needs flour and water.", "A mesh joins many nodes to each other."]}'""",
        ]
    runtime = (
        "" if "runtime_dir" not in settings.model_fields_set else f" --runtime-dir {settings.runtime_dir}"
    )
    lines += ["", f"More: make demo, or phasemesh demo{runtime}. Ctrl-C drains and stops.", ""]
    return "\n".join(lines)
