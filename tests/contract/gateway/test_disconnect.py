"""A client that goes away takes its call along, down to the encoder's handler."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.fakes.gateway_stack import Stack

PATIENCE_S = 5.0


def raw(path: str, body: dict[str, object]) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
    return head.encode() + content


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"model": "bag", "input": "x"}),
        ("/v1/rerank", {"model": "cross", "query": "x", "documents": ["y"]}),
    ],
)
async def test_disconnect_reaches_the_encoder(stack: Stack, path: str, body: dict[str, object]) -> None:
    stack.encoder.hold = asyncio.Event()  # Never set: only a cancellation ends the handler.
    _, writer = await asyncio.open_connection("127.0.0.1", stack.port)
    writer.write(raw(path, body))
    await asyncio.wait_for(stack.encoder.entered.wait(), PATIENCE_S)
    assert not stack.encoder.cancelled.is_set()
    writer.close()
    await asyncio.wait_for(stack.encoder.cancelled.wait(), PATIENCE_S)
    labels = {"route": path, "status": "499"}
    name = "phasemesh_http_server_duration_seconds_count"
    async with asyncio.timeout(PATIENCE_S):
        while not stack.metrics.registry.get_sample_value(name, labels):
            await asyncio.sleep(0.005)
    assert stack.metrics.registry.get_sample_value("phasemesh_inflight_requests") == 0


async def test_disconnect_in_the_middle_of_the_body(stack: Stack) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", stack.port)
    writer.write(raw("/v1/embeddings", {"model": "bag", "input": "x" * 100})[:-50])
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    reply = await stack.http.get("/health")
    assert reply.status_code == 200
    assert not stack.encoder.calls


async def test_patient_client_gets_its_answer(stack: Stack) -> None:
    stack.encoder.hold = asyncio.Event()
    waiting = asyncio.create_task(
        stack.http.post("/v1/embeddings", json={"model": "bag", "input": "x"}, timeout=PATIENCE_S)
    )
    await asyncio.wait_for(stack.encoder.entered.wait(), PATIENCE_S)
    stack.encoder.hold.set()
    assert (await waiting).status_code == 200
    assert not stack.encoder.cancelled.is_set()


async def test_the_deadline_is_the_gateways(stack: Stack) -> None:
    stack.encoder.hold = asyncio.Event()
    call = asyncio.create_task(
        stack.http.post("/v1/embeddings", json={"model": "bag", "input": "x"}, timeout=PATIENCE_S)
    )
    await asyncio.wait_for(stack.encoder.entered.wait(), PATIENCE_S)
    remaining_s = stack.encoder.calls[-1][0].remaining_s()
    stack.encoder.hold.set()
    await call
    assert 15 < remaining_s < 21  # The wire rounds up a little.
