"""The durable documents of one incarnation of a collection, and every version of them.

One Lance dataset. A write is one commit: whole or absent, never seen in part, and acknowledged only when
everything its version refers to is as durable as was asked for. A read names an exact version and gets the
same answer for ever. A fragment holds at most a limited number of token vectors, because it is the unit that
scorers place.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa

from phasemesh.index import reading
from phasemesh.index.catalogue import dataset_path
from phasemesh.index.checks import check_document
from phasemesh.index.commit import Committer, StoreOptions, cut_by_tokens
from phasemesh.index.compaction import physical_tokens
from phasemesh.index.durability import Sync, sync_path
from phasemesh.index.filters import Condition, check_filter, columns_of, evaluate, ids_sql
from phasemesh.index.history import History, open_dataset
from phasemesh.index.leases import FileLease
from phasemesh.index.listing import Listed, ListPosition, any_from, list_page
from phasemesh.index.maintenance import Maintenance
from phasemesh.index.reading import RowMask
from phasemesh.index.schema import (
    CHUNK_OFFSETS,
    ID,
    TOKEN_COUNT,
    TOKENS,
    Part,
    TokenRows,
    part_columns,
    table_to_documents,
    table_to_token_rows,
)
from phasemesh.index.spec import CatalogueEntry, CollectionSpec, FragmentRef, StoredDocument, Version

#: What a read of documents returns unless told otherwise.
TEXT_AND_FIELDS = frozenset({Part.TEXT, Part.FIELDS})


@dataclass(frozen=True, slots=True)
class Upserted:
    """What an upsert did.

    Args:
        version: First version that holds all of the documents.
        stored: Documents stored.
        superseded: Positions in the batch of documents that a later one with the same id replaced.
    """

    version: Version
    stored: int
    superseded: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Deleted:
    """What a deletion did.

    Args:
        version: First version without the documents.
        deleted: Documents deleted.
        missing: Ids asked for that weren't there, each once, in the order asked for.
    """

    version: Version
    deleted: int
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Size of one version: live documents, their token vectors, and fragments."""

    documents: int
    tokens: int
    fragments: int


@dataclass(frozen=True, slots=True)
class RowPlace:
    """Where a document lies in one version.

    Args:
        fragment_id: Fragment that holds it.
        row: Its physical row there.
        tokens: Its token vectors.
    """

    fragment_id: int
    row: int
    tokens: int


class CollectionStore:
    """Documents of one incarnation. Safe for several threads and for several processes at once.

    Lance doesn't survive a fork; start other processes with spawn.

    Args:
        root: Data root, on a local file system.
        tenant: Whose collection.
        entry: The collection as the catalogue has it, which made its dataset.
        options: How to write and read.
        sync: Forces a file or folder to the medium.
        monotonic_s: Clock for `refresh_ms`, in seconds.
        committed: Told after every commit of documents by this process; must return at once.

    Raises:
        DataMissing: The dataset isn't there.
        StorageFailure: It can't be opened.
    """

    def __init__(
        self,
        root: Path,
        tenant: str,
        entry: CatalogueEntry,
        options: StoreOptions | None = None,
        *,
        sync: Sync = sync_path,
        monotonic_s: Callable[[], float] = time.monotonic,
        committed: Callable[[], None] | None = None,
    ) -> None:
        options = options or StoreOptions()
        path = dataset_path(root, tenant, entry.incarnation)
        self._entry = entry
        self._options = options
        dataset = open_dataset(path)
        self._history = History(dataset, entry.incarnation, options.refresh_ms, monotonic_s)
        self._committer = Committer(
            path, entry.spec, self._history, options, sync,
            gate=FileLease(path / "commits.lock"), committed=committed,
        )  # fmt: skip
        self._committer.make_durable(dataset)
        self._file_tokens: dict[str, int] = {}
        self.maintenance = Maintenance(
            self._history, self._committer, options, FileLease(path / "writer.lease"), self._file_tokens, sync
        )

    @property
    def spec(self) -> CollectionSpec:
        """The collection's specification."""
        return self._entry.spec

    @property
    def incarnation(self) -> str:
        """Identifier of this life of the collection."""
        return self._entry.incarnation

    @property
    def waiting_upserts(self) -> int:
        """Batches that wait for a commit."""
        return self._committer.waiting_upserts

    # Versions

    def latest(self, *, refresh: bool = False) -> Version:
        """The newest version known: every commit of this process, others' up to `refresh_ms` late.

        Args:
            refresh: Look for others' commits now.
        """
        return self._history.version_of(self._history.head(refresh=refresh))

    def resolve(self, *, at_version: Version | None = None, min_version: Version | None = None) -> Version:
        """The exact version that a read should use.

        Args:
            at_version: This one.
            min_version: This one or a newer one.

        Raises:
            VersionGone: A version is of another incarnation, or `at_version` was never made or is cleaned up.
            VersionNotReached: No process has committed `min_version` yet.
        """
        if at_version is not None:
            return self._history.version_of(self._history.at(at_version))
        if min_version is not None:
            return self._history.version_of(self._history.at_least(min_version))
        return self.latest()

    # Writes

    def upsert(self, documents: Sequence[StoredDocument]) -> Upserted:
        """Insert documents, or replace those with the same id; the last of a batch counts.

        A batch beyond `target_tokens` is cut into several fragments, each a commit of its own in the order
        given: if a later one fails, the earlier ones stay.

        Raises:
            InvalidDocument: A document doesn't fit the collection; nothing is written. `check` tells which.
            WriteConflict: Other commits kept coming in between.
            OSError: The medium refused.
        """
        for document in documents:
            self.check(document)
        last = {document.id: position for position, document in enumerate(documents)}
        kept = [document for position, document in enumerate(documents) if last[document.id] == position]
        superseded = tuple(p for p, document in enumerate(documents) if last[document.id] != p)
        version = self.latest()
        for cut in cut_by_tokens(kept, self._options.target_tokens):
            version = self._committer.upsert(cut)
        return Upserted(version, len(kept), superseded)

    def check(self, document: StoredDocument) -> None:
        """Check that a document could be stored.

        Raises:
            InvalidDocument: It couldn't; the message names the part.
        """
        check_document(self._entry.spec, document, self._options.limit_tokens)

    def delete(self, ids: Sequence[str]) -> Deleted:
        """Delete documents by id, in one commit; none if no id is there.

        Raises:
            WriteConflict: Other commits kept coming in between.
            OSError: The medium refused.
        """
        asked = tuple(dict.fromkeys(ids))
        seen = self.latest(refresh=True)
        if not asked or not self._present(asked, seen):
            return Deleted(seen, 0, asked)
        version = self._committer.delete(asked)
        # Versions follow one another without gaps, so what went is what the one before had.
        present = self._present(asked, Version(version.incarnation, version.number - 1))
        missing = tuple(document_id for document_id in asked if document_id not in present)
        return Deleted(version, len(present), missing)

    def delete_where(self, condition: Condition) -> Deleted:
        """Delete the documents that meet a filter, in one commit; none if no document does.

        Which ones is decided on the newest version there is. One that another process stores meanwhile stays;
        if one that was to go is replaced meanwhile, all is decided anew.

        Raises:
            FilterError: The filter doesn't fit the collection.
            WriteConflict: Other commits to the same documents kept coming in between.
            OSError: The medium refused.
        """
        spec = self._entry.spec
        check_filter(spec, condition)
        columns = list(dict.fromkeys([ID, *columns_of(condition)]))

        def matching(dataset: lance.LanceDataset) -> list[str]:
            ids: list[str] = []
            for batch in dataset.scanner(columns=columns).to_batches():
                ids += batch.column(ID).filter(pa.array(evaluate(spec, condition, batch))).to_pylist()
            return ids

        version, deleted = self._committer.delete_matching(matching)
        return Deleted(version, deleted, ())

    # Reads

    def get(
        self, ids: Sequence[str], version: Version, parts: frozenset[Part] = TEXT_AND_FIELDS
    ) -> tuple[list[StoredDocument], list[str]]:
        """Documents by id, in the order asked for, and the ids that aren't there.

        Parts that weren't asked for are empty or None in the documents.

        Raises:
            VersionGone: There is no such version.
        """
        dataset = self._history.at(version)
        if not ids:
            return [], []
        columns = part_columns(self._entry.spec, parts)
        table = dataset.to_table(columns=columns, filter=ids_sql(dict.fromkeys(ids)))
        found = {document.id: document for document in table_to_documents(self._entry.spec, table)}
        missing = [document_id for document_id in dict.fromkeys(ids) if document_id not in found]
        return [found[document_id] for document_id in ids if document_id in found], missing

    def locate(self, ids: Sequence[str], version: Version) -> dict[str, RowPlace]:
        """Where documents lie; ids that aren't there are absent.

        Raises:
            VersionGone: There is no such version.
        """
        dataset = self._history.at(version)
        if not ids:
            return {}
        table = reading.row_addresses(dataset, ids_sql(dict.fromkeys(ids)), [ID, TOKEN_COUNT])
        columns = [table.column(name).to_pylist() for name in (ID, "fragment", "row", TOKEN_COUNT)]
        return {name: RowPlace(*place) for name, *place in zip(*columns, strict=True)}

    def count(self, version: Version, condition: Condition | None = None) -> int:
        """Live documents that meet the filter.

        Raises:
            VersionGone: There is no such version.
            FilterError: The filter doesn't fit the collection.
        """
        if condition is None:
            return int(self._history.at(version).count_rows())
        return sum(int(np.count_nonzero(mask)) for mask in self.allowed_rows(version, condition).values())

    def list_page(
        self,
        version: Version,
        start: ListPosition,
        limit: int,
        parts: frozenset[Part] = TEXT_AND_FIELDS,
        condition: Condition | None = None,
    ) -> list[Listed]:
        """Up to `limit` documents that meet the filter, from a place on, in the order of storage.

        Raises:
            VersionGone: There is no such version.
            FilterError: The filter doesn't fit the collection.
        """
        if condition is not None:
            check_filter(self._entry.spec, condition)
        return list_page(self._entry.spec, self._history.at(version), condition, start, limit, parts)

    def any_from(self, version: Version, start: ListPosition, condition: Condition | None = None) -> bool:
        """Whether a page from there would hold a document.

        Raises:
            VersionGone: There is no such version.
            FilterError: The filter doesn't fit the collection.
        """
        if condition is not None:
            check_filter(self._entry.spec, condition)
        return any_from(self._entry.spec, self._history.at(version), condition, start)

    def stats(self, version: Version) -> StoreStats:
        """Live documents, their token vectors, and fragments.

        Raises:
            VersionGone: There is no such version.
        """
        dataset = self._history.at(version)
        counts = dataset.to_table(columns=[TOKEN_COUNT]).column(TOKEN_COUNT)
        tokens = sum(int(chunk.to_numpy().sum()) for chunk in counts.chunks)
        return StoreStats(len(counts), tokens, len(dataset.get_fragments()))

    def fragments(self, version: Version) -> list[FragmentRef]:
        """The version's fragments in order of their ids.

        Raises:
            VersionGone: There is no such version.
        """
        dataset = self._history.at(version)
        refs = []
        for fragment in dataset.get_fragments():
            key = reading.token_file(dataset, fragment)
            tokens = physical_tokens(dataset, fragment, self._file_tokens)
            refs.append(FragmentRef(fragment.fragment_id, key, fragment.physical_rows, tokens))
        return sorted(refs, key=lambda ref: ref.fragment_id)

    def fragment_ids(self, version: Version) -> list[int]:
        """Ids of the version's fragments, in order; costs nothing per fragment.

        Raises:
            VersionGone: There is no such version.
        """
        return sorted(one.fragment_id for one in self._history.at(version).get_fragments())

    def deleted_rows(self, version: Version, fragment_id: int) -> RowMask:
        """Which physical rows of a fragment are deleted in this version, bool [physical_rows].

        Raises:
            VersionGone: There is no such version, or no such fragment in it.
        """
        return reading.deleted_rows(reading.fragment(self._history.at(version), fragment_id))

    def allowed_rows(self, version: Version, condition: Condition) -> dict[int, RowMask]:
        """Which physical rows of each fragment are live and meet the filter, bool [physical_rows].

        Fragments without such a row are absent; a filter that matches nothing gives an empty mapping.

        Raises:
            VersionGone: There is no such version.
            FilterError: The filter doesn't fit the collection.
        """
        spec = self._entry.spec
        check_filter(spec, condition)
        return reading.matching_rows(
            self._history.at(version), columns_of(condition), lambda batch: evaluate(spec, condition, batch)
        )

    def read_tokens(self, fragment_id: int, version: Version) -> TokenRows:
        """Token vectors of all physical rows of a fragment, since-deleted ones included.

        The answer depends on the fragment's data file alone, not on what the version deleted from it.

        Raises:
            VersionGone: There is no such version, or no such fragment in it.
        """
        dataset = self._history.at(version)
        fragment = reading.fragment(dataset, fragment_id)
        table = reading.physical_columns(dataset, fragment, [ID, TOKENS, CHUNK_OFFSETS])
        return table_to_token_rows(self._entry.spec, table)

    # Inside

    def _present(self, ids: Sequence[str], version: Version) -> set[str]:
        table = self._history.at(version).to_table(columns=[ID], filter=ids_sql(ids))
        return set(table.column(ID).to_pylist())
