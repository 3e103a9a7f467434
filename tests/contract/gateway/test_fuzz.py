"""Whatever JSON comes in, the answer is 200 or the caller's fault, in the dialect's shape."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
from hypothesis import given, settings

from tests.fakes.gateway_stack import Stack

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
)
ANY = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
IDS = st.lists(st.integers(-1, 1100), max_size=5)


def bodies(fields: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    """Mostly well-formed bodies in which any field may hold anything, or be missing."""
    return st.fixed_dictionaries({}, optional={key: likely | ANY for key, likely in fields.items()}) | ANY


EMBEDDINGS = bodies(
    {
        "model": st.sampled_from(["bag", "org/nested", "cross"]),
        "input": st.text(max_size=200) | st.lists(st.text(max_size=20), max_size=5) | IDS | st.lists(IDS),
        "encoding_format": st.sampled_from(["float", "base64"]),
        "dimensions": st.integers(-2, 20),
        "user": ANY,
    }
)
RERANK = bodies(
    {
        "model": st.sampled_from(["bag", "cross"]),
        "query": st.text(max_size=20),
        "documents": st.lists(st.text(max_size=20) | st.fixed_dictionaries({"text": st.text()})),
        "top_n": st.integers(-2, 5),
        "return_documents": st.booleans(),
    }
)
FUZZ = settings(max_examples=150, deadline=None, derandomize=True, database=None)


@FUZZ
@given(body=EMBEDDINGS)
async def test_embeddings(shared_stack: Stack, body: Any) -> None:
    reply = await shared_stack.http.post("/v1/embeddings", json=body)
    if reply.status_code == 200:
        assert reply.json()["data"]
    else:
        assert reply.status_code in (400, 404)
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}


@FUZZ
@given(body=RERANK)
async def test_rerank(shared_stack: Stack, body: Any) -> None:
    reply = await shared_stack.http.post("/v1/rerank", json=body)
    if reply.status_code == 200:
        scores = [result["relevance_score"] for result in reply.json()["results"]]
        assert scores == sorted(scores, reverse=True)
    else:
        assert reply.status_code in (400, 404)
        assert reply.json()["message"] == reply.json()["detail"]


@FUZZ
@given(raw=st.binary(max_size=60) | st.text(st.characters(), max_size=60).map(lambda text: text.encode()))
async def test_any_bytes(shared_stack: Stack, raw: bytes) -> None:
    reply = await shared_stack.http.post("/v1/embeddings", content=raw)
    assert reply.status_code == 400
    assert reply.json()["error"]["type"] == "invalid_request_error"
