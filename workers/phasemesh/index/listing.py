"""Pages through the documents of one version, in the order in which they are stored.

Invariant: the order is by fragment, then by row within it, and a version never changes; so a position means
the same for ever, and pages that follow one another hold every document once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import lance
import pyarrow as pa

from phasemesh.index.filters import Condition, columns_of, evaluate, ids_sql
from phasemesh.index.schema import ID, Part, part_columns, table_to_documents
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
    condition: Condition | None,
    start: ListPosition,
    limit: int,
    parts: frozenset[Part],
) -> list[Listed]:
    """Up to `limit` documents from a place on; fewer only at the end.

    Args:
        spec: The collection's.
        dataset: At the version.
        condition: Only documents that meet it, checked; None for all.
        start: Where to begin.
        limit: Most documents, at least 1.
        parts: What is read of each; the others are empty or None.
    """
    columns = part_columns(spec, parts)
    page: list[Listed] = []
    for fragment in _from(dataset, start):
        skipped = start.row if fragment.fragment_id == start.fragment_id else 0
        options: dict[str, Any] = {"columns": columns, "fragments": [fragment], "scan_in_order": True}
        need = limit - len(page)
        if condition is None:
            table = dataset.scanner(**options, offset=skipped, limit=need).to_table()
        else:
            ids = list(islice(_matching_ids(spec, dataset, fragment, condition), skipped, skipped + need))
            if not ids:
                continue
            table = dataset.scanner(**options, filter=ids_sql(ids)).to_table()
        page.extend(
            Listed(document, ListPosition(fragment.fragment_id, skipped + row))
            for row, document in enumerate(table_to_documents(spec, table), start=1)
        )
        if len(page) == limit:
            break
    return page


def any_from(
    spec: CollectionSpec, dataset: lance.LanceDataset, condition: Condition | None, start: ListPosition
) -> bool:
    """Whether a page from there would hold a document."""
    return bool(list_page(spec, dataset, condition, start, 1, frozenset()))


def _matching_ids(
    spec: CollectionSpec, dataset: lance.LanceDataset, fragment: lance.LanceFragment, condition: Condition
) -> Iterator[str]:
    """Ids of a fragment's live documents that meet the filter, in the order of storage."""
    columns = list(dict.fromkeys([ID, *columns_of(condition)]))
    scanner = dataset.scanner(columns=columns, fragments=[fragment], scan_in_order=True)
    for batch in scanner.to_batches():
        yield from batch.column(ID).filter(pa.array(evaluate(spec, condition, batch))).to_pylist()


def _from(dataset: lance.LanceDataset, start: ListPosition) -> list[lance.LanceFragment]:
    fragments = [one for one in dataset.get_fragments() if one.fragment_id >= start.fragment_id]
    return sorted(fragments, key=lambda one: one.fragment_id)
