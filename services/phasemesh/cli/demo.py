"""`phasemesh demo`: embeds, reranks, indexes and searches real passages, and shows where the time went."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from phasemesh.cli.banner import token_model
from phasemesh.cli.client_commands import timing_line
from phasemesh.cli.demo_passages import Passage, passages, queries
from phasemesh.cli.demo_search import call_rest, search_demo
from phasemesh.config.settings import Settings
from phasemesh.errors import FailedPrecondition, Unavailable
from phasemesh.rpc.client import RpcClient
from phasemesh.rpc.codec import decode_tensor
from phasemesh.v1 import common_pb2 as common
from phasemesh.v1 import encoder_pb2 as pb
from phasemesh.v1.encoder_pb2_grpc import EncoderServiceStub

_BATCH = 64
_SHOWN_QUERIES = 3
_CANDIDATES = 10


async def run_demo(settings: Settings, key: str | None, target: str, gateway: str | None, model: str) -> None:
    """Run the demo and print its results.

    Args:
        settings: for the limits of calls.
        key: sent with them; None takes the mesh key of the settings.
        target: the encoder service.
        gateway: base URL of the gateway; None leaves the REST part out, saying so.
        model: an embedder; "" for the first that is served.
    """
    key = key or settings.access.mesh_key()
    client = RpcClient(rpc=settings.rpc, key=key)
    try:
        await _run(client, key, target, gateway, model)
    finally:
        await client.close()


async def _run(client: RpcClient, key: str | None, target: str, gateway: str | None, model: str) -> None:
    console = Console(highlight=False)
    embedder = await _embedder(client, target, model)
    texts = passages()
    console.print(f"[bold]1. Embed[/] {len(texts)} passages with {embedder.name} over gRPC ({target})")
    matrix, tokens = await _embed(client, target, embedder.name, [passage.text for passage in texts], console)
    console.print(f"   {len(matrix)} vectors of {matrix.shape[1]}, {tokens} tokens\n")

    asked = queries()
    request = pb.EmbedRequest(
        model=embedder.name,
        inputs=[common.Input(text=query) for query, _ in asked],
        encoding=common.VECTOR_ENCODING_FLOAT32,
        role=common.INPUT_ROLE_QUERY,
        kinds=[pb.VECTOR_KIND_DENSE],
        normalize=True,
    )
    reply = await client.call(target, EncoderServiceStub, "Embed", request, timeout_s=60)
    order = np.argsort(-(decode_tensor(reply.dense, field="dense") @ matrix.T), axis=1, kind="stable")
    found = sum(
        bool(relevant & {texts[index].id for index in row[:3]})
        for row, (_, relevant) in zip(order, asked, strict=True)
    )
    console.print(
        f"[bold]2. Find[/] by cosine: {found} of {len(asked)} questions have their passage in the best 3"
    )
    console.print(f"   {timing_line(reply.timings)}\n", soft_wrap=True)

    console.print(f"[bold]3. Rerank[/] the best {_CANDIDATES} of a question with {embedder.name}")
    for (query, _), row in list(zip(asked, order, strict=True))[:_SHOWN_QUERIES]:
        candidates = [texts[index] for index in row[:_CANDIDATES]]
        table = Table("score", "passage", title=query, title_justify="left", title_style="italic")
        if gateway is None:
            ranked, timing = await _rerank_grpc(client, target, embedder.name, query, candidates)
        else:
            ranked, timing = _rerank_rest(gateway, key, embedder.name, query, candidates)
        for score, passage in ranked[:3]:
            table.add_row(f"{score:.3f}", f"[bold]{passage.title}[/] {passage.text[:90]}…")
        console.print(table)
        console.print(f"   {timing}\n", soft_wrap=True)
    where = f"REST ({gateway}/v1/rerank); the times are its Server-Timing header" if gateway else "gRPC"
    console.print(f"   over {where}\n", style="dim")

    await _collections(client, key, target, gateway, console)


async def _collections(
    client: RpcClient, key: str | None, target: str, gateway: str | None, console: Console
) -> None:
    listed = await client.call(target, EncoderServiceStub, "ListModels", pb.ListModelsRequest(), timeout_s=10)
    model = token_model(listed.models)
    if gateway is None or "retrieval" not in call_rest(gateway, "GET", "/health", key=key).body:
        console.print("   no gateway that serves collections is known here: nothing to index", style="dim")
    elif model is None:
        console.print("   no model with token vectors is served: nothing to index", style="dim")
    else:
        search_demo(gateway, model.name, passages(), queries(), console, key=key, shown=_SHOWN_QUERIES)


async def _embedder(client: RpcClient, target: str, model: str) -> pb.ModelInfo:
    listed = await client.call(target, EncoderServiceStub, "ListModels", pb.ListModelsRequest(), timeout_s=10)
    infos: list[pb.ModelInfo] = list(listed.models)
    for info in infos:
        if model in ("", info.name, *info.aliases) and pb.VECTOR_KIND_DENSE in info.vector_kinds:
            return info
    served = ", ".join(info.name for info in infos)
    raise FailedPrecondition(
        f"the demo needs a model with dense vectors; {target} serves {served}", field="model"
    )


async def _embed(
    client: RpcClient, target: str, model: str, texts: list[str], console: Console
) -> tuple[npt.NDArray[np.floating], int]:
    blocks, tokens, phases = [], 0, dict[str, int]()
    columns = (TextColumn("   {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("embedding", total=len(texts))
        for start in range(0, len(texts), _BATCH):
            batch = texts[start : start + _BATCH]
            request = pb.EmbedRequest(
                model=model,
                inputs=[common.Input(text=text) for text in batch],
                encoding=common.VECTOR_ENCODING_FLOAT32,
                role=common.INPUT_ROLE_DOCUMENT,
                kinds=[pb.VECTOR_KIND_DENSE],
                truncation=common.Truncation(enabled=True),
                normalize=True,
            )
            reply = await client.call(target, EncoderServiceStub, "Embed", request, timeout_s=120)
            blocks.append(decode_tensor(reply.dense, field="dense"))
            tokens += reply.usage.tokens
            for phase in reply.timings.phases:
                phases[phase.phase] = phases.get(phase.phase, 0) + phase.duration_ns
            progress.advance(task, len(batch))
    console.print(
        "   " + " · ".join(f"{name} {duration / 1e6:.1f}" for name, duration in phases.items()) + " ms",
        soft_wrap=True,
    )
    return np.concatenate(blocks), tokens


async def _rerank_grpc(
    client: RpcClient, target: str, model: str, query: str, candidates: list[Passage]
) -> tuple[list[tuple[float, Passage]], str]:
    request = pb.ScoreRequest(
        model=model,
        query=common.Input(text=query),
        documents=[common.Input(text=passage.text) for passage in candidates],
        truncation=common.Truncation(enabled=True),
    )
    reply = await client.call(target, EncoderServiceStub, "Score", request, timeout_s=60)
    ranked = sorted(zip(reply.scores, candidates, strict=True), key=lambda pair: -pair[0])
    return ranked, timing_line(reply.timings)


def _rerank_rest(
    gateway: str, key: str | None, model: str, query: str, candidates: list[Passage]
) -> tuple[list[tuple[float, Passage]], str]:
    body = {"model": model, "query": query, "documents": [passage.text for passage in candidates]}
    answer = call_rest(gateway, "POST", "/v1/rerank", body, key=key)
    if answer.status != 200:
        raise Unavailable(f"{gateway}/v1/rerank: {answer.status}: {answer.body.get('message', '')}")
    results = answer.body["results"]
    return [(row["relevance_score"], candidates[row["index"]]) for row in results], answer.timing
