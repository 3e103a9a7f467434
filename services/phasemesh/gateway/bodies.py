"""Request bodies: read under a size limit, then parsed to a JSON object with faults named by field.

Invariant: no byte above the limit is kept, whether the length was declared or the body came in chunks; and
what leaves here holds only text that UTF-8 can encode, because neither protobuf nor a tokenizer takes a lone
surrogate.
"""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import orjson
from starlette.datastructures import Headers
from starlette.requests import Request

from phasemesh.errors import Cancelled, InvalidArgument, PayloadTooLarge
from phasemesh.gateway.faults import HttpFault

_DIGITS = 18


async def read_body(request: Request, *, max_bytes: int, timeout_s: float) -> bytes:
    """The whole body.

    Raises:
        PayloadTooLarge: it has, or is declared to have, more than `max_bytes` bytes.
        HttpFault: 408 if it doesn't arrive within `timeout_s` seconds; 415 if it is compressed.
        Cancelled: the client went away.
    """
    _check_headers(request.headers, max_bytes)
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout_s):
            more = True
            while more:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise Cancelled("the client closed the connection")
                chunk: bytes = message.get("body", b"")
                size += len(chunk)
                if size > max_bytes:
                    raise _too_large(max_bytes)
                chunks.append(chunk)
                more = message.get("more_body", False)
    except TimeoutError:
        slow = InvalidArgument(
            f"the body did not arrive within {timeout_s:g} seconds", reason="REQUEST_TIMEOUT"
        )
        raise HttpFault(slow, 408) from None
    return b"".join(chunks)


def _check_headers(headers: Headers, max_bytes: int) -> None:
    encoding = headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        error = InvalidArgument(
            f"content-encoding {encoding!r} is not supported; send the body uncompressed",
            reason="UNSUPPORTED_ENCODING",
        )
        raise HttpFault(error, 415)
    declared = headers.get("content-length", "")
    if declared.isdecimal() and (len(declared) > _DIGITS or int(declared) > max_bytes):
        raise _too_large(max_bytes)


def _too_large(max_bytes: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the body is larger than {max_bytes} bytes; split the request")


#: Largest body that is parsed a second time to explain what is wrong with it.
_EXPLAINED_BYTES = 256 * 1024
#: A surrogate, escaped or encoded (which UTF-8 doesn't allow).
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")


def parse_object(raw: bytes) -> dict[str, Any]:
    """The JSON object that `raw` spells.

    Raises:
        InvalidArgument: not JSON, not an object, or text with lone surrogates (`field` is its path).
    """
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        _explain_surrogates(raw)
        raise InvalidArgument(f"the body is not valid JSON: {error}", reason="INVALID_JSON") from None
    if not isinstance(body, dict):
        raise InvalidArgument("the body has to be a JSON object", reason="INVALID_JSON")
    return body


def _explain_surrogates(raw: bytes) -> None:
    """Name the field whose text holds a lone surrogate, if that is why the strict parser refused.

    The standard library's parser lets surrogates pass, so it can tell where they stand. It parses again, on
    the event loop, and so only what is small and holds a surrogate at all.
    """
    if len(raw) > _EXPLAINED_BYTES or not _SURROGATE.search(raw):
        return
    try:
        body = json.loads(raw.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError):
        return
    waiting: list[tuple[str, Any]] = [("", body)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, str) and not _encodable(value):
            raise InvalidArgument(
                f"{path or 'the body'}: holds a lone surrogate (half of a UTF-16 pair), which is not text; "
                "replace it",
                reason="INVALID_UNICODE",
                field=path,
            )
        if isinstance(value, dict):
            if not all(map(_encodable, value)):
                raise InvalidArgument(
                    f"{path or 'the body'}: a field's name holds a lone surrogate",
                    reason="INVALID_UNICODE",
                    field=path,
                )
            waiting += [(f"{path}.{key}" if path else key, child) for key, child in reversed(value.items())]
        elif isinstance(value, list):
            waiting += [(f"{path}[{index}]", child) for index, child in reversed(list(enumerate(value)))]


def _encodable(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)
