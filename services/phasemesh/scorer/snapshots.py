"""Exact versions of collections, read-only: which fragments there are, what was deleted, and their vectors.

Invariant: nothing here makes or changes a dataset. A version is immutable, so what was read of one is kept.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

from phasemesh.errors import InvalidArgument, NotFound, Unavailable
from phasemesh.index import reading
from phasemesh.index.catalogue import dataset_path
from phasemesh.index.errors import VersionGone
from phasemesh.index.history import History, open_dataset
from phasemesh.index.schema import CHUNK_OFFSETS, ID, TOKEN_COUNT, TOKENS, table_to_token_rows
from phasemesh.index.segments import Segment, SegmentKey, build_segment
from phasemesh.index.spec import CollectionSpec, FragmentRef
from phasemesh.scorer.requests import Index

K = TypeVar("K")
V = TypeVar("V")

#: Datasets that stay open, and versions of which something is kept.
_OPEN_DATASETS = 64
_KEPT_SNAPSHOTS = 64
#: `History` looks up a version that it doesn't know in any case; the newest one is never asked for here.
_REFRESH_MS = 1000.0


class Snapshot:
    """One version of one collection. Safe for several threads.

    Args:
        dataset: handle at that version.
        dim: of token vectors.
        file_tokens: token vectors of each data file, shared by all versions.
    """

    def __init__(self, dataset: Any, dim: int, file_tokens: dict[str, int]) -> None:
        self._dataset = dataset
        # All that reading vectors needs of a spec.
        self._spec = CollectionSpec(name="", model="", recipe_hash="", token_dim=dim)
        self._file_tokens = file_tokens
        self._refs: dict[int, FragmentRef] = {}
        self._deleted: dict[int, reading.RowMask | None] = {}

    def fragment(self, fragment_id: int) -> FragmentRef:
        """One of the version's fragments.

        Raises:
            NotFound: the version has no such fragment.
        """
        ref = self._refs.get(fragment_id)
        if ref is None:
            fragment = self._fragment(fragment_id)
            key = reading.token_file(self._dataset, fragment)
            tokens = self._file_tokens.get(key)
            if tokens is None:
                counts = reading.physical_columns(self._dataset, fragment, [TOKEN_COUNT]).column(TOKEN_COUNT)
                tokens = sum(int(chunk.to_numpy().sum()) for chunk in counts.chunks)
                self._file_tokens[key] = tokens
            ref = FragmentRef(fragment_id, key, fragment.physical_rows, tokens)
            self._refs[fragment_id] = ref
        return ref

    def deleted_rows(self, fragment_id: int) -> reading.RowMask | None:
        """Physical rows of a fragment that this version has deleted, bool [rows]; None for none.

        Raises:
            NotFound: the version has no such fragment.
        """
        if fragment_id not in self._deleted:
            deleted = reading.deleted_rows(self._fragment(fragment_id))
            self._deleted[fragment_id] = deleted if deleted.any() else None
        return self._deleted[fragment_id]

    def derive(self, ref: FragmentRef, key: SegmentKey) -> Segment:
        """Make a fragment's segment from the store, in memory.

        Raises:
            NotFound: the version has no such fragment.
            ValueError: what is stored can't be scored.
        """
        table = reading.physical_columns(
            self._dataset, self._fragment(ref.fragment_id), [ID, TOKENS, CHUNK_OFFSETS]
        )
        rows = table_to_token_rows(self._spec, table)
        return build_segment(key, rows.ids, rows.vectors, rows.offsets, rows.chunk_offsets)

    def _fragment(self, fragment_id: int) -> Any:
        # Lance counts fragments in 32 bits and raises an OverflowError beyond.
        if fragment_id < 2**32:
            try:
                return reading.fragment(self._dataset, fragment_id)
            except VersionGone:
                pass
        raise NotFound(f"this version has no fragment {fragment_id}", reason="FRAGMENT_NOT_FOUND")


class Snapshots:
    """Opens versions of collections below one data root. Safe for several threads; waits for files.

    Args:
        data_dir: root of all collections; nothing outside it is ever read.
        now_s: monotonic seconds.
    """

    def __init__(self, data_dir: Path, *, now_s: Callable[[], float]) -> None:
        self._data_dir = data_dir
        self._now_s = now_s
        self._guard = threading.Lock()
        self._datasets: _Kept[tuple[str, str], tuple[History, int, dict[str, int]]] = _Kept(_OPEN_DATASETS)
        self._snapshots: _Kept[tuple[str, str, int], Snapshot] = _Kept(_KEPT_SNAPSHOTS)

    def open(self, index: Index) -> Snapshot:
        """The version that `index` names.

        Raises:
            NotFound: there is no such collection (COLLECTION_GONE) or version (VERSION_NOT_FOUND).
            InvalidArgument: its token vectors have another dimension.
            Unavailable: the dataset can't be read.
        """
        incarnation, number = index.version.incarnation, index.version.number
        with self._guard:
            opened = self._datasets.get((index.tenant, incarnation))
            snapshot = self._snapshots.get((index.tenant, incarnation, number))
        if opened is None:
            opened = self._open(index.tenant, incarnation)
        history, dim, file_tokens = opened
        # Before anything is derived: vectors read with a wrong dimension would be kept under the right key.
        if dim != index.dim:
            raise InvalidArgument(
                f"index.token_dimension: is {index.dim}; the collection's token vectors have {dim}",
                reason="WRONG_DIMENSION",
                field="index.token_dimension",
            )
        if snapshot is None:
            try:
                dataset = history.at(index.version)
            except VersionGone as gone:
                raise NotFound(
                    f"index.{gone}", reason="VERSION_NOT_FOUND", field="index.version.number"
                ) from gone
            snapshot = Snapshot(dataset, dim, file_tokens)
            with self._guard:
                self._snapshots.put((index.tenant, incarnation, number), snapshot)
        return snapshot

    def _open(self, tenant: str, incarnation: str) -> tuple[History, int, dict[str, int]]:
        path = dataset_path(self._data_dir, tenant, incarnation)
        if not (path / "_versions").is_dir():
            raise NotFound(
                "index.version.incarnation: there is no such collection here; it was deleted, or this scorer"
                " has another data_dir than the retrieval service",
                reason="COLLECTION_GONE",
                field="index.version.incarnation",
            )
        try:
            dataset = open_dataset(path)
        except (ValueError, OSError) as error:
            raise Unavailable("the collection's data can't be read now", reason="STORE_UNREADABLE") from error
        dim = int(dataset.schema.field(TOKENS).type.value_type.list_size)
        opened = (History(dataset, incarnation, _REFRESH_MS, self._now_s), dim, dict[str, int]())
        with self._guard:
            self._datasets.put((tenant, incarnation), opened)
        return opened


class _Kept(Generic[K, V]):
    """The values that were last used."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._values: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K) -> V | None:
        if key in self._values:
            self._values.move_to_end(key)
        return self._values.get(key)

    def put(self, key: K, value: V) -> None:
        self._values[key] = value
        self._values.move_to_end(key)
        while len(self._values) > self._most:
            self._values.popitem(last=False)
