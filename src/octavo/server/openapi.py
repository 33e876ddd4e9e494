"""The OpenAPI page. Routes take raw requests, so the schemas of bodies and replies are added from the wire types.

Source: the OpenAPI Specification 3.1; the schemas are msgspec's.
"""

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from octavo.server.errors import ErrorReply
from octavo.server.openai.models import ModelCard, ModelList
from octavo.server.openai.protocol import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from octavo.server.openai.replies import ChatCompletion, Completion, DetokenizeReply, TokenizeReply

Page = dict[str, Any]

_BODIES: dict[str, type] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
_REPLIES: dict[str, type] = {
    "/v1/chat/completions": ChatCompletion,
    "/v1/completions": Completion,
    "/tokenize": TokenizeReply,
    "/detokenize": DetokenizeReply,
    "/models": ModelList,
    "/v1/models": ModelList,
    "/v1/models/{name}": ModelCard,
}
_STREAMED = ("/v1/chat/completions", "/v1/completions")


def describe(app: FastAPI) -> None:
    """Let `app` serve the whole page."""

    def openapi() -> Page:
        if app.openapi_schema is None:
            app.openapi_schema = make_page(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's own way to replace it


def make_page(app: FastAPI) -> Page:
    """Return FastAPI's page of its routes, with our bodies and replies."""
    page: Page = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
    types = [*_BODIES.values(), *_REPLIES.values(), ErrorReply]
    links, schemas = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    link_of = dict(zip(types, links, strict=True))
    for path, operations in page["paths"].items():
        for operation in operations.values():
            operation["responses"] = _responses(path, operation["responses"], link_of)
            if path in _BODIES:
                operation["requestBody"] = {"required": True, "content": _json(link_of[_BODIES[path]])}
    page["components"] = {"schemas": schemas}
    return page


def _responses(path: str, responses: Page, link_of: dict[type, Page]) -> Page:
    """All errors have one shape; FastAPI's own validation errors never occur."""
    success = dict(responses["200"])
    if path in _REPLIES:
        success["content"] = _json(link_of[_REPLIES[path]])
    if path in _STREAMED:
        success["content"] |= {"text/event-stream": {"schema": {"type": "string"}}}
    return {"200": success, "default": {"description": "Why not.", "content": _json(link_of[ErrorReply])}}


def _json(schema: Page) -> Page:
    return {"application/json": {"schema": schema}}
