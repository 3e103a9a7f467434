"""The OpenAPI document and its page, which works without the internet.

Bodies are documented from pydantic models, though the hot routes read and write raw bytes. The page's script
and style come from the `fastapi-swagger` package, which carries the Swagger UI distribution.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from importlib import resources
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.responses import HTMLResponse, Response

_REF = "#/components/schemas/{model}"
_ASSETS = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "favicon-32x32.png": "image/png",
}
_MEANING = {
    400: "A field is wrong",
    401: "No key, or an unknown one",
    404: "No such model or collection",
    409: "Something of that name exists, or the state has moved on",
    413: "The body is too large",
    429: "Overloaded; see Retry-After",
    503: "What answers this is down; see Retry-After",
}


def body_of(model: type[BaseModel], *, required: bool = True) -> dict[str, Any]:
    """`openapi_extra` that documents a JSON body which the handler reads by itself."""
    schema = {"$ref": _REF.format(model=model.__name__)}
    return {"requestBody": {"required": required, "content": {"application/json": {"schema": schema}}}}


def errors_of(model: type[BaseModel], *statuses: int) -> dict[int | str, dict[str, Any]]:
    """`responses` that document a dialect's errors."""
    return {status: {"model": model, "description": _MEANING[status]} for status in statuses}


def add_docs(app: FastAPI, *, bodies: Sequence[type[BaseModel]], keys: bool) -> None:
    """Serve the document at /openapi.json and the page at /docs.

    Args:
        app: the application, all its routes added.
        bodies: every model given to `body_of`.
        keys: whether callers need a key.
    """

    @cache
    def openapi() -> dict[str, Any]:
        document = get_openapi(
            title=app.title, version=app.version, description=app.description, routes=app.routes
        )
        _, definitions = models_json_schema([(model, "validation") for model in bodies], ref_template=_REF)
        components = document.setdefault("components", {})
        components.setdefault("schemas", {}).update(definitions["$defs"])
        if keys:
            components["securitySchemes"] = {
                "bearer": {"type": "http", "scheme": "bearer"},
                "apiKey": {"type": "apiKey", "in": "header", "name": "api-key"},
            }
            document["security"] = [{"bearer": []}, {"apiKey": []}]
        return document

    async def page() -> HTMLResponse:
        # Relative addresses, so that the page also works behind a path prefix.
        return get_swagger_ui_html(
            openapi_url="openapi.json",
            title=f"{app.title} API",
            swagger_js_url="docs/swagger-ui-bundle.js",
            swagger_css_url="docs/swagger-ui.css",
            swagger_favicon_url="docs/favicon-32x32.png",
        )

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way to extend the document
    app.add_api_route("/docs", page, include_in_schema=False)
    for name in _ASSETS:
        app.add_api_route(f"/docs/{name}", _asset_route(name), include_in_schema=False)


def _asset_route(name: str) -> Callable[[], Awaitable[Response]]:
    async def asset() -> Response:
        return Response(_asset(name), media_type=_ASSETS[name], headers={"cache-control": "max-age=86400"})

    return asset


@cache
def _asset(name: str) -> bytes:
    return resources.files("fastapi_swagger.resources").joinpath(name).read_bytes()
