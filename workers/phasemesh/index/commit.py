"""Commits to one dataset: whole or absent, and acknowledged only when they are as durable as was asked for.

Commits go through Lance's own `execute`. Its uncommitted form would lose the list of inserted ids when the
transaction passes through Python, and with it the check that keeps concurrent inserts of one id from both
succeeding.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import lance
import pyarrow as pa

from phasemesh.index.durability import Durability, Sync, sync_all
from phasemesh.index.errors import WriteConflict
from phasemesh.index.filters import ids_sql
from phasemesh.index.history import History
from phasemesh.index.leases import Lease
from phasemesh.index.reading import referenced_files
from phasemesh.index.schema import ID, documents_to_table
from phasemesh.index.spec import CollectionSpec, StoredDocument, Version

#: Attempts after a restore by another process, each of which needs an unlucky moment of its own.
_RESTORED_RETRIES = 5


#: Token vectors that a fragment has at most, unless a document alone has more.
TARGET_TOKENS = 2_000_000


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """How a store writes and reads.

    Args:
        durability: What an acknowledged write survives.
        refresh_ms: Age up to which a read without a version may use what this process last saw; its own
            commits are seen at once.
        target_tokens: Token vectors at which a batch is cut into another fragment.
        limit_tokens: Most token vectors of one fragment, hence of one document.
        conflict_retries: Attempts after another process's commit got in between.
        conflict_timeout_s: Seconds after which those attempts end.
    """

    durability: Durability = Durability.DISK
    refresh_ms: float = 1000.0
    target_tokens: int = TARGET_TOKENS
    limit_tokens: int = 4_000_000
    conflict_retries: int = 50
    conflict_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if not 1 <= self.target_tokens <= self.limit_tokens:
            raise ValueError(f"target_tokens {self.target_tokens} isn't between 1 and {self.limit_tokens}")


@dataclass(slots=True, eq=False)
class _Turn:
    """One caller's batch on its way into a commit."""

    documents: Sequence[StoredDocument]
    tokens: int
    version: Version | None = None
    error: BaseException | None = None


class Committer:
    """The one writer of a dataset in this process; other processes may commit in between.

    Args:
        path: The dataset's folder.
        spec: The collection's specification.
        history: Learns of every commit once it is durable.
        options: How to write.
        sync: Forces a file or folder to the medium.
        gate: Held together by commits, and alone by what no commit may come in between of.
        committed: Told after every commit of this process; must return at once.
    """

    def __init__(
        self,
        path: Path,
        spec: CollectionSpec,
        history: History,
        options: StoreOptions,
        sync: Sync,
        *,
        gate: Lease,
        committed: Callable[[], None] | None = None,
    ) -> None:
        self._gate = gate
        self._committed = committed
        self._path = path
        self._spec = spec
        self._history = history
        self._options = options
        self._sync = sync
        self._lock = threading.Lock()
        self._durable_files: set[Path] = set()
        self._waiting: deque[_Turn] = deque()

    @property
    def waiting_upserts(self) -> int:
        """Batches that wait for a commit."""
        return len(self._waiting)

    def upsert(self, documents: Sequence[StoredDocument]) -> Version:
        """Insert or replace documents of different ids, in one commit that may hold other callers' too.

        Of two callers with the same id the one that came later counts; both get the commit's version.

        Raises:
            WriteConflict: Other commits kept coming in between.
            OSError: The medium refused.
        """
        turn = _Turn(documents, sum(len(document.tokens) for document in documents))
        self._waiting.append(turn)
        with self._lock:
            while turn.version is None and turn.error is None:
                self._commit_together(self._next_turns())
        if turn.error is not None:
            raise turn.error
        assert turn.version is not None
        return turn.version

    def delete(self, ids: Sequence[str]) -> Version:
        """Delete documents by id, in one commit.

        Raises:
            WriteConflict: Other commits kept coming in between.
            OSError: The medium refused.
        """
        predicate = ids_sql(ids)

        def delete(handle: lance.LanceDataset) -> None:
            handle.delete(
                predicate, conflict_retries=self._options.conflict_retries, retry_timeout=self._timeout()
            )

        with self._lock:
            return self._commit(delete)

    def delete_matching(self, matching: Callable[[lance.LanceDataset], list[str]]) -> tuple[Version, int]:
        """Delete the documents that `matching` finds, in one commit; none if it finds none.

        It is asked at the newest version, and again after a commit that touched one of them: a document that
        was replaced by one that it wouldn't find must not go.

        Returns:
            The first version without them, and how many went.

        Raises:
            WriteConflict: Other commits to the same documents kept coming in between.
            OSError: The medium refused.
        """
        until_s = time.monotonic() + self._options.conflict_timeout_s
        with self._lock:
            for retries_left in reversed(range(self._options.conflict_retries + 1)):
                head = self._history.head(refresh=True)
                ids = matching(head)
                if not ids:
                    return self._history.version_of(head), 0
                try:
                    return self._commit(partial(_delete_ids, ids=ids), head), len(ids)
                except WriteConflict:
                    if not retries_left or time.monotonic() > until_s:
                        raise
        raise AssertionError("the last attempt returns or raises")

    def make_durable(self, dataset: lance.LanceDataset) -> None:
        """Force out all that a version refers to, if writes are to survive a power cut.

        Raises:
            OSError: The medium refused.
        """
        if self._options.durability is not Durability.DISK:
            return
        # Not only what this commit wrote: it may stand on another process's commit that isn't forced out
        # yet, and would be lost with it. Lance itself never calls fsync.
        files = referenced_files(dataset)
        self.force_out([path for path in files if path not in self._durable_files])
        self._sync(self._path)

    def force_out(self, files: Sequence[Path]) -> None:
        """Force out files that a commit is going to refer to, so that it needn't, if that is asked for.

        Raises:
            OSError: The medium refused.
        """
        if self._options.durability is Durability.DISK:
            sync_all(files, self._sync)
            self._durable_files.update(files)

    def forget_files(self, dataset: lance.LanceDataset) -> None:
        """Forget which files are durable, but for those of a version: what it replaced may be many."""
        if self._options.durability is Durability.DISK:
            # Nothing is lost if a commit adds to the old set meanwhile: its files are forced out once more.
            self._durable_files = self._durable_files.intersection(referenced_files(dataset))

    def replace_head(self, write: Callable[[lance.LanceDataset], None]) -> Version:
        """Commit what no other commit may come in between of; `write` gets a handle at the newest version.

        Raises:
            LeaseHeld: Commits of other processes left no gap.
            OSError: The medium refused.
        """
        with self._lock, self._gate.hold(wait_s=self._options.conflict_timeout_s):
            head = self._history.head(refresh=True)
            return self._publish(head.checkout_version(head.version), write)

    def _timeout(self) -> timedelta:
        return timedelta(seconds=self._options.conflict_timeout_s)

    def _next_turns(self) -> list[_Turn]:
        turns = [self._waiting.popleft()]
        tokens = turns[0].tokens
        while self._waiting and tokens + self._waiting[0].tokens <= self._options.target_tokens:
            turns.append(self._waiting.popleft())
            tokens += turns[-1].tokens
        return turns

    def _commit_together(self, turns: Sequence[_Turn]) -> None:
        last = {document.id: document for turn in turns for document in turn.documents}

        def merge(handle: lance.LanceDataset) -> None:
            builder = handle.merge_insert(ID).when_matched_update_all().when_not_matched_insert_all()
            builder.conflict_retries(self._options.conflict_retries).retry_timeout(self._timeout())
            builder.execute(documents_to_table(self._spec, list(last.values())))

        try:
            version = self._commit(merge)
        except BaseException as error:  # even an interrupt must not leave the others waiting
            for turn in turns:
                turn.error = error
        else:
            for turn in turns:
                turn.version = version

    def _commit(
        self, write: Callable[[lance.LanceDataset], None], head: lance.LanceDataset | None = None
    ) -> Version:
        restored: Exception | None = None
        for attempt in range(_RESTORED_RETRIES + 1):
            # A handle of its own: a commit moves its handle on, and readers hold the head's.
            at = head if head is not None else self._history.head(refresh=attempt > 0)
            handle = at.checkout_version(at.version)
            try:
                with self._gate.hold(wait_s=self._options.conflict_timeout_s, shared=True):
                    return self._publish(handle, write)
            except (RuntimeError, OSError) as error:
                if _is_conflict(error):
                    raise WriteConflict("other commits to the same documents kept coming first") from error
                if not _is_restored(error):
                    raise
                if head is not None:
                    # What was to be written was settled at that version.
                    raise WriteConflict("the collection was restored to another version") from error
                restored = error
        raise WriteConflict("the collection was restored to another version over and over") from restored

    def _publish(self, handle: lance.LanceDataset, write: Callable[[lance.LanceDataset], None]) -> Version:
        write(handle)
        self.make_durable(handle)
        self._history.advance(handle)
        if self._committed is not None:
            self._committed()
        return self._history.version_of(handle)


def _delete_ids(handle: lance.LanceDataset, ids: list[str]) -> None:
    # A join with a table of ids: of 100,000 it takes 0.1 s, where a predicate that lists them takes 2 s.
    source = pa.table({ID: pa.array(ids, pa.string())}, schema=pa.schema([handle.schema.field(ID)]))
    handle.merge_insert(ID).when_matched_delete().conflict_retries(0).execute(source)


def cut_by_tokens(documents: Sequence[StoredDocument], target_tokens: int) -> Iterator[list[StoredDocument]]:
    """Cut documents, in order, into runs of at most `target_tokens` vectors; a longer one is a run alone."""
    cut: list[StoredDocument] = []
    tokens = 0
    for document in documents:
        if cut and tokens + len(document.tokens) > target_tokens:
            yield cut
            cut, tokens = [], 0
        cut.append(document)
        tokens += len(document.tokens)
    if cut:
        yield cut


def _is_conflict(error: Exception) -> bool:
    # Lance has no type of its own for retries that ran out, whether by number or by time.
    return "too many concurrent writers" in str(error).lower()


def _is_restored(error: Exception) -> bool:
    # A write that began before another process restored a version: Lance can't rebase it, a fresh one can.
    text = str(error)
    return "ncompatible" in text and "transaction Restore" in text
