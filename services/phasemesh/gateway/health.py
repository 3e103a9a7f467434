"""Whether this gateway can answer, for the public port's own callers and for probes.

Invariant: ready means that a request for some model would find an encoder, and that the process isn't
draining. Collections are a detail: without the retrieval service the gateway still embeds and reranks, and
taking it out of a balancer would only lose that too. Orchestrators probe the admin port; `/health` is for
clients that look before they call.
"""

from __future__ import annotations

from dataclasses import dataclass

import orjson
from fastapi import APIRouter
from starlette.responses import Response

from phasemesh.rpc.directory import ModelDirectory
from phasemesh.rpc.watch import PeerWatch


@dataclass(slots=True)
class Readiness:
    """What readiness depends on.

    Attributes:
        directory: models and their encoders.
        retrieval: the retrieval service's health; None where no collections are served.
        draining: the process was told to stop.
    """

    directory: ModelDirectory
    retrieval: PeerWatch | None = None
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
        described: dict[str, object] = {
            "status": status,
            "models": sorted(info.name for info in self.directory.models()),
        }
        if self.retrieval is not None:
            described["retrieval"] = "ok" if self.retrieval.serving else "does not answer"
        return described


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
