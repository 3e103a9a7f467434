"""`phasemesh collections`: what a mesh holds, and what is done to a collection as a whole."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, TypeVar

import typer
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich.console import Console
from rich.table import Table

from phasemesh.cli.client_commands import JsonOption, KeyOption, TimeoutOption
from phasemesh.cli.collection_commands import RetrievalOption, retrieval_target
from phasemesh.cli.options import ConfigOption, RuntimeDirOption, settings_from
from phasemesh.config.settings import Settings, SettingsError
from phasemesh.rpc.client import RpcClient
from phasemesh.v1 import retrieval_pb2 as pb
from phasemesh.v1.retrieval_pb2_grpc import RetrievalServiceStub

R = TypeVar("R", bound=Message)

NameArgument = Annotated[str, typer.Argument(help="Name of the collection.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")]

group = typer.Typer(
    help="List, describe, delete, compact, tag and restore collections.", no_args_is_help=True,
    rich_markup_mode="rich",
)  # fmt: skip


class _Mesh:
    """The retrieval service that a command talks to; every call has a connection of its own."""

    def __init__(self, settings: Settings, target: str | None, key: str | None, timeout_s: float) -> None:
        self._settings = settings
        self._target = retrieval_target(settings, target)
        self._key = key or settings.access.mesh_key()
        self._timeout_s = timeout_s

    def call(self, method: str, request: Message, kind: type[R]) -> R:
        """Call a method of the service."""

        async def call() -> R:
            client = RpcClient(rpc=self._settings.rpc, key=self._key)
            try:
                reply = await client.call(
                    self._target, RetrievalServiceStub, method, request, timeout_s=self._timeout_s
                )
            finally:
                await client.close()
            assert isinstance(reply, kind)
            return reply

        return asyncio.run(call())

    def collection(self, name: str) -> pb.Collection:
        """A collection as it stands."""
        return self.call(
            "GetCollection", pb.GetCollectionRequest(collection=name), pb.GetCollectionResponse
        ).collection


@group.command("list")
def list_(
    as_json: JsonOption = False, timeout_s: TimeoutOption = 60, target: RetrievalOption = None,
    key: KeyOption = None, config: ConfigOption = None, runtime_dir: RuntimeDirOption = None,
) -> None:  # fmt: skip
    """List collections with their sizes.

    [bold]Example[/]

      phasemesh collections list
    """
    mesh = _Mesh(settings_from(config, runtime_dir=runtime_dir), target, key, timeout_s)
    table = Table("name", "model", "documents", "tokens", "fragments", "version")
    token = ""
    while True:
        page = mesh.call(
            "ListCollections", pb.ListCollectionsRequest(page_token=token), pb.ListCollectionsResponse
        )
        for found in page.collections:
            if as_json:
                typer.echo(json.dumps(MessageToDict(found, preserving_proto_field_name=True)))
            numbers = (found.documents, found.tokens, found.fragments, found.version.number)
            table.add_row(found.spec.name, found.spec.model or "-", *map(str, numbers))
        token = page.next_page_token
        if not token:
            break
    if not as_json:
        Console().print(table)


@group.command()
def show(
    name: NameArgument, timeout_s: TimeoutOption = 60, target: RetrievalOption = None, key: KeyOption = None,
    config: ConfigOption = None, runtime_dir: RuntimeDirOption = None,
) -> None:  # fmt: skip
    """Describe a collection, as JSON.

    [bold]Example[/]

      phasemesh collections show documents
    """
    mesh = _Mesh(settings_from(config, runtime_dir=runtime_dir), target, key, timeout_s)
    typer.echo(json.dumps(MessageToDict(mesh.collection(name), preserving_proto_field_name=True), indent=2))


@group.command()
def delete(
    name: NameArgument, yes: YesOption = False, timeout_s: TimeoutOption = 60, target: RetrievalOption = None,
    key: KeyOption = None, config: ConfigOption = None, runtime_dir: RuntimeDirOption = None,
) -> None:  # fmt: skip
    """Delete a collection with all its documents and versions.

    [bold]Example[/]

      phasemesh collections delete documents
    """
    mesh = _Mesh(settings_from(config, runtime_dir=runtime_dir), target, key, timeout_s)
    if not yes:
        typer.confirm(f"Delete {mesh.collection(name).documents} documents of {name!r}?", abort=True)
    mesh.call("DeleteCollection", pb.DeleteCollectionRequest(collection=name), pb.DeleteCollectionResponse)
    typer.echo(f"deleted {name}")


@group.command()
def compact(
    name: NameArgument, timeout_s: TimeoutOption = 600, target: RetrievalOption = None, key: KeyOption = None,
    config: ConfigOption = None, runtime_dir: RuntimeDirOption = None,
) -> None:  # fmt: skip
    """Merge small fragments and drop deleted rows, now.

    [bold]Example[/]

      phasemesh collections compact documents
    """
    mesh = _Mesh(settings_from(config, runtime_dir=runtime_dir), target, key, timeout_s)
    done = mesh.call(
        "CompactCollection", pb.CompactCollectionRequest(collection=name), pb.CompactCollectionResponse
    )
    typer.echo(
        f"{done.fragments_before} fragments became {done.fragments_after}; version {done.version.number}"
    )


@group.command()
def tag(
    name: NameArgument,
    tag: Annotated[str, typer.Argument(help="Name for the version.")],
    version: Annotated[
        int | None, typer.Option("--version", help="Number; default: the newest.", show_default=False)
    ] = None,
    move: Annotated[bool, typer.Option("--move", help="Move the tag if there is one.")] = False,
    remove: Annotated[bool, typer.Option("--remove", help="Take the tag away instead.")] = False,
    timeout_s: TimeoutOption = 60,
    target: RetrievalOption = None,
    key: KeyOption = None,
    config: ConfigOption = None,
    runtime_dir: RuntimeDirOption = None,
) -> None:
    """Name a version, which keeps it from being cleaned up.

    [bold]Examples[/]

      phasemesh collections tag documents before-import

      phasemesh collections tag documents before-import --remove
    """
    if remove and (version is not None or move):
        raise SettingsError("--remove: takes the tag away; leave --version and --move out")
    mesh = _Mesh(settings_from(config, runtime_dir=runtime_dir), target, key, timeout_s)
    request = pb.TagVersionRequest(collection=name, tag=tag, overwrite=move or remove)
    if not remove:
        newest = mesh.collection(name).version
        request.version.CopyFrom(newest)
        if version is not None:
            request.version.number = version
    mesh.call("TagVersion", request, pb.TagVersionResponse)
    typer.echo(f"{tag} is gone" if remove else f"{tag} is version {request.version.number}")


@group.command()
def restore(
    name: NameArgument,
    tag: Annotated[str | None, typer.Option("--tag", help="Tag to go back to.", show_default=False)] = None,
    version: Annotated[
        int | None, typer.Option("--version", help="Number to go back to.", show_default=False)
    ] = None,
    yes: YesOption = False,
    timeout_s: TimeoutOption = 60,
    target: RetrievalOption = None,
    key: KeyOption = None,
    config: ConfigOption = None,
    runtime_dir: RuntimeDirOption = None,
) -> None:
    """Make an earlier version the newest, under a new number.

    [bold]Examples[/]

      phasemesh collections restore documents --tag before-import

      phasemesh collections restore documents --version 12 --yes
    """
    if (tag is None) == (version is None):
        raise SettingsError("--tag: give it, or else --version")
    mesh = _Mesh(settings_from(config, runtime_dir=runtime_dir), target, key, timeout_s)
    # Read before asking: what is written while the question stands makes the call fail, not vanish.
    found = mesh.collection(name)
    request = pb.RestoreVersionRequest(collection=name, expected_version=found.version)
    if tag is not None:
        request.tag = tag
    else:
        assert version is not None
        request.version.incarnation, request.version.number = found.version.incarnation, version
    if not yes:
        typer.confirm(f"Replace version {found.version.number} of {name!r}?", abort=True)
    done = mesh.call("RestoreVersion", request, pb.RestoreVersionResponse)
    typer.echo(f"restored as version {done.version.number}")
