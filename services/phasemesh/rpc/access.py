"""Who calls: keys to callers.

Where keys are configured every call but a health check needs one. What a peer says about tenant and caller
counts only if its key has the role `mesh`; from anybody else it is as if it weren't there.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from phasemesh.config.settings import AccessSettings
from phasemesh.errors import InvalidArgument, Unauthenticated
from phasemesh.rpc.context import ANONYMOUS, Caller, current_call, enter_call
from phasemesh.rpc.interceptor import AroundInterceptor, Context, first_metadata

AUTHORIZATION_KEY = "authorization"
API_KEY_KEY = "x-api-key"
TENANT_KEY = "x-phasemesh-tenant"
CALLER_KEY = "x-phasemesh-caller"

_TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")
_CALLER = re.compile(r"[!-~]([ -~]{0,126}[!-~])?")


class Keys:
    """The configured keys; finds who a credential belongs to in time that doesn't depend on it."""

    def __init__(self, access: AccessSettings) -> None:
        # Digests are of one length, so that comparing them tells nothing about a key's length either.
        self._callers = [
            (_digest(key.key.get_secret_value()), Caller(key.name, key.tenant, key.role))
            for key in access.keys
        ]

    def __bool__(self) -> bool:
        return bool(self._callers)

    def find(self, key: str) -> Caller | None:
        """Who `key` belongs to."""
        digest = _digest(key)
        found = None
        for known, caller in self._callers:
            if hmac.compare_digest(known, digest):
                found = caller
        return found


class AccessInterceptor(AroundInterceptor):
    """Refuses calls without a known key, and says in `Call.caller` who it is."""

    def __init__(self, access: AccessSettings) -> None:
        self._keys = Keys(access)

    @asynccontextmanager
    async def around(self, method: str, context: Context) -> AsyncIterator[None]:
        """See `AroundInterceptor`."""
        enter_call(replace(current_call(), caller=self._authenticate(context)))
        yield

    def _authenticate(self, context: Context) -> Caller:
        if not self._keys:
            return ANONYMOUS
        key = bearer_key(first_metadata(context, AUTHORIZATION_KEY), first_metadata(context, API_KEY_KEY))
        if key is None:
            raise Unauthenticated(
                "this service needs a key: send metadata `authorization: Bearer <key>` or `x-api-key: <key>`",
                reason="KEY_MISSING",
            )
        caller = self._keys.find(key)
        if caller is None:
            raise Unauthenticated("the key isn't known here", reason="KEY_UNKNOWN")
        if caller.role != "mesh":
            return caller
        return Caller(
            _checked(context, CALLER_KEY, _CALLER) or caller.name,
            _checked(context, TENANT_KEY, _TENANT) or caller.tenant,
            caller.role,
        )


def bearer_key(authorization: str | None, api_key: str | None) -> str | None:
    """The key in an `Authorization` header (RFC 6750; the scheme in any case), else in `x-api-key`."""
    if authorization is not None:
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() == "bearer" and key.strip():
            return key.strip()
    return api_key or None


def _checked(context: Context, name: str, pattern: re.Pattern[str]) -> str | None:
    value = first_metadata(context, name)
    if value is not None and not pattern.fullmatch(value):
        raise InvalidArgument(f"metadata {name} has to match {pattern.pattern}", field=name)
    return value


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
