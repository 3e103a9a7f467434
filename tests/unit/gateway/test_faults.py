"""Every error of the tree, in each dialect."""

from __future__ import annotations

import math

import orjson
import pytest

from phasemesh.errors import HTTP_STATUS, Internal, PhasemeshError, ResourceExhausted, Unavailable
from phasemesh.gateway.dialects.openai import routes as openai
from phasemesh.gateway.dialects.rerank import routes as rerank
from phasemesh.gateway.faults import Dialect, render_error

TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


def make(kind: type[PhasemeshError]) -> PhasemeshError:
    return kind("words")


@pytest.mark.parametrize("kind", HTTP_STATUS, ids=lambda kind: kind.__name__)
def test_openai(kind: type[PhasemeshError]) -> None:
    response = render_error(openai.DIALECT, make(kind), "r")
    body = orjson.loads(bytes(response.body))
    status = HTTP_STATUS[kind]
    assert response.status_code == status
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    fallback = "server_error" if status >= 500 else "invalid_request_error"
    assert body["error"]["type"] == TYPES.get(status, fallback)
    assert body["error"]["message"] == "words"


@pytest.mark.parametrize("kind", HTTP_STATUS, ids=lambda kind: kind.__name__)
def test_rerank(kind: type[PhasemeshError]) -> None:
    response = render_error(rerank.DIALECT, make(kind), "r")
    body = orjson.loads(bytes(response.body))
    assert response.status_code == HTTP_STATUS[kind]
    assert body == {"id": "r", "message": "words", "detail": "words", "code": kind.default_reason}


@pytest.mark.parametrize("dialect", [openai.DIALECT, rerank.DIALECT], ids=lambda dialect: dialect.name)
@pytest.mark.parametrize("wait_s", [None, -1.0, 0.0, 0.004, 1.0, 1.2, 3600.0])
@pytest.mark.parametrize("kind", [ResourceExhausted, Unavailable])
def test_retry_after_is_a_whole_second_at_least(
    dialect: Dialect, wait_s: float | None, kind: type[PhasemeshError]
) -> None:
    response = render_error(dialect, kind("busy", retry_after_s=wait_s), "r")
    told = response.headers["retry-after"]
    assert told.isdigit()
    assert int(told) == max(1, math.ceil(wait_s if wait_s is not None else 1))
    assert 1 <= int(response.headers["retry-after-ms"]) <= int(told) * 1000


def test_others_do_not_ask_to_retry() -> None:
    assert "retry-after" not in render_error(openai.DIALECT, Internal(), "r").headers
