"""What is done to a collection as a whole: compaction, cleanup, tags, and going back to an earlier version.

Invariant: all of it happens under the collection's lease, so at most one thread of one process does any of it
at a time. Commits of documents don't take the lease and are never kept waiting by it, but for the moment in
which an earlier version becomes the newest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import lance

from phasemesh.index import tags
from phasemesh.index.cleanup import Cleaned, remove_orphans, remove_versions
from phasemesh.index.commit import Committer, StoreOptions
from phasemesh.index.compaction import (
    MOST_MERGED,
    FragmentSize,
    Rewrite,
    fragment_sizes,
    plan_tail,
    plan_whole,
)
from phasemesh.index.durability import Durability, Sync
from phasemesh.index.errors import HeadMoved, WriteConflict
from phasemesh.index.history import History
from phasemesh.index.leases import Lease
from phasemesh.index.reading import token_file
from phasemesh.index.spec import Version

#: Plans that a write may spoil in a row before compaction gives up for now.
_PLANS = 8
#: Lance's operation after which every document is as it was.
_SAME_DOCUMENTS = "Rewrite"


@dataclass(frozen=True, slots=True)
class Compacted:
    """What a compaction did.

    Args:
        version: Newest version after it.
        before: Fragments when it began.
        after: Fragments when it ended.
        merged: Fragments that it replaced.
        conflicts: Plans that a write spoiled.
    """

    version: Version
    before: int
    after: int
    merged: int
    conflicts: int


class Maintenance:
    """Maintains one incarnation of a collection. Safe for several threads and processes at once.

    Args:
        history: Of its versions.
        committer: Of this process.
        options: How to write.
        lease: Whoever has it maintains the collection.
        file_tokens: Token vectors of data files that are known; completed.
        sync: Forces a file or folder to the medium.
    """

    def __init__(
        self,
        history: History,
        committer: Committer,
        options: StoreOptions,
        lease: Lease,
        file_tokens: dict[str, int],
        sync: Sync,
    ) -> None:
        self._history = history
        self._committer = committer
        self._options = options
        self._lease = lease
        self._file_tokens = file_tokens
        self._sync = sync
        self._live_tokens: dict[str, tuple[int, int]] = {}

    # Compaction

    def compact_tail(self, small_fragments: int, *, wait_s: float = 0.0) -> Compacted:
        """Merge small fragments until at most `small_fragments` are left.

        Args:
            small_fragments: How many are left alone.
            wait_s: Seconds to wait for the lease.

        Raises:
            LeaseHeld: Another maintains the collection.
            WriteConflict: Writes to the fragments kept spoiling the plans; what was merged before stays.
            OSError: The medium refused.
        """

        def plan(sizes: Sequence[FragmentSize], most: int) -> tuple[int, ...]:
            return plan_tail(sizes, self._options.target_tokens, small_fragments, most)

        with self._lease.hold(wait_s=wait_s):
            return self._compact(plan)

    def compact(self, *, wait_s: float) -> Compacted:
        """Merge all small fragments and drop deleted rows.

        Fragments that come to be meanwhile, and those that writes kept touching, may stay small.

        Args:
            wait_s: Seconds to wait for the lease.

        Raises:
            LeaseHeld: Another maintains the collection.
            WriteConflict: Writes to the fragments kept spoiling the plans; what was merged before stays.
            OSError: The medium refused.
        """
        with self._lease.hold(wait_s=wait_s):
            newest = max((one.fragment_id for one in self._sizes(self._head())), default=-1)

            def plan(sizes: Sequence[FragmentSize], most: int) -> tuple[int, ...]:
                # Only what was there at first, or a steady writer would keep this at work for ever.
                there = [size for size in sizes if size.fragment_id <= newest]
                return next(iter(plan_whole(there, self._options.target_tokens, most)), ())

            return self._compact(plan)

    def _compact(self, plan: Callable[[Sequence[FragmentSize], int], tuple[int, ...]]) -> Compacted:
        head = self._head()
        before = len(head.get_fragments())
        merged = conflicts = spoilt = 0
        while True:
            sizes = self._sizes(head)
            chosen = set(plan(sizes, max(2, MOST_MERGED >> spoilt)))
            if not chosen:
                break
            rewrite = Rewrite(head, [size for size in sizes if size.fragment_id in chosen])
            # Before the commit: the next writer's commit refers to these files too, and mustn't pay for them.
            self._committer.force_out(rewrite.files)
            handle = rewrite.commit()
            if handle is None:
                conflicts += 1
                # A smaller plan is over sooner, and less of what is being written lies in it.
                spoilt += 1
                if spoilt == _PLANS:
                    raise WriteConflict("writes to the fragments that were to be merged kept coming first")
            else:
                self._committer.make_durable(handle)
                self._history.advance(handle)
                merged += len(chosen)
                spoilt = 0
            head = self._head()
        if merged:
            self._forget_files(head)
        return Compacted(self._history.version_of(head), before, len(head.get_fragments()), merged, conflicts)

    # Cleanup

    def clean(self, keep_s: float, now_unix_s: Callable[[], float] = time.time) -> Cleaned:
        """Remove versions that were replaced longer ago than `keep_s`, and files of no version that old.

        Args:
            keep_s: Seconds; more than any read or write takes.
            now_unix_s: Clock, seconds since 1970 UTC.

        Raises:
            LeaseHeld: Another maintains the collection.
            OSError: The medium refused.
        """
        with self._lease.hold(wait_s=0.0):
            head = self._head()
            cutoff_unix_s = now_unix_s() - keep_s
            versions, freed = remove_versions(head, cutoff_unix_s)
            self._history.forget(versions)
            orphans, orphaned = remove_orphans(head, cutoff_unix_s)
            return Cleaned(tuple(versions), orphans, freed + orphaned)

    # Tags

    def tag(self, tag: str, version: Version, *, move: bool, wait_s: float) -> None:
        """Name a version, which keeps it from being cleaned up.

        Args:
            tag: The name.
            version: The version.
            move: Take the name from the version that has it; otherwise that is an error.
            wait_s: Seconds to wait for the lease.

        Raises:
            InvalidTag: The name can't be one.
            TagExists: A version has it and `move` is false.
            VersionGone: There is no such version.
            LeaseHeld: Another maintains the collection.
        """
        with self._lease.hold(wait_s=wait_s):  # or a cleanup could take the version meanwhile
            dataset = self._history.at(version)
            tags.set_tag(dataset, tag, version.number, move=move)
            self._force_out_tag(dataset, tag)

    def untag(self, tag: str, *, wait_s: float) -> None:
        """Take a name away; its version may be cleaned up then.

        Raises:
            InvalidTag: The name can't be one.
            TagNotFound: Nothing has it.
            LeaseHeld: Another maintains the collection.
        """
        with self._lease.hold(wait_s=wait_s):
            dataset = self._head()
            tags.drop_tag(dataset, tag)
            self._force_out_tag(dataset, tag)

    def tagged(self, tag: str) -> Version:
        """The version that has a name.

        Raises:
            InvalidTag: The name can't be one.
            TagNotFound: Nothing has it.
        """
        head = self._head()
        return Version(self._history.version_of(head).incarnation, tags.tagged_version(head, tag))

    # Going back

    def restore(self, target: Version | str, expected: Version, *, wait_s: float) -> Version:
        """Make an earlier version the newest, under a new number.

        Versions that compaction made since `expected` don't count as newer: their documents are the same.

        Args:
            target: The version, or its tag.
            expected: The newest version that the caller knows.
            wait_s: Seconds to wait for the lease.

        Raises:
            HeadMoved: There is a newer version than `expected`; nothing was changed.
            VersionGone: There is no such version.
            TagNotFound: Nothing has that tag.
            LeaseHeld: Another maintains the collection.
            OSError: The medium refused.
        """
        with self._lease.hold(wait_s=wait_s):
            version = self.tagged(target) if isinstance(target, str) else target
            source = self._history.at(version)
            self._history.at(expected)  # of this incarnation, and made

            def write(head: lance.LanceDataset) -> None:
                self._check_head(head, expected)
                restored = source.checkout_version(version.number)
                restored.restore()
                head.checkout_latest()

            return self._committer.replace_head(write)

    # Inside

    def _head(self) -> lance.LanceDataset:
        return self._history.head(refresh=True)

    def _sizes(self, dataset: lance.LanceDataset) -> list[FragmentSize]:
        return fragment_sizes(dataset, self._file_tokens, self._live_tokens)

    def _forget_files(self, dataset: lance.LanceDataset) -> None:
        """Forget what is known of files that a version doesn't have; they are looked up anew if need be."""
        self._committer.forget_files(dataset)
        there = {token_file(dataset, fragment) for fragment in dataset.get_fragments()}
        for known in (self._file_tokens, self._live_tokens):
            for key in [key for key in list(known) if key not in there]:
                known.pop(key, None)

    def _check_head(self, head: lance.LanceDataset, expected: Version) -> None:
        for number in range(expected.number + 1, head.version + 1):
            if not self._same_documents(head, number):
                raise HeadMoved(
                    f"expected_version: the newest version is {head.version}, not {expected.number}; look "
                    "at what changed, and give that version if it may go"
                )

    def _same_documents(self, head: lance.LanceDataset, number: int) -> bool:
        written = head.read_transaction(number)
        if written is not None and type(written.operation).__name__ == _SAME_DOCUMENTS:
            return True
        # Before a rewrite Lance reserves a number for the new fragment, in a version of its own.
        fragments = [
            [one.metadata.to_json() for one in head.checkout_version(version).get_fragments()]
            for version in (number - 1, number)
        ]
        return fragments[0] == fragments[1]

    def _force_out_tag(self, dataset: lance.LanceDataset, tag: str) -> None:
        if self._options.durability is Durability.DISK:
            files, folders = tags.tag_files(dataset, tag)
            for path in (*files, *folders):
                self._sync(path)
