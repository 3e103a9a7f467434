from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from phasemesh.telemetry.tracing import TracingSettings, configure_tracing, shutdown_tracing


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    """Every span of this process, as soon as it ends."""
    exporter = InMemorySpanExporter()
    configure_tracing(TracingSettings(), role="test", span_exporter=exporter)
    yield exporter
    shutdown_tracing()
