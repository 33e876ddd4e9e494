"""Pages for people: links at `/`, and the interactive documentation at `/docs`.

Swagger UI comes with the package fastapi-swagger and is served from here, so that `/docs` works without the internet.
Neither page contains anything of the model or the settings, so both are open to browsers, which send no key.
"""

from importlib.resources import files

from fastapi import FastAPI, Response
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse

_ASSETS = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "favicon-32x32.png": "image/png",
}
PUBLIC_PATHS = frozenset({"/", "/docs", "/openapi.json", *(f"/docs/{name}" for name in _ASSETS)})
_LINKS = (
    ("docs", "every route, to try out"),
    ("v1/models", "the model; OpenAI clients take the address up to <code>/v1</code>"),
    ("health", "whether the model is loaded"),
    ("metrics", "metrics for Prometheus"),
    ("openapi.json", "the API's description for programs"),
)
_HOME = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Octavo</title><link rel="icon" href="data:,">
<style>body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 40rem; margin: 3rem auto; padding: 0 1rem }}
:root {{ color-scheme: light dark }}</style></head>
<body><h1>Octavo</h1><p>An OpenAI-compatible server. Its API is at <code>{base}/v1</code>:</p>
<ul>{links}</ul></body></html>
"""


class Pages:
    """The handlers; `root_path` is the prefix under which a proxy exposes the server."""

    def __init__(self, root_path: str) -> None:
        self._root_path = root_path

    def add_to(self, app: FastAPI) -> None:
        """Register the pages, which the API's own description does not list."""
        for path, handler in (("/", self.home), ("/docs", self.docs), ("/docs/{name}", self.asset)):
            app.add_api_route(path, handler, methods=["GET", "HEAD"], response_model=None, include_in_schema=False)

    async def home(self) -> Response:
        """A short page of links."""
        links = "".join(f'<li><a href="{self._root_path}/{to}">/{to}</a> {text}</li>' for to, text in _LINKS)
        return HTMLResponse(_HOME.format(base=self._root_path, links=links))

    async def docs(self) -> Response:
        """Swagger UI on the API's own description."""
        return get_swagger_ui_html(
            openapi_url=f"{self._root_path}/openapi.json",
            title="Octavo",
            swagger_js_url=f"{self._root_path}/docs/swagger-ui-bundle.js",
            swagger_css_url=f"{self._root_path}/docs/swagger-ui.css",
            swagger_favicon_url=f"{self._root_path}/docs/favicon-32x32.png",
        )

    async def asset(self, name: str) -> Response:
        """One of Swagger UI's files."""
        if name not in _ASSETS:
            return Response(status_code=404)
        data = (files("fastapi_swagger.resources") / name).read_bytes()
        return Response(data, media_type=_ASSETS[name], headers={"cache-control": "max-age=86400"})
