"""The OpenAPI page. Routes take raw requests, so the schemas of bodies and replies are added from the wire types.

Source: the OpenAPI Specification 3.1; the schemas are msgspec's.
"""

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from octavo.server.errors import ErrorReply
from octavo.server.information import ServerInfo, TokenizerInfo
from octavo.server.openai.adapters import AdapterReply, LoadAdapterRequest, UnloadAdapterRequest
from octavo.server.openai.models import ModelCard, ModelList
from octavo.server.openai.protocol import ChatCompletionRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from octavo.server.openai.replies import ChatCompletion, Completion, DetokenizeReply, TokenizeReply

Page = dict[str, Any]

_BODIES: dict[str, type] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
    "/v1/load_lora_adapter": LoadAdapterRequest,
    "/v1/unload_lora_adapter": UnloadAdapterRequest,
}
_REPLIES: dict[str, type] = {
    "/v1/chat/completions": ChatCompletion,
    "/v1/completions": Completion,
    "/tokenize": TokenizeReply,
    "/detokenize": DetokenizeReply,
    "/v1/load_lora_adapter": AdapterReply,
    "/v1/unload_lora_adapter": AdapterReply,
    "/v1/models": ModelList,
    "/v1/models/{name}": ModelCard,
    "/server_info": ServerInfo,
    "/tokenizer_info": TokenizerInfo,
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
            operation["tags"] = [_tag(path)]
            operation["responses"] = _responses(path, operation["responses"], link_of)
            if path in _BODIES:
                content = _json(link_of[_BODIES[path]])
                content["application/json"]["examples"] = {
                    name: {"value": value} for name, value in _EXAMPLES[path].items()
                }
                operation["requestBody"] = {"required": True, "content": content}
    page["tags"] = [{"name": name, "description": text} for name, text in _TAGS.items()]
    page["components"] = {"schemas": schemas, "securitySchemes": _SECURITY_SCHEMES}
    page["security"] = [{name: []} for name in _SECURITY_SCHEMES] + [{}]  # or none, if the server has no key
    return page


def _responses(path: str, responses: Page, link_of: dict[type, Page]) -> Page:
    """All errors have one shape; FastAPI's own validation errors never occur."""
    success = dict(responses["200"])
    if path in _REPLIES:
        success["content"] = _json(link_of[_REPLIES[path]])
    if path in _STREAMED:
        success["content"] |= {"text/event-stream": {"schema": {"type": "string"}}}
    return {"200": success, "default": {"description": "Why not.", "content": _json(link_of[ErrorReply])}}


def _tag(path: str) -> str:
    if path in ("/tokenize", "/detokenize", "/tokenizer_info"):
        return "tokens"
    return "OpenAI" if path.startswith("/v1/") else "operations"


def _json(schema: Page) -> Page:
    return {"application/json": {"schema": schema}}
