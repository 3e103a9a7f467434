"""The outermost middleware: request id, server span, metrics and access line of every request.

Invariant: every request that reaches the gateway leaves one span, one observation and one access line, also
when it fails or its caller goes away. Plain ASGI, because Starlette's BaseHTTPMiddleware runs the app in
another task and so loses context variables and cancellation.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from phasemesh.gateway.exchange import Exchange, attach, request_id_of
from phasemesh.gateway.faults import Dialect
from phasemesh.telemetry import names
from phasemesh.telemetry.metrics import Metrics, current_exemplar
from phasemesh.telemetry.tracing import extract, tracer

_access = logging.getLogger("phasemesh.access")

#: Route label of requests that match none; paths would make the label unbounded.
UNMATCHED = "unmatched"
#: nginx's "client closed request"; stands in logs and metrics only.
CLIENT_CLOSED = 499
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"})


class Observe:
    """ASGI middleware; see the module."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics, dialect_of: Callable[[str], Dialect]) -> None:
        self._app = app
        self._metrics = metrics
        self._dialect_of = dialect_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the ASGI specification."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        exchange = Exchange(
            request_id=request_id_of(headers.get("x-request-id")),
            dialect=self._dialect_of(scope["path"]).name,
        )
        attach(scope, exchange)
        # An unknown method is one label and span name, as the semantic conventions say, not its own.
        method = scope["method"] if scope["method"] in _METHODS else "_OTHER"
        status = CLIENT_CLOSED

        async def numbered(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(raw=message["headers"])["x-request-id"] = exchange.request_id
            await send(message)

        carrier = {key: headers[key] for key in ("traceparent", "tracestate") if key in headers}
        self._metrics.inflight.inc()
        try:
            with tracer().start_as_current_span(
                method,
                context=extract(carrier),
                kind=SpanKind.SERVER,
                attributes={
                    names.HTTP_METHOD: method,
                    names.URL_PATH: scope["path"],
                    names.REQUEST_ID: exchange.request_id,
                    names.DIALECT: exchange.dialect,
                },
                record_exception=False,
            ) as span:
                try:
                    await self._app(scope, receive, numbered)
                finally:
                    self._finish(span, exchange, scope, method, status)
        finally:
            self._metrics.inflight.dec()

    def _finish(self, span: trace.Span, exchange: Exchange, scope: Scope, method: str, status: int) -> None:
        route = getattr(scope.get("route"), "path", None)
        duration_ns = exchange.clock.total_ns()
        if span.is_recording():
            span.update_name(f"{method} {route}" if route else method)
            span.set_attributes(_attributes(exchange, route, status))
            if status >= 500:
                span.set_status(StatusCode.ERROR, exchange.error_reason)
            exchange.clock.emit_spans(tracer(), span)
        self._metrics.http_duration.labels(route or UNMATCHED, str(status)).observe(
            duration_ns / 1e9, exemplar=current_exemplar()
        )
        if exchange.answered:
            exchange.clock.observe(self._metrics, exchange.model)
        _access.info(
            "http request",
            extra={
                "method": method,
                "route": route or UNMATCHED,
                "status": status,
                "duration_ms": round(duration_ns / 1e6, 3),
                "request_id": exchange.request_id,
                "caller": exchange.caller.name,
                "model": exchange.model,
                "items": exchange.items,
                "tokens": exchange.tokens,
                "reason": exchange.error_reason,
            },
        )


def _attributes(exchange: Exchange, route: str | None, status: int) -> dict[str, str | int | list[str]]:
    attributes: dict[str, str | int | list[str]] = {names.HTTP_STATUS: status, **exchange.attributes}
    if route:
        attributes[names.HTTP_ROUTE] = route
    if exchange.operation:
        attributes[names.GEN_AI_OPERATION] = exchange.operation
        attributes[names.GEN_AI_PROVIDER] = "phasemesh"
        attributes[names.ITEMS] = exchange.items
    if exchange.answered:
        attributes[names.GEN_AI_RESPONSE_MODEL] = exchange.model
        attributes[names.GEN_AI_INPUT_TOKENS] = exchange.tokens
    if exchange.error_reason:
        attributes[names.ERROR_TYPE] = exchange.error_reason
    return attributes
