"""What `phasemesh up` tells a person once the mesh answers: ports, models, commands to try."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from phasemesh.cli.report import RoleReport, read_report
from phasemesh.config.settings import ServerSettings, Settings
from phasemesh.errors import PhasemeshError
from phasemesh.rpc.bind import authority
from phasemesh.rpc.client import RpcClient
from phasemesh.v1 import common_pb2 as common
from phasemesh.v1 import encoder_pb2 as pb
from phasemesh.v1.encoder_pb2_grpc import EncoderServiceStub

_POLL_S = 0.2


async def announce(settings: Settings, names: Sequence[str], console: Console) -> None:
    """Wait until the mesh is ready, then print what there is and how to use it.

    What goes wrong here is only said: the roles run, whether or not their models could be listed.

    Args:
        settings: of the mesh.
        names: its processes.
        console: to print on.
    """
    began = time.monotonic()
    loading = [model.name for model in settings.encoder.models]
    console.print(f"starting phasemesh; loading {', '.join(loading)}")
    # The gateway is ready with an encoder alone; collections need the others too.
    for name in names:
        server = _server(settings, name)
        while not (report := read_report(settings.runtime_dir, name)) or not await _ready(server, report):
            await asyncio.sleep(_POLL_S)
    reports = {name: report for name in names if (report := read_report(settings.runtime_dir, name))}
    client = RpcClient(rpc=settings.rpc, key=settings.access.mesh_key())
    models: list[pb.ModelInfo] = []
    try:
        target = authority(settings.encoder.host, reports["encoder"].port)
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
    console.print(banner(settings, reports, models, seconds), markup=False, soft_wrap=True)


async def _ready(server: ServerSettings, report: RoleReport) -> bool:
    # A wildcard address can't be called; the loopback is part of it.
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(server.admin_host, server.admin_host)  # noqa: S104 -- compared
    url = f"http://{authority(host, report.admin_port)}/readyz"

    def probe() -> bool:
        try:
            with urllib.request.urlopen(url, timeout=1) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    return await asyncio.to_thread(probe)


def _server(settings: Settings, name: str) -> ServerSettings:
    server: ServerSettings = getattr(settings, "scorer" if name.startswith("scorer-") else name)
    return server


def grpcurl_command() -> str:
    """How to call grpcurl: the one in this environment's folder of programs, or the one in PATH."""
    beside = Path(sys.executable).parent / "grpcurl"
    if beside.exists():
        return os.path.relpath(beside) if beside.is_relative_to(Path.cwd()) else str(beside)
    return shutil.which("grpcurl") or "grpcurl"


def banner(
    settings: Settings, reports: Mapping[str, RoleReport], models: Sequence[pb.ModelInfo], seconds: float
) -> str:
    """The text; commands in it work as they stand.

    Args:
        settings: of the mesh.
        reports: of its processes, by name.
        models: that are served.
        seconds: that the start took.
    """
    rest = f"http://{authority(settings.gateway.host, reports['gateway'].port)}"
    grpc = authority(settings.encoder.host, reports["encoder"].port)
    key = "" if not settings.access.keys else " -H 'Authorization: Bearer KEY'"
    embedder = next((model for model in models if pb.TASK_EMBED in model.tasks), None)
    scorers = [model for model in models if pb.TASK_SCORE in model.tasks]
    # A cross-encoder is what reranks best, where there is one.
    scorers.sort(key=lambda model: common.SCORE_TYPE_CROSS_ENCODER not in model.score_types)
    scorer = scorers[0] if scorers else None
    lines = ["", f"phasemesh is ready ({seconds:.1f} s)", "", *_addresses(settings, reports, rest, grpc), ""]
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
    if "retrieval" in reports:
        lines += collection_lines(rest, key, models)
    runtime = (
        "" if "runtime_dir" not in settings.model_fields_set else f" --runtime-dir {settings.runtime_dir}"
    )
    lines += ["", f"More: make demo, or phasemesh demo{runtime}. Ctrl-C drains and stops.", ""]
    return "\n".join(lines)


def _addresses(settings: Settings, reports: Mapping[str, RoleReport], rest: str, grpc: str) -> list[str]:
    lines = [
        f"  REST    {rest}  (API page: {rest}/docs)",
        f"  gRPC    {grpc}  phasemesh.v1.EncoderService",
    ]
    admin = []
    for name, report in reports.items():
        server = _server(settings, name)
        if name not in ("gateway", "encoder"):
            service = "RetrievalService" if name == "retrieval" else "ScorerService"
            lines.append(f"          {authority(server.host, report.port)}  phasemesh.v1.{service} ({name})")
        admin.append(f"{name} http://{authority(server.admin_host, report.admin_port)}")
    lines.append(f"  admin   {'   '.join(admin)}   (/livez /readyz /metrics)")
    if "retrieval" in reports:
        lines.append(f"  data    {settings.data_dir}")
    return lines


def token_model(models: Sequence[pb.ModelInfo]) -> pb.ModelInfo | None:
    """The model to make a collection with: a late-interaction one, else one with token vectors."""
    able = [model for model in models if pb.VECTOR_KIND_TOKEN in model.vector_kinds]
    late = (model for model in able if common.SCORE_TYPE_LATE_INTERACTION in model.score_types)
    return next(late, able[0] if able else None)


def collection_lines(rest: str, key: str, models: Sequence[pb.ModelInfo]) -> list[str]:
    """How to make a collection and search it: with a model that is served, else with given vectors."""
    json = f"{key} -H 'Content-Type: application/json'"
    model = token_model(models)
    if model is None:
        return [
            "",
            "A collection of given vectors (no model here has token vectors), and a search:",
            "",
            f"  curl -s {rest}/v1/collections{json} \\",
            """    -d '{"name": "given", "token_dimension": 2}'""",
            f"  curl -s {rest}/v1/collections/given/documents{json} \\",
            """    -d '{"documents": [{"id": "a", "token_vectors": [[0.6, 0.8], [1, 0]]}]}'""",
            f"  curl -s {rest}/v1/collections/given/search{json} \\",
            """    -d '{"query": {"vectors": [[0, 1]]}, "k": 3}'""",
        ]
    late = common.SCORE_TYPE_LATE_INTERACTION in model.score_types
    kind = "a late-interaction model" if late else "an embedding model's token vectors"
    return [
        "",
        f"A collection with {model.name} ({kind}), a document, a search:",
        "",
        f"  curl -s {rest}/v1/collections{json} \\",
        f"""    -d '{{"name": "notes", "model": "{model.name}"}}'""",
        f"  curl -s {rest}/v1/collections/notes/documents{json} \\",
        """    -d '{"documents": [{"id": "a", "text": "A mesh joins many nodes to each other."}]}'""",
        f"  curl -s {rest}/v1/collections/notes/search{json} \\",
        """    -d '{"query": "What is a mesh?", "k": 3, "projection": {"text": true}}'""",
    ]
