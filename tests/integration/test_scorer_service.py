"""The scorer over real gRPC on a real store. Expected scores are float64 brute force over the stored vectors."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from threadpoolctl import threadpool_info, threadpool_limits

from phasemesh.config.settings import AccessSettings, RpcSettings, ScorerSettings, ServerSettings
from phasemesh.engine.device_scan import DeviceScanner
from phasemesh.errors import (
    InvalidArgument,
    NotFound,
    PermissionDenied,
    PhasemeshError,
    ResourceExhausted,
    Unavailable,
    Unimplemented,
)
from phasemesh.index.catalogue import Catalogue
from phasemesh.index.commit import StoreOptions
from phasemesh.index.durability import Durability
from phasemesh.index.native import kernel_name, slow_kernel
from phasemesh.index.scanner import CPU, Scanner
from phasemesh.index.spec import CollectionSpec, StoredDocument, Version
from phasemesh.index.store import CollectionStore
from phasemesh.rpc.client import RpcClient
from phasemesh.rpc.codec import encode_tensor
from phasemesh.rpc.context import Caller
from phasemesh.rpc.server import RpcServer
from phasemesh.scorer import search as search_module
from phasemesh.scorer.service import ScorerRuntime, ScorerStartError
from phasemesh.scorer.snapshots import Snapshot
from phasemesh.telemetry import names
from phasemesh.telemetry.metrics import Metrics
from phasemesh.telemetry.tracing import TracingSettings, configure_tracing, shutdown_tracing, tracer
from phasemesh.v1 import common_pb2 as common
from phasemesh.v1 import retrieval_pb2 as rpb
from phasemesh.v1 import scorer_pb2 as pb
from phasemesh.v1.scorer_pb2_grpc import ScorerServiceStub, add_ScorerServiceServicer_to_server

SERVICE = "phasemesh.v1.ScorerService"
DIM = 16
FLOAT32 = common.VECTOR_ENCODING_FLOAT32
FLOAT16 = common.VECTOR_ENCODING_FLOAT16


# ---- what is expected, in float64


def brute_force(
    query: np.ndarray, documents: dict[str, np.ndarray], *, mean: bool = False
) -> dict[str, float]:
    """MaxSim of each document that has vectors."""
    scores = {}
    for name, vectors in documents.items():
        if len(vectors):
            best = (query.astype(np.float64) @ vectors.astype(np.float64).T).max(axis=1)
            scores[name] = float(best.mean() if mean else best.sum())
    return scores


def ranking(scores: dict[str, float]) -> list[str]:
    return sorted(scores, key=lambda name: (-scores[name], name))


def assert_ranked(hits: Sequence[pb.LeafHit], scores: dict[str, float], k: int) -> None:
    """The hits are the best k of `scores`, in order, and carry those scores."""
    assert [hit.id for hit in hits] == ranking(scores)[:k]
    for hit in hits:
        assert hit.score == pytest.approx(scores[hit.id], rel=1e-12, abs=1e-12)


# ---- a collection and a served scorer


@dataclass
class Collection:
    root: Path
    store: CollectionStore
    documents: dict[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def create(cls, root: Path, name: str = "c", *, tenant: str = "default", dim: int = DIM) -> Collection:
        spec = CollectionSpec(name=name, model="", recipe_hash="", token_dim=dim)
        entry = Catalogue(root, sync=lambda _: None).create(tenant, spec)
        options = StoreOptions(durability=Durability.PROCESS)
        return cls(root, CollectionStore(root, tenant, entry, options))

    def put(self, documents: dict[str, np.ndarray], chunks: dict[str, list[int]] | None = None) -> Version:
        """One commit, hence one fragment."""
        stored = [
            StoredDocument(
                id=name, text=None, fields={}, tokens=vectors.astype(np.float16),
                chunk_offsets=np.array((chunks or {}).get(name, []), np.int32),
            )
            for name, vectors in documents.items()
        ]  # fmt: skip
        self.documents.update({document.id: document.tokens for document in stored})
        return self.store.upsert(stored).version

    def fragments(self, version: Version) -> list[int]:
        return [ref.fragment_id for ref in self.store.fragments(version)]

    def index(self, version: Version, /, **changes: Any) -> pb.IndexRef:
        options = {"tenant": "default", "token_dimension": self.store.spec.token_dim, **changes}
        wire = rpb.Version(incarnation=version.incarnation, number=version.number)
        return pb.IndexRef(version=wire, **options)

    def request(
        self, version: Version, query: np.ndarray, k: int = 10, /, **changes: Any
    ) -> pb.LeafSearchRequest:
        options = {
            "index": self.index(version),
            "fragments": [pb.FragmentSelection(fragment_id=one) for one in self.fragments(version)],
            "query": encode_tensor(query, FLOAT32),
            "k": k,
            **changes,
        }
        return pb.LeafSearchRequest(**options)


@dataclass
class Served:
    runtime: ScorerRuntime
    client: RpcClient
    target: str
    metrics: Metrics

    async def __call__(self, method: str, request: object, **options: Any) -> Any:
        options.setdefault("timeout_s", 30.0)
        return await self.client.call(self.target, ScorerServiceStub, method, request, **options)

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, labels)


@asynccontextmanager
async def serving(
    root: Path,
    cache: Path,
    *,
    access: AccessSettings | None = None,
    key: str | None = None,
    scanner: Scanner = CPU,
    **settings: Any,
) -> AsyncIterator[Served]:
    metrics = Metrics()
    options = {"port": 0, "admin_port": 0, "threads": 2, **settings}
    runtime = ScorerRuntime(ScorerSettings(**options), root, cache, metrics, scanner=scanner)
    rpc = RpcSettings(drain_s=5.0)
    server = RpcServer(
        role="scorer", server=ServerSettings(port=0, admin_port=0), rpc=rpc, access=access or AccessSettings(),
        metrics=metrics,
    )  # fmt: skip
    server.add(SERVICE, add_ScorerServiceServicer_to_server, runtime.servicer)
    await runtime.start()
    port = await server.start()
    client = RpcClient(rpc=rpc, key=key)
    try:
        yield Served(runtime, client, f"127.0.0.1:{port}", metrics)
    finally:
        await client.close()
        await server.drain()
        await runtime.drain()
        await runtime.close()


def random_documents(
    rng: np.random.Generator, count: int, prefix: str, longest: int = 12
) -> dict[str, np.ndarray]:
    """Ragged, some empty, some alike, similarities of both signs."""
    documents: dict[str, np.ndarray] = {}
    for i in range(count):
        length = 0 if i % 9 == 4 else int(rng.integers(0, longest))
        vectors = rng.standard_normal((length, DIM)).astype(np.float16)
        if documents and rng.random() < 0.15:
            vectors = documents[list(documents)[int(rng.integers(len(documents)))]]
        documents[f"{prefix}{i:03}"] = vectors
    return documents


@dataclass
class Corpus:
    collection: Collection
    version: Version
    query: np.ndarray


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    rng = np.random.default_rng(7)
    collection = Collection.create(tmp_path_factory.mktemp("root"))
    for prefix in "abcd":
        version = collection.put(random_documents(rng, 40, prefix))
    # All similarities with these are negative.
    query = rng.standard_normal((5, DIM)).astype(np.float32)
    version = collection.put({"neg": np.tile(-query.sum(axis=0), (3, 1)), "one": query[:1]})
    return Corpus(collection, version, query)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def served(corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    async with serving(corpus.collection.root, tmp_path_factory.mktemp("cache")) as served:
        yield served


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0.005)


# ---- LeafSearch equals brute force


@pytest.mark.parametrize("k", [1, 7, 1000])
@pytest.mark.parametrize("query_tokens", [1, 5, 33])
async def test_search_equals_brute_force_order_included(
    served: Served, corpus: Corpus, k: int, query_tokens: int
) -> None:
    query = np.random.default_rng(query_tokens).standard_normal((query_tokens, DIM)).astype(np.float32)
    reply = await served("LeafSearch", corpus.collection.request(corpus.version, query, k))
    scores = brute_force(query, corpus.collection.documents)
    assert len(scores) < len(corpus.collection.documents)  # some documents are empty
    assert_ranked(reply.hits, scores, k)
    assert list(reply.searched_fragments) == corpus.collection.fragments(corpus.version)
    assert not reply.failures
    coverage = reply.coverage
    assert (coverage.fragments, coverage.searched_fragments) == (5, 5)
    assert coverage.documents == len(scores)
    assert coverage.tokens == sum(map(len, corpus.collection.documents.values()))
    assert coverage.exact
    assert coverage.candidates == rpb.CANDIDATE_SOURCE_EXHAUSTIVE


async def test_a_scorer_with_a_device_answers_the_same_and_says_what_scans(
    served: Served, corpus: Corpus, tmp_path: Path
) -> None:
    request = corpus.collection.request(corpus.version, corpus.query, 25)
    scanner = DeviceScanner("cpu", 1 << 30)
    async with serving(corpus.collection.root, tmp_path, scanner=scanner) as other:
        reply = await other("LeafSearch", request)
        assert list(reply.hits) == list((await served("LeafSearch", request)).hits)
        assert reply.coverage.exact
        assert (await other("GetLoad", pb.GetLoadRequest())).kernel == "cpu-torch-float16"
    assert scanner.resident_bytes == 2 * DIM * reply.coverage.tokens


async def test_alike_documents_tie_by_id_whatever_fragment_they_lie_in(
    served: Served, tmp_path: Path
) -> None:
    collection = Collection.create(tmp_path)
    vectors = np.random.default_rng(3).standard_normal((9, DIM)).astype(np.float16)
    for names_ in (["z", "m"], ["a", "y"], ["k"]):
        version = collection.put(dict.fromkeys(names_, vectors))
    query = np.random.default_rng(4).standard_normal((3, DIM)).astype(np.float32)
    async with serving(tmp_path, tmp_path / "cache") as own:
        for k in (1, 3, 5):
            reply = await own("LeafSearch", collection.request(version, query, k))
            assert [hit.id for hit in reply.hits] == ["a", "k", "m", "y", "z"][:k]
            assert len({hit.score for hit in reply.hits}) == 1


async def test_mean_divides_by_the_querys_vectors(served: Served, corpus: Corpus) -> None:
    collection = corpus.collection
    index = collection.index(corpus.version, reduction=rpb.MAX_SIM_REDUCTION_MEAN)
    reply = await served("LeafSearch", collection.request(corpus.version, corpus.query, 20, index=index))
    assert_ranked(reply.hits, brute_force(corpus.query, collection.documents, mean=True), 20)


async def test_long_documents_score_as_their_best_chunk(tmp_path: Path) -> None:
    rng = np.random.default_rng(11)
    collection = Collection.create(tmp_path)
    long = rng.standard_normal((10, DIM)).astype(np.float16)
    version = collection.put({"long": long, "short": long[:4]}, {"long": [4, 7]})
    query = rng.standard_normal((4, DIM)).astype(np.float32)
    pieces = {"0": long[:4], "1": long[4:7], "2": long[7:]}
    scores = {"long": max(brute_force(query, pieces).values()), "short": brute_force(query, pieces)["0"]}
    async with serving(tmp_path, tmp_path / "cache") as own:
        assert_ranked((await own("LeafSearch", collection.request(version, query))).hits, scores, 10)


async def test_only_the_named_fragments_are_searched(served: Served, corpus: Corpus) -> None:
    collection = corpus.collection
    second = collection.fragments(corpus.version)[1]
    request = collection.request(
        corpus.version, corpus.query, 1000, fragments=[pb.FragmentSelection(fragment_id=second)]
    )
    reply = await served("LeafSearch", request)
    mine = {name: vectors for name, vectors in collection.documents.items() if name.startswith("b")}
    assert_ranked(reply.hits, brute_force(corpus.query, mine), 1000)
    assert {hit.fragment_id for hit in reply.hits} == {second}
    names_ = list(mine)
    assert all(names_[hit.row] == hit.id for hit in reply.hits)


async def test_no_fragments_give_no_hits(served: Served, corpus: Corpus) -> None:
    reply = await served("LeafSearch", corpus.collection.request(corpus.version, corpus.query, fragments=[]))
    assert not reply.hits
    assert reply.coverage.fragments == 0


async def test_two_scorers_equal_one_bit_for_bit(served: Served, corpus: Corpus, tmp_path: Path) -> None:
    collection, k = corpus.collection, 25
    whole = await served("LeafSearch", collection.request(corpus.version, corpus.query, k))
    selections = [pb.FragmentSelection(fragment_id=one) for one in collection.fragments(corpus.version)]
    async with serving(collection.root, tmp_path / "other", threads=1) as other:
        halves = [
            await one("LeafSearch", collection.request(corpus.version, corpus.query, k, fragments=part))
            for one, part in ((served, selections[::2]), (other, selections[1::2]))
        ]
    merged = sorted((hit for half in halves for hit in half.hits), key=lambda hit: (-hit.score, hit.id))
    assert merged[:k] == list(whole.hits)


def bitmap(rows: Sequence[int], count: int) -> bytes:
    packed = bytearray((count + 7) // 8)
    for row in rows:
        packed[row // 8] |= 1 << row % 8
    return bytes(packed)


async def test_a_bitmap_restricts_the_rows(served: Served, corpus: Corpus) -> None:
    collection = corpus.collection
    first, second, third, *_ = collection.fragments(corpus.version)
    allowed = [0, 7, 8, 39]
    request = collection.request(
        corpus.version,
        corpus.query,
        1000,
        fragments=[
            pb.FragmentSelection(fragment_id=first, allowed_rows=bitmap(allowed, 40)),
            pb.FragmentSelection(fragment_id=second, allowed_rows=bitmap([], 40)),
            pb.FragmentSelection(fragment_id=third, allowed_rows=b"\xff" * 4),
        ],
    )
    reply = await served("LeafSearch", request)
    mine = {f"a{row:03}": collection.documents[f"a{row:03}"] for row in allowed}
    assert_ranked(reply.hits, brute_force(corpus.query, mine), 1000)
    # Too short a bitmap is that fragment's fault alone.
    assert list(reply.searched_fragments) == [first, second]
    (failure,) = reply.failures
    assert (failure.fragment_id, failure.retryable) == (third, False)
    assert (failure.error.code, failure.error.field) == (3, "fragments[2].allowed_rows")


# ---- versions and deletions


async def test_deletions_and_versions_share_one_segment(tmp_path: Path) -> None:
    collection = Collection.create(tmp_path)
    rng = np.random.default_rng(5)
    documents = {name: rng.standard_normal((4, DIM)).astype(np.float16) for name in "abc"}
    before = collection.put(documents)
    query = rng.standard_normal((3, DIM)).astype(np.float32)
    after = collection.store.delete(["b"]).version
    async with serving(tmp_path, tmp_path / "cache") as own:
        new = await own("LeafSearch", collection.request(after, query))
        old = await own("LeafSearch", collection.request(before, query))
        assert_ranked(old.hits, brute_force(query, documents), 10)
        assert [hit for hit in old.hits if hit.id != "b"] == list(new.hits)
        assert "b" in [hit.id for hit in old.hits]
        assert own.value("phasemesh_segment_derivations_total") == 1


async def test_after_a_restart_segments_are_mapped_not_derived(tmp_path: Path) -> None:
    collection = Collection.create(tmp_path)
    version = collection.put(random_documents(np.random.default_rng(1), 20, "a"))
    query = np.random.default_rng(2).standard_normal((3, DIM)).astype(np.float32)
    replies = []
    for derivations, mapped in ((1, 0), (0, 1)):
        async with serving(tmp_path, tmp_path / "cache") as own:
            replies.append(await own("LeafSearch", collection.request(version, query)))
            await own("LeafSearch", collection.request(version, query))
            await own("GetLoad", pb.GetLoadRequest())
            assert own.value("phasemesh_segment_derivations_total") == derivations
            assert own.value("phasemesh_segment_cache_hits_total", tier="disk") == mapped
            assert own.value("phasemesh_segment_cache_hits_total", tier="memory") == 1
    assert list(replies[0].hits) == list(replies[1].hits)


@pytest.mark.parametrize(
    ("change", "reason", "field_"),
    [
        ({"number": 99}, "VERSION_NOT_FOUND", "index.version.number"),
        ({"incarnation": "0" * 32}, "COLLECTION_GONE", "index.version.incarnation"),
    ],
)
async def test_what_is_gone_is_not_found(
    served: Served, corpus: Corpus, change: dict[str, Any], reason: str, field_: str
) -> None:
    request = corpus.collection.request(corpus.version, corpus.query, fragments=[])
    for name, value in change.items():
        setattr(request.index.version, name, value)
    before = sorted(path.name for path in (corpus.collection.root / "default").iterdir())
    with pytest.raises(NotFound) as refused:
        await served("LeafSearch", request)
    assert (refused.value.reason, refused.value.field) == (reason, field_)
    # Asking for a collection must not make one.
    assert sorted(path.name for path in (corpus.collection.root / "default").iterdir()) == before


async def test_a_recreated_collection_answers_no_old_version(tmp_path: Path) -> None:
    old = Collection.create(tmp_path)
    version = old.put({"a": np.ones((2, DIM))})
    Catalogue(tmp_path).delete("default", "c")
    new = Collection.create(tmp_path)
    new.put({"b": np.ones((2, DIM))})
    query = np.ones((1, DIM), np.float32)
    request = old.request(version, query)
    request.index.version.incarnation = new.store.incarnation
    async with serving(tmp_path, tmp_path / "cache") as own:
        reply = await own("LeafSearch", request)
        assert "a" not in [hit.id for hit in reply.hits]
        shutil.rmtree(tmp_path / "default" / f"{version.incarnation}.lance")
        with pytest.raises(NotFound):
            await own("LeafSearch", pb.LeafSearchRequest(
                index=old.index(version), query=encode_tensor(query, FLOAT32), k=1))  # fmt: skip


# ---- fragments that fail alone


async def test_a_fragment_that_is_not_in_the_version_fails_alone(served: Served, corpus: Corpus) -> None:
    collection = corpus.collection
    first = collection.fragments(corpus.version)[0]
    for missing in (77, 2**40):
        selections = [pb.FragmentSelection(fragment_id=one) for one in (missing, first)]
        reply = await served(
            "LeafSearch", collection.request(corpus.version, corpus.query, fragments=selections)
        )
        assert list(reply.searched_fragments) == [first]
        assert reply.hits
        (failure,) = reply.failures
        assert (failure.fragment_id, failure.error.code, failure.retryable) == (missing, 5, False)
        assert failure.error.reason == "FRAGMENT_NOT_FOUND"
        assert (reply.coverage.fragments, reply.coverage.searched_fragments) == (2, 1)


async def test_a_fragment_whose_file_is_gone_fails_alone_and_may_be_retried(tmp_path: Path) -> None:
    collection = Collection.create(tmp_path)
    rng = np.random.default_rng(8)
    collection.put(random_documents(rng, 10, "a"))
    version = collection.put(random_documents(rng, 10, "b"))
    lost, kept = collection.store.fragments(version)
    request = collection.request(version, np.ones((2, DIM), np.float32))
    (tmp_path / "default" / f"{version.incarnation}.lance" / "data" / lost.data_key).unlink()
    async with serving(tmp_path, tmp_path / "cache") as own:
        reply = await own("LeafSearch", request)
        assert list(reply.searched_fragments) == [kept.fragment_id]
        assert {hit.id[0] for hit in reply.hits} == {"b"}
        (failure,) = reply.failures
        assert (failure.fragment_id, failure.retryable) == (lost.fragment_id, True)
        assert str(tmp_path) not in failure.error.message


async def test_a_bug_in_one_fragment_spares_its_neighbours(
    served: Served, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    collection = corpus.collection
    bad = collection.fragments(corpus.version)[2]
    real = search_module.leaf_search

    def buggy(sources: Any, *args: Any, **options: Any) -> Any:
        if any(source.fragment_id == bad for source in sources):
            raise RuntimeError("secret words")
        return real(sources, *args, **options)

    monkeypatch.setattr(search_module, "leaf_search", buggy)
    reply = await served("LeafSearch", collection.request(corpus.version, corpus.query, 1000))
    (failure,) = reply.failures
    assert (failure.fragment_id, failure.error.reason) == (bad, "INTERNAL")
    assert "secret" not in failure.error.message
    rest = {name: vectors for name, vectors in collection.documents.items() if not name.startswith("c")}
    assert_ranked(reply.hits, brute_force(corpus.query, rest), 1000)


# ---- requests that are refused


def bad(array: np.ndarray, row: int, value: float) -> np.ndarray:
    changed = array.copy()
    changed[row] = value
    return changed


QUERY = np.ones((3, DIM), np.float32)


@pytest.mark.parametrize(
    ("change", "reason", "field_"),
    [
        ({"k": 0}, "BAD_K", "k"),
        ({"k": 2**31}, "BAD_K", "k"),
        ({"candidate_limit": 3}, "BAD_CANDIDATE_LIMIT", "candidate_limit"),
        ({"query": None}, "EMPTY_QUERY", "query"),
        ({"query": common.Tensor(shape=[0, DIM])}, "EMPTY_QUERY", "query"),
        ({"query": encode_tensor(np.ones((3, DIM + 1), np.float32), FLOAT32)}, "WRONG_DIMENSION", "query"),
        ({"query": encode_tensor(np.ones(DIM, np.float32), FLOAT32)}, "WRONG_DIMENSION", "query"),
        ({"query": encode_tensor(bad(QUERY, 1, np.nan), FLOAT32)}, "NOT_FINITE", "query"),
        ({"query": encode_tensor(bad(QUERY, 2, np.inf), FLOAT16)}, "NOT_FINITE", "query"),
        ({"query": encode_tensor(bad(QUERY, 0, 0.0), FLOAT32)}, "ZERO_VECTOR", "query"),
        ({"query": encode_tensor(bad(QUERY, 0, -0.0), FLOAT32)}, "ZERO_VECTOR", "query"),
        ({"query": encode_tensor(bad(QUERY, 0, 3e38), FLOAT32)}, "VALUE_TOO_LARGE", "query"),
        ({"query": common.Tensor(dtype=common.DTYPE_FLOAT32, shape=[1, DIM], data=b"12")}, "BAD_TENSOR", "query.data"),
        ({"candidates": 77}, "UNKNOWN_CANDIDATE_SOURCE", "candidates"),
        ({"fragments": [pb.FragmentSelection(fragment_id=0)] * 2}, "DUPLICATE_FRAGMENT", "fragments[1].fragment_id"),
    ],
)  # fmt: skip
async def test_a_bad_request_names_its_field(
    served: Served, corpus: Corpus, change: dict[str, Any], reason: str, field_: str
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        await served("LeafSearch", corpus.collection.request(corpus.version, QUERY, **change))
    assert (refused.value.reason, refused.value.field) == (reason, field_)


@pytest.mark.parametrize(
    ("change", "reason", "field_"),
    [
        ({"token_dimension": DIM * 2}, "WRONG_DIMENSION", "index.token_dimension"),
        ({"token_dimension": 0}, "BAD_DIMENSION", "index.token_dimension"),
        ({"codec": 9}, "UNKNOWN_CODEC", "index.codec"),
        ({"reduction": 9}, "UNKNOWN_REDUCTION", "index.reduction"),
        (
            {"version": rpb.Version(incarnation="../../etc", number=1)},
            "BAD_VERSION",
            "index.version.incarnation",
        ),
        ({"version": rpb.Version(incarnation="0" * 32)}, "BAD_VERSION", "index.version.number"),
    ],
)
async def test_a_bad_index_names_its_field(
    served: Served, corpus: Corpus, change: dict[str, Any], reason: str, field_: str
) -> None:
    index = corpus.collection.index(corpus.version)
    index.MergeFrom(pb.IndexRef(**{name: value for name, value in change.items() if name != "version"}))
    if "version" in change:
        index.version.CopyFrom(change["version"])
    if change.get("token_dimension") == 0:
        index.ClearField("token_dimension")
    query = np.ones((1, index.token_dimension or 1), np.float32)
    with pytest.raises(InvalidArgument) as refused:
        await served("LeafSearch", corpus.collection.request(corpus.version, query, index=index))
    assert (refused.value.reason, refused.value.field) == (reason, field_)


async def test_later_tiers_are_unimplemented(served: Served, corpus: Corpus) -> None:
    with pytest.raises(Unimplemented):
        await served(
            "LeafSearch",
            corpus.collection.request(corpus.version, QUERY, candidates=rpb.CANDIDATE_SOURCE_PRUNED),
        )


async def test_a_callers_key_reads_its_own_tenant_only(corpus: Corpus, tmp_path: Path) -> None:
    keys = [
        {"name": "gateway", "key": "mesh-secret", "role": "mesh"},
        {"name": "team", "key": "team-secret", "tenant": "team"},
    ]
    access = AccessSettings.model_validate({"keys": keys})
    request = corpus.collection.request(corpus.version, corpus.query)
    root = corpus.collection.root
    async with serving(root, tmp_path / "1", access=access, key="team-secret") as own:
        with pytest.raises(PermissionDenied):
            await own("LeafSearch", request)
        request.index.tenant = "../default"
        with pytest.raises(PermissionDenied):
            await own("LeafSearch", request)
    request.index.tenant = "default"
    async with serving(root, tmp_path / "2", access=access, key="mesh-secret") as own:
        assert (await own("LeafSearch", request)).hits
        request.index.tenant = "../default"
        with pytest.raises(InvalidArgument):
            await own("LeafSearch", request)
        request.index.tenant = ""
        assert (await own("LeafSearch", request, caller=Caller("x", "default", "caller"))).hits
        with pytest.raises(NotFound):
            await own("LeafSearch", request, caller=Caller("x", "nobody", "caller"))


# ---- LeafScore


async def test_rows_are_scored_in_order_and_empty_documents_have_no_score(
    served: Served, corpus: Corpus
) -> None:
    collection = corpus.collection
    first, second, *_ = collection.fragments(corpus.version)
    rows = {second: [5, 0, 5, 39], first: list(range(40))}
    request = pb.LeafScoreRequest(
        index=collection.index(corpus.version),
        fragments=[pb.FragmentRows(fragment_id=one, rows=which) for one, which in rows.items()],
        query=encode_tensor(corpus.query, FLOAT32),
    )
    reply = await served("LeafScore", request)
    expected = brute_force(corpus.query, collection.documents)
    asked = [(second, f"b{row:03}", row) for row in rows[second]] + [
        (first, f"a{row:03}", row) for row in rows[first]
    ]
    assert [(one.fragment_id, one.id, one.row) for one in reply.scores] == asked
    assert not reply.failures
    assert any(not one.HasField("score") for one in reply.scores)
    for one in reply.scores:
        assert one.HasField("score") == (one.id in expected)
        if one.id in expected:
            assert one.score == pytest.approx(expected[one.id], rel=1e-12, abs=1e-12)
        assert not one.best_tokens


async def test_alignment_names_each_query_vectors_best_token(served: Served, corpus: Corpus) -> None:
    collection = corpus.collection
    request = pb.LeafScoreRequest(
        index=collection.index(corpus.version),
        fragments=[pb.FragmentRows(fragment_id=collection.fragments(corpus.version)[0], rows=range(40))],
        query=encode_tensor(corpus.query, FLOAT32),
        include_alignment=True,
    )
    for one in (await served("LeafScore", request)).scores:
        vectors = collection.documents[one.id].astype(np.float64)
        if not len(vectors):
            assert not one.best_tokens
            continue
        similarities = corpus.query.astype(np.float64) @ vectors.T
        assert list(one.best_tokens) == similarities.argmax(axis=1).tolist()
        np.testing.assert_allclose(one.best_similarities, similarities.max(axis=1), rtol=1e-6)


async def test_rows_that_are_not_there_are_named_and_spare_the_others(tmp_path: Path) -> None:
    collection = Collection.create(tmp_path)
    collection.put({name: np.ones((2, DIM)) for name in "abc"})
    version = collection.store.delete(["b"]).version
    (fragment,) = collection.fragments(version)
    request = pb.LeafScoreRequest(
        index=collection.index(version),
        fragments=[
            pb.FragmentRows(fragment_id=fragment, rows=[0, 1, 2, 3, 2**64 - 1]),
            pb.FragmentRows(fragment_id=55, rows=[0]),
        ],
        query=encode_tensor(QUERY, FLOAT32),
    )
    async with serving(tmp_path, tmp_path / "cache") as own:
        reply = await own("LeafScore", request)
    assert [(one.id, one.score) for one in reply.scores] == [("a", 3.0 * DIM), ("c", 3.0 * DIM)]
    reasons = {failure.fragment_id: failure.error for failure in reply.failures}
    assert reasons[fragment].reason == "ROW_NOT_FOUND"
    assert f"1, 3, {2**64 - 1}" in reasons[fragment].message
    assert reasons[55].reason == "FRAGMENT_NOT_FOUND"


# ---- MaxSim


def maxsim_request(query: np.ndarray, documents: Sequence[np.ndarray], /, **changes: Any) -> pb.MaxSimRequest:
    offsets = np.cumsum([0, *map(len, documents)]).tolist()
    rows = np.concatenate([np.zeros((0, query.shape[1]), np.float32), *documents])
    options = {
        "query": encode_tensor(query, FLOAT32),
        "documents": encode_tensor(rows, FLOAT32),
        "row_offsets": offsets,
        **changes,
    }
    return pb.MaxSimRequest(**options)


@pytest.mark.parametrize("encoding", [common.VECTOR_ENCODING_UNSPECIFIED, FLOAT32, FLOAT16])
@pytest.mark.parametrize("mean", [False, True])
async def test_maxsim_equals_brute_force(served: Served, encoding: Any, mean: bool) -> None:
    rng = np.random.default_rng(9)
    documents = [rng.standard_normal((n, DIM)).astype(np.float16) for n in (3, 0, 1, 700, 0)]
    query = rng.standard_normal((33, DIM)).astype(np.float32)
    rows = np.concatenate(documents)
    reduction = rpb.MAX_SIM_REDUCTION_MEAN if mean else rpb.MAX_SIM_REDUCTION_UNSPECIFIED
    reply = await served(
        "MaxSim",
        maxsim_request(query, documents, documents=encode_tensor(rows, encoding), reduction=reduction),
    )
    expected = brute_force(query, {str(i): one for i, one in enumerate(documents)}, mean=mean)
    assert len(reply.scores) == 5
    for i, one in enumerate(reply.scores):
        assert not one.HasField("error")
        assert one.HasField("score") == (str(i) in expected)
        if str(i) in expected:
            assert one.score == pytest.approx(expected[str(i)], rel=1e-5, abs=1e-5)


async def test_a_bad_document_fails_alone(served: Served) -> None:
    good = np.ones((2, DIM), np.float32)
    documents = [
        good, bad(good, 1, np.nan), good[:0], bad(good, 0, -np.inf), bad(good, 1, 0.0), bad(good, 0, 3e38), good * 2,
    ]  # fmt: skip
    reply = await served("MaxSim", maxsim_request(QUERY, documents))
    found = [
        (one.error.reason, one.error.field, one.error.code) if one.HasField("error") else one.score
        for one in reply.scores
    ]
    assert found == [
        3.0 * DIM,
        ("NOT_FINITE", "documents[1]", 3),
        0.0,
        ("NOT_FINITE", "documents[3]", 3),
        ("ZERO_VECTOR", "documents[4]", 3),
        ("VALUE_TOO_LARGE", "documents[5]", 3),
        6.0 * DIM,
    ]
    assert not reply.scores[2].HasField("score")
    assert "token vector 1" in reply.scores[1].error.message


@pytest.mark.parametrize(
    ("change", "reason", "field_"),
    [
        ({"row_offsets": []}, "BAD_OFFSETS", "row_offsets"),
        ({"row_offsets": [1, 2]}, "BAD_OFFSETS", "row_offsets"),
        ({"row_offsets": [0, 2, 1, 2]}, "BAD_OFFSETS", "row_offsets"),
        ({"row_offsets": [0, 2**63]}, "BAD_OFFSETS", "row_offsets"),
        ({"query": encode_tensor(np.ones((1, DIM + 1), np.float32), FLOAT32)}, "WRONG_DIMENSION", "query"),
        ({"query": encode_tensor(bad(QUERY, 1, 0), FLOAT32)}, "ZERO_VECTOR", "query"),
        ({"query": None}, "EMPTY_QUERY", "query"),
        ({"documents": None}, "EMPTY_INPUT", "documents"),
        ({"reduction": 7}, "UNKNOWN_REDUCTION", "reduction"),
    ],
)
async def test_a_bad_maxsim_request_names_its_field(
    served: Served, change: dict[str, Any], reason: str, field_: str
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        await served("MaxSim", maxsim_request(QUERY, [np.ones((2, DIM), np.float32)], **change))
    assert (refused.value.reason, refused.value.field) == (reason, field_)


async def test_no_documents_give_no_scores(served: Served) -> None:
    assert not (await served("MaxSim", maxsim_request(QUERY, []))).scores


# ---- warming and load


async def test_warmed_fragments_are_resident_and_counted(tmp_path: Path) -> None:
    collection = Collection.create(tmp_path)
    rng = np.random.default_rng(6)
    collection.put(random_documents(rng, 30, "a"))
    version = collection.put(random_documents(rng, 30, "b"))
    ids = collection.fragments(version)
    async with serving(tmp_path, tmp_path / "cache", capacity_bytes=2**20) as own:
        empty = await own("GetLoad", pb.GetLoadRequest())
        assert (empty.resident_bytes, empty.capacity_bytes, empty.cached_bytes) == (0, 2**20, 0)
        warm = pb.WarmFragmentsRequest(index=collection.index(version), fragment_ids=[*ids, 99])
        reply = await own("WarmFragments", warm)
        assert list(reply.resident_fragments) == ids
        assert [(one.fragment_id, one.error.code) for one in reply.failures] == [(99, 5)]
        load = await own("GetLoad", pb.GetLoadRequest())
        assert load.resident_segments == 2
        assert (load.kernel, load.kernel_warning) == (kernel_name(), slow_kernel())
        tokens = sum(map(len, collection.documents.values()))
        # The codes, or the vectors where there are none, and little beside them.
        assert tokens * DIM < load.resident_bytes < load.cached_bytes
        assert load.cached_bytes == sum(
            path.stat().st_size for path in (tmp_path / "cache").glob("*.safetensors")
        )
        assert (load.queued_scan_work, load.running_searches) == (0, 0)
        assert own.value("phasemesh_segment_resident_bytes") == load.resident_bytes
        assert own.value("phasemesh_segment_cached_bytes") == load.cached_bytes
        await own("LeafSearch", collection.request(version, QUERY))
        assert own.value("phasemesh_segment_derivations_total") == 2


async def test_what_finds_no_room_is_told_and_still_searched(tmp_path: Path) -> None:
    collection = Collection.create(tmp_path)
    rng = np.random.default_rng(6)
    version = collection.put({f"d{i}": rng.standard_normal((200, DIM)) for i in range(400)})
    (fragment,) = collection.fragments(version)
    async with serving(tmp_path, tmp_path / "cache", capacity_bytes=2**20) as own:
        warm = pb.WarmFragmentsRequest(index=collection.index(version), fragment_ids=[fragment])
        reply = await own("WarmFragments", warm)
        assert not reply.resident_fragments
        assert [one.error.reason for one in reply.failures] == ["NO_ROOM"]
        found = await own("LeafSearch", collection.request(version, QUERY, 3))
        assert_ranked(found.hits, brute_force(QUERY, collection.documents), 3)
        load = await own("GetLoad", pb.GetLoadRequest())
        assert (load.resident_bytes, load.resident_segments) == (0, 0)
        assert own.value("phasemesh_segment_derivations_total") == 1
        assert own.value("phasemesh_segment_cold_total") == 2


def two_large_fragments(root: Path) -> tuple[Collection, Version]:
    """Of which one fits a mebibyte, and not both."""
    collection = Collection.create(root)
    rng = np.random.default_rng(6)
    for prefix in "ab":
        version = collection.put({f"{prefix}{i}": rng.standard_normal((100, DIM)) for i in range(400)})
    return collection, version


async def resident(own: Served, collection: Collection, version: Version, fragment_id: int) -> bool:
    warm = pb.WarmFragmentsRequest(index=collection.index(version), fragment_ids=[fragment_id])
    return bool((await own("WarmFragments", warm)).resident_fragments)


async def test_a_search_that_is_over_lets_its_segments_go(tmp_path: Path) -> None:
    collection, version = two_large_fragments(tmp_path)
    first, second = collection.fragments(version)
    selected = [pb.FragmentSelection(fragment_id=first)]
    async with serving(tmp_path, tmp_path / "cache", capacity_bytes=2**20) as own:
        await own("LeafSearch", collection.request(version, QUERY, fragments=selected))
        assert await resident(own, collection, version, second)
        await own("GetLoad", pb.GetLoadRequest())
        assert own.value("phasemesh_segment_evictions_total") == 1


async def test_a_search_cancelled_while_it_loads_lets_its_segments_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    collection, version = two_large_fragments(tmp_path)
    first, second = collection.fragments(version)
    deriving, go = threading.Event(), threading.Event()
    real = Snapshot.derive

    def held(self: Snapshot, *args: Any) -> Any:
        deriving.set()
        assert go.wait(20)
        return real(self, *args)

    monkeypatch.setattr(Snapshot, "derive", held)
    selected = [pb.FragmentSelection(fragment_id=first)]
    async with serving(tmp_path, tmp_path / "cache", capacity_bytes=2**20) as own:
        loading = asyncio.create_task(
            own("LeafSearch", collection.request(version, QUERY, fragments=selected))
        )
        await until(deriving.is_set)
        load = await own("GetLoad", pb.GetLoadRequest())
        assert load.queued_scan_work == 40_000
        loading.cancel()
        await until(lambda: own.value("phasemesh_scorer_queued_scan_work") == 0)
        go.set()
        # Its segment is loaded all the same, and then in nobody's use.
        assert await resident(own, collection, version, first)
        assert await resident(own, collection, version, second)


# ---- bounds, cancellation, drain


class Held:
    """Every scan stays on its thread until `go`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        self.scans = 0
        real = search_module.leaf_search

        def held(sources: Any, *args: Any, **options: Any) -> Any:
            self.scans += 1
            assert self.go.wait(20)
            return real(sources, *args, **options)

        monkeypatch.setattr(search_module, "leaf_search", held)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    held = Held(monkeypatch)
    yield held
    held.go.set()


async def test_work_beyond_the_limit_is_refused_and_the_service_still_answers(
    corpus: Corpus, tmp_path: Path, held: Held
) -> None:
    request = corpus.collection.request(corpus.version, corpus.query)
    tokens = sum(map(len, corpus.collection.documents.values()))
    async with serving(
        corpus.collection.root, tmp_path / "cache", threads=1, max_queued_scan_work=tokens + 1
    ) as own:
        first = asyncio.create_task(own("LeafSearch", request))
        await until(lambda: held.scans == 1)
        second = asyncio.create_task(own("LeafSearch", request))
        while (await own("GetLoad", pb.GetLoadRequest())).queued_scan_work != tokens:
            await asyncio.sleep(0.005)
        load = await own("GetLoad", pb.GetLoadRequest())
        assert (load.queued_scan_work, load.running_searches) == (tokens, 1)
        with pytest.raises(ResourceExhausted) as refused:
            await own("LeafSearch", request)
        assert refused.value.retry_after_s
        held.go.set()
        replies = await asyncio.gather(first, second)
        assert list(replies[0].hits) == list(replies[1].hits)
        assert (await own("GetLoad", pb.GetLoadRequest())).queued_scan_work == 0


async def test_searches_that_waited_share_a_scan_and_answer_as_alone(
    corpus: Corpus, tmp_path: Path, held: Held
) -> None:
    rng = np.random.default_rng(3)
    queries = [rng.normal(size=(1 + n, DIM)).astype(np.float32) for n in range(5)]
    async with serving(corpus.collection.root, tmp_path / "cache", threads=1) as own:
        first = asyncio.create_task(
            own("LeafSearch", corpus.collection.request(corpus.version, corpus.query))
        )
        await until(lambda: held.scans == 1)
        tasks = [
            asyncio.create_task(own("LeafSearch", corpus.collection.request(corpus.version, query, 1 + n)))
            for n, query in enumerate(queries)
        ]
        tokens = sum(map(len, corpus.collection.documents.values()))
        while (await own("GetLoad", pb.GetLoadRequest())).queued_scan_work != tokens * len(queries):
            await asyncio.sleep(0.005)
        held.go.set()
        await first
        replies = await asyncio.gather(*tasks)
        assert own.value("phasemesh_shared_searches_total") == len(queries)
        for n, (query, reply) in enumerate(zip(queries, replies, strict=True)):
            assert_ranked(reply.hits, brute_force(query, corpus.collection.documents), 1 + n)
            alone = await own("LeafSearch", corpus.collection.request(corpus.version, query, 1 + n))
            assert list(alone.hits) == list(reply.hits)


async def test_a_cancelled_search_is_dropped_before_it_begins(
    corpus: Corpus, tmp_path: Path, held: Held
) -> None:
    request = corpus.collection.request(corpus.version, corpus.query)
    async with serving(corpus.collection.root, tmp_path / "cache", threads=1) as own:
        first = asyncio.create_task(own("LeafSearch", request))
        await until(lambda: held.scans == 1)
        second = asyncio.create_task(own("LeafSearch", request))
        await until(lambda: (own.value("phasemesh_scorer_queued_scan_work") or 0) > 0)
        second.cancel()
        await until(lambda: own.value("phasemesh_scorer_queued_scan_work") == 0)
        held.go.set()
        assert (await first).hits
        assert held.scans == 1


async def test_a_drain_refuses_what_is_new_and_finishes_what_was_begun(
    corpus: Corpus, tmp_path: Path, held: Held
) -> None:
    request = corpus.collection.request(corpus.version, corpus.query)
    async with serving(corpus.collection.root, tmp_path / "cache") as own:
        assert own.runtime.health().ok
        running = asyncio.create_task(own("LeafSearch", request))
        await until(lambda: held.scans > 0)
        draining = asyncio.create_task(own.runtime.drain())
        await asyncio.sleep(0)
        assert not own.runtime.health().ok
        with pytest.raises(Unavailable):
            await own("LeafSearch", request)
        assert not draining.done()
        held.go.set()
        assert (await running).hits
        await draining


async def test_matrix_products_start_no_threads_of_their_own(tmp_path: Path) -> None:
    def counts() -> list[int]:
        return [library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas"]

    with threadpool_limits(2, user_api="blas"):
        async with serving(tmp_path, tmp_path / "cache"):
            assert set(counts()) == {1}
        assert set(counts()) == {2}


# ---- health, series, spans


async def test_a_cache_folder_is_one_scorers_alone(tmp_path: Path) -> None:
    async with serving(tmp_path, tmp_path / "cache"):
        with pytest.raises(ScorerStartError, match=r"scorer\.cache_dir.*another scorer"):
            ScorerRuntime(ScorerSettings(), tmp_path, tmp_path / "cache", Metrics())
    (tmp_path / "file").write_text("")
    with pytest.raises(ScorerStartError, match=r"scorer\.cache_dir"):
        ScorerRuntime(ScorerSettings(), tmp_path, tmp_path / "file", Metrics())


async def test_it_is_not_ready_without_its_cache_folder(tmp_path: Path) -> None:
    now_s = 50.0
    runtime = ScorerRuntime(ScorerSettings(), tmp_path, tmp_path / "cache", Metrics(), now_s=lambda: now_s)
    await runtime.start()
    assert runtime.health().ok
    (tmp_path / "cache").rename(tmp_path / "moved")
    now_s += 2
    health = runtime.health()
    assert not health.ok
    assert "can't be written" in str(health.detail["cache_dir"])
    (tmp_path / "moved").rename(tmp_path / "cache")
    now_s += 2
    assert runtime.health().ok
    await runtime.close()


async def test_every_series_is_there_at_zero_from_the_start(tmp_path: Path) -> None:
    metrics = Metrics()
    runtime = ScorerRuntime(ScorerSettings(), tmp_path, tmp_path / "cache", metrics)
    await runtime.start()
    value = metrics.registry.get_sample_value
    for name in (
        "phasemesh_scorer_queued_scan_work", "phasemesh_scorer_running_searches", "phasemesh_scanned_tokens_total",
        "phasemesh_scanned_documents_total", "phasemesh_segment_resident_bytes", "phasemesh_segment_cached_bytes",
        "phasemesh_segment_derivations_total", "phasemesh_segment_evictions_total", "phasemesh_resident_segments",
        "phasemesh_shared_searches_total",
    ):  # fmt: skip
        assert value(name) == 0, name
    for tier in ("memory", "disk"):
        assert value("phasemesh_segment_cache_hits_total", {"tier": tier}) == 0
    for phase in ("score.load", "score.queue", "score.maxsim"):
        assert value("phasemesh_phase_duration_seconds_count", {"phase": phase, "model": ""}) == 0
    assert value("phasemesh_segment_capacity_bytes") == ScorerSettings().capacity_bytes
    await runtime.close()


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    configure_tracing(TracingSettings(), role="test", span_exporter=exporter)
    yield exporter
    shutdown_tracing()


async def test_spans_timings_and_series_tell_the_same_phases(
    corpus: Corpus, tmp_path: Path, spans: InMemorySpanExporter
) -> None:
    request = corpus.collection.request(corpus.version, corpus.query)
    async with serving(corpus.collection.root, tmp_path / "cache") as own:
        with tracer().start_as_current_span("caller"):
            reply = await own("LeafSearch", request)
        tokens = sum(map(len, corpus.collection.documents.values()))
        assert own.value("phasemesh_scanned_tokens_total") == tokens
        assert own.value("phasemesh_scanned_documents_total") == reply.coverage.documents
        phases = {phase.phase: phase for phase in reply.timings.phases}
        assert list(phases) == list(names.SCORE_PHASES)
        end_ns = 0
        for phase in reply.timings.phases:
            assert phase.start_offset_ns >= end_ns
            end_ns = phase.start_offset_ns + phase.duration_ns
            count = own.value("phasemesh_phase_duration_seconds_count", phase=phase.phase, model="")
            total = own.value("phasemesh_phase_duration_seconds_sum", phase=phase.phase, model="")
            assert (count, total) == (1, pytest.approx(phase.duration_ns / 1e9))
        assert end_ns <= reply.timings.total_ns
        assert phases["score.maxsim"].duration_ns > 0
    found = {span.name: span for span in spans.get_finished_spans()}
    server = next(
        span for span in spans.get_finished_spans()
        if span.name == f"{SERVICE}/LeafSearch" and span.kind.name == "SERVER"
    )  # fmt: skip
    for name, phase in phases.items():
        span = found[name]
        assert span.end_time - span.start_time == phase.duration_ns
        assert span.parent.span_id == server.context.span_id
        assert server.start_time <= span.start_time <= span.end_time <= server.end_time
    assert found["score.maxsim"].attributes[names.TOKENS] == tokens


async def test_a_refused_search_leaves_nothing_behind(served: Served, corpus: Corpus) -> None:
    for request in (
        corpus.collection.request(corpus.version, QUERY, k=0),
        corpus.collection.request(corpus.version, QUERY, index=corpus.collection.index(Version("0" * 32, 1))),
    ):
        with pytest.raises(PhasemeshError):
            await served("LeafSearch", request)
    load = await served("GetLoad", pb.GetLoadRequest())
    assert (load.queued_scan_work, load.running_searches) == (0, 0)
