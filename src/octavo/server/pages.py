"""Pages about the API: Swagger UI at `/docs`, and the OpenAPI page (version 3.1).

Swagger UI comes with the package fastapi-swagger and is served from here, so that `/docs` works without the internet.
No page contains anything of the model or the settings, so all are open to browsers, which send no key. The page at `/`
is `server/ui`.
"""

from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Any

import msgspec
from fastapi import FastAPI, Response
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi

from octavo.server.http.routing import ApiRoute, RouteTable
from octavo.server.ui.files import public_paths

Page = dict[str, Any]

_SECURITY_SCHEMES: Page = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "The server's API key, if it has one."},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same, as a header."},
}
_TAGS = {
    "OpenAI": "The OpenAI API, with extensions of other engines.",
    "Anthropic": "The Messages API.",
    "Ollama": "Ollama's API, for its clients.",
    "tokens": "How the model's tokenizer and chat template see a text.",
    "operations": "For probes, dashboards and operators.",
}
_ASSETS = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "favicon-32x32.png": "image/png",
}
PUBLIC_PATHS = frozenset({"/", "/docs", "/openapi.json", *(f"/docs/{name}" for name in _ASSETS)}) | public_paths()


def add_pages(app: FastAPI, root_path: str) -> None:
    """Register the pages below `root_path`, a proxy's prefix, and let `app` serve its own description."""

    async def docs() -> Response:
        return get_swagger_ui_html(
            openapi_url=f"{root_path}/openapi.json",
            title="Octavo",
            swagger_js_url=f"{root_path}/docs/swagger-ui-bundle.js",
            swagger_css_url=f"{root_path}/docs/swagger-ui.css",
            swagger_favicon_url=f"{root_path}/docs/favicon-32x32.png",
        )

    async def asset(name: str) -> Response:
        if name not in _ASSETS:
            return Response(status_code=404)
        data = (files("fastapi_swagger.resources") / name).read_bytes()
        return Response(data, media_type=_ASSETS[name], headers={"cache-control": "max-age=86400"})

    def openapi() -> Page:
        if app.openapi_schema is None:
            app.openapi_schema = make_page(app)
        return app.openapi_schema

    pages: dict[str, Callable[..., Awaitable[Response]]] = {"/docs": docs, "/docs/{name}": asset}
    for path, page in pages.items():
        app.add_api_route(path, page, methods=["GET", "HEAD"], response_model=None, include_in_schema=False)
    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way to replace it


def make_page(app: FastAPI) -> Page:
    """Return FastAPI's page of its routes, with what the tables say of their bodies and replies."""
    page: Page = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
    tables: list[RouteTable] = app.state.tables
    of_routes = [kind for table in tables for route in table.routes for kind in (route.body, route.reply)]
    kinds = [*(table.error for table in tables), *of_routes]
    types = list(dict.fromkeys(kind for kind in kinds if not isinstance(kind, dict | None)))
    links, schemas = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    content = {kind: {"application/json": {"schema": link}} for kind, link in zip(types, links, strict=True)}
    for table in tables:
        # All errors of an API have one shape; FastAPI's own validation errors never occur.
        error = {"description": "Why not.", "content": content[table.error]}
        for route in table.routes:
            operation = page["paths"][route.path.replace(":path}", "}")][route.method.lower()]
            operation["tags"] = [table.tag]
            success = dict(operation["responses"]["200"])
            if route.reply is not None:
                success["content"] = dict(content[route.reply])
            if route.stream is not None:
                whole = {} if route.reply is None else success["content"]
                success["content"] = {**whole, route.stream: {"schema": {"type": "string"}}}
            operation["responses"] = {"200": success, "default": error}
            if route.body is not None:
                operation["requestBody"] = {"required": True, "content": _body(route, content)}
    page["tags"] = [{"name": name, "description": text} for name, text in _TAGS.items()]
    page["components"] = {"schemas": schemas, "securitySchemes": _SECURITY_SCHEMES}
    page["security"] = [{name: []} for name in _SECURITY_SCHEMES] + [{}]  # or none, if the server has no key
    return page


def _body(route: ApiRoute, content: dict[Any, Page]) -> Page:
    if isinstance(route.body, dict):
        return route.body
    examples = {name: {"value": value} for name, value in route.examples.items()}
    return {"application/json": content[route.body]["application/json"] | {"examples": examples}}
