"""Faults between the gateway and a service behind it, kept from looking like the caller's.

Invariant: a caller never hears about the mesh's own key, nor of a call that a service cut off as if it had
left by itself.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from phasemesh.errors import (
    Cancelled,
    Internal,
    PermissionDenied,
    PhasemeshError,
    Unauthenticated,
    Unavailable,
)

_log = logging.getLogger(__name__)


@contextmanager
def not_the_callers(peer: str) -> Iterator[None]:
    """Translate what the caller has no part in.

    Args:
        peer: what is called, with its article, e.g. "the encoder".

    Raises:
        Internal: the peer refused the gateway's own key.
        Unavailable: the peer dropped the call.
    """
    try:
        yield
    except (Unauthenticated, PermissionDenied) as error:
        internal = Internal()
        _log.error(
            "a peer refused the gateway's key; set the same access.keys on both",
            extra={"error_id": internal.error_id, "peer": peer, "reason": error.reason},
        )
        raise internal from error
    except Cancelled as error:
        # The caller is still there (its own leaving cancels this task), so the service dropped the call.
        raise Unavailable(f"{peer} dropped the call; try again", reason="CALL_DROPPED") from error


def broken_reply(peer: str, what: str, **fields: object) -> PhasemeshError:
    """The error for a reply that breaks the contract; the log has the cause."""
    internal = Internal()
    _log.error(
        "broken reply of a peer",
        extra={"error_id": internal.error_id, "peer": peer, "fault": what, **fields},
    )
    return internal
