"""Through the whole mesh: three models in one service give what the reference libraries give."""

import asyncio
import base64

import httpx
import numpy as np
import openai
import pytest
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer

from phasemesh.rpc.client import RpcClient
from phasemesh.rpc.codec import decode_tensor
from phasemesh.v1 import common_pb2 as common
from phasemesh.v1 import encoder_pb2 as pb
from phasemesh.v1.encoder_pb2_grpc import EncoderServiceStub
from tests.integration.mesh.conftest import Sources
from tests.mesh import Mesh

pytestmark = [pytest.mark.ray, pytest.mark.slow]

TEXTS = [
    "A mesh joins many nodes to each other.",
    "naïve café — 東京 \U0001f642\u200d\U0001f4a8 \u0000 NUL inside",
    "[CLS] looks like [SEP] special tokens [MASK]",
    "   ",
    "short",
    "One sentence after another makes a long text. " * 12,
]


def unit(matrix: np.ndarray) -> np.ndarray:
    return matrix / np.linalg.norm(matrix, axis=-1, keepdims=True)


async def call(client: RpcClient, mesh: Mesh, method: str, request: object) -> object:
    return await client.call(mesh.grpc, EncoderServiceStub, method, request, timeout_s=60)


@pytest.fixture(scope="module")
def reference(sources: Sources) -> np.ndarray:
    return SentenceTransformer(str(sources.minilm), device="cpu").encode(TEXTS, normalize_embeddings=True)


async def test_grpc_embeddings_equal_sentence_transformers(
    mesh: Mesh, client: RpcClient, reference: np.ndarray
) -> None:
    request = pb.EmbedRequest(
        model="minilm",
        inputs=[common.Input(text=text) for text in TEXTS],
        encoding=common.VECTOR_ENCODING_FLOAT32,
    )
    reply = await call(client, mesh, "Embed", request)
    got = decode_tensor(reply.dense, field="dense")
    assert (unit(got) * reference).sum(axis=1).min() >= 1 - 1e-5
    readable = pb.EmbedRequest(model="minilm", inputs=[common.Input(text=TEXTS[0])])
    values = (await call(client, mesh, "Embed", readable)).dense.values
    assert np.allclose(values, reference[0], atol=2e-5)


async def test_openai_client_unmodified(mesh: Mesh, reference: np.ndarray) -> None:
    async with openai.AsyncOpenAI(base_url=f"{mesh.rest}/v1", api_key="unused", max_retries=0) as api:
        by_default = await api.embeddings.create(model="minilm", input=TEXTS)
        as_floats = await api.embeddings.create(model="minilm", input=TEXTS, encoding_format="float")
        got = np.array([row.embedding for row in by_default.data])
        assert (got * reference).sum(axis=1).min() >= 1 - 1e-5
        assert np.array_equal(
            got.astype(np.float32), np.array([r.embedding for r in as_floats.data], np.float32)
        )
        assert [row.index for row in by_default.data] == list(range(len(TEXTS)))
        assert [model.id async for model in api.models.list()] == ["minilm", "cross", "colbert"]
        with pytest.raises(openai.NotFoundError) as unknown:
            await api.embeddings.create(model="nobody", input="x")
        assert unknown.value.body["code"] == "model_not_found"
        with pytest.raises(openai.BadRequestError) as cut:
            await api.embeddings.create(model="minilm", input="x", dimensions=17)
        assert cut.value.body["param"] == "dimensions"


async def test_rest_token_ids_equal_text(mesh: Mesh, client: RpcClient) -> None:
    tokenized = await call(client, mesh, "Tokenize", pb.TokenizeRequest(model="minilm", texts=[TEXTS[0]]))
    ids = list(tokenized.texts[0].ids)
    async with httpx.AsyncClient(base_url=mesh.rest) as http:
        vectors = []
        for given in (TEXTS[0], ids, [ids]):
            body = {"model": "minilm", "input": given, "encoding_format": "base64"}
            reply = await http.post("/v1/embeddings", json=body)
            assert reply.status_code == 200, reply.text
            assert reply.json()["usage"] == {"prompt_tokens": len(ids), "total_tokens": len(ids)}
            vectors.append(np.frombuffer(base64.b64decode(reply.json()["data"][0]["embedding"]), "<f4"))
    assert np.allclose(vectors[0], vectors[1], atol=1e-6)
    assert np.allclose(vectors[0], vectors[2], atol=1e-6)
    restored = await call(
        client, mesh, "Detokenize", pb.DetokenizeRequest(model="minilm", sequences=[common.TokenIds(ids=ids)])
    )
    assert restored.texts[0] == TEXTS[0].lower()


async def test_cross_encoder_scores_equal_the_reference(
    mesh: Mesh, client: RpcClient, sources: Sources
) -> None:
    query, documents = "what joins nodes", [*TEXTS[:3], "", TEXTS[4], TEXTS[5]]
    want = CrossEncoder(str(sources.cross), device="cpu").predict(
        [(query, document) for document in documents]
    )
    request = pb.ScoreRequest(
        model="cross",
        query=common.Input(text=query),
        documents=[common.Input(text=document) for document in documents],
        truncation=common.Truncation(enabled=True),
    )
    reply = await call(client, mesh, "Score", request)
    assert reply.score_type == common.SCORE_TYPE_CROSS_ENCODER
    assert np.allclose(reply.scores, want, atol=1e-4)
    async with httpx.AsyncClient(base_url=mesh.rest) as http:
        body = {"model": "cross", "query": query, "documents": documents}
        results = (await http.post("/v1/rerank", json=body)).json()["results"]
    sigmoid = 1 / (1 + np.exp(-want.astype(np.float64)))
    assert [row["index"] for row in results] == sorted(range(len(want)), key=lambda i: (-sigmoid[i], i))
    assert np.allclose([row["relevance_score"] for row in results], sorted(sigmoid, reverse=True), atol=1e-4)


async def test_late_interaction_scores_equal_the_reference(
    mesh: Mesh, client: RpcClient, sources: Sources
) -> None:
    model = MultiVectorEncoder(str(sources.colbert), device="cpu")
    query, documents = TEXTS[0], [text for text in TEXTS[1:] if text.strip()]
    q = np.asarray(model.encode_query([query])[0], np.float64)
    want = [
        float((q @ np.asarray(d, np.float64).T).max(axis=1).sum()) for d in model.encode_document(documents)
    ]
    request = pb.ScoreRequest(
        model="colbert",
        query=common.Input(text=query),
        documents=[common.Input(text=document) for document in documents],
        truncation=common.Truncation(enabled=True),
    )
    reply = await call(client, mesh, "Score", request)
    assert reply.score_type == common.SCORE_TYPE_LATE_INTERACTION
    assert np.allclose(reply.scores, want, atol=1e-3)

    embed = pb.EmbedRequest(
        model="colbert",
        inputs=[common.Input(text=document) for document in documents],
        role=common.INPUT_ROLE_DOCUMENT,
        encoding=common.VECTOR_ENCODING_FLOAT32,
        truncation=common.Truncation(enabled=True),
    )
    reply = await call(client, mesh, "Embed", embed)
    rows = decode_tensor(reply.token.vectors, field="token.vectors")
    for index, matrix in enumerate(model.encode_document(documents)):
        start, end = reply.token.row_offsets[index : index + 2]
        assert np.allclose(rows[start:end], np.asarray(matrix), atol=3e-5)


async def test_bi_encoder_scores_equal_the_reference(
    mesh: Mesh, client: RpcClient, reference: np.ndarray
) -> None:
    request = pb.ScoreRequest(
        model="minilm",
        query=common.Input(text=TEXTS[0]),
        documents=[common.Input(text=text) for text in TEXTS],
    )
    reply = await call(client, mesh, "Score", request)
    assert reply.score_type == common.SCORE_TYPE_BI_ENCODER
    assert np.allclose(reply.scores, reference @ reference[0], atol=2e-5)


async def test_three_models_at_once(mesh: Mesh, client: RpcClient, reference: np.ndarray) -> None:
    async def embed(model: str) -> object:
        request = pb.EmbedRequest(
            model=model,
            inputs=[common.Input(text=text) for text in TEXTS],
            truncation=common.Truncation(enabled=True),
            encoding=common.VECTOR_ENCODING_FLOAT32,
        )
        return await call(client, mesh, "Embed", request)

    async def score(model: str) -> object:
        request = pb.ScoreRequest(
            model=model,
            query=common.Input(text="q"),
            documents=[common.Input(text=text) for text in TEXTS],
            truncation=common.Truncation(enabled=True),
        )
        return await call(client, mesh, "Score", request)

    work = [
        call
        for _ in range(5)
        for call in (embed("minilm"), score("cross"), embed("colbert"), score("colbert"))
    ]
    replies = await asyncio.gather(*work)
    for reply in replies[::4]:
        assert (unit(decode_tensor(reply.dense, field="dense")) * reference).sum(axis=1).min() >= 1 - 1e-5
    for kind in (1, 2, 3):
        assert len({reply.recipe_hash for reply in replies[kind::4]}) == 1
    assert all(np.allclose(reply.scores, replies[1].scores, atol=1e-5) for reply in replies[1::4])


async def test_models_describe_themselves(mesh: Mesh, client: RpcClient) -> None:
    models = {
        model.name: model for model in (await call(client, mesh, "ListModels", pb.ListModelsRequest())).models
    }
    assert [(m.replicas, m.ready_replicas, m.state) for m in models.values()] == [
        (2, 2, pb.MODEL_STATE_READY)
    ] * 3
    minilm = models["minilm"]
    assert (minilm.dense_dimension, minilm.max_tokens, minilm.dtype) == (384, 256, "float32")
    assert list(minilm.score_types) == [common.SCORE_TYPE_BI_ENCODER]
    assert list(models["cross"].tasks) == [pb.TASK_SCORE]
    assert list(models["colbert"].vector_kinds) == [pb.VECTOR_KIND_TOKEN]
