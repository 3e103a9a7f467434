"""Calls to other processes of the mesh: one helper, one channel per target.

Invariants: every call has a deadline, and within a handler never a later one than the call being answered;
its CLIENT span ends however the call ends; cancelling the awaiting task cancels the call at the server. The
OpenTelemetry client interceptors break the last two for `grpc.aio`, so the span is made here instead.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import uuid
from typing import Any

import grpc
from opentelemetry import trace

from phasemesh.config.settings import RpcSettings
from phasemesh.errors import DeadlineExceeded
from phasemesh.rpc.access import AUTHORIZATION_KEY, CALLER_KEY, TENANT_KEY
from phasemesh.rpc.catalogue import SERVICES
from phasemesh.rpc.context import Caller, current_call_or_none
from phasemesh.rpc.details import code_of, to_error
from phasemesh.rpc.status import REQUEST_ID_KEY
from phasemesh.telemetry import names, tracing

#: Kept back from the rest of a caller's deadline, for the way back.
DEADLINE_MARGIN_S = 0.01

_SCHEME = re.compile(r"(dns|ipv4|ipv6|unix|unix-abstract|vsock|xds|passthrough):")

#: Methods that a channel may send again by itself when the peer is UNAVAILABLE: reads, which change nothing,
#: and the upsert, which is idempotent by id. The other writes count, move or create something each time.
_RETRYABLE = {
    "phasemesh.v1.EncoderService": None,
    "phasemesh.v1.ScorerService": None,
    "phasemesh.v1.RetrievalService": (
        *("GetCollection", "ListCollections", "GetDocuments", "ListDocuments", "CountDocuments"),
        *("Search", "Rerank", "Explain", "UpsertDocuments"),
    ),
}
_RETRIED_NAMES = [
    {"service": service, **({"method": method} if method else {})}
    for service, methods in _RETRYABLE.items()
    for method in methods or ("",)
]
_SERVICE_CONFIG = json.dumps(
    {
        "loadBalancingConfig": [{"round_robin": {}}],
        "methodConfig": [
            {
                "name": _RETRIED_NAMES,
                "retryPolicy": {
                    "maxAttempts": 3,
                    "initialBackoff": "0.05s",
                    "maxBackoff": "1s",
                    "backoffMultiplier": 2,
                    "retryableStatusCodes": ["UNAVAILABLE"],
                },
            }
        ],
        "retryThrottling": {"maxTokens": 10, "tokenRatio": 0.1},
    }
)


class RpcClient:
    """Calls other processes; belongs to the event loop that makes its first call.

    Args:
        rpc: limits and times.
        key: sent with every call; None where the mesh has no keys.
        retries: whether channels send again what a peer has refused as unavailable.
    """

    def __init__(self, *, rpc: RpcSettings, key: str | None, retries: bool = True) -> None:
        self._rpc = rpc
        self._retries = retries
        self._key = key
        self._loop: asyncio.AbstractEventLoop | None = None
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._stubs: dict[tuple[str, type], Any] = {}
        self._closed = False

    async def call(
        self,
        target: str,
        stub: type,
        method: str,
        request: Any,
        *,
        timeout_s: float,
        request_id: str | None = None,
        caller: Caller | None = None,
        traced: bool = True,
    ) -> Any:
        """Call one method and wait for its reply.

        Within an RPC handler, `request_id` and `caller` default to those of the call being answered, and its
        remaining time bounds this call's.

        Args:
            target: "host:port" (resolved by DNS, balanced over all addresses) or any gRPC target URI.
            stub: generated stub class, e.g. `EncoderServiceStub`.
            method: e.g. "Embed".
            request: its request message.
            timeout_s: longest time for all attempts together, seconds.
            request_id: for logs on both sides.
            caller: on whose behalf; the server believes it only with a mesh key.
            traced: False for polls that belong to no request: they make no spans, here or at the server.

        Raises:
            PhasemeshError: the leaf that the server or gRPC meant.
            TypeError: `request` isn't what the method takes.
        """
        service = _service_of(stub)
        full_name = f"{service}/{method}"
        _check_type(service, method, request)
        parent = current_call_or_none()
        if parent is not None:
            timeout_s = min(timeout_s, parent.remaining_s() - DEADLINE_MARGIN_S)
            request_id = request_id or parent.request_id
            caller = caller or parent.caller
        timeout_s = min(timeout_s, self._rpc.max_deadline_s)
        if timeout_s <= 0:
            raise DeadlineExceeded(f"no time is left to call {full_name}")
        invoke = getattr(self._stub(target, stub), method)
        if not traced:
            span: trace.Span = _unsampled()
        else:
            span = tracing.tracer().start_span(
                full_name,
                kind=trace.SpanKind.CLIENT,
                attributes={names.RPC_SYSTEM: "grpc", names.RPC_METHOD: full_name},
            )
        outcome = "UNKNOWN"
        try:
            metadata = self._metadata(span, request_id or uuid.uuid4().hex, caller)
            reply = await invoke(request, timeout=timeout_s, metadata=metadata)
            outcome = "OK"
        except grpc.RpcError as exc:
            error = to_error(exc)
            outcome = code_of(error).name
            raise error from exc
        except asyncio.CancelledError:
            outcome = "CANCELLED"
            raise
        finally:
            _end(span, outcome)
        return reply

    def _metadata(self, span: trace.Span, request_id: str, caller: Caller | None) -> list[tuple[str, str]]:
        metadata = [*tracing.inject(span).items(), (REQUEST_ID_KEY, request_id)]
        if self._key is not None:
            metadata.append((AUTHORIZATION_KEY, f"Bearer {self._key}"))
            if caller is not None:
                metadata += [(CALLER_KEY, caller.name), (TENANT_KEY, caller.tenant)]
        return metadata

    def _stub(self, target: str, stub: type) -> Any:
        loop = asyncio.get_running_loop()
        if self._closed:
            raise RuntimeError("the client is closed")
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            # Two loops polling gRPC's one completion queue starve each other (grpc#25364).
            raise RuntimeError(
                "this client belongs to another event loop; a process has one that speaks gRPC"
            )
        known = self._stubs.get((target, stub))
        if known is None:
            channel = self._channels.get(target)
            if channel is None:
                options = channel_options(self._rpc)
                if not self._retries:
                    options.append(("grpc.enable_retries", 0))
                channel = grpc.aio.insecure_channel(dial_target(target), options=options)
                self._channels[target] = channel
            known = self._stubs[target, stub] = stub(channel)
        return known

    async def close(self) -> None:
        """Close every channel; calls in flight are cancelled."""
        self._closed = True
        channels, self._channels = self._channels, {}
        self._stubs.clear()
        for channel in channels.values():
            await channel.close(None)


def dial_target(target: str) -> str:
    """`target` as gRPC takes it: host:port becomes `dns:///host:port`, a URI stays."""
    return target if _SCHEME.match(target) else f"dns:///{target}"


def channel_options(rpc: RpcSettings) -> list[tuple[str, int | str]]:
    """Channel arguments of our clients; see `server.server_options` for the other side."""
    keepalive_ms = round(rpc.keepalive_s * 1e3)
    return [
        ("grpc.service_config", _SERVICE_CONFIG),
        ("grpc.max_receive_message_length", rpc.max_message_bytes),
        ("grpc.max_send_message_length", rpc.max_message_bytes),
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", min(20_000, keepalive_ms)),
        ("grpc.keepalive_permit_without_calls", 1),
        # The default stops pinging after two pings without data: exactly in a long call.
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2000),
        ("grpc.dns_min_time_between_resolutions_ms", 5000),
        # Peers are within the mesh; an HTTP proxy of the environment is not the way to them.
        ("grpc.enable_http_proxy", 0),
        # Otherwise channels of one process share connections, and their back-off, behind our back.
        ("grpc.use_local_subchannel_pool", 1),
    ]


def _service_of(stub: type) -> str:
    # Our Python packages are named as the proto packages are, so the stub's own name is the service's.
    package = stub.__module__.rpartition(".")[0]
    return f"{package}.{stub.__name__.removesuffix('Stub')}"


def _check_type(service: str, method: str, request: Any) -> None:
    # gRPC logs that it can't serialise a request, and then sends an empty one.
    descriptor = SERVICES[service][0].methods_by_name[method].input_type if service in SERVICES else None
    if descriptor is not None and getattr(request, "DESCRIPTOR", None) is not descriptor:
        raise TypeError(f"{service}/{method} takes {descriptor.full_name}, not {type(request).__name__}")


def _unsampled() -> trace.Span:
    context = trace.SpanContext(
        trace_id=secrets.randbits(128) or 1, span_id=secrets.randbits(64) or 1, is_remote=False
    )
    return trace.NonRecordingSpan(context)


def _end(span: trace.Span, outcome: str) -> None:
    if span.is_recording():
        span.set_attribute(names.RPC_STATUS, outcome)
        if outcome != "OK":
            span.set_attribute(names.ERROR_TYPE, outcome)
            span.set_status(trace.StatusCode.ERROR, outcome)
    span.end()
