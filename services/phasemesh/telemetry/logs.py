"""Logs: one line per event, with fields instead of interpolation, and the current trace's ids.

`log.info("batch done", extra={"items": 3})` puts `items` beside the message. Texts, vectors and keys never
go into a log.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any, Literal

from opentelemetry import trace

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    # Ray and uvicorn put fields of their own on every record.
    fields = {
        key: value
        for key, value in vars(record).items()
        if key not in _STANDARD and not key.startswith("_") and key != "color_message"
    }
    context = trace.get_current_span().get_span_context()
    if context.is_valid:
        fields.setdefault("trace_id", trace.format_trace_id(context.trace_id))
        fields.setdefault("span_id", trace.format_span_id(context.span_id))
    return fields


class JsonFormatter(logging.Formatter):
    """One JSON object per record."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter.format`."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "ts": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "role": self._role,
            "logger": record.name,
            "msg": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """The same record for a person at a terminal."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """See `logging.Formatter.format`."""
        fields = {key: value for key, value in _fields(record).items() if key not in ("span_id",)}
        return " ".join([super().format(record), *(f"{key}={value}" for key, value in fields.items())])


class _OncePerMinute(logging.Filter):
    """Lets one record a minute through: an exporter complains all the time while its collector is away."""

    def __init__(self) -> None:
        super().__init__()
        self._next_s = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        if record.created < self._next_s:
            return False
        self._next_s = record.created + 60
        return True


def configure_logging(
    *, role: str, level: str = "info", style: Literal["auto", "json", "text"] = "auto"
) -> None:
    """Send this process's logs to stderr; "auto" is text on a terminal and JSON elsewhere."""
    if style == "auto":
        style = "text" if sys.stderr.isatty() else "json"
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(role) if style == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("opentelemetry.exporter").addFilter(_OncePerMinute())
    # Libraries that log every connection or request at INFO; ours is one access line per call.
    for chatty in ("httpx", "httpcore", "urllib3", "filelock", "huggingface_hub", "asyncio", "uvicorn.error"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
