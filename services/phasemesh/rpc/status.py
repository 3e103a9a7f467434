"""What becomes of a handler's exception: one table, one interceptor.

Handlers raise leaves of `phasemesh.errors` and nothing else; this interceptor answers them by setting a
status, never by raising further, because gRPC's own `abort` raises and would leave an exception event on the
span of every refused call. Anything else that is raised is a bug: the caller gets INTERNAL and an error id,
the log gets the cause under that id.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import inf

import grpc
from opentelemetry import trace

from phasemesh.errors import Code, Internal, PhasemeshError, Unimplemented
from phasemesh.rpc.catalogue import metric_label
from phasemesh.rpc.context import UNAUTHENTICATED, Call, current_call, enter_call
from phasemesh.rpc.details import DETAILS_KEY, code_of, to_details, to_error, wire_message
from phasemesh.rpc.interceptor import AroundInterceptor, Context, first_metadata
from phasemesh.telemetry import names
from phasemesh.telemetry.metrics import Metrics, current_exemplar

__all__ = ["REQUEST_ID_KEY", "RetryableInterceptor", "StatusInterceptor", "to_error"]

REQUEST_ID_KEY = "x-request-id"
MAX_REQUEST_ID_CHARS = 128

_GRPC_CODE = {Code(status.value[0]): status for status in grpc.StatusCode}

#: Methods that every gateway calls every other second; their access lines would drown the others.
_POLLED = frozenset({"phasemesh.v1.EncoderService/ListModels"})

#: Reasons of UNAVAILABLE that channels don't send again by themselves (gRFC A6: a negative pushback). A batch
#: that was lost has been tried twice already; if its input is what kills workers, more tries kill more.
_TRIED_ENOUGH = frozenset({"REPLICA_LOST"})

_log = logging.getLogger(__name__)
_access = logging.getLogger("phasemesh.access")


class StatusInterceptor(AroundInterceptor):
    """Maps exceptions to statuses, and tells span, metrics and log how each call ended."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    @asynccontextmanager
    async def around(self, method: str, context: Context) -> AsyncIterator[None]:
        """See `AroundInterceptor`."""
        started_s = time.monotonic()
        request_id = _request_id(context)
        enter_call(Call(method, UNAUTHENTICATED, request_id, inf))
        span = trace.get_current_span()
        if span.is_recording():
            span.update_name(method)
            span.set_attributes(
                {names.RPC_SYSTEM: "grpc", names.RPC_METHOD: method, names.REQUEST_ID: request_id}
            )
        self._metrics.inflight.inc()
        code = Code.UNKNOWN
        try:
            try:
                yield
                code = _code_set(context)
            except PhasemeshError as error:
                code = _answer(context, _guarded(error, method), request_id)
            except grpc.aio.AbortError:
                # A library's servicer; it has answered already.
                code = _code_set(context)
                raise
            except NotImplementedError as error:
                code = _answer(context, _unimplemented(context, method, error), request_id)
            except Exception as error:
                code = _answer(context, _bug(error, method), request_id)
            else:
                context.set_trailing_metadata(_trailers(context, request_id))
        except (asyncio.CancelledError, GeneratorExit):
            code = _why_cancelled(current_call(), started_s)
            # Nobody reads this status, but the span takes it from here.
            context.set_code(_GRPC_CODE[code])
            raise
        finally:
            self._metrics.inflight.dec()
            self._report(method, code, time.monotonic() - started_s, request_id)

    def _report(self, method: str, code: Code, seconds: float, request_id: str) -> None:
        span = trace.get_current_span()
        if span.is_recording():
            span.set_attribute(names.RPC_STATUS, code.name)
            if code is not Code.OK:
                span.set_attribute(names.ERROR_TYPE, code.name)
        self._metrics.rpc_duration.labels(metric_label(method), code.name).observe(
            seconds, exemplar=current_exemplar()
        )
        _access.log(
            logging.DEBUG if method in _POLLED and code is Code.OK else logging.INFO,
            "call",
            extra={
                "method": method,
                "code": code.name,
                "ms": round(seconds * 1e3, 3),
                "caller": current_call().caller.name or None,
                "request_id": request_id,
            },
        )


class RetryableInterceptor(AroundInterceptor):
    """Answers UNAVAILABLE in the one form that a caller's channel sends again: trailers only.

    `grpc.aio` sends initial metadata and an empty message with a status that was set, which commits the call
    at the client; `abort` sends trailers alone. It raises, so this stands outside the tracing interceptor,
    which would note the exception.
    """

    @asynccontextmanager
    async def around(self, method: str, context: Context) -> AsyncIterator[None]:
        """See `AroundInterceptor`."""
        yield
        if _code_set(context) is Code.UNAVAILABLE:
            trailers = tuple(context.trailing_metadata() or ())
            await context.abort(grpc.StatusCode.UNAVAILABLE, _text(context.details()), trailers)


def _text(details: str | bytes) -> str:
    return details.decode() if isinstance(details, bytes) else details


def _request_id(context: Context) -> str:
    """The caller's `x-request-id` if it is 1 to 128 visible ASCII characters, else a new one."""
    given = first_metadata(context, REQUEST_ID_KEY)
    if given and len(given) <= MAX_REQUEST_ID_CHARS and all("!" <= char <= "~" for char in given):
        return given
    return uuid.uuid4().hex


def _answer(context: Context, error: PhasemeshError, request_id: str) -> Code:
    code = code_of(error)
    context.set_code(_GRPC_CODE[code])
    context.set_details(wire_message(error))
    trailers = (*_trailers(context, request_id), (DETAILS_KEY, to_details(error)))
    if error.reason in _TRIED_ENOUGH:
        trailers = (*trailers, ("grpc-retry-pushback-ms", "-1"))
    context.set_trailing_metadata(trailers)
    return code


def _trailers(context: Context, request_id: str) -> tuple[tuple[str, str | bytes], ...]:
    # Not initial metadata: once that is sent, the caller's channel can't retry the call any more.
    return (*(context.trailing_metadata() or ()), (REQUEST_ID_KEY, request_id))


def _guarded(error: PhasemeshError, method: str) -> PhasemeshError:
    """`error`, with an `Internal`'s own words kept from the caller: they are for the log."""
    if not isinstance(error, Internal):
        return error
    _log.error(
        "internal error",
        exc_info=error,
        extra={"error_id": error.error_id, "method": method, "detail": error.message},
    )
    return Internal(reason=error.reason, error_id=error.error_id)


def _bug(error: Exception, method: str) -> Internal:
    internal = Internal()
    _log.error("unhandled error", exc_info=error, extra={"error_id": internal.error_id, "method": method})
    return internal


def _unimplemented(context: Context, method: str, error: NotImplementedError) -> PhasemeshError:
    # Generated servicers set the code and raise for methods that a servicer doesn't define; without the code
    # it is somebody's forgotten branch.
    if _code_set(context) is Code.UNIMPLEMENTED:
        return Unimplemented(f"{method} isn't implemented by this release")
    return _bug(error, method)


def _code_set(context: Context) -> Code:
    code = context.code()
    return Code(code.value[0] if isinstance(code, grpc.StatusCode) else code or 0)


def _why_cancelled(call: Call, started_s: float) -> Code:
    """Whether a cancelled call ran into its deadline, or its caller left.

    gRPC cancels the handler alike for both. A caller's own timer may end the call a little before ours, and
    `grpc-timeout` is rounded to two or three digits, hence the slack.
    """
    if call.deadline_s == inf:
        return Code.CANCELLED
    slack_s = 0.02 + 0.015 * (call.deadline_s - started_s)
    return Code.DEADLINE_EXCEEDED if call.remaining_s() <= slack_s else Code.CANCELLED
