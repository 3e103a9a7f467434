"""Commands about collections of a running mesh: `index` fills one from text files, `search` asks it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Value
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from phasemesh.cli.banner import token_model
from phasemesh.cli.client_commands import (
    JsonOption,
    KeyOption,
    TimeoutOption,
    encoder_target,
    named_target,
    timing_line,
)
from phasemesh.cli.collection_values import declared_fields, filter_of
from phasemesh.cli.corpus import PATH_FIELD, SourceDocument, batches, corpus_files, read_documents
from phasemesh.cli.options import ConfigOption, RuntimeDirOption, settings_from
from phasemesh.cli.report import read_report
from phasemesh.config.settings import Settings, SettingsError
from phasemesh.errors import NotFound
from phasemesh.rpc.bind import authority
from phasemesh.rpc.client import RpcClient
from phasemesh.v1 import common_pb2 as common
from phasemesh.v1 import encoder_pb2
from phasemesh.v1 import retrieval_pb2 as pb
from phasemesh.v1.encoder_pb2_grpc import EncoderServiceStub
from phasemesh.v1.retrieval_pb2_grpc import RetrievalServiceStub

R = TypeVar("R", bound=Message)

#: Documents of one commit: enough that commits don't count, few enough that the progress bar moves.
BATCH_DOCUMENTS = 200
BATCH_BYTES = 4 * 2**20
DEFAULT_COLLECTION = "documents"
_SNIPPET_CHARS = 160
_SHOWN_FAILURES = 5
#: Paragraphs of a file up to which those that an earlier run made are looked for: a filter takes 10,000.
STALE_IDS = 9_000

CollectionOption = Annotated[str, typer.Option("--collection", help="Name of the collection.")]
RetrievalOption = Annotated[
    str | None,
    typer.Option(
        "--target", "-t", metavar="HOST:PORT", help="Retrieval service; default: the one `up` started.",
        show_default=False,
    ),
]  # fmt: skip


@dataclass(slots=True)
class Indexed:
    """What an index run did so far.

    Attributes:
        stored: documents stored.
        failed: documents refused, with the reasons of the first ones.
        failures: texts of the first refusals.
        removed: documents of earlier runs that the files no longer hold.
        tokens: that encoding took.
        truncated: documents that were cut to fit the model.
    """

    stored: int = 0
    failed: int = 0
    tokens: int = 0
    truncated: int = 0
    failures: list[str] = field(default_factory=list)
    removed: int = 0

    def add(self, reply: pb.UpsertDocumentsResponse) -> None:
        """Count a batch."""
        self.stored += reply.stored
        self.tokens += reply.usage.tokens
        self.truncated += sum(status.truncated for status in reply.documents)
        for status in reply.documents:
            if status.HasField("error"):
                self.failed += 1
                if len(self.failures) < _SHOWN_FAILURES:
                    self.failures.append(f"{status.id}: {status.error.message}")

    def summary(self, seconds: float) -> str:
        """One line."""
        rate = self.stored / seconds if seconds > 0 else 0.0
        parts = [
            f"{self.stored} documents in {seconds:.1f} s ({rate:.0f} docs/s)",
            f"{self.tokens} tokens",
        ]
        if self.truncated:
            parts.append(f"{self.truncated} cut to fit the model")
        if self.removed:
            parts.append(f"{self.removed} removed")
        if self.failed:
            parts.append(f"{self.failed} refused")
        return ", ".join(parts)


def retrieval_target(settings: Settings, target: str | None) -> str:
    """The target that was given, else where the retrieval service of this runtime folder reports.

    Raises:
        SettingsError: there is neither.
    """
    if target is not None:
        return target
    report = read_report(settings.runtime_dir, "retrieval")
    if report is None:
        raise SettingsError(
            f"no retrieval service has reported in {settings.runtime_dir}; start one with `phasemesh up`, "
            "or name one with --target HOST:PORT"
        )
    return authority(settings.retrieval.host, report.port)


def index(
    folder: Annotated[
        Path | None, typer.Argument(help="Folder of .txt, .md and .jsonl files.", show_default=False)
    ] = None,
    file: Annotated[
        list[Path] | None,
        typer.Option("--file", "-f", help="Also index this file. Repeatable.", show_default=False),
    ] = None,
    collection: CollectionOption = DEFAULT_COLLECTION,
    model: Annotated[
        str,
        typer.Option(
            "--model", "-m", help="Model of a new collection; default: the first with token vectors.",
            show_default=False,
        ),
    ] = "",
    timeout_s: TimeoutOption = 600,
    target: RetrievalOption = None,
    key: KeyOption = None,
    config: ConfigOption = None,
    runtime_dir: RuntimeDirOption = None,
) -> None:  # fmt: skip
    """Index the paragraphs of text files; the collection is created if it isn't there.

    Ids are made of path and position, so running it again replaces documents instead of doubling them, and a
    run that was broken off can be repeated. What a file no longer holds is deleted; documents of a file that
    is gone stay. A file that can't be read is named at the end, and the others are indexed. Each line of a
    .jsonl file is an object with `text`, perhaps an `id`, and values for fields that the collection declares.

    [bold]Examples[/]

      phasemesh index docs/

      phasemesh index --file notes.md --collection notes --model all-MiniLM-L6-v2
    """
    files = corpus_files(folder, file or ())
    settings = settings_from(config, runtime_dir=runtime_dir)
    documents: list[SourceDocument] = []
    unread: list[str] = []
    for path, name in files:
        try:
            documents += list(read_documents(path, name))
        except SettingsError as error:
            # The others are worth having without it.
            unread.append(str(error))
    if not documents:
        raise SettingsError(unread[0] if unread else "the files hold no text")
    address = retrieval_target(settings, target)
    console = Console(stderr=True, highlight=False)
    done = asyncio.run(_index(settings, key, address, collection, model, documents, timeout_s, console))
    for failure in done.failures:
        console.print(f"refused: {failure}", style="red", markup=False, soft_wrap=True)
    for problem in unread:
        console.print(f"not read: {problem}", style="red", markup=False, soft_wrap=True)
    if done.failed or unread:
        raise typer.Exit(1)


async def _index(
    settings: Settings,
    key: str | None,
    target: str,
    collection: str,
    model: str,
    documents: Sequence[SourceDocument],
    timeout_s: float,
    console: Console,
) -> Indexed:
    client = RpcClient(rpc=settings.rpc, key=key or settings.access.mesh_key())
    done = Indexed()
    began = time.monotonic()
    try:
        spec = await _existing_or_new(client, settings, target, collection, model, console)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console) as progress:
            task = progress.add_task(f"indexing into {collection}", total=len(documents))
            for batch in batches(documents, size=BATCH_DOCUMENTS, max_bytes=BATCH_BYTES):
                done.add(await _upsert(client, target, spec, batch, timeout_s))
                progress.advance(task, len(batch))
        if any(declared.name == PATH_FIELD for declared in spec.fields):
            done.removed = await _remove_stale(client, target, collection, documents, timeout_s)
    finally:
        await client.close()
        console.print(done.summary(time.monotonic() - began), markup=False, soft_wrap=True)
    return done


async def _remove_stale(
    client: RpcClient, target: str, collection: str, documents: Sequence[SourceDocument], timeout_s: float
) -> int:
    """Delete what earlier runs made of these files and this one didn't; returns how many.

    Of a file that is gone altogether nothing is known here, so its documents stay.
    """
    kept: dict[str, list[str]] = {}
    for document in documents:
        # A line of JSON may have a `path` of its own: whose documents those are isn't ours to say.
        if document.fields[PATH_FIELD] == document.file:
            kept.setdefault(document.file, []).append(document.id)
    removed = 0
    for path, ids in kept.items():
        if len(ids) > STALE_IDS:
            continue
        ours = pb.Filter(equals=pb.FieldEquals(field=PATH_FIELD, value=Value(string_value=path)))
        current = pb.Filter()
        getattr(current, "not").CopyFrom(pb.Filter(id_in=pb.IdIn(ids=ids)))
        request = pb.DeleteDocumentsRequest(
            collection=collection, filter=pb.Filter(all=pb.FilterList(filters=[ours, current]))
        )
        reply = await _call(client, target, "DeleteDocuments", request, pb.DeleteDocumentsResponse, timeout_s)
        removed += reply.deleted
    return removed


async def _existing_or_new(
    client: RpcClient, settings: Settings, target: str, collection: str, model: str, console: Console
) -> pb.CollectionSpec:
    try:
        found = await _call(
            client, target, "GetCollection", pb.GetCollectionRequest(collection=collection),
            pb.GetCollectionResponse, 30,
        )  # fmt: skip
    except NotFound as error:
        if error.reason != "COLLECTION_NOT_FOUND":
            raise
    else:
        spec = found.collection.spec
        if model not in ("", spec.model):
            raise SettingsError(
                f"--model {model}: the collection {collection!r} is of {spec.model or 'given vectors'}; "
                "leave it out, or name another --collection"
            )
        return spec
    if not model:
        encoder = encoder_target(settings, None)
        listed = await client.call(
            encoder, EncoderServiceStub, "ListModels", encoder_pb2.ListModelsRequest(), timeout_s=30
        )
        chosen = token_model(listed.models)
        if chosen is None:
            raise SettingsError("no model with token vectors is served; serve one, or name one with --model")
        model = chosen.name
    wanted = pb.CollectionSpec(
        name=collection,
        model=model,
        fields=[pb.FieldDeclaration(name=PATH_FIELD, type=pb.FIELD_TYPE_STRING)],
    )
    made = await _call(
        client, target, "CreateCollection", pb.CreateCollectionRequest(spec=wanted),
        pb.CreateCollectionResponse, 30,
    )  # fmt: skip
    spec = made.collection.spec
    console.print(f"created {spec.name}: {spec.model}, token vectors of {spec.token_dimension}", markup=False)
    return spec


async def _upsert(
    client: RpcClient,
    target: str,
    spec: pb.CollectionSpec,
    batch: Sequence[SourceDocument],
    timeout_s: float,
) -> pb.UpsertDocumentsResponse:
    request = pb.UpsertDocumentsRequest(
        collection=spec.name,
        documents=[
            pb.Document(
                id=document.id, text=document.text, fields=declared_fields(document.fields, spec.fields)
            )
            for document in batch
        ],
        truncation=common.Truncation(enabled=True),
        priority=common.PRIORITY_BULK,
    )
    return await _call(client, target, "UpsertDocuments", request, pb.UpsertDocumentsResponse, timeout_s)


def search(
    query: Annotated[str, typer.Argument(help="What to look for.")],
    collection: CollectionOption = DEFAULT_COLLECTION,
    k: Annotated[int, typer.Option("--k", "-k", min=1, max=2**32 - 1, help="Hits wanted.")] = 5,
    filter_: Annotated[
        str | None,
        typer.Option(
            "--filter", metavar="FIELD=VALUE", help="Only documents whose field has this value; or JSON.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
    timeout_s: TimeoutOption = 60,
    target: RetrievalOption = None,
    key: KeyOption = None,
    config: ConfigOption = None,
    runtime_dir: RuntimeDirOption = None,
) -> None:  # fmt: skip
    """Search a collection and print the best documents, with the time of each phase.

    [bold]Examples[/]

      phasemesh search "How do I drain a worker?"

      phasemesh search "retry" --collection notes --k 3 --filter path=operations.md --json

      phasemesh search "retry" --filter '{"prefix": {"field": "path", "prefix": "docs/"}}'
    """
    settings = settings_from(config, runtime_dir=runtime_dir)
    address = retrieval_target(settings, target)
    reply = asyncio.run(_search(settings, key, address, collection, query, k, filter_, timeout_s))
    if as_json:
        for hit in reply.hits:
            line = {
                "id": hit.id,
                "score": hit.score,
                "text": hit.document.text,
                "fields": MessageToDict(hit.document.fields),
            }
            typer.echo(json.dumps(line, ensure_ascii=False))
    else:
        table = Table("score", "id", "text")
        for hit in reply.hits:
            table.add_row(f"{hit.score:.3f}", hit.id, snippet(hit.document.text))
        Console().print(table)
    covered = reply.coverage
    typer.echo(
        f"{covered.documents} documents, {covered.tokens} token vectors scored"
        f"{', exact' if covered.exact else ''}",
        err=True,
    )
    typer.echo(timing_line(reply.timings), err=True)


async def _search(
    settings: Settings,
    key: str | None,
    target: str,
    collection: str,
    query: str,
    k: int,
    filter_: str | None,
    timeout_s: float,
) -> pb.SearchResponse:
    client = RpcClient(rpc=settings.rpc, key=key or settings.access.mesh_key())
    try:
        condition = None
        if filter_ is not None:
            found = await _call(
                client, target, "GetCollection", pb.GetCollectionRequest(collection=collection),
                pb.GetCollectionResponse, timeout_s,
            )  # fmt: skip
            condition = filter_of(filter_, found.collection.spec.fields)
        request = pb.SearchRequest(
            collection=collection,
            query=pb.Query(text=query),
            k=k,
            filter=condition,
            projection=pb.Projection(text=True, fields=["*"]),
            truncation=common.Truncation(enabled=True),
        )
        return await _call(client, target, "Search", request, pb.SearchResponse, timeout_s)
    finally:
        await client.close()


def snippet(text: str, most: int = _SNIPPET_CHARS) -> str:
    """The beginning of `text` on one line."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 1].rstrip()}…"


async def _call(
    client: RpcClient, target: str, method: str, request: Message, kind: type[R], timeout_s: float
) -> R:
    with named_target(target):
        reply = await client.call(target, RetrievalServiceStub, method, request, timeout_s=timeout_s)
    assert isinstance(reply, kind)
    return reply
