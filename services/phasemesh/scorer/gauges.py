"""The segment cache's own counts, as series.

Invariant: a series' growth equals the cache's, whoever refreshes it and however many at once.
"""

from __future__ import annotations

import threading

from phasemesh.index.cache import CacheCounters, CacheSize, SegmentCache
from phasemesh.telemetry.metrics import Metrics


class CacheGauges:
    """Copies a cache's counters and sizes into `metrics`. Safe for several threads."""

    def __init__(self, cache: SegmentCache, metrics: Metrics) -> None:
        self._cache = cache
        self._metrics = metrics
        self._told = CacheCounters()
        self._guard = threading.Lock()

    def count(self) -> None:
        """Bring the counters up to date."""
        metrics = self._metrics
        with self._guard:
            now, before = self._cache.counters, self._told
            self._told = now
        metrics.segment_cache_hits.labels("memory").inc(now.hits - before.hits)
        metrics.segment_cache_hits.labels("disk").inc(now.mapped - before.mapped)
        metrics.segment_derivations.inc(now.derivations - before.derivations)
        metrics.segment_evictions.inc(now.evictions - before.evictions)
        metrics.segment_cold.inc(now.cold - before.cold)
        metrics.segment_damaged.inc(now.corrupt - before.corrupt)
        metrics.segment_write_failures.inc(now.write_failures - before.write_failures)

    def refresh(self) -> CacheSize:
        """Bring counters and sizes up to date; reads the folder.

        Raises:
            OSError: the folder can't be read.
        """
        self.count()
        size = self._cache.size
        self._metrics.segment_resident_bytes.set(size.resident_bytes)
        self._metrics.segment_capacity_bytes.set(size.capacity_bytes)
        self._metrics.segment_cached_bytes.set(size.cached_bytes)
        self._metrics.resident_segments.set(size.resident_segments)
        return size
