"""Leases: who may maintain a collection, agreed on between threads and processes.

Invariant: while one holder has a lease exclusively nobody else has it, and a holder that dies loses it at
once. Work asks for the `Lease` protocol alone, so that an object store's conditional writes can take the
place of the lock files of a local root.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

from phasemesh.index.errors import CollectionNotFound, LeaseHeld

#: Seconds between two looks at a lease that another has.
_POLL_S = 0.005


class Lease(Protocol):
    """A lease that threads and processes take in turn."""

    def hold(self, *, wait_s: float, shared: bool = False) -> AbstractContextManager[None]:
        """Hold the lease for the body of a `with`.

        Args:
            wait_s: Seconds to wait for others; 0 takes it now or not at all.
            shared: Any number may hold it together, but none of them beside an exclusive holder.

        Raises:
            LeaseHeld: Others had it all that time.
        """
        ...


class FileLease:
    """A lease on a local file system: `flock` on a file, which the kernel releases when its holder ends.

    Every hold opens the file anew, so threads of one process exclude each other too.

    Args:
        path: The lock file; made in a folder that has to be there.
        pause: Waits, in seconds.
        monotonic_s: Clock of the waiting.
    """

    def __init__(
        self,
        path: Path,
        *,
        pause: Callable[[float], None] = time.sleep,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._pause = pause
        self._monotonic_s = monotonic_s

    @contextmanager
    def hold(self, *, wait_s: float, shared: bool = False) -> Iterator[None]:
        """See `Lease`.

        Raises:
            LeaseHeld: Others had it all that time.
            CollectionNotFound: The collection's folder is gone.
        """
        try:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:
            raise CollectionNotFound("collection: its data is gone; it was deleted") from None
        try:
            self._lock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX, wait_s)
            yield
        finally:
            os.close(descriptor)

    def _lock(self, descriptor: int, how: int, wait_s: float) -> None:
        deadline_s = self._monotonic_s() + wait_s
        while True:
            try:
                fcntl.flock(descriptor, how | fcntl.LOCK_NB)
            except BlockingIOError:
                if self._monotonic_s() >= deadline_s:
                    raise LeaseHeld(
                        "collection: another thread or process is maintaining it; try again later"
                    ) from None
                self._pause(_POLL_S)
            else:
                return
