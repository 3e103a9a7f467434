"""Keeps batches that may kill workers away from all others.

A worker that dies takes with it the batch that it runs and the one queued behind it. Who is to blame shows
only if the suspect is alone, so that a trial waits for all else to finish, and all else waits for the trial.

Invariant: while one holds `alone`, nobody else holds anything; who waits for `alone` goes before newcomers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


class Isolation:
    """For one event loop; holders may be cancelled at any time."""

    def __init__(self) -> None:
        self._shared = 0
        self._trials = 0
        self._alone = False
        self._changed = asyncio.Event()

    @property
    def wanted(self) -> bool:
        """Whether somebody is alone, or waits to be."""
        return self._trials > 0

    @asynccontextmanager
    async def shared(self) -> AsyncIterator[None]:
        """Run beside others; doesn't suspend while no trial is wanted."""
        await self._until(lambda: not self.wanted)
        self._shared += 1
        try:
            yield
        finally:
            self._shared -= 1
            self._changed.set()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Run while nobody else does."""
        self._trials += 1
        try:
            await self._until(lambda: not (self._shared or self._alone))
            self._alone = True
            try:
                yield
            finally:
                self._alone = False
        finally:
            self._trials -= 1
            self._changed.set()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()
