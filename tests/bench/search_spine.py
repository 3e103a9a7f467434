"""Writing, ingesting and searching a collection through real processes.

`commit_p50_ms` is an upsert of 10 documents with given vectors, as the caller sees it, with each durability.
`ingest_docs_per_s` is from text, encoding included. `search_p50_ms` is over 5,000 documents of 120 vectors each,
split by phase. Documents are about topics and queries about a document, so that a few documents are close to a
query and most aren't, as in real collections; `search_worst_p50_ms` is over vectors without any structure, where
all scores are nearly alike and codes rule hardly any document out. `search_over_kernel` sets a search beside a
float32 scan of all its vectors by one thread of this process, and `search_bytes_over_bandwidth` beside copying
them once.

    python -m tests.bench.search_spine --json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from typing import Any

import numpy as np

from phasemesh.cli.demo_passages import passages
from phasemesh.cli.process import cpus
from phasemesh.config.settings import RpcSettings
from phasemesh.index.kernel import maxsim
from phasemesh.rpc.client import RpcClient
from phasemesh.rpc.codec import encode_tensor
from phasemesh.v1 import common_pb2 as common
from phasemesh.v1 import retrieval_pb2 as pb
from phasemesh.v1.retrieval_pb2_grpc import RetrievalServiceStub
from tests.mesh import Mesh, running_mesh

DIM = 128
QUERY_TOKENS = 32
MODEL = "all-MiniLM-L6-v2"


class Caller:
    """Calls the retrieval service of a mesh."""

    def __init__(self, mesh: Mesh) -> None:
        self._client = RpcClient(rpc=RpcSettings(), key=None)
        self._target = mesh.retrieval

    async def __call__(self, method: str, request: Any) -> Any:
        """The reply of one call."""
        return await self._client.call(self._target, RetrievalServiceStub, method, request, timeout_s=300)

    async def close(self) -> None:
        """Close the channel."""
        await self._client.close()


def unit(rng: np.random.Generator, rows: int) -> np.ndarray:
    """float16[rows, DIM], unit rows."""
    matrix = rng.standard_normal((rows, DIM)).astype(np.float32)
    return (matrix / np.linalg.norm(matrix, axis=1, keepdims=True)).astype(np.float16)


class Topics:
    """Documents of a few topics each, and queries about one document."""

    def __init__(self, rng: np.random.Generator, count: int = 400) -> None:
        self._rng = rng
        self._centres = unit(rng, count).astype(np.float32)

    def _near(self, centres: np.ndarray, spread: float) -> np.ndarray:
        rows = centres + spread * unit(self._rng, len(centres)).astype(np.float32)
        return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float16)

    def document(self, rows: int) -> np.ndarray:
        """float16[rows, DIM], unit rows."""
        own = self._rng.choice(len(self._centres), 5)
        return self._near(self._centres[self._rng.choice(own, rows)], 0.8)

    def query(self, about: np.ndarray) -> np.ndarray:
        """float32[QUERY_TOKENS, DIM], unit rows, near vectors of the document `about`."""
        rows = about[self._rng.choice(len(about), QUERY_TOKENS)].astype(np.float32)
        return self._near(rows, 0.6).astype(np.float32)


def document(name: str, vectors: np.ndarray) -> pb.Document:
    """A document with given vectors."""
    tensor = encode_tensor(vectors, common.VECTOR_ENCODING_FLOAT16)
    return pb.Document(id=name, token_vectors=pb.TokenMatrix(vectors=tensor))


async def create(call: Caller, name: str, **spec: Any) -> None:
    """Create a collection."""
    await call("CreateCollection", pb.CreateCollectionRequest(spec=pb.CollectionSpec(name=name, **spec)))


async def commits(durability: str, count: int) -> float:
    """Median milliseconds of an upsert of 10 documents of 60 vectors."""
    rng = np.random.default_rng(1)
    with running_mesh("--no-ray", "--set", f"retrieval.durability={durability}") as mesh:
        call = Caller(mesh)
        await create(call, "commits", token_dimension=DIM, normalize=pb.NORMALIZE_POLICY_NEVER)
        times = []
        for number in range(count):
            batch = [document(f"{number}-{part}", unit(rng, 60)) for part in range(10)]
            began = time.perf_counter()
            await call("UpsertDocuments", pb.UpsertDocumentsRequest(collection="commits", documents=batch))
            times.append((time.perf_counter() - began) * 1e3)
        await call.close()
    return round(statistics.median(times), 2)


async def ingest(call: Caller, documents: int) -> float:
    """Documents per second from text."""
    await create(call, "texts", model=MODEL)
    texts = [passage.text for passage in passages()]
    rows = [pb.Document(id=str(n), text=f"{n}. {texts[n % len(texts)]}") for n in range(documents)]
    began = time.perf_counter()
    for start in range(0, documents, 128):
        batch = rows[start : start + 128]
        await call("UpsertDocuments", pb.UpsertDocumentsRequest(collection="texts", documents=batch))
    return round(documents / (time.perf_counter() - began), 1)


async def store(call: Caller, name: str, matrices: list[np.ndarray]) -> None:
    """A collection of given vectors."""
    await create(call, name, token_dimension=DIM, normalize=pb.NORMALIZE_POLICY_NEVER)
    for start in range(0, len(matrices), 250):
        rows = [
            document(f"d{start + n:06}", matrix) for n, matrix in enumerate(matrices[start : start + 250])
        ]
        await call("UpsertDocuments", pb.UpsertDocumentsRequest(collection=name, documents=rows))
        print(f"{name}: {start + len(rows)} of {len(matrices)} documents stored", file=sys.stderr)


async def searches(call: Caller, documents: int, tokens: int, count: int) -> dict[str, float]:
    """Medians of a search of all documents, its phases, and what it is set beside."""
    rng = np.random.default_rng(2)
    topics = Topics(rng)
    matrices = [topics.document(tokens) for _ in range(documents)]
    await store(call, "topics", matrices)
    await store(call, "alike", [unit(rng, tokens) for _ in range(documents)])
    packed = np.concatenate(matrices)
    offsets = np.arange(0, len(packed) + 1, tokens, dtype=np.int64)
    whole: list[float] = []
    worst: list[float] = []
    kernel: list[float] = []
    copy: list[float] = []
    phases: dict[str, list[float]] = {}
    for number in range(count + 3):
        query = topics.query(matrices[int(rng.integers(documents))])
        took, reply = await timed(call, "topics", query)
        slow, _ = await timed(call, "alike", unit(rng, QUERY_TOKENS).astype(np.float32))
        if number < 3:  # the first ones derive and map segments
            continue
        assert reply.coverage.documents == documents
        assert reply.coverage.exact
        whole.append(took)
        worst.append(slow)
        for phase in reply.timings.phases:
            phases.setdefault(phase.phase, []).append(phase.duration_ns / 1e6)
        began = time.perf_counter()
        scores = maxsim(query, packed, offsets)
        kernel.append((time.perf_counter() - began) * 1e3)
        assert f"d{int(np.argmax(scores)):06}" == reply.hits[0].id
        began = time.perf_counter()
        packed.copy()
        copy.append((time.perf_counter() - began) * 1e3)
    return {
        "search_p50_ms": round(statistics.median(whole), 2),
        **{
            f"search_{name.replace('.', '_')}_p50_ms": round(statistics.median(v), 2)
            for name, v in phases.items()
        },
        "search_worst_p50_ms": round(statistics.median(worst), 2),
        "search_over_kernel": round(statistics.median(a / b for a, b in zip(whole, kernel, strict=True)), 3),
        "search_bytes_over_bandwidth": round(
            statistics.median(a / b for a, b in zip(whole, copy, strict=True)), 2
        ),
        "documents": documents,
        "tokens": len(packed),
    }


async def timed(call: Caller, collection: str, query: np.ndarray) -> tuple[float, Any]:
    """Milliseconds of one search, and its reply."""
    tensor = encode_tensor(query, common.VECTOR_ENCODING_FLOAT32)
    request = pb.SearchRequest(collection=collection, query=pb.Query(vectors=tensor), k=10)
    began = time.perf_counter()
    reply = await call("Search", request)
    return (time.perf_counter() - began) * 1e3, reply


async def run(options: argparse.Namespace) -> dict[str, object]:
    """The whole benchmark; the result is what `--json` prints."""
    result: dict[str, object] = {"benchmark": "search_spine", "cpus": cpus()}
    for durability in ("process", "disk"):
        result[f"commit_{durability}_p50_ms"] = await commits(durability, options.commits)
    with running_mesh() as mesh:
        call = Caller(mesh)
        result["ingest_docs_per_s"] = await ingest(call, options.texts)
        result |= await searches(call, options.documents, options.tokens, options.searches)
        await call.close()
    return result


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--commits", type=int, default=40)
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--documents", type=int, default=5000)
    parser.add_argument("--tokens", type=int, default=120, help="vectors per document")
    parser.add_argument("--searches", type=int, default=20)
    options = parser.parse_args()
    result = asyncio.run(run(options))
    if options.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:36} {value}")


if __name__ == "__main__":
    main()
