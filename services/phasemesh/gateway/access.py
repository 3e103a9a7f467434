"""Who may use the public port.

Invariant: where keys are set, no route answers without one, and only the name and tenant behind a key travel
on, never the key.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from phasemesh.config.settings import AccessSettings
from phasemesh.errors import Unauthenticated
from phasemesh.gateway.exchange import exchange_of
from phasemesh.rpc.access import Keys, bearer_key


class Access:
    """ASGI middleware; lets callers in by `Authorization: Bearer`, `api-key` or `x-api-key`."""

    def __init__(self, app: ASGIApp, *, access: AccessSettings) -> None:
        self._app = app
        self._keys = Keys(access)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the ASGI specification.

        Raises:
            Unauthenticated: keys are set, and the request shows none of them.
        """
        if scope["type"] == "http" and self._keys:
            headers = Headers(scope=scope)
            key = bearer_key(headers.get("authorization"), headers.get("api-key") or headers.get("x-api-key"))
            if key is None:
                raise Unauthenticated(
                    "no API key; send it as `Authorization: Bearer <key>`, `api-key` or `x-api-key`",
                    reason="KEY_MISSING",
                )
            caller = self._keys.find(key)
            if caller is None:
                raise Unauthenticated("the API key is not known here", reason="KEY_UNKNOWN")
            exchange_of(scope).caller = caller
        await self._app(scope, receive, send)
