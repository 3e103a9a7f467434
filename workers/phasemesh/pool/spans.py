"""The worker's own spans of one batch, made from the times that the engine took.

    batch.run                parent: the batch's span in the service, from `Batch.carrier`
      batch.transfer         padding and copying inputs to the device
      batch.compute          the backbone
      batch.pool             pooling, heads, copying results to the host

Times are explicit, so that spans, `Timings` and `Server-Timing` agree. Nothing is made for a batch whose
carrier is absent or not sampled.
"""

from __future__ import annotations

from opentelemetry import trace

from phasemesh.pool.protocol import Batch, BatchResult
from phasemesh.telemetry import names, tracing


def emit_batch_spans(batch: Batch, result: BatchResult) -> None:
    """Record the spans of a batch that has been computed."""
    if not batch.carrier:
        return
    parent = tracing.extract(batch.carrier)
    parent_context = trace.get_current_span(parent).get_span_context()
    if not (parent_context.is_valid and parent_context.trace_flags.sampled):
        return

    timings = result.timings
    attributes: dict[str, str | int] = {
        names.BATCH_ID: batch.batch_id,
        names.BATCH_ITEMS: len(batch.sequences),
        names.BATCH_TOKENS: batch.sequences.tokens,
        names.BATCH_PADDED_TOKENS: timings.padded_tokens,
        names.REPLICA_ID: result.replica_id,
        names.MODEL: batch.model,
    }
    phases = (
        (names.SPAN_WORKER_TRANSFER, timings.transfer_ns),
        (names.SPAN_WORKER_COMPUTE, timings.compute_ns),
        (names.SPAN_WORKER_POOL, timings.pool_ns),
    )
    tracer = tracing.tracer()
    at = timings.started_unix_ns
    whole = tracer.start_span(names.SPAN_WORKER, context=parent, attributes=attributes, start_time=at)
    inside = trace.set_span_in_context(whole, parent)
    for name, duration_ns in phases:
        span = tracer.start_span(name, context=inside, start_time=at)
        at += duration_ns
        span.end(end_time=at)
    whole.end(end_time=at)
