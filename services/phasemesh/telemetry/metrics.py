"""The Prometheus series of one process.

Invariants: label sets are fixed, values of labels are bounded (models of the configuration, phases, codes),
and every series that a scaler or alert reads exists at zero before the first request, because a missing
series reads as "no load" (keda#3065).
"""

from __future__ import annotations

from collections.abc import Iterable

from opentelemetry import trace
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST, generate_latest

#: 35 steps of 1.5 from 10 µs to 14.4 s, as TEI's; wide enough for a tokenize phase and for a bulk request.
DURATION_BUCKETS_S = tuple(round(1e-5 * 1.5**step, 9) for step in range(36))
#: Powers of two, for counts of tokens and items.
COUNT_BUCKETS = tuple(float(2**step) for step in range(18))
RATIO_BUCKETS = tuple(step / 20 for step in range(1, 21))

#: Reasons for which admission refuses work; the label's whole vocabulary.
REJECT_REASONS = ("QUEUE_FULL", "WAIT_TOO_LONG", "DRAINING")
#: Where a segment was found: in memory, or in the cache folder.
CACHE_TIERS = ("memory", "disk")
#: How a compaction ended: fragments were merged, writes kept coming first, or the store failed.
COMPACTION_OUTCOMES = ("merged", "conflict", "failed")
CLEANUP_OUTCOMES = ("done", "failed")
REPLICA_STATES = ("starting", "ready", "restarting", "failed", "draining")


class Metrics:
    """All series of a process, in a registry of its own."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self.phase_duration = Histogram(
            "phasemesh_phase_duration_seconds", "Time in a phase.", ["phase", "model"],
            buckets=DURATION_BUCKETS_S, registry=r,
        )  # fmt: skip
        self.rpc_duration = Histogram(
            "phasemesh_rpc_server_duration_seconds", "Time of an RPC on the server.", ["method", "code"],
            buckets=DURATION_BUCKETS_S, registry=r,
        )  # fmt: skip
        self.http_duration = Histogram(
            "phasemesh_http_server_duration_seconds", "Time of an HTTP request.", ["route", "status"],
            buckets=DURATION_BUCKETS_S, registry=r,
        )  # fmt: skip
        self.inflight = Gauge("phasemesh_inflight_requests", "Requests being worked on.", registry=r)
        self.queue_tokens = Gauge(
            "phasemesh_queue_tokens", "Tokens waiting for a batch.", ["model"], registry=r
        )
        self.queue_items = Gauge(
            "phasemesh_queue_items", "Inputs waiting for a batch.", ["model"], registry=r
        )
        self.queue_oldest = Gauge(
            "phasemesh_queue_oldest_seconds", "Age of the oldest waiting input.", registry=r
        )
        self.tokens_per_second = Gauge(
            "phasemesh_encoder_tokens_per_second", "Measured throughput while busy.", registry=r
        )
        self.tokens = Counter("phasemesh_tokens", "Real tokens computed.", ["model"], registry=r)
        self.padded_tokens = Counter(
            "phasemesh_padded_tokens", "Tokens computed, padding included.", ["model"], registry=r
        )
        self.truncated = Counter("phasemesh_truncated_inputs", "Inputs cut to fit.", ["model"], registry=r)
        self.failed_items = Counter(
            "phasemesh_failed_items", "Inputs that failed by themselves.", ["model", "reason"], registry=r
        )
        self.cancelled_items = Counter(
            "phasemesh_cancelled_items",
            "Inputs dropped from the queue because their caller left.",
            registry=r,
        )
        self.rejected = Counter(
            "phasemesh_rejected", "Requests refused by admission.", ["reason"], registry=r
        )
        self.batch_items = Histogram(
            "phasemesh_batch_items", "Inputs in a batch.", ["model"], buckets=COUNT_BUCKETS, registry=r
        )
        self.batch_tokens = Histogram(
            "phasemesh_batch_tokens", "Real tokens in a batch.", ["model"], buckets=COUNT_BUCKETS, registry=r
        )
        self.batch_fill = Histogram(
            "phasemesh_batch_fill_ratio", "Real tokens over padded tokens.", ["model"],
            buckets=RATIO_BUCKETS, registry=r,
        )  # fmt: skip
        self.batch_retries = Counter(
            "phasemesh_batch_bisections", "Batches split after a failure.", registry=r
        )
        self.replicas = Gauge("phasemesh_replicas", "Replicas by state.", ["state"], registry=r)
        self.replica_restarts = Gauge("phasemesh_replica_restarts", "Restarts of all replicas.", registry=r)
        self.queued_scan_work = Gauge(
            "phasemesh_scorer_queued_scan_work",
            "Scan work that waits: tokens times query tokens over 32, rounded up.",
            registry=r,
        )
        self.running_searches = Gauge(
            "phasemesh_scorer_running_searches", "Requests on scoring threads.", registry=r
        )
        self.shared_searches = Counter(
            "phasemesh_shared_searches",
            "Parts of searches that shared a scan with others.",
            registry=r,
        )
        self.scanned_tokens = Counter("phasemesh_scanned_tokens", "Token vectors scored.", registry=r)
        self.scanned_documents = Counter("phasemesh_scanned_documents", "Documents scored.", registry=r)
        self.segment_resident_bytes = Gauge(
            "phasemesh_segment_resident_bytes", "Bytes of segments in memory.", registry=r
        )
        self.segment_capacity_bytes = Gauge(
            "phasemesh_segment_capacity_bytes", "Most bytes of segments kept in memory.", registry=r
        )
        self.segment_cached_bytes = Gauge(
            "phasemesh_segment_cached_bytes", "Bytes of segments in the disk cache.", registry=r
        )
        self.resident_segments = Gauge("phasemesh_resident_segments", "Segments in memory.", registry=r)
        self.segment_derivations = Counter(
            "phasemesh_segment_derivations", "Segments built from the store.", registry=r
        )
        self.segment_cache_hits = Counter(
            "phasemesh_segment_cache_hits", "Segments found ready.", ["tier"], registry=r
        )
        self.segment_evictions = Counter(
            "phasemesh_segment_evictions", "Segments that gave way to others.", registry=r
        )
        self.segment_cold = Counter(
            "phasemesh_segment_cold", "Segments read that found no room in memory.", registry=r
        )
        self.segment_damaged = Counter(
            "phasemesh_segment_damaged", "Segment files that failed their checksum.", registry=r
        )
        self.segment_write_failures = Counter(
            "phasemesh_segment_write_failures", "Segments that the cache folder didn't take.", registry=r
        )
        self.failed_fragments = Counter(
            "phasemesh_failed_fragments", "Fragments that a search couldn't read.", ["reason"], registry=r
        )
        self.tail_fragments = Gauge(
            "phasemesh_collection_fragments",
            "Fragments of the collection that has most, of those written to.",
            registry=r,
        )
        self.compactions = Counter(
            "phasemesh_compactions", "Compactions of a collection.", ["outcome"], registry=r
        )
        self.compaction_duration = Histogram(
            "phasemesh_compaction_duration_seconds", "Time of a compaction.", buckets=DURATION_BUCKETS_S,
            registry=r,
        )  # fmt: skip
        self.compacted_fragments = Counter(
            "phasemesh_compacted_fragments", "Fragments replaced by compaction.", registry=r
        )
        self.cleanups = Counter("phasemesh_cleanups", "Cleanups of a collection.", ["outcome"], registry=r)
        self.removed_versions = Counter(
            "phasemesh_removed_versions", "Versions removed by cleanup.", registry=r
        )
        self.removed_bytes = Counter("phasemesh_removed_bytes", "Bytes freed by cleanup.", registry=r)

    def start_at_zero(self, phases: Iterable[str], models: Iterable[str] = ()) -> None:
        """Create the series of `phases` and `models`, so that a scrape before the first request has them."""
        for reason in REJECT_REASONS:
            self.rejected.labels(reason)
        for state in REPLICA_STATES:
            self.replicas.labels(state)
        for tier in CACHE_TIERS:
            self.segment_cache_hits.labels(tier)
        for model in models:
            for phase in phases:
                self.phase_duration.labels(phase, model)
            for family in (
                self.queue_tokens, self.queue_items, self.tokens, self.padded_tokens,
                self.truncated, self.batch_items, self.batch_tokens, self.batch_fill,
            ):  # fmt: skip
                family.labels(model)

    def observe_phase(self, phase: str, model: str, seconds: float) -> None:
        """Add one phase, with the current trace id as exemplar where the trace is sampled."""
        self.phase_duration.labels(phase, model).observe(seconds, exemplar=current_exemplar())

    def exposition(self) -> bytes:
        """The registry in OpenMetrics text format, which is the one that carries exemplars."""
        exposition: bytes = generate_latest(self.registry)  # type: ignore[no-untyped-call]  # no annotations there
        return exposition


def current_exemplar() -> dict[str, str] | None:
    """Trace id of the current span, if that trace is sampled."""
    context = trace.get_current_span().get_span_context()
    if not (context.is_valid and context.trace_flags.sampled):
        return None
    return {"trace_id": trace.format_trace_id(context.trace_id)}
