"""The rerank dialect: order, shape, and every bad input."""

from __future__ import annotations

import math
from typing import Any

import pytest

from phasemesh.errors import ResourceExhausted
from tests.fakes.encoder_service import logit, text_vector
from tests.fakes.gateway_stack import Stack

QUERY = "when does water boil"
DOCUMENTS = ["the river froze", "water does boil", "", "water does boil", "when water"]


async def rerank(stack: Stack, path: str = "/v1/rerank", **fields: Any) -> Any:
    sent = {"model": "cross", "query": QUERY, "documents": DOCUMENTS, **fields}
    reply = await stack.http.post(path, json=sent)
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank"])
async def test_cross_encoder_order_and_shape(stack: Stack, path: str) -> None:
    body = await rerank(stack, path)
    scores = [1 / (1 + math.exp(-logit(QUERY, document))) for document in DOCUMENTS]
    order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    assert order[:2] == [1, 3]  # The tie goes by index.
    assert [result["index"] for result in body["results"]] == order
    assert [result["relevance_score"] for result in body["results"]] == pytest.approx(
        [scores[index] for index in order], rel=1e-6
    )
    assert all(set(result) == {"index", "relevance_score"} for result in body["results"])
    assert body["object"] == "list"
    assert body["model"] == "cross"
    assert body["usage"] == {"total_tokens": sum(len(text.split()) + 2 for text in DOCUMENTS)}
    assert body["meta"] == {"api_version": {"version": "1"}, "billed_units": {"search_units": 1}}
    assert body["id"]


async def test_cosine_passes_as_it_is(stack: Stack) -> None:
    body = await rerank(stack, model="bag")
    query = text_vector(QUERY.split(), 16)
    for result in body["results"]:
        cosine = float(query @ text_vector(DOCUMENTS[result["index"]].split(), 16))
        assert result["relevance_score"] == pytest.approx(cosine, rel=1e-6)


async def test_top_n_and_documents(stack: Stack) -> None:
    body = await rerank(stack, top_n=2, return_documents=True, documents=[{"text": "a", "n": 1}, "water"])
    assert [result["document"] for result in body["results"]] == [{"text": "water"}, {"text": "a"}]
    assert len((await rerank(stack, top_n=1))["results"]) == 1
    assert len((await rerank(stack, top_n=99))["results"]) == len(DOCUMENTS)
    assert len((await rerank(stack, top_n=None, return_documents=None))["results"]) == len(DOCUMENTS)


async def test_long_documents_are_cut(stack: Stack) -> None:
    body = await rerank(stack, documents=["word " * 500, "water"])
    assert len(body["results"]) == 2
    assert stack.encoder.calls[-1][1].truncation.enabled


BAD: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "model: is missing; give the name of a model; GET /v1/models lists them"),
    ({"query": None}, "query: is missing; give the text to rank by"),
    ({"query": ""}, "query: is empty; give the text to rank by"),
    ({"query": ["x"]}, "query: has to be a string, not a list"),
    ({"documents": None}, "documents: is missing; give a list of texts"),
    ({"documents": []}, "documents: is an empty list; give at least one document"),
    ({"documents": "x"}, "documents: has to be a list, not a string"),
    ({"documents": ["x", 1]}, 'documents[1]: has to be a string or {"text": string}, not an integer'),
    ({"documents": [{"title": "x"}]}, "documents[0].text: has to be a string, not null"),
    (
        {"documents": ["x"] * 65},
        "documents: has 65 documents; at most 64 fit in one request, so split it",
    ),
    ({"top_n": 0}, "top_n: has to be between 1 and 4294967295, not 0"),
    ({"top_n": -1}, "top_n: has to be between 1 and 4294967295, not -1"),
    ({"top_n": True}, "top_n: has to be an integer, not a boolean"),
    ({"top_n": "3"}, "top_n: has to be an integer, not a string"),
    ({"return_documents": 1}, "return_documents: has to be true or false, not an integer"),
]


@pytest.mark.parametrize(("fields", "message"), BAD, ids=[case[1][:50] for case in BAD])
@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank"])
async def test_bad_input(stack: Stack, fields: dict[str, Any], message: str, path: str) -> None:
    sent = {"model": "cross", "query": QUERY, "documents": DOCUMENTS, **fields}
    reply = await stack.http.post(path, json=sent, headers={"x-request-id": "r-1"})
    assert reply.status_code == 400
    body = reply.json()
    assert (body["message"], body["detail"], body["id"]) == (message, message, "r-1")


async def test_a_lone_surrogate_is_named(stack: Stack) -> None:
    sent = '{"model": "cross", "query": "x", "documents": ["a", {"text": "\\udc00"}]}'
    reply = await stack.http.post("/v1/rerank", content=sent)
    assert reply.status_code == 400
    assert reply.json()["message"].startswith("documents[1].text: ")


async def test_unknown_model_and_overload(stack: Stack) -> None:
    unknown = await stack.http.post("/rerank", json={"model": "nobody", "query": "x", "documents": ["y"]})
    assert (unknown.status_code, unknown.json()["code"]) == (404, "MODEL_NOT_FOUND")
    stack.encoder.failures.append(ResourceExhausted("queue full", retry_after_s=0.01))
    busy = await stack.http.post("/rerank", json={"model": "cross", "query": "x", "documents": ["y"]})
    assert (busy.status_code, busy.headers["retry-after"], busy.headers["retry-after-ms"]) == (429, "1", "10")
    assert busy.json()["detail"] == "queue full"
