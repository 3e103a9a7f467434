"""One HTTP request and what becomes known about it on its way.

Invariant: there is one exchange and one clock per request, made by the outermost middleware; the header, the
spans, the metrics and the access line all read from it.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any, cast

from phasemesh.rpc.context import ANONYMOUS, Caller
from phasemesh.telemetry.phases import PhaseClock

_KEY = "phasemesh.exchange"
_SANE_ID = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass(slots=True)
class Exchange:
    """A request under way.

    Attributes:
        request_id: the caller's own if it is sane, else a new one.
        dialect: name of the dialect that owns the route.
        clock: the request's phases.
        caller: who calls.
        operation: GenAI operation, "embeddings" or "rerank"; "" for routes without a model.
        model: name of the model that answered (or was asked for, until it has); "" before it is known.
        answered: whether `model` did answer, so that the name is one of the configuration's.
        items: inputs or documents.
        tokens: tokens that the model computed.
        error_reason: reason of the error that was answered; "" for none.
        attributes: further attributes of the server span.
    """

    request_id: str
    dialect: str
    clock: PhaseClock = field(default_factory=PhaseClock)
    caller: Caller = ANONYMOUS
    operation: str = ""
    model: str = ""
    answered: bool = False
    items: int = 0
    tokens: int = 0
    error_reason: str = ""
    attributes: dict[str, str | int | list[str]] = field(default_factory=dict)


def request_id_of(header: str | None) -> str:
    """`header` if it is 1 to 128 visible ASCII characters, else 32 random hex digits.

    A caller's id goes into logs and gRPC metadata as it stands, hence the narrow alphabet.
    """
    if header is not None and _SANE_ID.fullmatch(header):
        return header
    return uuid.uuid4().hex


def attach(scope: MutableMapping[str, Any], exchange: Exchange) -> None:
    """Put the exchange into its ASGI scope."""
    scope[_KEY] = exchange


def exchange_of(scope: MutableMapping[str, Any]) -> Exchange:
    """The exchange of an ASGI scope."""
    return cast(Exchange, scope[_KEY])
