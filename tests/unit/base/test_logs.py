"""Logs: one JSON object per line, with fields and the trace's ids."""

import json
import logging
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from phasemesh.telemetry import logs, tracing


@pytest.fixture(autouse=True)
def restored_root_logger() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def test_json_line(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure_logging(role="encoder")
    tracing.configure_tracing(tracing.TracingSettings(), role="test", span_exporter=InMemorySpanExporter())
    with tracing.tracer().start_as_current_span("s") as span:
        logging.getLogger("phasemesh.x").info("batch done", extra={"items": 3})
    tracing.shutdown_tracing()
    line = json.loads(capsys.readouterr().err)
    assert line["msg"] == "batch done"
    assert (line["level"], line["role"], line["items"]) == ("info", "encoder", 3)
    assert line["trace_id"] == format(span.get_span_context().trace_id, "032x")
    assert line["ts"].endswith("Z")


def test_exception_stays_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure_logging(role="encoder", style="json")
    try:
        raise ValueError("a\nb")
    except ValueError:
        logging.getLogger("x").exception("it\nbroke")
    written = capsys.readouterr().err
    assert written.count("\n") == 1
    assert "ValueError" in json.loads(written)["exception"]


def test_level_and_text(capsys: pytest.CaptureFixture[str]) -> None:
    logs.configure_logging(role="encoder", level="warning", style="text")
    logging.getLogger("x").info("quiet")
    logging.getLogger("x").warning("loud", extra={"n": 1})
    written = capsys.readouterr().err
    assert "quiet" not in written
    assert written.rstrip().endswith("loud n=1")
