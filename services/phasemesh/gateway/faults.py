"""Errors on their way out: one body per dialect from one error tree.

Invariant: whatever goes wrong, the caller gets the body that its client library parses, and nothing of ours
that is no business of a caller: an unknown exception becomes an error id.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from phasemesh.errors import Internal, InvalidArgument, NotFound, PhasemeshError
from phasemesh.gateway.exchange import exchange_of

_log = logging.getLogger(__name__)

#: Statuses for which a caller is told when to come back.
_RETRY_LATER = (429, 503)
_DEFAULT_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Dialect:
    """How one family of clients reads errors.

    Attributes:
        name: label of spans and logs.
        error_body: (error, HTTP status, request id) → JSON-ready body.
    """

    name: str
    error_body: Callable[[PhasemeshError, int, str], Mapping[str, object]]


class HttpFault(Exception):
    """An error whose HTTP status isn't its row of `HTTP_STATUS`: those of HTTP itself, such as 405.

    Attributes:
        error: what to tell.
        status: the HTTP status.
        headers: further headers.
    """

    def __init__(self, error: PhasemeshError, status: int, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(error.message)
        self.error = error
        self.status = status
        self.headers = headers or {}


def render_error(
    dialect: Dialect,
    error: PhasemeshError,
    request_id: str,
    *,
    status: int | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """The response for `error`.

    429 and 503 say when to come back: `Retry-After` in whole seconds of at least 1 (Cohere's client reads
    digits only) and `retry-after-ms` for OpenAI's.
    """
    status = status or error.http_status
    all_headers = dict(headers or {})
    if status in _RETRY_LATER:
        wait_s = _DEFAULT_RETRY_S if error.retry_after_s is None else max(error.retry_after_s, 0.0)
        all_headers["retry-after"] = str(max(1, math.ceil(wait_s)))
        all_headers["retry-after-ms"] = str(max(1, math.ceil(wait_s * 1000)))
    body = orjson.dumps(dialect.error_body(error, status, request_id))
    return Response(body, status, all_headers, media_type="application/json")


async def raise_http_fault(request: Request, exception: Exception) -> Response:
    """Exception handler for the router's own errors: hands them to `Errors` as faults.

    Raises:
        HttpFault: always.
    """
    assert isinstance(exception, HTTPException)
    where = f"{request.method} {request.url.path}"
    error: PhasemeshError
    if exception.status_code == 404:
        error = NotFound(f"there is no route {where}", reason="ROUTE_NOT_FOUND")
    elif exception.status_code == 405:
        allowed = (exception.headers or {}).get("Allow", "")
        error = InvalidArgument(f"{where}: use {allowed or 'another method'}", reason="METHOD_NOT_ALLOWED")
    else:
        error = InvalidArgument(str(exception.detail), reason="HTTP_ERROR")
    raise HttpFault(error, exception.status_code, exception.headers)


class Errors:
    """ASGI middleware that answers every exception in the dialect of the route."""

    def __init__(self, app: ASGIApp, *, dialect_of: Callable[[str], Dialect]) -> None:
        self._app = app
        self._dialect_of = dialect_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the ASGI specification."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as exception:
            if started:  # Too late for another status; the server closes the connection.
                raise
            response = self._answer(exception, scope)
            await response(scope, receive, send)

    def _answer(self, exception: Exception, scope: Scope) -> Response:
        exchange = exchange_of(scope)
        dialect = self._dialect_of(scope["path"])
        status: int | None = None
        headers: Mapping[str, str] = {}
        if isinstance(exception, HttpFault):
            error, status, headers = exception.error, exception.status, exception.headers
        elif isinstance(exception, PhasemeshError):
            error = exception
        else:
            error = Internal()
            _log.error("unhandled error", extra={"error_id": error.error_id}, exc_info=exception)
        exchange.error_reason = error.reason
        return render_error(dialect, error, exchange.request_id, status=status, headers=headers)
