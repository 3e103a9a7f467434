"""Why a fragment or a document failed, in the contract's words: one table.

Invariant: what isn't foreseen is logged under an error id, and the caller gets the id and nothing else.
"""

from __future__ import annotations

import logging

from phasemesh.errors import Internal, PhasemeshError, Unavailable
from phasemesh.v1.common_pb2 import ItemError
from phasemesh.v1.scorer_pb2 import FragmentFailure

_log = logging.getLogger(__name__)


def item_error(error: PhasemeshError) -> ItemError:
    """`error` as the contract carries it."""
    return ItemError(code=int(error.code), reason=error.reason, message=error.message, field=error.field)


def fragment_failure(fragment_id: int, error: Exception) -> FragmentFailure:
    """Why a fragment wasn't searched.

    What the caller asked for wrongly fails everywhere; what went wrong here (a disk, memory, a bug that one
    machine's data brings out) may go right on another scorer.
    """
    if isinstance(error, PhasemeshError):
        return FragmentFailure(fragment_id=fragment_id, error=item_error(error), retryable=error.retryable)
    if isinstance(error, OSError | MemoryError):
        _log.warning("fragment %d can't be read", fragment_id, exc_info=error)
        unavailable = Unavailable(
            "the fragment can't be read on this scorer now; try another", reason="FRAGMENT_UNREADABLE"
        )
        return FragmentFailure(fragment_id=fragment_id, error=item_error(unavailable), retryable=True)
    internal = Internal()
    _log.error("fragment %d failed", fragment_id, exc_info=error, extra={"error_id": internal.error_id})
    return FragmentFailure(fragment_id=fragment_id, error=item_error(internal), retryable=True)
