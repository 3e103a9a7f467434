"""The versions of one dataset: opening it, knowing the newest, and holding handles to exact ones.

A handle that was given out never moves: a newer version is another handle, so a reader keeps what it began
with whatever is committed meanwhile.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import lance
import pyarrow as pa

from phasemesh.index.errors import (
    DataMissing,
    StorageFailure,
    VersionGone,
    VersionNotReached,
    storage_failure,
)
from phasemesh.index.spec import Version

# File format of the data, named so that a newer pylance can't change it under collections that exist.
_STORAGE_VERSION: Final = "2.2"
_CHECKED_OUT_VERSIONS = 16
# Age at which a handle that is kept is looked up anew: another process may have cleaned its version up.
_CHECKED_OUT_S = 60.0
_METADATA_CACHE_BYTES = 64 << 20
_INDEX_CACHE_BYTES = 16 << 20


def create_dataset(path: Path, schema: pa.Schema) -> lance.LanceDataset:
    """Make an empty dataset with stable row ids.

    Raises:
        OSError: There is one, or the medium refuses.
    """
    return lance.write_dataset(
        schema.empty_table(),
        str(path),
        schema=schema,
        mode="create",
        enable_stable_row_ids=True,
        data_storage_version=_STORAGE_VERSION,
    )


def open_dataset(path: Path) -> lance.LanceDataset:
    """Open a dataset at its newest version. Never makes one: data that is gone must not look like none.

    Raises:
        DataMissing: There is none.
        StorageFailure: It can't be read.
    """
    if not path.is_dir():
        raise DataMissing(
            "the collection's data isn't in data_dir: it was moved or removed, or its disk isn't mounted"
        )
    try:
        return lance.dataset(
            str(path),
            metadata_cache_size_bytes=_METADATA_CACHE_BYTES,
            index_cache_size_bytes=_INDEX_CACHE_BYTES,
        )
    except (ValueError, OSError, RuntimeError) as error:
        failure = storage_failure(error) if not isinstance(error, ValueError) else None
        raise failure or StorageFailure("the collection's data can't be opened; it is damaged") from error


class History:
    """Handles to the versions of one incarnation's dataset. Safe for several threads.

    Args:
        dataset: The dataset at a version that is committed.
        incarnation: Whose versions these are.
        refresh_ms: Age up to which the newest version known is taken for the newest there is.
        monotonic_s: Clock, in seconds.
    """

    def __init__(
        self,
        dataset: lance.LanceDataset,
        incarnation: str,
        refresh_ms: float,
        monotonic_s: Callable[[], float],
    ) -> None:
        self._incarnation = incarnation
        self._refresh_ms = refresh_ms
        self._monotonic_s = monotonic_s
        self._lock = threading.Lock()
        self._checked_out: OrderedDict[int, tuple[float, lance.LanceDataset]] = OrderedDict()
        self._head = dataset
        self._seen_s = monotonic_s()

    def version_of(self, dataset: lance.LanceDataset) -> Version:
        """The version that a handle is at."""
        return Version(self._incarnation, dataset.version)

    def head(self, *, refresh: bool = False) -> lance.LanceDataset:
        """The newest version known, looked up anew if asked for or if what is known is too old."""
        with self._lock:
            head = self._head
            if not refresh and (self._monotonic_s() - self._seen_s) * 1000.0 < self._refresh_ms:
                return head
        # Taken before looking: what is committed while we look may not be seen.
        looked_s = self._monotonic_s()
        number = head.latest_version
        newest = head.checkout_version(number) if number != head.version else head
        self.advance(newest)
        with self._lock:
            self._seen_s = max(self._seen_s, looked_s)
            return self._head

    def advance(self, dataset: lance.LanceDataset) -> None:
        """Learn of a committed version; an older one than the head changes nothing."""
        with self._lock:
            if dataset.version > self._head.version:
                self._head = dataset

    def at(self, version: Version) -> lance.LanceDataset:
        """A handle at exactly this version.

        Raises:
            VersionGone: It is of another incarnation, was never made, or is cleaned up.
        """
        self._check_incarnation(version)
        number = version.number
        now_s = self._monotonic_s()
        with self._lock:
            head = self._head
            if head.version == number:
                return head
            looked_s, known = self._checked_out.get(number, (now_s, None))
            if known is not None and now_s - looked_s < _CHECKED_OUT_S:
                self._checked_out.move_to_end(number)
                return known
        if number < 1 or (number > head.version and number > self.head(refresh=True).version):
            raise VersionGone(f"version: {number} was never made")
        try:
            dataset = head.checkout_version(number)
        except (ValueError, OSError) as error:
            self.forget([number])
            raise VersionGone(f"version: {number} is no longer kept") from error
        with self._lock:
            self._checked_out[number] = (now_s, dataset)
            self._checked_out.move_to_end(number)
            while len(self._checked_out) > _CHECKED_OUT_VERSIONS:
                self._checked_out.popitem(last=False)
        return dataset

    def forget(self, numbers: Iterable[int]) -> None:
        """Drop the handles that are kept of versions that were cleaned up."""
        with self._lock:
            for number in numbers:
                self._checked_out.pop(number, None)

    def at_least(self, version: Version) -> lance.LanceDataset:
        """A handle at this version or a newer one.

        Raises:
            VersionGone: It is of another incarnation.
            VersionNotReached: No process has committed it yet.
        """
        self._check_incarnation(version)
        head = self.head()
        if head.version < version.number:
            head = self.head(refresh=True)
        if head.version < version.number:
            raise VersionNotReached(
                f"min_version: the collection is at version {head.version}, not {version.number} yet"
            )
        return head

    def _check_incarnation(self, version: Version) -> None:
        if version.incarnation != self._incarnation:
            raise VersionGone(
                f"version: {version.incarnation[:64]!r} isn't this collection's incarnation; it was made anew"
            )
