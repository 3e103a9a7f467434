"""What the service costs over its own engine: throughput ratios, and latency of one short text.

The same texts go, in turn and in one run, through the engine in this process (tokenized, sorted by length,
cut to the same token budget), through gRPC and through REST with base64, against one real mesh on this machine.
Shared machines are noisy, so each figure is a median of rounds and only ratios mean anything.

    python -m tests.bench.skeleton --json
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from importlib import metadata

import httpx
import numpy as np
from tokenizers import Tokenizer

from phasemesh.cli.demo_model import NAME, demo_model
from phasemesh.cli.demo_passages import passages
from phasemesh.cli.process import cpus
from phasemesh.config.settings import RpcSettings
from phasemesh.engine.engine import Engine
from phasemesh.pool.protocol import Batch, ModelSpec, Output, Sequences
from phasemesh.rpc.client import RpcClient
from phasemesh.rpc.codec import decode_tensor
from phasemesh.v1 import common_pb2 as common
from phasemesh.v1 import encoder_pb2 as pb
from phasemesh.v1.encoder_pb2_grpc import EncoderServiceStub
from tests.mesh import Mesh, running_mesh

#: As the encoder's default on a CPU.
TOKEN_BUDGET = 2048
SHORT_TEXT = "What is a service mesh?"
NS = 1e9


def corpus(count: int) -> list[str]:
    """`count` different texts, from one sentence to a whole passage; none is another's duplicate."""
    texts: list[str] = []
    while len(texts) < count:
        for passage in passages():
            sentences = passage.text.split(". ")
            kept = 1 + len(texts) % len(sentences)
            texts.append(f"{len(texts)}. " + ". ".join(sentences[:kept]))
    return texts[:count]


class InProcessEngine:
    """The engine alone, fed as well as a batch job could feed it."""

    def __init__(self) -> None:
        model = demo_model()
        assert model is not None
        self._engine = Engine(device="cpu", threads=cpus())
        loaded = self._engine.load(ModelSpec(NAME, model.source))
        self.dtype = loaded.dtype
        self._tokenizer = Tokenizer.from_str(loaded.tokenizer_json)
        self._limit = loaded.recipe.max_tokens

    def embed(self, texts: list[str]) -> np.ndarray:
        """float32[n, dim], unit rows, in the order of `texts`."""
        ids = [encoding.ids for encoding in self._tokenizer.encode_batch(texts)]
        ids = [row if len(row) <= self._limit else [*row[: self._limit - 1], row[-1]] for row in ids]
        order = sorted(range(len(ids)), key=lambda index: len(ids[index]))
        vectors = np.empty((len(ids), 384), np.float32)
        start = 0
        while start < len(order):
            end = start + 1
            while end < len(order) and len(ids[order[end]]) * (end + 1 - start) <= TOKEN_BUDGET:
                end += 1
            rows = [ids[index] for index in order[start:end]]
            cu = np.concatenate([[0], np.cumsum([len(row) for row in rows])]).astype(np.int32)
            packed = np.concatenate(rows).astype(np.int32)
            batch = Batch("bench", NAME, frozenset({Output.DENSE}), Sequences(packed, cu))
            dense = self._engine.forward(batch).dense
            assert dense is not None
            vectors[order[start:end]] = dense / np.linalg.norm(dense, axis=1, keepdims=True)
            start = end
        return vectors


async def over_grpc(
    client: RpcClient, mesh: Mesh, texts: list[str], request_size: int, callers: int
) -> np.ndarray:
    """The same over gRPC: `callers` at once, each sending `request_size` texts at a time."""

    async def one(block: list[str]) -> np.ndarray:
        request = pb.EmbedRequest(
            model=NAME,
            inputs=[common.Input(text=text) for text in block],
            encoding=common.VECTOR_ENCODING_FLOAT32,
            truncation=common.Truncation(enabled=True),
        )
        reply = await client.call(mesh.grpc, EncoderServiceStub, "Embed", request, timeout_s=120)
        return decode_tensor(reply.dense, field="dense")

    return await _in_blocks(one, texts, request_size, callers)


async def over_rest(
    client: httpx.AsyncClient, mesh: Mesh, texts: list[str], request_size: int, callers: int
) -> np.ndarray:
    """The same over REST, base64 as the official OpenAI client asks for."""
    url = f"{mesh.rest}/v1/embeddings"

    async def one(block: list[str]) -> np.ndarray:
        body = {"model": NAME, "input": block, "encoding_format": "base64"}
        reply = await client.post(url, json=body, timeout=120)
        reply.raise_for_status()
        rows = [np.frombuffer(base64.b64decode(row["embedding"]), "<f4") for row in reply.json()["data"]]
        return np.stack(rows)

    return await _in_blocks(one, texts, request_size, callers)


async def _in_blocks(
    one: Callable[[list[str]], Awaitable[np.ndarray]], texts: list[str], request_size: int, callers: int
) -> np.ndarray:
    blocks = [texts[start : start + request_size] for start in range(0, len(texts), request_size)]
    results: list[np.ndarray | None] = [None] * len(blocks)
    waiting = iter(range(len(blocks)))

    async def caller() -> None:
        for index in waiting:
            results[index] = await one(blocks[index])

    await asyncio.gather(*(caller() for _ in range(callers)))
    return np.concatenate([block for block in results if block is not None])


async def latencies(client: RpcClient, mesh: Mesh, calls: int) -> dict[str, float]:
    """Milliseconds of one short text, one call after another, and of its phases."""
    whole, phases = [], dict[str, list[float]]()
    request = pb.EmbedRequest(
        model=NAME, inputs=[common.Input(text=SHORT_TEXT)], encoding=common.VECTOR_ENCODING_FLOAT32
    )
    for _ in range(calls):
        began = time.perf_counter_ns()
        reply = await client.call(mesh.grpc, EncoderServiceStub, "Embed", request, timeout_s=30)
        whole.append((time.perf_counter_ns() - began) / 1e6)
        for phase in reply.timings.phases:
            phases.setdefault(phase.phase, []).append(phase.duration_ns / 1e6)
    p50, p99 = np.percentile(whole, [50, 99])
    return {
        "short_embed_p50_ms": round(float(p50), 3),
        "short_embed_p99_ms": round(float(p99), 3),
        **{
            f"short_{name.replace('.', '_')}_p50_ms": round(statistics.median(v), 3)
            for name, v in phases.items()
        },
    }


def engine_forward_ms(engine: InProcessEngine, calls: int) -> float:
    """Median milliseconds of the short text through the engine alone, tokenizing included."""
    times = []
    for _ in range(calls):
        began = time.perf_counter_ns()
        engine.embed([SHORT_TEXT])
        times.append((time.perf_counter_ns() - began) / 1e6)
    return round(statistics.median(times), 3)


async def run(options: argparse.Namespace) -> dict[str, object]:
    """The whole benchmark; the result is what `--json` prints."""
    texts = corpus(options.texts)
    engine = InProcessEngine()
    rates: dict[str, list[float]] = {"engine": [], "grpc": [], "rest": []}
    with running_mesh() as mesh:
        rpc = RpcClient(rpc=RpcSettings(), key=None)
        async with httpx.AsyncClient() as rest:
            size, callers = options.request_size, options.callers
            warm = texts[: 2 * size]
            reference = engine.embed(warm)
            for name, got in (
                ("grpc", await over_grpc(rpc, mesh, warm, size, callers)),
                ("rest", await over_rest(rest, mesh, warm, size, callers)),
            ):
                worst = float((reference * got).sum(axis=1).min())
                assert worst >= 0.9995, f"{name} gives other vectors than the engine: cosine {worst}"
            for number in range(options.rounds):
                began = time.perf_counter()
                engine.embed(texts)
                rates["engine"].append(len(texts) / (time.perf_counter() - began))
                began = time.perf_counter()
                await over_grpc(rpc, mesh, texts, size, callers)
                rates["grpc"].append(len(texts) / (time.perf_counter() - began))
                began = time.perf_counter()
                await over_rest(rest, mesh, texts, size, callers)
                rates["rest"].append(len(texts) / (time.perf_counter() - began))
                shown = ", ".join(f"{name} {values[-1]:.0f}" for name, values in rates.items())
                print(f"round {number + 1}/{options.rounds}: {shown} texts/s", file=sys.stderr)
            short = await latencies(rpc, mesh, options.calls)
        await rpc.close()
    # A ratio within a round, then the median: rounds differ more than what is measured in one of them.
    ratios = {
        name: statistics.median(a / b for a, b in zip(rates[name], rates["engine"], strict=True))
        for name in ("grpc", "rest")
    }
    return {
        "benchmark": "skeleton",
        "model": NAME,
        "dtype": engine.dtype,
        "cpus": cpus(),
        "texts": len(texts),
        "callers": options.callers,
        "request_size": options.request_size,
        "rounds": options.rounds,
        "grpc_over_engine": round(ratios["grpc"], 3),
        "rest_over_engine": round(ratios["rest"], 3),
        **{f"{name}_texts_per_s": round(statistics.median(values), 1) for name, values in rates.items()},
        **short,
        "engine_short_forward_p50_ms": engine_forward_ms(engine, options.calls),
        "phasemesh": metadata.version("phasemesh"),
    }


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--texts", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--callers", type=int, default=4)
    parser.add_argument("--request-size", type=int, default=64)
    parser.add_argument("--calls", type=int, default=300, help="calls with one short text")
    options = parser.parse_args()
    result = asyncio.run(run(options))
    if options.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:32} {value}")


if __name__ == "__main__":
    main()
