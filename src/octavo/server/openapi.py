"""Pages about the server: links at `/`, Swagger UI at `/docs`, and the OpenAPI page (version 3.1).

Swagger UI comes with the package fastapi-swagger and is served from here, so that `/docs` works without the internet.
No page contains anything of the model or the settings, so all are open to browsers, which send no key.
"""

from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Any

import msgspec
from fastapi import FastAPI, Response
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse

from octavo.server.errors import ErrorReply
from octavo.server.lifecycle import ServerInfo, TokenizerInfo
from octavo.server.openai.models import AdapterReply, LoadAdapterRequest, ModelCard, ModelList, UnloadAdapterRequest
from octavo.server.openai.protocol import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from octavo.server.openai.replies import ChatCompletion, Completion, DetokenizeReply, TokenizeReply

Page = dict[str, Any]

# Of the routes that have either: the body and the reply.
_TYPES: dict[str, tuple[type | None, type]] = {
    "/v1/chat/completions": (ChatCompletionRequest, ChatCompletion),
    "/v1/completions": (CompletionRequest, Completion),
    "/tokenize": (TokenizeRequest, TokenizeReply),
    "/detokenize": (DetokenizeRequest, DetokenizeReply),
    "/v1/load_lora_adapter": (LoadAdapterRequest, AdapterReply),
    "/v1/unload_lora_adapter": (UnloadAdapterRequest, AdapterReply),
    "/v1/models": (None, ModelList),
    "/v1/models/{name}": (None, ModelCard),
    "/server_info": (None, ServerInfo),
    "/tokenizer_info": (None, TokenizerInfo),
}
_EXAMPLES: dict[str, Page] = {
    "/v1/chat/completions": {
        "chat": {"messages": [{"role": "user", "content": "What is a block?"}], "max_tokens": 64},
        "stream": {"messages": [{"role": "user", "content": "What is a block?"}], "stream": True},
        "JSON schema": {
            "messages": [{"role": "user", "content": "It is 21 degrees in Oslo."}],
            "response_format": {
                "type": "json_schema",
                "json_schema": {
                    "name": "weather",
                    "strict": True,
                    "schema": {
                        "type": "object",
                        "properties": {"city": {"type": "string"}, "temperature": {"type": "integer"}},
                        "required": ["city", "temperature"],
                    },
                },
            },
        },
    },
    "/v1/completions": {"text": {"prompt": "Octavo is", "max_tokens": 32, "temperature": 0}},
    "/tokenize": {
        "text": {"prompt": "Hello, world!"},
        "chat": {"messages": [{"role": "user", "content": "Hello!"}]},
    },
    "/detokenize": {"tokens": {"tokens": [72, 105]}},
    "/v1/load_lora_adapter": {"below --lora-root": {"lora_name": "support", "lora_path": "support-v2"}},
    "/v1/unload_lora_adapter": {"by name": {"lora_name": "support"}},
}
_SECURITY_SCHEMES: Page = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "The server's API key, if it has one."},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same, as a header."},
}
_TAGS = {
    "OpenAI": "The OpenAI API, with extensions of other engines.",
    "tokens": "How the model's tokenizer and chat template see a text.",
    "operations": "For probes, dashboards and operators.",
}
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


def add_pages(app: FastAPI, root_path: str) -> None:
    """Register the pages below `root_path`, a proxy's prefix, and let `app` serve its own description."""

    async def home() -> Response:
        links = "".join(f'<li><a href="{root_path}/{to}">/{to}</a> {text}</li>' for to, text in _LINKS)
        return HTMLResponse(_HOME.format(base=root_path, links=links))

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

    pages: dict[str, Callable[..., Awaitable[Response]]] = {"/": home, "/docs": docs, "/docs/{name}": asset}
    for path, page in pages.items():
        app.add_api_route(path, page, methods=["GET", "HEAD"], response_model=None, include_in_schema=False)
    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way to replace it


def make_page(app: FastAPI) -> Page:
    """Return FastAPI's page of its routes, with the bodies and replies: routes take raw requests, so it knows none."""
    page: Page = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
    bodies = {path: body for path, (body, _) in _TYPES.items() if body is not None}
    types = [*bodies.values(), *(reply for _, reply in _TYPES.values()), ErrorReply]
    links, schemas = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    content = {kind: {"application/json": {"schema": link}} for kind, link in zip(types, links, strict=True)}
    for path, operations in page["paths"].items():
        for operation in operations.values():
            is_of_tokens = path in ("/tokenize", "/detokenize", "/tokenizer_info")
            operation["tags"] = ["tokens" if is_of_tokens else "OpenAI" if path.startswith("/v1/") else "operations"]
            success = dict(operation["responses"]["200"])
            if path in _TYPES:
                success["content"] = dict(content[_TYPES[path][1]])
            if path.endswith("/completions"):
                success["content"] |= {"text/event-stream": {"schema": {"type": "string"}}}
            # All errors have one shape; FastAPI's own validation errors never occur.
            error = {"description": "Why not.", "content": content[ErrorReply]}
            operation["responses"] = {"200": success, "default": error}
            if path in bodies:
                examples = {name: {"value": value} for name, value in _EXAMPLES[path].items()}
                body = {"application/json": content[bodies[path]]["application/json"] | {"examples": examples}}
                operation["requestBody"] = {"required": True, "content": body}
    page["tags"] = [{"name": name, "description": text} for name, text in _TAGS.items()]
    page["components"] = {"schemas": schemas, "securitySchemes": _SECURITY_SCHEMES}
    page["security"] = [{name: []} for name in _SECURITY_SCHEMES] + [{}]  # or none, if the server has no key
    return page
