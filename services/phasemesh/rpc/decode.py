"""Requests that can't be decoded: an error like any other, not UNKNOWN with a Python class in it.

gRPC decodes outside of every interceptor, so such a call would have no error details, no access line and no
metric. Here the bytes travel through the interceptors and are decoded innermost, where errors are mapped.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from phasemesh.errors import InvalidArgument
from phasemesh.rpc.catalogue import HEALTH, split_method
from phasemesh.rpc.interceptor import Context, Handler, _Base


class DecodeInterceptor(_Base):
    """Decodes the request of every unary-request method but health's; to be the last of the interceptors."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """See `grpc.aio.ServerInterceptor`."""
        handler: Handler | None = await continuation(handler_call_details)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler  # type: ignore[return-value]  # gRPC takes None for "no such method"; the stub doesn't
        if split_method(handler_call_details.method)[0] == HEALTH:
            return handler
        deserialize: Callable[[bytes], Any] = handler.request_deserializer

        def decoded(raw: bytes) -> Any:
            try:
                return deserialize(raw)
            except DecodeError as error:
                # upb's text names the field for bad UTF-8, and nothing of ours.
                raise InvalidArgument(
                    f"the request is no valid message ({error}); texts have to be UTF-8 without surrogates",
                    reason="INVALID_MESSAGE",
                ) from None

        async def run(raw: bytes, context: Context) -> Any:
            return await behaviour(decoded(raw), context)

        async def stream(raw: bytes, context: Context) -> Any:
            async for reply in behaviour(decoded(raw), context):
                yield reply

        kind = "unary_stream" if handler.response_streaming else "unary_unary"
        behaviour: Callable[[Any, Context], Any] = getattr(handler, kind)
        wrapped: Handler = getattr(grpc, f"{kind}_rpc_method_handler")(
            stream if handler.response_streaming else run,
            request_deserializer=None,
            response_serializer=handler.response_serializer,
        )
        return wrapped
