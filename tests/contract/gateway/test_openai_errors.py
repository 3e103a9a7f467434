"""Bad input at OpenAI's routes: the whole body of each answer."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes.gateway_stack import Stack

BAD = "invalid_request_error"


def body(message: str, param: str | None, code: str, kind: str = BAD) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


M = "model: is missing; give the name of a model; GET /v1/models lists them"
GOLDEN: list[tuple[str, int, dict[str, Any]]] = [
    ('{"input": "x"}', 400, body(M, "model", "missing_field")),
    ('{"model": null, "input": "x"}', 400, body(M, "model", "missing_field")),
    (
        '{"model": 7, "input": "x"}',
        400,
        body("model: has to be a string, not an integer", "model", "invalid_field"),
    ),
    (
        '{"model": "bag"}',
        400,
        body("input: is missing; give a string, a list of strings, or token ids", "input", "missing_field"),
    ),
    (
        '{"model": "bag", "input": []}',
        400,
        body("input: is an empty list; give at least one input", "input", "empty_input"),
    ),
    (
        '{"model": "bag", "input": ""}',
        400,
        body("input: is an empty string; give some text", "input", "empty_input"),
    ),
    (
        '{"model": "bag", "input": ["a", ""]}',
        400,
        body("input[1]: is an empty string; give some text or leave it out", "input[1]", "empty_input"),
    ),
    (
        '{"model": "bag", "input": ["a", 1]}',
        400,
        body("input[1]: has to be a string as input[0] is, not an integer", "input[1]", "invalid_field"),
    ),
    (
        '{"model": "bag", "input": true}',
        400,
        body("input: has to be a string or a list, not a boolean", "input", "invalid_field"),
    ),
    (
        '{"model": "bag", "input": [true]}',
        400,
        body(
            "input[0]: has to be a string, a token id or a list of these, not a boolean",
            "input[0]",
            "invalid_field",
        ),
    ),
    (
        '{"model": "bag", "input": [1, 2.5]}',
        400,
        body(
            "input[1]: has to be a token id, not a number with a fraction or exponent",
            "input[1]",
            "invalid_field",
        ),
    ),
    (
        '{"model": "bag", "input": [1, true]}',
        400,
        body("input[1]: has to be a token id, not a boolean", "input[1]", "invalid_field"),
    ),
    (
        '{"model": "bag", "input": [[1], []]}',
        400,
        body("input[1]: is an empty list; give token ids or leave it out", "input[1]", "empty_input"),
    ),
    (
        '{"model": "bag", "input": [[[1]]]}',
        400,
        body("input[0][0]: has to be a token id, not a list", "input[0][0]", "invalid_field"),
    ),
    (
        '{"model": "bag", "input": [[1], [2, -1]]}',
        400,
        body("input[1][1]: -1 is not a token id of any model", "input[1][1]", "token_out_of_range"),
    ),
    (
        '{"model": "bag", "input": [[1], [2, 1000]]}',
        400,
        body("input[1][1]: 1000 is not in the vocabulary of 1000", "input[1][1]", "token_out_of_range"),
    ),
    (
        '{"model": "bag", "input": [2, 1000]}',
        400,
        body("input[1]: 1000 is not in the vocabulary of 1000", "input[1]", "token_out_of_range"),
    ),
    (
        '{"model": "bag", "input": "x", "encoding_format": "hex"}',
        400,
        body(
            "encoding_format: has to be one of 'float', 'base64', not 'hex'",
            "encoding_format",
            "invalid_field",
        ),
    ),
    (
        '{"model": "bag", "input": "x", "dimensions": 0}',
        400,
        body("dimensions: has to be between 1 and 4294967295, not 0", "dimensions", "invalid_field"),
    ),
    (
        '{"model": "bag", "input": "x", "dimensions": true}',
        400,
        body("dimensions: has to be an integer, not a boolean", "dimensions", "invalid_field"),
    ),
    (
        '{"model": "bag", "input": ["fine", "half \\ud83d"]}',
        400,
        body(
            "input[1]: holds a lone surrogate (half of a UTF-16 pair), which is not text; replace it",
            "input[1]",
            "invalid_unicode",
        ),
    ),
    ("[1]", 400, body("the body has to be a JSON object", None, "invalid_json")),
    (
        '{"model": "nobody", "input": "x"}',
        404,
        body("", "model", "model_not_found", "not_found_error"),
    ),
]


@pytest.mark.parametrize(("sent", "status", "answer"), GOLDEN, ids=[case[0][:60] for case in GOLDEN])
@pytest.mark.parametrize("path", ["/v1/embeddings", "/embeddings"])
async def test_golden(stack: Stack, sent: str, status: int, answer: dict[str, Any], path: str) -> None:
    reply = await stack.http.post(path, content=sent)
    got = reply.json()
    if not answer["error"]["message"]:  # The directory's words, which name the served models.
        assert "bag" in got["error"]["message"]
        got["error"]["message"] = ""
    assert (reply.status_code, got) == (status, answer)


@pytest.mark.parametrize("sent", [b"", b"{", b"nope", b'{"a": NaN}', b"\xff\xfe{}", b"[" * 5000, b"\x00"])
async def test_what_is_not_json(stack: Stack, sent: bytes) -> None:
    reply = await stack.http.post("/v1/embeddings", content=sent)
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "invalid_json"


async def test_too_many_inputs(stack: Stack) -> None:
    reply = await stack.http.post("/v1/embeddings", json={"model": "bag", "input": ["a"] * 65})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "too_many_inputs")
    assert "at most 64" in reply.json()["error"]["message"]


async def test_nulls_unknown_fields_and_odd_text_are_fine(stack: Stack) -> None:
    odd = ["   ", "a\x00b", "[CLS] [SEP] </s>", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\u202eabc"]
    reply = await stack.http.post(
        "/v1/embeddings",
        json={
            "model": "bag",
            "input": odd,
            "dimensions": None,
            "encoding_format": None,
            "user": None,
            "input_type": {"x": 1},
        },
    )
    assert reply.status_code == 200
    assert [item.text for item in stack.encoder.calls[-1][1].inputs] == odd
    assert isinstance(reply.json()["data"][0]["embedding"], list)


async def test_a_vector_that_is_not_finite_is_an_error_not_null(stack: Stack) -> None:
    stack.encoder.spoil = True
    reply = await stack.http.post("/v1/embeddings", json={"model": "bag", "input": "x"})
    assert (reply.status_code, reply.json()["error"]["type"]) == (500, "server_error")
    assert "internal error" in reply.json()["error"]["message"]


async def test_floats_are_short(stack: Stack) -> None:
    # Float64 digits of float32 numbers would take twice the bytes.
    reply = await stack.http.post("/v1/embeddings", json={"model": "bag", "input": ["some text"] * 64})
    assert len(reply.content) / (64 * 16) < 16
