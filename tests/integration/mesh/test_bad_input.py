"""Every kind of bad input, at REST and at gRPC: an error that names the field, never a 500, neighbours served."""

import json
import re

import grpc
import httpx
import numpy as np
import pytest

from phasemesh.errors import Code, PhasemeshError
from phasemesh.rpc.client import RpcClient
from phasemesh.rpc.codec import decode_tensor
from phasemesh.rpc.details import to_error
from phasemesh.v1 import common_pb2 as common
from phasemesh.v1 import encoder_pb2 as pb
from phasemesh.v1.encoder_pb2_grpc import EncoderServiceStub
from tests.mesh import Mesh

pytestmark = [pytest.mark.ray, pytest.mark.slow]

MEGABYTE = "word " * 200_000
LONG = "word " * 400


def text(value: str) -> common.Input:
    return common.Input(text=value)


def ids(*values: int) -> common.Input:
    return common.Input(token_ids=common.TokenIds(ids=values))


# what is wrong: (request, code, reason, field)
REFUSED_BY_GRPC = {
    "empty list": (pb.EmbedRequest(model="minilm"), Code.INVALID_ARGUMENT, "EMPTY_LIST", "inputs"),
    "no content": (pb.EmbedRequest(model="minilm", inputs=[common.Input()]), Code.INVALID_ARGUMENT, "EMPTY_INPUT", "inputs[0]"),
    "no ids": (pb.EmbedRequest(model="minilm", inputs=[ids()]), Code.INVALID_ARGUMENT, "EMPTY_INPUT", "inputs[0]"),
    "unknown model": (pb.EmbedRequest(model="nobody", inputs=[text("x")]), Code.NOT_FOUND, "MODEL_NOT_FOUND", "model"),
    "wrong task": (pb.EmbedRequest(model="cross", inputs=[text("x")]), Code.FAILED_PRECONDITION, "TASK_NOT_SUPPORTED", "model"),
    "megabyte": (pb.EmbedRequest(model="minilm", inputs=[text(MEGABYTE)]), Code.INVALID_ARGUMENT, "INPUT_TOO_LONG", "inputs[0].text"),
    "too long": (pb.EmbedRequest(model="minilm", inputs=[text(LONG)]), Code.INVALID_ARGUMENT, "INPUT_TOO_LONG", "inputs[0].text"),
    "id out of range": (pb.EmbedRequest(model="minilm", inputs=[ids(101, 30522, 102)]), Code.INVALID_ARGUMENT, "TOKEN_OUT_OF_RANGE", "inputs[0].token_ids.ids[1]"),
    "no Matryoshka": (pb.EmbedRequest(model="minilm", inputs=[text("x")], dimensions=128), Code.INVALID_ARGUMENT, "NOT_MATRYOSHKA", "dimensions"),
    "dimensions 0": (pb.EmbedRequest(model="minilm", inputs=[text("x")], dimensions=0), Code.INVALID_ARGUMENT, "DIMENSIONS_OUT_OF_RANGE", "dimensions"),
    "dimensions too large": (pb.EmbedRequest(model="minilm", inputs=[text("x")], dimensions=385), Code.INVALID_ARGUMENT, "DIMENSIONS_OUT_OF_RANGE", "dimensions"),
}  # fmt: skip


@pytest.mark.parametrize(
    "raw",
    [
        b"\x12\x05\x0a\x03\xed\xa0\xbd",  # inputs { text: half a surrogate pair, as UTF-8 doesn't allow }
        b"\x12\xff\xff",  # a length that goes beyond the end
    ],
)
async def test_grpc_refuses_what_is_no_message(mesh: Mesh, raw: bytes) -> None:
    async with grpc.aio.insecure_channel(mesh.grpc) as channel:
        embed = channel.unary_unary("/phasemesh.v1.EncoderService/Embed")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await embed(raw, timeout=10)
    error = to_error(caught.value)
    assert (error.code, error.reason) == (Code.INVALID_ARGUMENT, "INVALID_MESSAGE")
    assert "class" not in error.message
    labels = 'code="INVALID_ARGUMENT",method="phasemesh.v1.EncoderService/Embed"'
    assert labels in mesh.admin("encoder", "/metrics")[1]


async def test_grpc_refuses_a_message_over_the_limit(mesh: Mesh) -> None:
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(mesh.grpc, options=options) as channel:
        embed = channel.unary_unary("/phasemesh.v1.EncoderService/Embed")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await embed(b"\x12" * (64 * 2**20 + 1), timeout=30)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("what", REFUSED_BY_GRPC)
async def test_grpc_refuses(mesh: Mesh, client: RpcClient, what: str) -> None:
    request, code, reason, field = REFUSED_BY_GRPC[what]
    with pytest.raises(PhasemeshError) as caught:
        await client.call(mesh.grpc, EncoderServiceStub, "Embed", request, timeout_s=30)
    assert (caught.value.code, caught.value.reason, caught.value.field) == (code, reason, field)


async def test_bad_items_fail_alone(mesh: Mesh, client: RpcClient) -> None:
    good = ["first", "", "NUL \u0000 inside", "[CLS] [SEP] [MASK]", "last"]
    bad = [text(LONG), ids(999_999), common.Input(), common.Input(image=common.Image(data=b"png"))]
    inputs = [
        text(good[0]),
        bad[0],
        text(good[1]),
        bad[1],
        text(good[2]),
        bad[2],
        text(good[3]),
        bad[3],
        text(good[4]),
    ]
    mixed = pb.EmbedRequest(model="minilm", inputs=inputs, encoding=common.VECTOR_ENCODING_FLOAT32)
    alone = pb.EmbedRequest(
        model="minilm", inputs=[text(t) for t in good], encoding=common.VECTOR_ENCODING_FLOAT32
    )
    got = await client.call(mesh.grpc, EncoderServiceStub, "Embed", mixed, timeout_s=30)
    want = await client.call(mesh.grpc, EncoderServiceStub, "Embed", alone, timeout_s=30)
    assert [item.error.reason for item in got.items] == [
        "", "INPUT_TOO_LONG", "", "TOKEN_OUT_OF_RANGE", "", "EMPTY_INPUT", "", "MODALITY_NOT_SUPPORTED", "",
    ]  # fmt: skip
    rows = decode_tensor(got.dense, field="dense")
    assert np.allclose(rows[::2], decode_tensor(want.dense, field="dense"), atol=1e-5)
    assert not rows[1::2].any()
    assert got.usage.tokens == want.usage.tokens == sum(item.tokens for item in got.items)


async def test_long_input_is_cut_on_request(mesh: Mesh, client: RpcClient) -> None:
    for given in (MEGABYTE, LONG):
        request = pb.EmbedRequest(
            model="minilm", inputs=[text(given)], truncation=common.Truncation(enabled=True)
        )
        reply = await client.call(mesh.grpc, EncoderServiceStub, "Embed", request, timeout_s=30)
        assert (reply.items[0].tokens, reply.items[0].truncated, reply.usage.truncated_inputs) == (
            256,
            True,
            1,
        )


# what is wrong: (body, status, param)
REFUSED_BY_REST = {
    "empty list": ({"input": []}, 400, "input"),
    "empty string": ({"input": ["fine", ""]}, 400, "input[1]"),
    "no input": ({}, 400, "input"),
    "null input": ({"input": None}, 400, "input"),
    "number": ({"input": 7}, 400, "input"),
    "object": ({"input": {"text": "x"}}, 400, "input"),
    "mixed list": ({"input": ["x", 7]}, 400, "input[1]"),
    "nested text": ({"input": [["x"]]}, 400, "input[0][0]"),
    "negative id": ({"input": [[101, -1]]}, 400, "input[0][1]"),
    "id out of range": ({"input": [[101, 30522]]}, 400, "input[0][1]"),
    "megabyte": ({"input": MEGABYTE}, 400, "input"),
    "too long": ({"input": ["fine", LONG]}, 400, "input[1]"),
    "lone surrogate": ('{"model": "minilm", "input": ["fine", "\\ud83d"]}', 400, "input[1]"),
    "unknown model": ({"model": "nobody", "input": "x"}, 404, "model"),
    "no model": ('{"input": "x"}', 400, "model"),
    "wrong task": ({"model": "cross", "input": "x"}, 400, "model"),
    "no Matryoshka": ({"input": "x", "dimensions": 128}, 400, "dimensions"),
    "dimensions 0": ({"input": "x", "dimensions": 0}, 400, "dimensions"),
    "dimensions too large": ({"input": "x", "dimensions": 385}, 400, "dimensions"),
    "dimensions a text": ({"input": "x", "dimensions": "many"}, 400, "dimensions"),
    "encoding": ({"input": "x", "encoding_format": "hex"}, 400, "encoding_format"),
    "not JSON": ("{", 400, None),
    "not an object": ("[]", 400, None),
}


@pytest.mark.parametrize("what", REFUSED_BY_REST)
async def test_rest_refuses(mesh: Mesh, what: str) -> None:
    body, status, param = REFUSED_BY_REST[what]
    content = body if isinstance(body, str) else json.dumps({"model": "minilm", **body})
    async with httpx.AsyncClient(base_url=mesh.rest) as http:
        reply = await http.post(
            "/v1/embeddings",
            content=content.encode(),
            headers={"Content-Type": "application/json"},
            timeout=30,
        )
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    assert error["message"]
    # What only a gRPC caller could do is no advice here.
    assert not re.search(r"truncation\.enabled|VECTOR_|TASK_", error["message"]), error


async def test_body_over_the_limit(mesh: Mesh) -> None:
    async with httpx.AsyncClient(base_url=mesh.rest) as http:
        reply = await http.post("/v1/embeddings", content=b" " * (16 * 2**20 + 1), timeout=30)
    assert reply.status_code == 413
    assert reply.json()["error"]["message"]


async def test_odd_text_is_served(mesh: Mesh) -> None:
    odd = [
        "   ",
        "NUL \u0000",
        "[CLS] a [SEP]",
        "\u200d",
        "\u202e rtl",
        "\U0001f468\u200d\U0001f469",
        "z" * 500,
    ]
    async with httpx.AsyncClient(base_url=mesh.rest) as http:
        reply = await http.post("/v1/embeddings", json={"model": "minilm", "input": odd}, timeout=30)
    assert reply.status_code == 200, reply.text
    assert len(reply.json()["data"]) == len(odd)


RERANK = {
    "lone surrogate": (
        '{"model": "cross", "query": "q", "documents": ["x", "\\ud83d"]}',
        400,
        "documents[1]",
    ),
    "no query": ({"documents": ["x"]}, 400, "query"),
    "no documents": ({"query": "q", "documents": []}, 400, "documents"),
    "documents a text": ({"query": "q", "documents": "x"}, 400, "documents"),
    "document a number": ({"query": "q", "documents": ["x", 7]}, 400, "documents[1]"),
    "top_n 0": ({"query": "q", "documents": ["x"], "top_n": 0}, 400, "top_n"),
    "top_n a bool": ({"query": "q", "documents": ["x"], "top_n": True}, 400, "top_n"),
    "unknown model": ({"model": "nobody", "query": "q", "documents": ["x"]}, 404, "model"),
}


@pytest.mark.parametrize("what", RERANK)
@pytest.mark.parametrize("route", ["/rerank", "/v1/rerank"])
async def test_rerank_refuses(mesh: Mesh, route: str, what: str) -> None:
    body, status, named = RERANK[what]
    async with httpx.AsyncClient(base_url=mesh.rest) as http:
        content = body if isinstance(body, str) else json.dumps({"model": "cross", **body})
        reply = await http.post(
            route, content=content.encode(), headers={"Content-Type": "application/json"}, timeout=30
        )
    assert reply.status_code == status, reply.text
    error = reply.json()
    assert named in error["message"]
    assert error["detail"]


async def test_rerank_serves_empty_and_long_documents(mesh: Mesh) -> None:
    odd = ["", LONG, "x", "NUL \u0000", "[CLS] [SEP]"]
    body = {
        "model": "cross",
        "query": "q",
        "documents": odd,
        "top_n": 10,
        "return_documents": True,
    }
    async with httpx.AsyncClient(base_url=mesh.rest) as http:
        reply = await http.post("/v1/rerank", json=body, timeout=30)
    assert reply.status_code == 200, reply.text
    results = reply.json()["results"]
    assert sorted(row["index"] for row in results) == [0, 1, 2, 3, 4]
    assert {row["document"]["text"] for row in results} == set(odd)
