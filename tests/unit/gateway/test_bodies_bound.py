"""A body that the strict parser refuses must not cost more to explain than to refuse."""

import time

import pytest

from phasemesh.errors import InvalidArgument
from phasemesh.gateway import bodies


def refused(raw: bytes) -> InvalidArgument:
    with pytest.raises(InvalidArgument) as caught:
        bodies.parse_object(raw)
    return caught.value


def test_a_surrogate_is_named() -> None:
    assert refused(b'{"a": ["x", "\\ud83d"]}').field == "a[1]"


@pytest.mark.parametrize("tail", [b"NaN}", b'"\\ud83d"}'])
def test_a_large_body_is_not_parsed_again(tail: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def parsed_again(*_: object) -> None:
        raise AssertionError("the slow parser ran")

    monkeypatch.setattr(bodies.json, "loads", parsed_again)
    large = b'{"input": [' + b"0," * 200_000 + b'0], "x": ' + tail
    began = time.perf_counter()
    assert refused(large).reason == "INVALID_JSON"
    refusing_s = time.perf_counter() - began
    began = time.perf_counter()
    bodies.orjson.loads(large[: large.rindex(b",")] + b"}")
    # The scan for surrogates is the only work besides the strict parser's.
    assert refusing_s < 20 * (time.perf_counter() - began)
