"""The gateway as one ASGI application: middleware and dialects put together.

Order of the middleware, outermost first: `Observe` sees everything, `Errors` turns what the rest raises into
the dialect's body, `Access` lets nobody else in. All are plain ASGI.
"""

from __future__ import annotations

from importlib import metadata

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from phasemesh.config.settings import Settings
from phasemesh.gateway import health
from phasemesh.gateway.access import Access
from phasemesh.gateway.dialects.native import routes as native
from phasemesh.gateway.dialects.openai import routes as openai
from phasemesh.gateway.dialects.openai import schema as openai_schema
from phasemesh.gateway.dialects.rerank import routes as rerank
from phasemesh.gateway.dialects.rerank import schema as rerank_schema
from phasemesh.gateway.docs import add_docs
from phasemesh.gateway.faults import Dialect, Errors, raise_http_fault
from phasemesh.gateway.health import Readiness
from phasemesh.gateway.mesh import Mesh
from phasemesh.gateway.observe import Observe
from phasemesh.gateway.retrieval import Retrieval
from phasemesh.rpc.client import RpcClient
from phasemesh.rpc.directory import ModelDirectory
from phasemesh.telemetry.metrics import Metrics


def create_app(
    settings: Settings,
    *,
    client: RpcClient,
    directory: ModelDirectory,
    metrics: Metrics,
    readiness: Readiness | None = None,
) -> FastAPI:
    """The application; it owns none of what it is given.

    Args:
        settings: `gateway` and `access` are read.
        client: calls encoders and the retrieval service.
        directory: finds them; started by the caller.
        metrics: of the process.
        readiness: shared with whoever drains the process; default: of `directory` alone.
    """
    app = FastAPI(
        title="Phasemesh",
        description="Embeddings and reranking in the shapes that existing clients speak, and "
        "late-interaction search over collections of documents.",
        version=_version(),
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.add_exception_handler(HTTPException, raise_http_fault)
    # Each call wraps what was added before it.
    app.add_middleware(Access, access=settings.access)
    app.add_middleware(Errors, dialect_of=dialect_of)
    app.add_middleware(Observe, metrics=metrics, dialect_of=dialect_of)
    mesh = Mesh(settings, client, directory)
    app.include_router(openai.routes(mesh, settings.gateway))
    app.include_router(rerank.routes(mesh, settings.gateway))
    bodies: tuple[type[BaseModel], ...] = (openai_schema.EmbeddingsRequest, rerank_schema.RerankRequest)
    if settings.gateway.retrieval is not None:
        retrieval = Retrieval(settings, client, settings.gateway.retrieval)
        app.include_router(native.routes(retrieval, settings.gateway))
        bodies += native.BODIES
    app.include_router(health.routes(readiness or Readiness(directory)))
    add_docs(
        app,
        bodies=bodies,
        keys=bool(settings.access.keys),
    )
    return app


def dialect_of(path: str) -> Dialect:
    """The dialect whose clients call `path`; OpenAI's for every path that no other owns."""
    if native.owns(path):
        return native.DIALECT
    return rerank.DIALECT if path in rerank.PATHS else openai.DIALECT


def _version() -> str:
    try:
        return metadata.version("phasemesh")
    except metadata.PackageNotFoundError:  # Run from a checkout that isn't installed.
        return "unknown"
