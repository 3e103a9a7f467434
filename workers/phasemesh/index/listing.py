"""Pages through the documents of one version, in the order in which they are stored.

Invariant: the order is by fragment, then by row within it, and a version never changes; so a position means
the same for ever, and pages that follow one another hold every document once.
"""

from __future__ import annotations

from dataclasses import dataclass

import lance

from phasemesh.index.schema import Part, part_columns, table_to_documents
from phasemesh.index.spec import CollectionSpec, StoredDocument


@dataclass(frozen=True, slots=True, order=True)
class ListPosition:
    """A place in a listing: the fragment, and how many of its matching rows lie before it."""

    fragment_id: int = 0
    row: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Listed:
    """A document of a page, and the place right after it."""

    document: StoredDocument
    after: ListPosition


def list_page(
    spec: CollectionSpec,
    dataset: lance.LanceDataset,
    predicate: str | None,
    start: ListPosition,
    limit: int,
    parts: frozenset[Part],
) -> list[Listed]:
    """Up to `limit` documents from a place on; fewer only at the end.

    Args:
        spec: The collection's.
        dataset: At the version.
        predicate: Only documents that meet it; None for all.
        start: Where to begin.
        limit: Most documents, at least 1.
        parts: What is read of each; the others are empty or None.
    """
    columns = part_columns(spec, parts)
    page: list[Listed] = []
    for fragment in _from(dataset, start):
        skipped = start.row if fragment.fragment_id == start.fragment_id else 0
        table = dataset.scanner(
            columns=columns,
            filter=predicate,
            fragments=[fragment],
            offset=skipped,
            limit=limit - len(page),
            scan_in_order=True,
        ).to_table()
        page.extend(
            Listed(document, ListPosition(fragment.fragment_id, skipped + row))
            for row, document in enumerate(table_to_documents(spec, table), start=1)
        )
        if len(page) == limit:
            break
    return page


def any_from(dataset: lance.LanceDataset, predicate: str | None, start: ListPosition) -> bool:
    """Whether a page from there would hold a document."""
    for fragment in _from(dataset, start):
        skipped = start.row if fragment.fragment_id == start.fragment_id else 0
        found = dataset.scanner(
            columns=[],
            with_row_address=True,
            filter=predicate,
            fragments=[fragment],
            offset=skipped,
            limit=1,
            scan_in_order=True,
        ).to_table()
        if len(found):
            return True
    return False


def _from(dataset: lance.LanceDataset, start: ListPosition) -> list[lance.LanceFragment]:
    fragments = [one for one in dataset.get_fragments() if one.fragment_id >= start.fragment_id]
    return sorted(fragments, key=lambda one: one.fragment_id)
