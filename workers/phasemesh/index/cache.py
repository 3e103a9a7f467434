"""A scorer's cache of segments: one folder on disk, and of it as much resident as the byte budget allows.

A segment is asked for by key, together with the function that derives it from the store. It is derived once,
however many ask at the same time, written to the folder and mapped. Afterwards, also after a restart, it is
only mapped. What the cache holds is never the truth: a file that is damaged or gone is derived again, and a
folder that can't be written costs speed, never an answer.

*Resident* segments stay mapped and verified between searches, least recently used ones leave first. A segment
in use never leaves. One that finds no room beside those in use is *cold*: mapped for its lease alone, so a
corpus larger than the budget doesn't make every search evict what the next one needs. Ask for all segments of
a search in one `lease`: those already resident are taken first.
"""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from phasemesh.index.errors import IndexFailure
from phasemesh.index.segment_file import SegmentDamaged, open_segment, write_segment
from phasemesh.index.segments import SUFFIX, Segment, SegmentKey

_log = logging.getLogger(__name__)


class CacheFolderInUse(IndexFailure):
    """Another scorer works in the cache folder."""


@dataclass(frozen=True, slots=True)
class SegmentRequest:
    """A segment that is needed.

    Args:
        key: Which one.
        derive: Makes it from the store, in memory; called at most once at a time per key. What it raises is
            what everyone gets who waits for this segment.
    """

    key: SegmentKey
    derive: Callable[[], Segment]


@dataclass(frozen=True, slots=True)
class Leased:
    """Answer to one request: a segment, or why there is none.

    Args:
        segment: The segment; usable until the lease ends.
        failure: What went wrong while deriving it.
        cold: It has no place among the residents.
    """

    segment: Segment | None = None
    failure: Exception | None = None
    cold: bool = False


@dataclass(frozen=True, slots=True)
class CacheCounters:
    """What happened since the cache was opened.

    Args:
        hits: Requests that found their segment resident.
        mapped: Segments mapped from a file that was there.
        derivations: Segments derived from the store.
        evictions: Residents that left for others.
        cold: Requests served without a place among the residents.
        corrupt: Files found damaged and removed.
        write_failures: Segments that couldn't be written and are held in memory instead.
        cold_bytes: Bytes of segments served cold.
    """

    hits: int = 0
    mapped: int = 0
    derivations: int = 0
    evictions: int = 0
    cold: int = 0
    corrupt: int = 0
    write_failures: int = 0
    cold_bytes: int = 0


@dataclass(frozen=True, slots=True)
class CacheSize:
    """How full a cache is.

    Args:
        resident_bytes: Bytes of resident segments.
        resident_segments: Their number.
        capacity_bytes: Most bytes that may be resident.
        cached_bytes: Bytes of all segment files in the folder.
    """

    resident_bytes: int
    resident_segments: int
    capacity_bytes: int
    cached_bytes: int


@dataclass(slots=True)
class _Resident:
    segment: Segment
    users: int = 0


@dataclass(frozen=True, slots=True)
class _Held:
    """A segment on its way to one lease; `resident` says whose count of users it raised."""

    segment: Segment
    resident: _Resident | None


class SegmentCache:
    """Segments of one scorer. Safe for use from any number of threads.

    Args:
        folder: The cache folder; made if missing. One scorer's alone.
        capacity_bytes: Most bytes of segments that are resident.

    Raises:
        CacheFolderInUse: Another cache has the folder open.
        OSError: The folder can't be made or locked.
    """

    def __init__(self, folder: Path, capacity_bytes: int) -> None:
        if capacity_bytes < 0:
            raise ValueError(f"capacity_bytes: is {capacity_bytes}, expected at least 0")
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._capacity = capacity_bytes
        self._lock_file = _LockFile(folder / "lock")
        self._guard = threading.Lock()
        self._residents: OrderedDict[SegmentKey, _Resident] = OrderedDict()
        self._resident_bytes = 0
        self._loading: dict[SegmentKey, Future[Segment]] = {}
        # Files whose checksum this process has seen to be right, by what changes when they are written to.
        self._verified: dict[SegmentKey, tuple[int, ...]] = {}
        self._counters = CacheCounters()
        self._closed = False
        for leftover in folder.glob(f"*{SUFFIX}.*.tmp"):
            leftover.unlink(missing_ok=True)

    def close(self) -> None:
        """Gives the folder up. Segments still leased stay usable."""
        with self._guard:
            self._closed = True
            self._residents.clear()
            self._resident_bytes = 0
        self._lock_file.close()

    @property
    def counters(self) -> CacheCounters:
        """Counts since the cache was opened."""
        with self._guard:
            return self._counters

    @property
    def size(self) -> CacheSize:
        """How full it is; reads the folder."""
        cached = 0
        # The folder, or a file of it, may be gone by now: then it takes no room.
        with suppress(FileNotFoundError), os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name.endswith(SUFFIX):
                    with suppress(FileNotFoundError):
                        cached += entry.stat().st_size
        with self._guard:
            return CacheSize(self._resident_bytes, len(self._residents), self._capacity, cached)

    def is_resident(self, key: SegmentKey) -> bool:
        """Whether a segment would be a hit now."""
        with self._guard:
            return key in self._residents

    @contextmanager
    def lease(self, requests: Sequence[SegmentRequest]) -> Iterator[list[Leased]]:
        """Holds segments for the length of a search.

        One that can't be derived doesn't fail the others.

        Args:
            requests: Segments needed.

        Yields:
            One answer per request, in their order.

        Raises:
            RuntimeError: The cache is closed; its folder may be another's by now.
        """
        if self._closed:
            raise RuntimeError(f"the segment cache {self._folder} is closed")
        held: list[_Held | Exception | None] = [None] * len(requests)
        try:
            # Residents first: they are in use before anything else looks for room.
            for position, request in enumerate(requests):
                held[position] = self._take_resident(request.key, count_hit=True)
            for position, request in enumerate(requests):
                if held[position] is None:
                    try:
                        held[position] = self._load(request)
                    except Exception as error:
                        held[position] = error
            yield [_answer(item) for item in held]
        finally:
            with self._guard:
                for item in held:
                    if isinstance(item, _Held) and item.resident is not None:
                        item.resident.users -= 1

    def _take_resident(self, key: SegmentKey, *, count_hit: bool) -> _Held | None:
        with self._guard:
            resident = self._residents.get(key)
            if resident is None:
                return None
            self._residents.move_to_end(key)
            resident.users += 1
            if count_hit:
                self._count(hits=1)
            return _Held(resident.segment, resident)

    def _load(self, request: SegmentRequest) -> _Held:
        """Maps or derives a segment, or waits for the thread that is at it."""
        key = request.key
        with self._guard:
            loading = self._loading.get(key)
            mine = loading is None
            if loading is None:
                loading = self._loading[key] = Future()
        if not mine:
            segment = loading.result()
            with self._guard:
                self._count(hits=1)
            return self._admit(segment)
        try:
            # Between the look for a resident and the claim another thread may have finished the same work.
            found = self._take_resident(key, count_hit=True)
            if found is None:
                found = self._admit(self._map(key) or self._derive(request))
            loading.set_result(found.segment)
            return found
        except BaseException as error:
            loading.set_exception(error)
            raise
        finally:
            with self._guard:
                del self._loading[key]

    def _admit(self, segment: Segment) -> _Held:
        """Gives a segment a place among the residents if there is, or can be made, room."""
        with self._guard:
            resident = self._residents.get(segment.key)
            if resident is None and self._make_room(segment.resident_bytes):
                resident = self._residents[segment.key] = _Resident(segment)
                self._resident_bytes += segment.resident_bytes
            if resident is None:
                self._count(cold=1, cold_bytes=segment.resident_bytes)
                return _Held(segment, None)
            resident.users += 1
            return _Held(resident.segment, resident)

    def _make_room(self, nbytes: int) -> bool:
        """Evicts the least recently used until `nbytes` fit; nobody, where that can't be enough."""
        missing = self._resident_bytes + nbytes - self._capacity
        victims = []
        for key, resident in self._residents.items():
            if missing <= 0:
                break
            if not resident.users:
                victims.append(key)
                missing -= resident.segment.resident_bytes
        if missing > 0:
            return False
        for key in victims:
            self._resident_bytes -= self._residents.pop(key).segment.resident_bytes
        self._count(evictions=len(victims))
        return True

    def _map(self, key: SegmentKey) -> Segment | None:
        """The segment in the folder; None if there is none, or it was damaged and is gone now."""
        path = self._folder / key.file_name
        try:
            stat = path.stat()
            identity = _identity(stat)
            segment = open_segment(path, key, verify=self._verified.get(key) != identity)
        except FileNotFoundError:
            return None
        except (SegmentDamaged, OSError) as error:
            _log.warning("segment file %s is damaged and will be derived again: %s", path, error)
            self._verified.pop(key, None)
            with self._guard:
                self._count(corrupt=1)
            try:
                path.unlink(missing_ok=True)
            except OSError as refused:
                _log.warning("damaged segment file %s can't be removed: %s", path, refused)
            return None
        self._verified[key] = identity
        with self._guard:
            self._count(mapped=1)
        return segment

    def _derive(self, request: SegmentRequest) -> Segment:
        key = request.key
        segment = request.derive()
        with self._guard:
            self._count(derivations=1)
        try:
            path = write_segment(segment, self._folder)
            mapped = open_segment(path, key, verify=False)
            stat = path.stat()
        except (OSError, SegmentDamaged) as error:
            _log.warning(
                "segment cache %s can't be written (%s): a segment of %d bytes is held in memory only and "
                "will be derived again after a restart; free space or set another cache folder",
                self._folder,
                error,
                segment.nbytes,
            )
            with self._guard:
                self._count(write_failures=1)
            return segment
        self._verified[key] = _identity(stat)
        return mapped

    def _count(self, **increments: int) -> None:
        """Adds to the counters; the caller holds the guard."""
        totals = {name: getattr(self._counters, name) + count for name, count in increments.items()}
        self._counters = replace(self._counters, **totals)


def _identity(stat: os.stat_result) -> tuple[int, ...]:
    return (stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


def _answer(item: _Held | Exception | None) -> Leased:
    if isinstance(item, _Held):
        return Leased(segment=item.segment, cold=item.resident is None)
    return Leased(failure=item)


class _LockFile:
    """An advisory lock that ends with the process, however that ends."""

    def __init__(self, path: Path) -> None:
        self._descriptor: int | None = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._descriptor)
            raise CacheFolderInUse(
                f"cache_dir: {path.parent} is in use by another scorer; give each scorer a folder of its own"
            ) from error

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
