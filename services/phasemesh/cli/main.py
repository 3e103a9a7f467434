"""The `phasemesh` command."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
from rich.console import Console

from phasemesh.cli.options import (
    ConfigOption,
    DataDirOption,
    ModelOption,
    NoRayOption,
    RuntimeDirOption,
    SetOption,
    settings_from,
)
from phasemesh.cli.supervisor import EXIT_CONFIG, MeshFailed
from phasemesh.config.settings import Settings, SettingsError, describe, summarize
from phasemesh.errors import PhasemeshError

app = typer.Typer(
    name="phasemesh",
    help="Serve embeddings, reranking and late-interaction retrieval as a mesh of separate phases.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Console(stderr=True, highlight=False)


def _complain(text: str) -> None:
    for line in text.splitlines():
        console.print(f"error: {line}", style="red", markup=False, soft_wrap=True)


ParentOption = Annotated[bool, typer.Option("--exit-with-parent", hidden=True)]
PortOption = Annotated[
    int | None, typer.Option("--port", help="Public port; 0 takes a free one.", show_default=False)
]
AdminPortOption = Annotated[
    int | None, typer.Option("--admin-port", help="Port of /livez, /readyz and /metrics.", show_default=False)
]


@app.command()
def up(
    config: ConfigOption = None,
    model: ModelOption = None,
    port: Annotated[int | None, typer.Option(help="REST port.", show_default=False)] = None,
    grpc_port: Annotated[int | None, typer.Option(help="gRPC port.", show_default=False)] = None,
    replicas: Annotated[int | None, typer.Option(help="Encoder workers.", show_default=False)] = None,
    scorers: Annotated[int, typer.Option(min=1, max=64, help="Late-interaction scorers.")] = 2,
    device: Annotated[
        str | None, typer.Option(help="auto, cuda, xpu, mps or cpu.", show_default=False)
    ] = None,
    no_ray: NoRayOption = False,
    data_dir: DataDirOption = None,
    runtime_dir: RuntimeDirOption = None,
    assignments: SetOption = None,
) -> None:
    """Run the whole mesh on this machine, one process per role.

    Without a model it serves all-MiniLM-L6-v2 from the demo extra.

    [bold]Examples[/]

      phasemesh up

      phasemesh up -m BAAI/bge-small-en-v1.5 -m rerank=/models/ms-marco-MiniLM-L6-v2

      phasemesh up -c phasemesh.yaml -s encoder.replicas=2

      phasemesh up --data-dir ./collections --scorers 4
    """
    from phasemesh.cli.demo_model import PACKAGE, demo_model
    from phasemesh.cli.up import run_up

    settings = settings_from(
        config,
        assignments,
        models=model,
        runtime_dir=runtime_dir,
        data_dir=data_dir,
        gateway__port=port,
        encoder__port=grpc_port,
        encoder__replicas=replicas,
        encoder__device=device,
        encoder__ray=False if no_ray else None,
    )
    if not settings.encoder.models:
        demo = demo_model()
        if demo is None:
            raise SettingsError(
                f"encoder.models: names no model, and the demo's package {PACKAGE} isn't installed; "
                "give --model [NAME=]SOURCE, or install phasemesh[demo]"
            )
        encoder = settings.encoder.model_copy(update={"models": (demo,)})
        settings = settings.model_copy(update={"encoder": encoder})
    if not run_up(_printed(settings), console, scorers=scorers):
        raise typer.Exit(130)


@app.command()
def encoder(
    config: ConfigOption = None,
    model: ModelOption = None,
    port: PortOption = None,
    admin_port: AdminPortOption = None,
    no_ray: NoRayOption = False,
    runtime_dir: RuntimeDirOption = None,
    assignments: SetOption = None,
    exit_with_parent: ParentOption = False,
) -> None:
    """Run the encoder role: the gRPC service and its workers.

    [bold]Example[/]

      phasemesh encoder -m BAAI/bge-small-en-v1.5 --port 50051
    """
    from phasemesh.cli.encoder_role import run_encoder

    settings = settings_from(
        config,
        assignments,
        models=model,
        runtime_dir=runtime_dir,
        encoder__port=port,
        encoder__admin_port=admin_port,
        encoder__ray=False if no_ray else None,
    )
    # `up` has printed the settings of its roles.
    run_encoder(settings if exit_with_parent else _printed(settings), exit_with_parent=exit_with_parent)


@app.command()
def gateway(
    config: ConfigOption = None,
    encoder_target: Annotated[
        list[str] | None,
        typer.Option(
            "--encoder", metavar="HOST:PORT", help="An encoder service. Repeatable.", show_default=False
        ),
    ] = None,
    retrieval_target: Annotated[
        str | None,
        typer.Option("--retrieval", metavar="HOST:PORT", help="The retrieval service.", show_default=False),
    ] = None,
    port: PortOption = None,
    admin_port: AdminPortOption = None,
    runtime_dir: RuntimeDirOption = None,
    assignments: SetOption = None,
    exit_with_parent: ParentOption = False,
) -> None:
    """Run the gateway role: REST in front of encoder and retrieval services.

    [bold]Example[/]

      phasemesh gateway --encoder encoder-embed:50051 --encoder encoder-rerank:50051 --port 8080
    """
    from phasemesh.cli.gateway_role import run_gateway

    settings = settings_from(
        config,
        assignments,
        runtime_dir=runtime_dir,
        gateway__encoders=encoder_target,
        gateway__retrieval=retrieval_target,
        gateway__port=port,
        gateway__admin_port=admin_port,
    )
    run_gateway(settings if exit_with_parent else _printed(settings), exit_with_parent=exit_with_parent)


@app.command()
def retrieval(
    config: ConfigOption = None,
    encoder_target: Annotated[
        list[str] | None,
        typer.Option(
            "--encoder", metavar="HOST:PORT", help="An encoder service. Repeatable.", show_default=False
        ),
    ] = None,
    scorer_target: Annotated[
        list[str] | None,
        typer.Option("--scorer", metavar="HOST:PORT", help="A scorer. Repeatable.", show_default=False),
    ] = None,
    port: PortOption = None,
    admin_port: AdminPortOption = None,
    data_dir: DataDirOption = None,
    runtime_dir: RuntimeDirOption = None,
    assignments: SetOption = None,
    exit_with_parent: ParentOption = False,
) -> None:
    """Run the retrieval role: collections, ingestion, and search over scorers.

    [bold]Example[/]

      phasemesh retrieval --data-dir /data --scorer scorer-0:50071 --scorer scorer-1:50071
    """
    from phasemesh.cli.retrieval_role import run_retrieval

    settings = settings_from(
        config,
        assignments,
        runtime_dir=runtime_dir,
        data_dir=data_dir,
        retrieval__encoders=encoder_target,
        retrieval__scorers=scorer_target,
        retrieval__port=port,
        retrieval__admin_port=admin_port,
    )
    run_retrieval(settings if exit_with_parent else _printed(settings), exit_with_parent=exit_with_parent)


@app.command()
def scorer(
    config: ConfigOption = None,
    port: PortOption = None,
    admin_port: AdminPortOption = None,
    data_dir: DataDirOption = None,
    name: Annotated[
        str, typer.Option(help="Name among this machine's scorers: of its report and its cache folder.")
    ] = "scorer",
    runtime_dir: RuntimeDirOption = None,
    assignments: SetOption = None,
    exit_with_parent: ParentOption = False,
) -> None:
    """Run a scorer: it holds token vectors of collections and searches them.

    [bold]Example[/]

      phasemesh scorer --data-dir /data --port 50071
    """
    from phasemesh.cli.scorer_role import run_scorer

    settings = settings_from(
        config,
        assignments,
        runtime_dir=runtime_dir,
        data_dir=data_dir,
        scorer__port=port,
        scorer__admin_port=admin_port,
    )
    run_scorer(
        settings if exit_with_parent else _printed(settings), name=name, exit_with_parent=exit_with_parent
    )


@app.command(name="config")
def config_(
    config: ConfigOption = None,
    runtime_dir: RuntimeDirOption = None,
    assignments: SetOption = None,
) -> None:
    """Print the settings in force as YAML, with their defaults and without secrets.

    [bold]Example[/]

      phasemesh config -c phasemesh.yaml -s encoder.replicas=2
    """
    typer.echo(describe(settings_from(config, assignments, runtime_dir=runtime_dir)))


def _printed(settings: Settings) -> Settings:
    """The settings, after they were printed without their secrets."""
    console.print(summarize(settings), style="dim", markup=False, soft_wrap=True)
    return settings


def _add_client_commands() -> None:
    from phasemesh.cli import client_commands

    client_commands.add_to(app)


def main() -> None:
    """Entry point: runs the command and turns expected failures into one line and an exit status."""
    from phasemesh.encoder.service import EncoderStartError
    from phasemesh.pool.settings import PoolStartError
    from phasemesh.rpc.bind import BindError

    _add_client_commands()
    status: Any = 0
    try:
        status = app(standalone_mode=False)
    except typer.Exit as leave:
        status = leave.exit_code
    except typer.Abort:
        status = 130
    except (SettingsError, PoolStartError, EncoderStartError) as error:
        _complain(str(error))
        status = EXIT_CONFIG
    except MeshFailed as error:
        _complain(str(error))
        status = error.status
    except BindError as error:
        _complain(str(error))
        status = 1
    except PhasemeshError as error:
        field = f" ({error.field})" if error.field else ""
        _complain(f"{error.reason}{field}: {error.message}")
        status = 1
    except Exception as error:
        if not hasattr(error, "format_message"):  # anything but click's usage errors is a bug: show its trace
            raise
        error.show()  # type: ignore[attr-defined]  # click.ClickException, which typer vendors
        status = getattr(error, "exit_code", 2)
    sys.exit(status if isinstance(status, int) else 0)


if __name__ == "__main__":
    main()
