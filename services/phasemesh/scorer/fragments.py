"""The fragments that a request names, as sources that can be scanned: looked up, admitted, loaded, held.

Invariant: a request's segments are held from the moment they are loaded until it ends, and let go however it
ends; a fragment that fails leaves the others alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from phasemesh.errors import InvalidArgument
from phasemesh.index.cache import CacheSize, Leased, SegmentCache, SegmentRequest
from phasemesh.index.coded import served_codec
from phasemesh.index.leaf import LeafSource
from phasemesh.index.overlay import unpack_rows, visible_rows
from phasemesh.index.segments import SegmentKey
from phasemesh.index.spec import FragmentRef
from phasemesh.scorer.faults import fragment_failure
from phasemesh.scorer.gauges import CacheGauges
from phasemesh.scorer.requests import Index
from phasemesh.scorer.snapshots import Snapshot, Snapshots
from phasemesh.telemetry.metrics import Metrics
from phasemesh.v1.scorer_pb2 import FragmentFailure


@dataclass(frozen=True, slots=True)
class Asked:
    """A fragment that a request names.

    Attributes:
        fragment_id: its number.
        field: its path in the request.
        allowed: bitmap of rows that may be scored; None for all.
        rows: how many of its rows are scored; None for all.
    """

    fragment_id: int
    field: str
    allowed: bytes | None = None
    rows: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Found:
    """A fragment that is there.

    Attributes:
        ref: what the version says of it.
        request: for its segment.
        visible: rows that may be seen, bool [rows]; None for all.
        tokens: about how many of its token vectors will be scored.
    """

    ref: FragmentRef
    request: SegmentRequest
    visible: npt.NDArray[np.bool_] | None
    tokens: int


class Fragments:
    """Looks fragments up and loads them; `lookup` and `sources` belong to one event loop.

    Args:
        snapshots: versions of collections.
        cache: segments.
        metrics: of the process.
        lookups: threads for short reads.
        loaders: threads for reading and deriving whole segments.
    """

    def __init__(
        self,
        snapshots: Snapshots,
        cache: SegmentCache,
        metrics: Metrics,
        *,
        lookups: Executor,
        loaders: Executor,
    ) -> None:
        self._snapshots = snapshots
        self._cache = cache
        self._metrics = metrics
        self._gauges = CacheGauges(cache, metrics)
        self._lookups = lookups
        self._loaders = loaders

    async def lookup(self, index: Index, asked: Sequence[Asked]) -> list[Found | FragmentFailure]:
        """What is known of fragments before any vector is read, in the order asked for.

        Raises:
            PhasemeshError: the collection or the version isn't there, or can't be read.
        """
        return await asyncio.get_running_loop().run_in_executor(self._lookups, self._lookup, index, asked)

    @asynccontextmanager
    async def sources(
        self, found: Sequence[Found | FragmentFailure]
    ) -> AsyncIterator[list[LeafSource | FragmentFailure]]:
        """Hold the segments of `found` while the body runs; in the same order, failures passed on."""
        present = [one for one in found if isinstance(one, Found)]
        requests = [one.request for one in present]
        # What is in memory isn't kept waiting behind what must be read or derived.
        resident = all(self._cache.is_resident(request.key) for request in requests)
        lease = self._cache.lease(requests)
        entering = (self._lookups if resident else self._loaders).submit(lease.__enter__)
        try:
            leased = await asyncio.wrap_future(entering)
        except asyncio.CancelledError:
            # A thread that has begun can't be stopped; what it gets is given back when it has it.
            entering.add_done_callback(partial(_give_back, lease))
            raise
        try:
            answers = iter(leased)
            yield [self._source(one, next(answers)) if isinstance(one, Found) else one for one in found]
        finally:
            lease.__exit__(None, None, None)
            if not resident:
                self._lookups.submit(self._gauges.refresh)
            else:
                self._gauges.count()

    def is_resident(self, source: LeafSource) -> bool:
        """Whether a source's segment has a place in memory."""
        return self._cache.is_resident(source.segment.key)

    async def size(self) -> CacheSize:
        """How full the cache is.

        Raises:
            OSError: its folder can't be read.
        """
        return await asyncio.get_running_loop().run_in_executor(self._lookups, self._gauges.refresh)

    def failed(self, fragment_id: int, error: Exception) -> FragmentFailure:
        """Count and describe a fragment that wasn't searched."""
        failure = fragment_failure(fragment_id, error)
        self._metrics.failed_fragments.labels(failure.error.reason).inc()
        return failure

    def _lookup(self, index: Index, asked: Sequence[Asked]) -> list[Found | FragmentFailure]:
        snapshot = self._snapshots.open(index)
        found: list[Found | FragmentFailure] = []
        for one in asked:
            try:
                found.append(self._find(snapshot, index, one))
            except Exception as error:
                found.append(self.failed(one.fragment_id, error))
        return found

    def _find(self, snapshot: Snapshot, index: Index, asked: Asked) -> Found:
        ref = snapshot.fragment(asked.fragment_id)
        allowed = None
        if asked.allowed is not None:
            try:
                allowed = unpack_rows(asked.allowed, ref.physical_rows)
            except ValueError as error:
                raise InvalidArgument(
                    f"{asked.field}.{error}", reason="BAD_ROWS", field=f"{asked.field}.allowed_rows"
                ) from error
        visible = visible_rows(ref.physical_rows, snapshot.deleted_rows(ref.fragment_id), allowed)
        scored = asked.rows
        if scored is None:
            scored = ref.physical_rows if visible is None else int(np.count_nonzero(visible))
        codec = served_codec(index.codec, index.dim)
        key = SegmentKey(index.version.incarnation, ref.data_key, codec)
        return Found(
            ref=ref,
            request=SegmentRequest(key, partial(snapshot.derive, ref, key)),
            visible=visible,
            tokens=-(-ref.tokens * scored // max(1, ref.physical_rows)),
        )

    def _source(self, found: Found, leased: Leased) -> LeafSource | FragmentFailure:
        segment, fragment_id = leased.segment, found.ref.fragment_id
        if segment is None:
            return self.failed(fragment_id, leased.failure or RuntimeError("there is no segment"))
        if segment.rows != found.ref.physical_rows:
            mismatch = f"the segment has {segment.rows} rows, the fragment {found.ref.physical_rows}"
            return self.failed(fragment_id, RuntimeError(mismatch))
        return LeafSource(fragment_id, segment, found.visible)


def _give_back(lease: Any, entered: Future[Any]) -> None:
    if not entered.cancelled() and entered.exception() is None:
        lease.__exit__(None, None, None)
