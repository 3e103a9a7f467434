"""Commands that talk to encoders of a running mesh over gRPC, and `demo`; registers all client commands."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from google.protobuf.message import Message
from rich.console import Console
from rich.table import Table

from phasemesh.cli.options import ConfigOption, RuntimeDirOption, settings_from
from phasemesh.cli.report import read_report
from phasemesh.config.settings import Settings, SettingsError
from phasemesh.errors import Unauthenticated, Unavailable
from phasemesh.rpc.bind import authority
from phasemesh.rpc.client import RpcClient
from phasemesh.rpc.codec import decode_tensor
from phasemesh.v1 import common_pb2 as common
from phasemesh.v1 import encoder_pb2 as pb
from phasemesh.v1.encoder_pb2_grpc import EncoderServiceStub

T = TypeVar("T", bound=Message)

TargetOption = Annotated[
    str | None,
    typer.Option(
        "--target", "-t", metavar="HOST:PORT", help="Encoder service; default: the one `up` started.",
        show_default=False,
    ),
]  # fmt: skip
ModelNameOption = Annotated[
    str, typer.Option("--model", "-m", help="Model or alias; may be left out where only one is served.")
]
KeyOption = Annotated[
    str | None,
    typer.Option(
        "--key",
        envvar="PHASEMESH_KEY",
        help="API key; default: the mesh key of --config.",
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
TimeoutOption = Annotated[float, typer.Option("--timeout", help="Deadline in seconds.")]


def add_to(app: typer.Typer) -> None:
    """Register the commands."""
    from phasemesh.cli.collection_commands import index, search
    from phasemesh.cli.collections_group import group
    from phasemesh.cli.explain_command import explain

    for command in (models, embed, rerank, index, search, explain, demo):
        app.command()(command)
    app.add_typer(group, name="collections")


def encoder_target(settings: Settings, target: str | None) -> str:
    """The target that was given, else where the encoder of this runtime folder reports.

    Raises:
        SettingsError: there is neither.
    """
    if target is not None:
        return target
    report = read_report(settings.runtime_dir, "encoder")
    if report is None:
        raise SettingsError(
            f"no encoder has reported in {settings.runtime_dir}; start one with `phasemesh up`, "
            "or name one with --target HOST:PORT"
        )
    return authority(settings.encoder.host, report.port)


@contextmanager
def named_target(target: str) -> Iterator[None]:
    """Say whom a call was for where nobody answers, or a key is wanted."""
    try:
        yield
    except Unavailable as error:
        hint = "; does it run there?" if error.reason == "PEER_UNREACHABLE" else ""
        raise Unavailable(f"{target}: {error.message}{hint}", reason=error.reason) from None
    except Unauthenticated as error:
        raise Unauthenticated(
            f"{target} needs a key: give --key, PHASEMESH_KEY, or the mesh's --config", reason=error.reason
        ) from None


def call_once(
    settings: Settings,
    key: str | None,
    target: str,
    method: str,
    request: Message,
    kind: type[T],
    timeout_s: float,
) -> T:
    """One call to an encoder; `kind` is the type of its reply, `key` None takes the mesh key of the settings.

    Raises:
        PhasemeshError: what the encoder answered, or that it can't be reached.
    """

    async def run() -> T:
        client = RpcClient(rpc=settings.rpc, key=key or settings.access.mesh_key())
        try:
            with named_target(target):
                reply = await client.call(target, EncoderServiceStub, method, request, timeout_s=timeout_s)
        finally:
            await client.close()
        assert isinstance(reply, kind)
        return reply

    return asyncio.run(run())


def timing_line(timings: common.Timings) -> str:
    """One line: each phase and the total, in milliseconds."""
    phases = [f"{phase.phase} {phase.duration_ns / 1e6:.2f}" for phase in timings.phases]
    return " · ".join([*phases, f"total {timings.total_ns / 1e6:.2f} ms"])


def _texts(arguments: Sequence[str] | None, file: Path | None) -> list[str]:
    if file is not None:
        source = sys.stdin if str(file) == "-" else file.open(encoding="utf-8")
        with source as stream:
            return [*(arguments or ()), *(line.rstrip("\n") for line in stream)]
    return list(arguments or ())


def models(
    target: TargetOption = None,
    as_json: JsonOption = False,
    key: KeyOption = None,
    config: ConfigOption = None,
    runtime_dir: RuntimeDirOption = None,
) -> None:
    """List the models that an encoder serves."""
    settings = settings_from(config, runtime_dir=runtime_dir)
    address = encoder_target(settings, target)
    reply = call_once(settings, key, address, "ListModels", pb.ListModelsRequest(), pb.ListModelsResponse, 10)
    if as_json:
        from google.protobuf.json_format import MessageToJson

        typer.echo(MessageToJson(reply))
        return
    table = Table("model", "vectors", "scores", "tokens", "dtype", "state", "recipe")
    # A name that is cut can't be copied.
    table.columns[0].no_wrap = True
    for model in reply.models:
        vectors = ", ".join(
            pb.VectorKind.Name(kind).removeprefix("VECTOR_KIND_").lower() for kind in model.vector_kinds
        )
        scores = ", ".join(
            common.ScoreType.Name(kind).removeprefix("SCORE_TYPE_").lower() for kind in model.score_types
        )
        state = pb.ModelState.Name(model.state).removeprefix("MODEL_STATE_").lower()
        table.add_row(
            "\n".join([model.name, *model.aliases]),
            f"{vectors} ({model.dense_dimension or model.token_dimension})" if vectors else "-",
            scores or "-",
            str(model.max_tokens),
            model.dtype,
            f"{state} {model.ready_replicas}/{model.replicas}",
            model.recipe_hash[:8],
        )
    Console().print(table)


def embed(
    texts: Annotated[list[str] | None, typer.Argument(help="Texts to embed.", show_default=False)] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", help="Also embed each line of this file; - for standard input."),
    ] = None,
    model: ModelNameOption = "",
    truncate: Annotated[bool, typer.Option(help="Cut long texts instead of refusing them.")] = False,
    role: Annotated[str, typer.Option(help="query, document or none: chooses the model's prompt.")] = "none",
    as_json: JsonOption = False,
    timeout_s: TimeoutOption = 60,
    target: TargetOption = None,
    key: KeyOption = None,
    config: ConfigOption = None,
    runtime_dir: RuntimeDirOption = None,
) -> None:
    """Embed texts and print their vectors, one JSON line each with --json.

    [bold]Examples[/]

      phasemesh embed "Hello, mesh!"

      phasemesh embed -f texts.txt --role document --json > vectors.jsonl
    """
    roles = {
        "none": common.INPUT_ROLE_UNSPECIFIED,
        "query": common.INPUT_ROLE_QUERY,
        "document": common.INPUT_ROLE_DOCUMENT,
    }
    if role not in roles:
        raise SettingsError(f"--role {role}: has to be one of {', '.join(roles)}")
    inputs = _texts(texts, file)
    if not inputs:
        raise SettingsError("there is nothing to embed; give texts, or a file of lines with --file")
    settings = settings_from(config, runtime_dir=runtime_dir)
    address = encoder_target(settings, target)
    request = pb.EmbedRequest(
        model=model,
        inputs=[common.Input(text=text) for text in inputs],
        encoding=common.VECTOR_ENCODING_FLOAT32,
        role=roles[role],
        kinds=[pb.VECTOR_KIND_DENSE],
        truncation=common.Truncation(enabled=truncate),
    )
    reply = call_once(settings, key, address, "Embed", request, pb.EmbedResponse, timeout_s)
    vectors = decode_tensor(reply.dense, field="dense")
    for item, vector in zip(reply.items, vectors, strict=True):
        if as_json:
            failed = item.HasField("error")
            line = (
                {"error": item.error.message} if failed else {"embedding": [float(value) for value in vector]}
            )
            typer.echo(json.dumps(line))
        elif item.HasField("error"):
            typer.echo(f"error: {item.error.message}")
        else:
            shown = " ".join(f"{value:+.4f}" for value in vector[:6])
            typer.echo(f"[{shown} …] {len(vector)} dimensions, {item.tokens} tokens")
    typer.echo(timing_line(reply.timings), err=True)
    if any(item.HasField("error") for item in reply.items):
        raise typer.Exit(1)


def rerank(
    query: Annotated[str, typer.Argument(help="What the documents are to answer.")],
    documents: Annotated[list[str] | None, typer.Argument(help="Documents.", show_default=False)] = None,
    file: Annotated[
        Path | None,
        typer.Option("--file", "-f", help="Also score each line of this file; - for standard input."),
    ] = None,
    model: ModelNameOption = "",
    top: Annotated[int, typer.Option("--top", "-k", min=1, help="Documents shown.")] = 10,
    as_json: JsonOption = False,
    timeout_s: TimeoutOption = 60,
    target: TargetOption = None,
    key: KeyOption = None,
    config: ConfigOption = None,
    runtime_dir: RuntimeDirOption = None,
) -> None:
    """Order documents by how well they answer a query.

    [bold]Example[/]

      phasemesh rerank "Who wrote Faust?" "Goethe finished Faust in 1831." "Bread needs yeast."
    """
    inputs = _texts(documents, file)
    if not inputs:
        raise SettingsError("there is nothing to score; give documents, or a file of lines with --file")
    settings = settings_from(config, runtime_dir=runtime_dir)
    address = encoder_target(settings, target)
    request = pb.ScoreRequest(
        model=model,
        query=common.Input(text=query),
        documents=[common.Input(text=text) for text in inputs],
        truncation=common.Truncation(enabled=True),
    )
    reply = call_once(settings, key, address, "Score", request, pb.ScoreResponse, timeout_s)
    ranked = sorted(zip(reply.scores, range(len(inputs)), strict=True), key=lambda pair: (-pair[0], pair[1]))[
        :top
    ]
    if as_json:
        typer.echo(json.dumps([{"index": index, "score": score} for score, index in ranked]))
    else:
        table = Table("score", "index", "document")
        for score, index in ranked:
            table.add_row(f"{score:.4f}", str(index), inputs[index])
        Console().print(table)
    typer.echo(timing_line(reply.timings), err=True)


def demo(
    model: ModelNameOption = "",
    target: TargetOption = None,
    gateway: Annotated[
        str | None,
        typer.Option(help="URL of the gateway; default: the one `up` started.", show_default=False),
    ] = None,
    key: KeyOption = None,
    config: ConfigOption = None,
    runtime_dir: RuntimeDirOption = None,
) -> None:
    """Embed, rerank, index and search the passages that ship with Phasemesh, against a running mesh."""
    from phasemesh.cli.demo import run_demo

    settings = settings_from(config, runtime_dir=runtime_dir)
    address = encoder_target(settings, target)
    if gateway is None and (report := read_report(settings.runtime_dir, "gateway")) is not None:
        gateway = f"http://{authority(settings.gateway.host, report.port)}"
    asyncio.run(run_demo(settings, key, address, gateway, model))
