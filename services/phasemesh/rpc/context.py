"""Who is calling, and until when: what a handler may know of its RPC beside the request.

The server's interceptors set it for the task that runs the handler; nothing else does. It is deliberately
free of gRPC, so that code below a servicer can ask for the remaining time without knowing how it was called.
"""

from __future__ import annotations

import time
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Caller:
    """The peer on whose behalf a call runs.

    Attributes:
        name: of the key, or what a mesh peer said in `x-phasemesh-caller`; "anonymous" where no keys are set.
        tenant: owner of what is read and made.
        role: role of the key that authenticated the call, whoever a mesh peer speaks for.
    """

    name: str
    tenant: str
    role: Literal["caller", "mesh"]


#: A call whose credential hasn't been looked at yet; no handler ever sees it.
UNAUTHENTICATED = Caller("", "", "caller")
#: Everybody, where no keys are configured.
ANONYMOUS = Caller("anonymous", "default", "caller")


@dataclass(frozen=True, slots=True)
class Call:
    """One RPC being answered.

    Attributes:
        method: full name without a leading slash, e.g. "phasemesh.v1.EncoderService/Embed".
        caller: on whose behalf.
        request_id: the caller's `x-request-id`, or one made here.
        deadline_s: `time.monotonic()` at which it ends.
    """

    method: str
    caller: Caller
    request_id: str
    deadline_s: float

    def remaining_s(self) -> float:
        """Seconds left, never below zero."""
        return max(0.0, self.deadline_s - time.monotonic())


_current: ContextVar[Call | None] = ContextVar("phasemesh_call", default=None)


def enter_call(call: Call) -> None:
    """Make `call` current for the running task and what it starts; for interceptors."""
    _current.set(call)


def current_call_or_none() -> Call | None:
    """The RPC that this task answers, or None outside one."""
    return _current.get()


def current_call() -> Call:
    """The RPC that this task answers.

    Raises:
        LookupError: outside an RPC handler.
    """
    call = _current.get()
    if call is None:
        raise LookupError("current_call() was asked for outside an RPC handler")
    return call
