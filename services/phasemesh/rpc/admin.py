"""Probes and metrics of a process, on a port of their own.

Invariant: it answers while the event loop is blocked, for it is the one that must tell; hence threads, and
nothing of asyncio or gRPC. It has no keys, so it isn't part of the public service.
"""

from __future__ import annotations

import json
import logging
import socket
import socketserver
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from typing import Any
from urllib.parse import urlsplit

from phasemesh.rpc.bind import BindError
from phasemesh.telemetry.metrics import Metrics

#: Longest time for a client to send its request and to take each piece of the answer, seconds.
CLIENT_TIMEOUT_S = 5.0

_JSON = "application/json"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Health:
    """An answer to a probe.

    Attributes:
        ok: 200 or 503.
        detail: why; JSON values, for people.
    """

    ok: bool
    detail: Mapping[str, object]


class AdminServer:
    """Serves /livez, /readyz, /metrics and /version from a daemon thread.

    Args:
        host: address to listen on.
        port: 0 takes a free one.
        metrics: what /metrics shows.
        live: whether the process works at all; a failing one wants a restart. Called from other threads.
        ready: whether it can serve now. Called from other threads.
        client_timeout_s: longest time for a client to send its request, seconds.
    """

    def __init__(
        self,
        *,
        host: str,
        port: int,
        metrics: Metrics,
        live: Callable[[], Health],
        ready: Callable[[], Health],
        client_timeout_s: float = CLIENT_TIMEOUT_S,
    ) -> None:
        self._host = host
        self._port = port
        self._client_timeout_s = client_timeout_s
        self._pages: dict[str, Callable[[], _Page]] = {
            "/livez": lambda: _probe(live),
            "/readyz": lambda: _probe(ready),
            "/metrics": lambda: _Page(HTTPStatus.OK, metrics.content_type, metrics.exposition()),
            "/version": lambda: _json(HTTPStatus.OK, {"version": _version()}),
        }
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> int:
        """Listen; returns the port.

        Raises:
            BindError: the port can't be had.
        """
        pages, timeout_s = self._pages, self._client_timeout_s

        class Handler(_Handler):
            timeout = timeout_s

            def page(self, path: str) -> _Page:
                page = pages.get(path)
                if page is None:
                    return _json(HTTPStatus.NOT_FOUND, {"error": f"there is {', '.join(pages)}"})
                return page()

        try:
            self._server = _Server(self._host, self._port, Handler)
        except OSError as error:
            raise BindError(
                "the admin server", self._host, self._port, error.strerror or str(error)
            ) from None
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="admin", daemon=True
        )
        self._thread.start()
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Stop listening; answers in flight are finished by their own threads."""
        server, self._server = self._server, None
        if server is not None and self._thread is not None:
            server.shutdown()
            server.server_close()
            self._thread.join()


@dataclass(frozen=True, slots=True)
class _Page:
    status: HTTPStatus
    content_type: str
    body: bytes


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    # The default of 5 makes a sixth connection of one moment wait a second for its repeated SYN.
    request_queue_size = 128

    def __init__(self, host: str, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), handler)

    def server_bind(self) -> None:
        # HTTPServer's own also looks up this host's full name, which can take seconds without a resolver.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]  # typed for any family

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("admin client failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server_version = "phasemesh"
    sys_version = ""

    def page(self, path: str) -> _Page:
        raise NotImplementedError

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        try:
            page = self.page(path)
        except Exception:
            _log.exception("admin page failed", extra={"path": path})
            page = _json(HTTPStatus.INTERNAL_SERVER_ERROR, {"error": "the server's log has the cause"})
        self.send_response(page.status)
        self.send_header("Content-Type", page.content_type)
        self.send_header("Content-Length", str(len(page.body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(page.body)

    do_HEAD = do_GET  # noqa: N815  # the name that http.server looks for

    def log_message(self, format: str, *args: Any) -> None:
        _log.debug("admin request", extra={"line": format % args})


def _probe(check: Callable[[], Health]) -> _Page:
    health = check()
    status = HTTPStatus.OK if health.ok else HTTPStatus.SERVICE_UNAVAILABLE
    return _json(status, {"ok": health.ok, "detail": dict(health.detail)})


def _json(status: HTTPStatus, body: Mapping[str, object]) -> _Page:
    return _Page(status, _JSON, json.dumps(body, default=str).encode() + b"\n")


def _version() -> str:
    try:
        return metadata.version("phasemesh")
    except metadata.PackageNotFoundError:
        return "unknown"
