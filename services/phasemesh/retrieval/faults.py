"""What the index raises, as leaves of the error tree: one table, applied where the index is called.

Invariant: nothing of the index reaches a caller unmapped; what isn't in the table is a bug or a broken store,
and stays an exception that the status interceptor answers with an error id.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from phasemesh.errors import (
    Aborted,
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    PhasemeshError,
    Unavailable,
)
from phasemesh.index import errors as index

_log = logging.getLogger(__name__)

_TABLE: dict[type[index.IndexFailure], tuple[type[PhasemeshError], str, str]] = {
    index.InvalidName: (InvalidArgument, "INVALID_NAME", "collection"),
    index.InvalidSpec: (InvalidArgument, "INVALID_SPEC", "spec"),
    index.InvalidDocument: (InvalidArgument, "INVALID_DOCUMENT", ""),
    index.FilterError: (InvalidArgument, "INVALID_FILTER", "filter"),
    index.CollectionExists: (AlreadyExists, "COLLECTION_EXISTS", "spec.name"),
    index.CollectionNotFound: (NotFound, "COLLECTION_NOT_FOUND", "collection"),
    index.CatalogueCorrupt: (FailedPrecondition, "CATALOGUE_CORRUPT", "collection"),
    index.InvalidTag: (InvalidArgument, "INVALID_NAME", "tag"),
    index.TagExists: (AlreadyExists, "TAG_EXISTS", "tag"),
    index.TagNotFound: (NotFound, "TAG_NOT_FOUND", "tag"),
    index.HeadMoved: (Aborted, "VERSION_MOVED", "expected_version"),
    index.LeaseHeld: (Aborted, "MAINTENANCE_RUNNING", "collection"),
    index.VersionGone: (NotFound, "VERSION_NOT_FOUND", "version"),
    index.VersionNotReached: (Aborted, "VERSION_NOT_REACHED", "version"),
    index.WriteConflict: (Aborted, "WRITE_CONFLICT", "collection"),
    # Not RESOURCE_EXHAUSTED, which tells callers to send less: they can't mend it, and may try again later.
    index.DataMissing: (Unavailable, "DATA_MISSING", "collection"),
    index.StorageFull: (Unavailable, "STORAGE_FULL", ""),
    index.StorageFailure: (Unavailable, "STORAGE_FAILED", ""),
}


def mapped(failure: index.IndexFailure) -> PhasemeshError | None:
    """The leaf that a failure of the index means, or None where it isn't in the table."""
    for kind in type(failure).__mro__:
        if kind in _TABLE:
            leaf, reason, field = _TABLE[kind]
            return leaf(str(failure), reason=reason, field=field)
    return None


@contextmanager
def index_faults() -> Iterator[None]:
    """Map what the body's calls of the index raise.

    Raises:
        PhasemeshError: the leaf that the index's failure means.
    """
    try:
        yield
    except index.IndexFailure as failure:
        error = mapped(failure)
        if error is None:
            raise
        raise error from failure
    except (OSError, RuntimeError) as cause:  # Lance raises either
        storage = index.storage_failure(cause)
        error = None if storage is None else mapped(storage)
        if error is None:
            raise
        _log.error("the store failed", exc_info=cause)
        raise error from cause
