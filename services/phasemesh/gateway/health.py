"""Whether this gateway can answer, for the public port's own callers and for probes.

Invariant: ready means that a request for some model would find an encoder, and that the process isn't
draining. Orchestrators probe the admin port; `/health` is for clients that look before they call.
"""

from __future__ import annotations

from dataclasses import dataclass

import orjson
from fastapi import APIRouter
from starlette.responses import Response

from phasemesh.rpc.directory import ModelDirectory


@dataclass(slots=True)
class Readiness:
    """What readiness depends on.

    Attributes:
        directory: models and their encoders.
        draining: the process was told to stop.
    """

    directory: ModelDirectory
    draining: bool = False

    @property
    def ready(self) -> bool:
        """Whether requests should be sent here."""
        return not self.draining and self.directory.ready()

    def describe(self) -> dict[str, object]:
        """JSON-ready state."""
        if self.draining:
            status = "draining"
        elif not self.directory.ready():
            status = "no encoder answers"
        else:
            status = "ok"
        return {"status": status, "models": sorted(info.name for info in self.directory.models())}


def routes(readiness: Readiness) -> APIRouter:
    """`/health`, and `/` as a signpost."""
    router = APIRouter(tags=["Service"])

    @router.get("/health", responses={503: {"description": "Draining, or no encoder answers"}})
    async def health() -> Response:
        """Whether requests can be answered now."""
        return Response(
            orjson.dumps(readiness.describe()),
            200 if readiness.ready else 503,
            media_type="application/json",
        )

    @router.get("/", include_in_schema=False)
    async def signpost() -> Response:
        return Response(
            orjson.dumps({"service": "phasemesh", "docs": "/docs", "openapi": "/openapi.json"}),
            media_type="application/json",
        )

    return router
