"""The one shape that our server interceptors have: code around a handler's run.

A subclass writes `around`, an async context manager's worth of code for both unary and streaming replies.
Health checks pass every interceptor by: a probe has no key, no deadline to speak of, and no place in logs.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any

import grpc

from phasemesh.rpc.catalogue import HEALTH, split_method

if TYPE_CHECKING:
    # Generic in the stubs only.
    Handler = grpc.RpcMethodHandler[Any, Any]
    Context = grpc.aio.ServicerContext[Any, Any]
    _Base = grpc.aio.ServerInterceptor[Any, Any]
else:
    Handler, Context, _Base = grpc.RpcMethodHandler, grpc.aio.ServicerContext, grpc.aio.ServerInterceptor


class AroundInterceptor(_Base):
    """Runs `around` around every handler but health's."""

    @abstractmethod
    def around(self, method: str, context: Context) -> AbstractAsyncContextManager[None]:
        """What happens before and after; it may swallow the handler's exception after setting a status.

        Args:
            method: full name without a leading slash.
            context: of the call; its `invocation_metadata()` has what the caller sent.
        """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """See `grpc.aio.ServerInterceptor`."""
        handler: Handler | None = await continuation(handler_call_details)
        path: str = handler_call_details.method
        if handler is None or split_method(path)[0] == HEALTH:
            return handler  # type: ignore[return-value]  # gRPC takes None for "no such method"; the stub doesn't
        method = path.lstrip("/")

        async def run(request: Any, context: Context) -> Any:
            async with self.around(method, context):
                return await behaviour(request, context)

        async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
            async with self.around(method, context):
                async for reply in behaviour(request, context):
                    yield reply

        kind = (
            f"{'stream' if handler.request_streaming else 'unary'}"
            f"_{'stream' if handler.response_streaming else 'unary'}"
        )
        behaviour: Callable[[Any, Context], Any] = getattr(handler, kind)
        rebuild = getattr(grpc, f"{kind}_rpc_method_handler")
        wrapped: Handler = rebuild(
            stream if handler.response_streaming else run,
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )
        return wrapped


def first_metadata(context: Context, *keys: str) -> str | None:
    """First text value that the caller sent under the first of `keys` that it sent at all."""
    metadata = context.invocation_metadata() or ()
    for key in keys:
        for name, value in metadata:
            if name == key and isinstance(value, str):
                return value
    return None
