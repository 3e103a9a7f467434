from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.requests import Request
from starlette.types import Message

from phasemesh.errors import InvalidArgument
from phasemesh.gateway.bodies import parse_object, read_body
from phasemesh.gateway.faults import HttpFault


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        (rb'{"input": "\ud83d"}', "input"),
        (rb'{"input": ["ok", "\ud83d\ude00", "\ude00"]}', "input[2]"),
        (rb'{"documents": ["a", {"text": "x\udfff"}]}', "documents[1].text"),
        (rb'{"a": {"\ud83d": 1}}', "a"),
        (b'{"input": "\xed\xa0\xbd"}', "input"),
    ],
)
def test_lone_surrogates_name_their_field(raw: bytes, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_object(raw)
    assert (caught.value.field, caught.value.reason) == (field, "INVALID_UNICODE")
    caught.value.message.encode()  # The answer itself must be text.


def test_pairs_and_nul_are_text() -> None:
    body = {"input": "\U0001f600 a\x00b"}
    assert parse_object(json.dumps(body).encode()) == body


async def test_a_body_that_does_not_arrive_is_408() -> None:
    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    scope: dict[str, Any] = {"type": "http", "headers": [], "method": "POST", "path": "/"}
    with pytest.raises(HttpFault) as caught:
        await read_body(Request(scope, receive), max_bytes=10, timeout_s=0)
    assert caught.value.status == 408
