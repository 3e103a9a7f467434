"""Every failure that a caller can see, as one tree.

    PhasemeshError
    ├── InvalidArgument          a field is wrong; the same request will never succeed
    │   └── PayloadTooLarge      the request as a whole is too big
    ├── Unauthenticated          no credential, or an unknown one
    ├── PermissionDenied         a known credential that may not do this
    ├── NotFound                 no such model, collection or route
    ├── AlreadyExists            something of that name is there
    ├── FailedPrecondition       the thing exists but can't do this (a task the model doesn't have)
    ├── Aborted                  the state moved under the caller
    ├── ResourceExhausted        overload or quota; `retry_after_s` says when to come back
    ├── Unavailable              a peer or replica is down, loading or draining
    ├── DeadlineExceeded         the caller's time was up
    ├── Cancelled                the caller went away
    ├── Unimplemented            a later release will do this
    └── Internal                 a bug; the text is generic, the error id finds it in the logs

`GRPC_CODE` and `HTTP_STATUS` are total over the tree. Nothing here imports grpc: codes are the canonical
numbers of google.rpc.Code.
"""

from __future__ import annotations

import uuid
from enum import IntEnum


class Code(IntEnum):
    """Canonical gRPC status codes (google/rpc/code.proto)."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class PhasemeshError(Exception):
    """Base of the tree; raise a leaf.

    Attributes:
        message: what is wrong and how to mend it, in words for the caller.
        reason: stable UPPER_SNAKE_CASE reason; google.rpc.ErrorInfo carries it.
        field: path of the request field at fault, "" where there is none.
        retry_after_s: seconds after which a retry may succeed; None where that is unknown.
    """

    default_reason = "ERROR"
    #: Whether the same request, sent again, may succeed.
    retryable = False

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        field: str = "",
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.field = field
        self.retry_after_s = retry_after_s

    @property
    def code(self) -> Code:
        """Its row of `GRPC_CODE`, or that of the leaf it derives from."""
        return next(GRPC_CODE[kind] for kind in type(self).__mro__ if kind in GRPC_CODE)

    @property
    def http_status(self) -> int:
        """Its row of `HTTP_STATUS`, or that of the leaf it derives from."""
        return next(HTTP_STATUS[kind] for kind in type(self).__mro__ if kind in HTTP_STATUS)


class InvalidArgument(PhasemeshError):
    """A field is wrong; the same request will never succeed."""

    default_reason = "INVALID_ARGUMENT"


class PayloadTooLarge(InvalidArgument):
    """The request as a whole is too big."""

    default_reason = "PAYLOAD_TOO_LARGE"


class Unauthenticated(PhasemeshError):
    """No credential, or an unknown one."""

    default_reason = "UNAUTHENTICATED"


class PermissionDenied(PhasemeshError):
    """A known credential that may not do this."""

    default_reason = "PERMISSION_DENIED"


class NotFound(PhasemeshError):
    """No such model, collection or route."""

    default_reason = "NOT_FOUND"


class AlreadyExists(PhasemeshError):
    """Something of that name is there."""

    default_reason = "ALREADY_EXISTS"


class FailedPrecondition(PhasemeshError):
    """The thing exists but can't do this."""

    default_reason = "FAILED_PRECONDITION"


class Aborted(PhasemeshError):
    """The state moved under the caller, who may start again from the new one."""

    default_reason = "ABORTED"


class ResourceExhausted(PhasemeshError):
    """Overload or quota; `retry_after_s` says when to come back."""

    default_reason = "OVERLOADED"
    retryable = True


class Unavailable(PhasemeshError):
    """A peer or replica is down, loading or draining."""

    default_reason = "UNAVAILABLE"
    retryable = True


class DeadlineExceeded(PhasemeshError):
    """The caller's time was up."""

    default_reason = "DEADLINE_EXCEEDED"


class Cancelled(PhasemeshError):
    """The caller went away."""

    default_reason = "CANCELLED"


class Unimplemented(PhasemeshError):
    """A later release will do this."""

    default_reason = "UNIMPLEMENTED"


class Internal(PhasemeshError):
    """A bug. The caller gets a generic text and an error id, the logs get the cause under that id.

    Attributes:
        error_id: random, 16 hex digits.
    """

    default_reason = "INTERNAL"

    def __init__(self, message: str = "", *, reason: str | None = None, error_id: str | None = None) -> None:
        self.error_id = error_id or uuid.uuid4().hex[:16]
        super().__init__(
            message or f"internal error {self.error_id}; the server's log has the cause", reason=reason
        )


#: Error → gRPC status code. Total over the tree.
GRPC_CODE: dict[type[PhasemeshError], Code] = {
    PhasemeshError: Code.UNKNOWN,
    InvalidArgument: Code.INVALID_ARGUMENT,
    PayloadTooLarge: Code.INVALID_ARGUMENT,
    Unauthenticated: Code.UNAUTHENTICATED,
    PermissionDenied: Code.PERMISSION_DENIED,
    NotFound: Code.NOT_FOUND,
    AlreadyExists: Code.ALREADY_EXISTS,
    FailedPrecondition: Code.FAILED_PRECONDITION,
    Aborted: Code.ABORTED,
    ResourceExhausted: Code.RESOURCE_EXHAUSTED,
    Unavailable: Code.UNAVAILABLE,
    DeadlineExceeded: Code.DEADLINE_EXCEEDED,
    Cancelled: Code.CANCELLED,
    Unimplemented: Code.UNIMPLEMENTED,
    Internal: Code.INTERNAL,
}

#: Error → HTTP status. Total over the tree. 499 is nginx's "client closed request"; it only reaches logs.
HTTP_STATUS: dict[type[PhasemeshError], int] = {
    PhasemeshError: 500,
    InvalidArgument: 400,
    PayloadTooLarge: 413,
    Unauthenticated: 401,
    PermissionDenied: 403,
    NotFound: 404,
    AlreadyExists: 409,
    FailedPrecondition: 400,
    Aborted: 409,
    ResourceExhausted: 429,
    Unavailable: 503,
    DeadlineExceeded: 504,
    Cancelled: 499,
    Unimplemented: 501,
    Internal: 500,
}

_BY_CODE: dict[Code, type[PhasemeshError]] = {
    code: kind for kind, code in reversed(GRPC_CODE.items()) if kind not in (PhasemeshError, Internal)
}


def from_code(
    code: int, message: str, *, reason: str | None = None, field: str = "", retry_after_s: float | None = None
) -> PhasemeshError:
    """The error that a peer meant by a gRPC status `code`.

    Codes outside the tree (UNKNOWN, DATA_LOSS, OUT_OF_RANGE) and INTERNAL become `Internal`: a peer's own
    bug is no more for the caller to see than ours. `reason` PAYLOAD_TOO_LARGE selects that leaf.
    """
    kind = _BY_CODE.get(Code(code)) if code in set(Code) else None
    if kind is None:
        return Internal(message, reason=reason)
    if kind is InvalidArgument and reason == PayloadTooLarge.default_reason:
        kind = PayloadTooLarge
    return kind(message, reason=reason, field=field, retry_after_s=retry_after_s)
