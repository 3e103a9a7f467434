"""Collections through real processes: restart, kill -9 of a scorer, kill -9 of retrieval in a write loop."""

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phasemesh.config.settings import RpcSettings
from phasemesh.errors import PhasemeshError
from phasemesh.rpc.client import RpcClient
from phasemesh.rpc.codec import encode_tensor
from phasemesh.telemetry import names
from phasemesh.v1 import common_pb2 as common
from phasemesh.v1 import retrieval_pb2 as pb
from phasemesh.v1.retrieval_pb2_grpc import RetrievalServiceStub
from tests.fakes.collector import Collector, SeenSpan, collecting
from tests.mesh import Mesh, free_scorer_ports, running_mesh

pytestmark = pytest.mark.slow

DIM = 16
MODEL = "all-MiniLM-L6-v2"


async def call(mesh: Mesh, method: str, request: Any, timeout_s: float = 30) -> Any:
    client = RpcClient(rpc=RpcSettings(), key=None)
    try:
        return await client.call(mesh.retrieval, RetrievalServiceStub, method, request, timeout_s=timeout_s)
    finally:
        await client.close()


def unit(rng: np.random.Generator, rows: int) -> np.ndarray:
    matrix = rng.standard_normal((rows, DIM)).astype(np.float32)
    return matrix / np.linalg.norm(matrix, axis=1, keepdims=True)


def document(name: str, vectors: np.ndarray) -> pb.Document:
    tensor = encode_tensor(vectors.astype(np.float16), common.VECTOR_ENCODING_FLOAT16)
    return pb.Document(id=name, token_vectors=pb.TokenMatrix(vectors=tensor))


async def collection_of(mesh: Mesh, name: str, documents: dict[str, np.ndarray], commits: int = 4) -> None:
    spec = pb.CollectionSpec(name=name, token_dimension=DIM, normalize=pb.NORMALIZE_POLICY_NEVER)
    await call(mesh, "CreateCollection", pb.CreateCollectionRequest(spec=spec))
    ids = list(documents)
    # Several commits, so that there are several fragments and each scorer has some.
    for part in range(commits):
        batch = [document(key, documents[key]) for key in ids[part::commits]]
        await call(mesh, "UpsertDocuments", pb.UpsertDocumentsRequest(collection=name, documents=batch))


async def search(mesh: Mesh, name: str, query: np.ndarray, k: int = 10, timeout_s: float = 30) -> Any:
    tensor = encode_tensor(query, common.VECTOR_ENCODING_FLOAT32)
    request = pb.SearchRequest(collection=name, query=pb.Query(vectors=tensor), k=k)
    return await call(mesh, "Search", request, timeout_s)


def brute_force(documents: dict[str, np.ndarray], query: np.ndarray, k: int) -> list[tuple[str, float]]:
    """float64 MaxSim over the stored float16 vectors; best first, ties by id."""
    q = query.astype(np.float64)
    scores = {
        key: float((q @ vectors.astype(np.float16).astype(np.float64).T).max(axis=1).sum())
        for key, vectors in documents.items()
    }
    return sorted(scores.items(), key=lambda item: (-item[1], item[0]))[:k]


def assert_equal(reply: Any, want: list[tuple[str, float]]) -> None:
    assert [hit.id for hit in reply.hits] == [key for key, _ in want]
    assert np.allclose([hit.score for hit in reply.hits], [score for _, score in want], rtol=1e-6)
    assert reply.coverage.searched_fragments == reply.coverage.fragments


def derivations(mesh: Mesh, scorers: int = 2) -> int:
    total = 0
    for index in range(scorers):
        text = mesh.admin(f"scorer-{index}", "/metrics")[1]
        total += int(float(re.search(r"^phasemesh_segment_derivations_total ([0-9.]+)", text, re.M)[1]))  # type: ignore[index]  # always there
    return total


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module")
def mesh(collector: Collector) -> Iterator[Mesh]:
    tracing = ("--set", "tracing.exporter=otlp", "--set", f"tracing.endpoint={collector.url}")
    with running_mesh("--no-ray", *tracing, "--set", "tracing.schedule_delay_ms=200") as mesh:
        yield mesh


async def test_restart_keeps_documents_and_segments(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    documents = {f"d{number:03}": unit(rng, 1 + number % 9) for number in range(120)}
    query = unit(rng, 5)
    ports = free_scorer_ports()
    with running_mesh("--no-ray", *ports, data_dir=tmp_path) as first:
        await collection_of(first, "kept", documents)
        before = await search(first, "kept", query)
        assert_equal(before, brute_force(documents, query, 10))
        assert derivations(first) > 0
    with running_mesh("--no-ray", *ports, data_dir=tmp_path) as second:
        after = await search(second, "kept", query)
        assert [(hit.id, hit.score) for hit in after.hits] == [(hit.id, hit.score) for hit in before.hits]
        assert after.version == before.version
        assert derivations(second) == 0  # mapped from the cache


async def test_a_killed_scorer_costs_no_result(mesh: Mesh) -> None:
    rng = np.random.default_rng(2)
    documents = {f"d{number:03}": unit(rng, 1 + number % 7) for number in range(200)}
    query = unit(rng, 4)
    await collection_of(mesh, "killed", documents, commits=8)
    want = brute_force(documents, query, 20)
    assert_equal(await search(mesh, "killed", query, 20), want)
    for index in (0, 1):
        victim = mesh.report(f"scorer-{index}")
        os.kill(victim.pid, signal.SIGKILL)
        assert_equal(await search(mesh, "killed", query, 20, timeout_s=20), want)
        mesh.wait_until(
            lambda at=index, pid=victim.pid: mesh.report(f"scorer-{at}").pid != pid, 40, "a restart"
        )
        assert mesh.report(f"scorer-{index}").port == victim.port
    assert_equal(await search(mesh, "killed", query, 20), want)


async def test_kill_retrieval_in_a_write_loop(mesh: Mesh) -> None:
    """Every acknowledged write is there; every other is whole or absent."""
    rng = np.random.default_rng(3)
    spec = pb.CollectionSpec(name="written", token_dimension=DIM, normalize=pb.NORMALIZE_POLICY_NEVER)
    await call(mesh, "CreateCollection", pb.CreateCollectionRequest(spec=spec))
    acknowledged: set[int] = set()
    sent: dict[int, np.ndarray] = {}

    async def write() -> None:
        for number in range(10_000):
            sent[number] = unit(rng, 3)
            batch = [document(f"{number}-{part}", sent[number]) for part in range(5)]
            try:
                await call(
                    mesh,
                    "UpsertDocuments",
                    pb.UpsertDocumentsRequest(collection="written", documents=batch),
                    5,
                )
            except PhasemeshError:
                return
            acknowledged.add(number)

    victim = mesh.report("retrieval")
    writing = asyncio.create_task(write())
    async with asyncio.timeout(60):
        while len(acknowledged) < 12:
            await asyncio.sleep(0.01)
    os.kill(victim.pid, signal.SIGKILL)
    await writing
    await asyncio.to_thread(
        mesh.wait_until, lambda: mesh.report("retrieval").pid != victim.pid, 40, "retrieval to be restarted"
    )
    ids = [f"{number}-{part}" for number in sent for part in range(5)]
    request = pb.GetDocumentsRequest(
        collection="written",
        ids=ids,
        projection=pb.Projection(token_vectors=True, encoding=common.VECTOR_ENCODING_FLOAT16),
    )
    found = {row.id for row in (await call(mesh, "GetDocuments", request)).documents}
    for number in sent:
        parts = {f"{number}-{part}" for part in range(5)} & found
        assert len(parts) in (0, 5), "a batch was torn"
        assert number not in acknowledged or len(parts) == 5, "an acknowledged write is gone"
    best = await search(mesh, "written", sent[max(acknowledged)], 5)
    assert {hit.id.split("-")[0] for hit in best.hits} == {str(max(acknowledged))}


async def test_one_trace_from_text_to_scores(mesh: Mesh, collector: Collector) -> None:
    spec = pb.CollectionSpec(name="traced", model=MODEL)
    await call(mesh, "CreateCollection", pb.CreateCollectionRequest(spec=spec))
    texts = ["Bread needs flour, water and yeast.", "A mesh joins many nodes.", "The Moon orbits the Earth."]
    documents = [pb.Document(id=str(number), text=text) for number, text in enumerate(texts)]
    await call(mesh, "UpsertDocuments", pb.UpsertDocumentsRequest(collection="traced", documents=documents))
    request = pb.SearchRequest(collection="traced", query=pb.Query(text="How do I bake bread?"), k=2)
    reply = await call(mesh, "Search", request)
    assert reply.hits[0].id == "0"
    phases = [phase.phase for phase in reply.timings.phases]
    wanted = (names.PHASE_PLAN, *names.ENCODE_PHASES, names.PHASE_LOAD, names.PHASE_MAXSIM, names.PHASE_MERGE)
    assert [phase for phase in phases if phase in wanted] == list(wanted)
    assert sum(phase.duration_ns for phase in reply.timings.phases) <= reply.timings.total_ns

    def of_search(spans: list[SeenSpan]) -> list[SeenSpan]:
        server = [
            span for span in spans if span.name == "phasemesh.v1.RetrievalService/Search" and span.kind == 2
        ]
        traces = {span.trace_id for span in server}
        encoded = {span.trace_id for span in spans if span.name == names.PHASE_FORWARD} & traces
        return [span for span in spans if span.trace_id in encoded]

    def complete(spans: list[SeenSpan]) -> bool:
        return set(wanted) <= {span.name for span in of_search(spans)}

    spans = of_search(await asyncio.to_thread(collector.wait_for, complete))
    assert len({span.trace_id for span in spans}) == 1
    services = {span.service for span in spans}
    assert {"phasemesh-retrieval", "phasemesh-encoder", "phasemesh-scorer"} <= services
    by_id = {span.span_id: span for span in spans}
    for child in spans:
        if (parent := by_id.get(child.parent_id)) is not None:
            assert parent.start_ns <= child.start_ns <= child.end_ns <= parent.end_ns, (
                parent.name,
                child.name,
            )


async def test_delete_and_recreate_starts_anew(mesh: Mesh) -> None:
    rng = np.random.default_rng(4)
    documents = {name: unit(rng, 3) for name in ("a", "b", "c")}
    await collection_of(mesh, "again", documents, commits=1)
    query = unit(rng, 2)
    old = await search(mesh, "again", query)
    await call(mesh, "DeleteCollection", pb.DeleteCollectionRequest(collection="again"))
    await collection_of(mesh, "again", {"z": unit(rng, 3)}, commits=1)
    new = await search(mesh, "again", query)
    assert [hit.id for hit in new.hits] == ["z"]
    tensor = encode_tensor(query, common.VECTOR_ENCODING_FLOAT32)
    stale = pb.SearchRequest(
        collection="again",
        query=pb.Query(vectors=tensor),
        k=3,
        version=pb.ReadVersion(at_version=old.version),
    )
    with pytest.raises(PhasemeshError) as caught:
        await call(mesh, "Search", stale)
    assert caught.value.reason == "INCARNATION_MISMATCH"
