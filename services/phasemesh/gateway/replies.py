"""Replies of the hot routes: bytes as they are, with the request's phases in the header."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from starlette.responses import Response

from phasemesh.errors import PhasemeshError
from phasemesh.gateway.exchange import Exchange
from phasemesh.telemetry import names
from phasemesh.telemetry.phases import server_timing

#: Advice that only a gRPC caller can follow, and what stands in its place.
_WIRE_ADVICE = {
    " or set truncation.enabled": "",
    " or ask for VECTOR_ENCODING_FLOAT16": "",
    ", or ask for VECTOR_ENCODING_FLOAT16": "",
    "VECTOR_KIND_DENSE": "one vector per input",
    "VECTOR_KIND_TOKEN": "one vector per token",
}


def json_reply(exchange: Exchange, content: bytes, peer_phases: Sequence[tuple[str, int]]) -> Response:
    """A 200 with `content` and a `Server-Timing` header.

    The header lists the gateway's phases in order, the peer's (from the reply's `Timings`, so the figures
    are the same) after the `gateway.rpc` that contains them, and the total last.
    """
    phases: list[tuple[str, int]] = []
    for phase in exchange.clock.phases:
        phases.append((phase.name, phase.duration_ns))
        if phase.name == names.PHASE_RPC:
            phases.extend(peer_phases)
    timing = server_timing(phases, exchange.clock.total_ns())
    return Response(content, headers={"server-timing": timing}, media_type="application/json")


@contextmanager
def renamed_fields(rename: Callable[[str], str], field_names: Callable[[str], str]) -> Iterator[None]:
    """Let errors of the body speak of the dialect's fields, not of the wire's.

    Args:
        rename: replaces the wire's paths wherever they stand in a message.
        field_names: wire path of a field → the dialect's.
    """
    try:
        yield
    except PhasemeshError as error:
        for advice, instead in _WIRE_ADVICE.items():
            error.message = error.message.replace(advice, instead)
        if error.field:
            error.field = field_names(error.field)
            message = rename(error.message)
            error.message = message if error.field in message else f"{error.field}: {message}"
        raise
