"""Errors to `google.rpc` trailers and back: the only place that knows how an error looks on the wire.

Every error carries ErrorInfo (domain "phasemesh"; AIP-193), one with a field BadRequest, one with a time to
retry RetryInfo. Both directions are total: whatever an error holds can be sent, whatever a peer sends can be
read.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import cast

import grpc
from google.protobuf.any_pb2 import Any
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from phasemesh.errors import (
    GRPC_CODE,
    Code,
    DeadlineExceeded,
    Internal,
    PayloadTooLarge,
    PhasemeshError,
    ResourceExhausted,
    Unavailable,
    Unimplemented,
    from_code,
)

DOMAIN = "phasemesh"
DETAILS_KEY = "grpc-status-details-bin"

# UTF-8 bytes. The message travels twice, percent-encoded (up to three times as long) and base64 in the
# details, the field twice in base64; gRPC gives all metadata of a reply 8 KiB, and above that the caller sees
# RESOURCE_EXHAUSTED in place of the status.
MAX_MESSAGE_BYTES = 1000
MAX_FIELD_BYTES = 300
MAX_REASON_BYTES = 63

_log = logging.getLogger(__name__)


def code_of(error: PhasemeshError) -> Code:
    """Row of `GRPC_CODE` of the error's class, or of the nearest class above it."""
    return next(GRPC_CODE[kind] for kind in type(error).__mro__ if kind in GRPC_CODE)


def wire_message(error: PhasemeshError) -> str:
    """The error's message as it may be sent: bounded, and free of what UTF-8 can't express."""
    return _sendable(error.message, MAX_MESSAGE_BYTES)


def to_details(error: PhasemeshError) -> bytes:
    """Serialised `google.rpc.Status` of an error, for the trailer `DETAILS_KEY`."""
    status = status_pb2.Status(code=int(code_of(error)), message=wire_message(error))
    info = error_details_pb2.ErrorInfo(reason=_sendable(error.reason, MAX_REASON_BYTES), domain=DOMAIN)
    if isinstance(error, Internal):
        info.metadata["error_id"] = error.error_id
    if error.field:
        info.metadata["field"] = _sendable(error.field, MAX_FIELD_BYTES)
    _add(status, info)
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=_sendable(error.field, MAX_FIELD_BYTES), description=info.reason
        )
        _add(status, error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(max(0, round(error.retry_after_s * 1e9)))
        _add(status, retry)
    serialised: bytes = status.SerializeToString()
    return serialised


def to_error(exc: grpc.RpcError) -> PhasemeshError:
    """The error that a peer, or gRPC itself, meant by `exc`.

    A Phasemesh peer's own words, reason, field and time to retry are kept. What gRPC says by itself names
    addresses, and what a foreign peer says of its own fault names its internals, so neither is passed on.
    """
    call = cast(grpc.aio.AioRpcError, exc)
    code = Code(call.code().value[0])
    status = _read_status(call)
    info = error_details_pb2.ErrorInfo()
    if status is None or not _unpack(status, info) or info.domain != DOMAIN:
        return _from_bare(code, call.details() or "")
    if code is Code.INTERNAL:
        return Internal(status.message, reason=info.reason, error_id=info.metadata.get("error_id"))
    retry = error_details_pb2.RetryInfo()
    return from_code(
        code,
        status.message,
        reason=info.reason,
        field=info.metadata.get("field", ""),
        retry_after_s=retry.retry_delay.ToNanoseconds() / 1e9 if _unpack(status, retry) else None,
    )


def _from_bare(code: Code, details: str) -> PhasemeshError:
    match code:
        case Code.UNAVAILABLE:
            return Unavailable("the service can't be reached now", reason="PEER_UNREACHABLE")
        case Code.CANCELLED:
            # Our own cancellation never gets here: it is a CancelledError. So the peer stopped.
            return Unavailable("the service stopped while it worked on this", reason="PEER_STOPPED")
        case Code.DEADLINE_EXCEEDED:
            return DeadlineExceeded("the time for this call was up")
        case Code.RESOURCE_EXHAUSTED if "larger than max" in details:
            return PayloadTooLarge(
                f"a message is over the limit of the connection ({details}); send or ask for less at once"
            )
        case Code.RESOURCE_EXHAUSTED:
            return ResourceExhausted("the service has too many calls in flight", retry_after_s=1.0)
        case Code.UNIMPLEMENTED:
            return Unimplemented("the service doesn't have this method")
        case Code.UNKNOWN | Code.INTERNAL | Code.DATA_LOSS | Code.OUT_OF_RANGE | Code.OK:
            error = Internal()
            _log.error(
                "peer failed", extra={"error_id": error.error_id, "code": code.name, "details": details}
            )
            return error
    return from_code(code, details)


def _read_status(call: grpc.aio.AioRpcError) -> status_pb2.Status | None:
    # The stub says mapping; it yields pairs.
    trailers = cast("Iterable[tuple[str, str | bytes]]", call.trailing_metadata() or ())
    for key, value in trailers:
        if key == DETAILS_KEY and isinstance(value, bytes):
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                return None
    return None


def _unpack(
    status: status_pb2.Status, into: error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo
) -> bool:
    return any(detail.Is(into.DESCRIPTOR) and detail.Unpack(into) for detail in status.details)


def _add(
    status: status_pb2.Status,
    detail: error_details_pb2.ErrorInfo | error_details_pb2.BadRequest | error_details_pb2.RetryInfo,
) -> None:
    packed = Any()
    packed.Pack(detail)
    status.details.append(packed)


def _sendable(text: str, max_bytes: int) -> str:
    encoded = text.encode("utf-8", "replace")
    if len(encoded) > max_bytes:
        ellipsis = "…".encode()
        encoded = encoded[: max_bytes - len(ellipsis)].decode("utf-8", "ignore").encode() + ellipsis
    return encoded.decode()
