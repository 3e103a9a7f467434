"""Random documents for the tests of the store, and comparison of what comes back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from phasemesh.index.catalogue import Catalogue
from phasemesh.index.commit import StoreOptions
from phasemesh.index.durability import Durability, sync_path
from phasemesh.index.schema import Part
from phasemesh.index.spec import CollectionSpec, FieldDeclaration, FieldType, FieldValue, StoredDocument
from phasemesh.index.store import CollectionStore

DIM = 8
EVERYTHING = frozenset(Part)
FIELDS = tuple(FieldDeclaration(str(field_type), field_type) for field_type in FieldType)
SPEC = CollectionSpec("passages", "", "", DIM, fields=FIELDS, dense_dim=4)
FAST = StoreOptions(durability=Durability.PROCESS)


def make_document(document_id: str, tokens: int = 3, seed: int = 0, **fields: FieldValue) -> StoredDocument:
    """A document whose content is decided by its id, size and seed."""
    random = np.random.default_rng([*document_id.encode(), tokens, seed])
    starts = np.arange(tokens, dtype=np.int32) * 4
    return StoredDocument(
        id=document_id,
        text=f"text {seed} of {document_id}",
        fields=fields,
        tokens=random.standard_normal((tokens, DIM)).astype(np.float16),
        token_spans=np.stack([starts, starts + 3], axis=1).astype(np.int32),
        chunk_offsets=np.arange(2, tokens, 2, dtype=np.int32),
        dense=random.standard_normal(4).astype(np.float32),
    )


def assert_same(left: StoredDocument, right: StoredDocument) -> None:
    """Every part is equal, bit for bit."""
    assert (left.id, left.text) == (right.id, right.text)
    assert {k: v for k, v in left.fields.items() if v is not None} == {
        k: v for k, v in right.fields.items() if v is not None
    }
    for name in ("tokens", "token_spans", "chunk_offsets", "dense"):
        ours, theirs = getattr(left, name), getattr(right, name)
        assert (ours is None) == (theirs is None), name
        if ours is not None:
            assert ours.dtype == theirs.dtype
            assert ours.shape == theirs.shape
            assert ours.tobytes() == theirs.tobytes(), name


def open_store(root: Path, spec: CollectionSpec = SPEC, options: StoreOptions = FAST) -> CollectionStore:
    """A new collection."""
    return CollectionStore(root, "acme", Catalogue(root).create("acme", spec), options)


@dataclass
class Clock:
    """A clock that a test moves."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class SyncLog:
    """Stands where fsync is called, and calls it, keeping what was synced in order."""

    root: Path
    paths: list[str] = field(default_factory=list)

    def __call__(self, path: Path) -> None:
        sync_path(path)
        self.paths.append(str(path.relative_to(self.root)))


def by_id(documents: list[StoredDocument]) -> Mapping[str, StoredDocument]:
    """Documents under their ids."""
    return {document.id: document for document in documents}
