"""The command `explain`: which words of a stored document a query's words matched."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from phasemesh.cli.client_commands import JsonOption, KeyOption, TimeoutOption, timing_line
from phasemesh.cli.collection_commands import (
    DEFAULT_COLLECTION,
    CollectionOption,
    RetrievalOption,
    retrieval_target,
)
from phasemesh.cli.options import ConfigOption, RuntimeDirOption, settings_from
from phasemesh.config.settings import Settings
from phasemesh.rpc.client import RpcClient
from phasemesh.v1 import common_pb2 as common
from phasemesh.v1 import retrieval_pb2 as pb
from phasemesh.v1.retrieval_pb2_grpc import RetrievalServiceStub

#: Characters of a document's text that are shown on each side of a match.
_AROUND = 24
_BAR_CHARS = 12


def explain(
    query: Annotated[str, typer.Argument(help="The query.")],
    document_id: Annotated[str, typer.Argument(metavar="ID", help="The document, as `search` names it.")],
    collection: CollectionOption = DEFAULT_COLLECTION,
    as_json: JsonOption = False,
    timeout_s: TimeoutOption = 60,
    target: RetrievalOption = None,
    key: KeyOption = None,
    config: ConfigOption = None,
    runtime_dir: RuntimeDirOption = None,
) -> None:
    """Show which words of a document each word of a query matched, and how well.

    [bold]Examples[/]

      phasemesh explain "How do I drain a worker?" operations.md#3

      phasemesh explain "retry" notes/7 --collection notes --json
    """
    settings = settings_from(config, runtime_dir=runtime_dir)
    address = retrieval_target(settings, target)
    reply, text = asyncio.run(_explain(settings, key, address, collection, query, document_id, timeout_s))
    if as_json:
        for row in rows(reply, query, text):
            typer.echo(json.dumps(row, ensure_ascii=False))
    else:
        best = max((one.similarity for one in reply.alignments), default=0.0)
        table = Table("query", "document", "similarity", "")
        for row in rows(reply, query, text):
            share = max(row["similarity"], 0.0) / best if best > 0 else 0.0
            found = Text.assemble(row["before"], (row["document"], "bold"), row["after"])
            table.add_row(
                Text(row["query"]), found, f"{row['similarity']:.3f}", "█" * round(share * _BAR_CHARS)
            )
        Console().print(table)
    combined = "mean" if reply.reduction == pb.MAX_SIM_REDUCTION_MEAN else "sum"
    typer.echo(f"score {reply.score:.3f}, the {combined} of the similarities", err=True)
    typer.echo(timing_line(reply.timings), err=True)


def rows(reply: pb.ExplainResponse, query: str, text: str) -> list[dict[str, Any]]:
    """One line per query token: its words, the document's with what stands around them, the similarity.

    A token without characters (a marker of the model) or without a stored span is shown by its row.
    """
    made = []
    for one in reply.alignments:
        asked = query[one.query_span_start : one.query_span_end] or f"[{one.query_token}]"
        begin, end = one.document_span_start, one.document_span_end
        found = text[begin:end]
        made.append(
            {
                "query": asked,
                "document": found or f"[{one.document_token}]",
                "before": _line(text[max(begin - _AROUND, 0) : begin]) if found else "",
                "after": _line(text[end : end + _AROUND]) if found else "",
                "similarity": one.similarity,
            }
        )
    return made


def _line(text: str) -> str:
    return "".join(" " if char.isspace() else char for char in text)


async def _explain(
    settings: Settings,
    key: str | None,
    target: str,
    collection: str,
    query: str,
    document_id: str,
    timeout_s: float,
) -> tuple[pb.ExplainResponse, str]:
    client = RpcClient(rpc=settings.rpc, key=key or settings.access.mesh_key())
    try:
        reply: pb.ExplainResponse = await client.call(
            target,
            RetrievalServiceStub,
            "Explain",
            pb.ExplainRequest(
                collection=collection,
                query=pb.Query(text=query),
                id=document_id,
                truncation=common.Truncation(enabled=True),
            ),
            timeout_s=timeout_s,
        )
        # Of the same version, or the spans could be another text's.
        documents: pb.GetDocumentsResponse = await client.call(
            target,
            RetrievalServiceStub,
            "GetDocuments",
            pb.GetDocumentsRequest(
                collection=collection,
                ids=[document_id],
                projection=pb.Projection(text=True),
                version=pb.ReadVersion(at_version=reply.version),
            ),
            timeout_s=timeout_s,
        )
        return reply, documents.documents[0].text if documents.documents else ""
    finally:
        await client.close()
