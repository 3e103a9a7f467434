"""An OTLP/HTTP collector that keeps what it receives in memory."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue


@dataclass(frozen=True, slots=True)
class SeenSpan:
    """A span as the collector got it; ids are hex, times wall-clock nanoseconds."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: int
    start_ns: int
    end_ns: int
    attributes: dict[str, object]
    links: frozenset[str]
    linked_traces: frozenset[str]
    service: str
    pid: int
    status: int


class Collector:
    """What `collecting` yields."""

    def __init__(self) -> None:
        self._spans: list[SeenSpan] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                collector._spans += seen_spans(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Keep quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    @property
    def spans(self) -> list[SeenSpan]:
        """Every span so far."""
        return list(self._spans)

    def wait_for(self, enough: Callable[[list[SeenSpan]], object], timeout_s: float = 20.0) -> list[SeenSpan]:
        """All spans, once `enough` is true of them; exporters of other processes can't be awaited."""
        deadline = time.monotonic() + timeout_s
        while not enough(self.spans):
            assert time.monotonic() < deadline, sorted({(s.service, s.name) for s in self.spans})
            time.sleep(0.05)
        return self.spans


def seen_spans(request: ExportTraceServiceRequest) -> list[SeenSpan]:
    """The spans of one export."""
    spans = []
    for resource_spans in request.resource_spans:
        resource = _attributes(resource_spans.resource.attributes)
        for scope in resource_spans.scope_spans:
            spans += [
                SeenSpan(
                    name=span.name,
                    trace_id=span.trace_id.hex(),
                    span_id=span.span_id.hex(),
                    parent_id=span.parent_span_id.hex(),
                    kind=span.kind,
                    start_ns=span.start_time_unix_nano,
                    end_ns=span.end_time_unix_nano,
                    attributes=_attributes(span.attributes),
                    links=frozenset(link.span_id.hex() for link in span.links),
                    linked_traces=frozenset(link.trace_id.hex() for link in span.links),
                    service=str(resource["service.name"]),
                    pid=int(str(resource["process.pid"])),
                    status=span.status.code,
                )
                for span in scope.spans
            ]
    return spans


def _attributes(pairs: object) -> dict[str, object]:
    return {pair.key: _value(pair.value) for pair in pairs}  # type: ignore[attr-defined]  # a repeated field


def _value(value: AnyValue) -> object:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(element) for element in value.array_value.values]
    return None if kind is None else getattr(value, kind)


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on the loopback, for as long as the body runs."""
    collector = Collector()
    thread = threading.Thread(target=collector.server.serve_forever)
    thread.start()
    try:
        yield collector
    finally:
        collector.server.shutdown()
        collector.server.server_close()
        thread.join()
