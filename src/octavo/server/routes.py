"""The routes: decode the body to a wire type, call the service, encode the reply. And pages about the API.

These are Swagger UI at `/docs`, and the OpenAPI page (version 3.1). Swagger UI comes with the package fastapi-swagger
and is served from here, so that `/docs` works without the internet. No page contains anything of the model or the
settings, so all are open to browsers, which send no key. The page at `/` is `server/ui`.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from importlib.resources import files
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi

from octavo._version import __version__
from octavo.errors import InvalidParameterError
from octavo.metrics.prometheus import Exposition
from octavo.server.anthropic.errors import MessagesError
from octavo.server.anthropic.routes import MESSAGES_EXAMPLES, MESSAGES_TYPES
from octavo.server.args import ServerArgs
from octavo.server.http.errors import MESSAGES, RESPONSES, ErrorReply, as_api_error
from octavo.server.http.exchange import CLIENT_LEFT, STREAMS, Exchange
from octavo.server.http.sse import EventStreamResponse, FrameSource, wait_for_disconnect
from octavo.server.kept.responses import Begin
from octavo.server.kept.responses import Reply as Preparation
from octavo.server.kept.returning import Returning
from octavo.server.lifecycle import EngineLifecycle, ServerInfo, TokenizerInfo
from octavo.server.logged.log import RequestLog
from octavo.server.ollama.protocol import OLLAMA_EXAMPLES, OLLAMA_TYPES, STREAMED, OllamaError
from octavo.server.openai.birth import Birth
from octavo.server.openai.chat_batch import ChatBatchService
from octavo.server.openai.embeddings import Embeddings, EmbeddingsRequest, VectorsRequest
from octavo.server.openai.models import AdapterReply, LoadAdapterRequest, ModelCard, ModelList, UnloadAdapterRequest
from octavo.server.openai.params import LARGE_BODY, num_samples
from octavo.server.openai.protocol import (
    ChatBatchRequest,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
    read_request,
)
from octavo.server.openai.replies import ChatCompletion, Completion, DetokenizeReply, TokenizeReply
from octavo.server.openai.reply_stream import ReplyStream
from octavo.server.openai.stored import STORED_TYPES, UPLOAD_FORM
from octavo.server.openai.token_usage import CountsTokens
from octavo.server.responses.page import RESPONSES_EXAMPLES, RESPONSES_TYPES
from octavo.server.tenants.claim import claim, claim_vectors
from octavo.server.ui.files import public_paths
from octavo.server.ui.names import RequestNames
from octavo.server.vectors.decision_protocol import SYSTEM_ONE, SystemOneError
from octavo.server.vectors.protocol import VECTORS_EXAMPLES, VECTORS_TYPES

T = TypeVar("T")
Reply = msgspec.Struct | FrameSource

Page = dict[str, Any]

# Of the routes that have either: the body and the reply.
_TYPES: dict[str, tuple[type | None, type]] = {
    "/v1/chat/completions": (ChatCompletionRequest, ChatCompletion),
    "/v1/chat/completions/batch": (ChatBatchRequest, ChatCompletion),
    "/v1/completions": (CompletionRequest, Completion),
    "/v1/embeddings": (EmbeddingsRequest, Embeddings),
    "/tokenize": (TokenizeRequest, TokenizeReply),
    "/detokenize": (DetokenizeRequest, DetokenizeReply),
    "/v1/load_lora_adapter": (LoadAdapterRequest, AdapterReply),
    "/v1/unload_lora_adapter": (UnloadAdapterRequest, AdapterReply),
    "/v1/models": (None, ModelList),
    "/v1/models/{name}": (None, ModelCard),
    "/server_info": (None, ServerInfo),
    "/tokenizer_info": (None, TokenizerInfo),
    **MESSAGES_TYPES,
    **VECTORS_TYPES,
}
_ASKED = {"role": "user", "content": "What is a block?"}
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
    "/v1/chat/completions/batch": {"two": {"messages": [[_ASKED], [_ASKED]], "max_tokens": 16}},
    "/v1/completions": {"text": {"prompt": "Octavo is", "max_tokens": 32, "temperature": 0}},
    "/v1/embeddings": {"texts": {"input": ["Octavo is", "Hello, world!"]}},
    "/tokenize": {
        "text": {"prompt": "Hello, world!"},
        "chat": {"messages": [{"role": "user", "content": "Hello!"}]},
    },
    "/detokenize": {"tokens": {"tokens": [72, 105]}},
    "/v1/batches": {
        "chats": {"input_file_id": "file-...", "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    },
    "/v1/load_lora_adapter": {"below --lora-root": {"lora_name": "support", "lora_path": "support-v2"}},
    "/v1/unload_lora_adapter": {"by name": {"lora_name": "support"}},
    **MESSAGES_EXAMPLES,
    **RESPONSES_EXAMPLES,
    **VECTORS_EXAMPLES,
}
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
_ERRORS = {"OpenAI": ErrorReply, "Anthropic": MessagesError, "Ollama": OllamaError}
_ASSETS = {
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
    "favicon-32x32.png": "image/png",
}
PUBLIC_PATHS = frozenset({"/", "/docs", "/openapi.json", *(f"/docs/{name}" for name in _ASSETS)}) | public_paths()


class Routes:
    """Handlers of raw requests; `server/openai` interprets the bodies."""

    def __init__(
        self,
        lifecycle: EngineLifecycle,
        args: ServerArgs,
        exposition: Exposition,
        returning: Returning,
        request_log: RequestLog | None = None,
    ) -> None:
        self._lifecycle, self._args, self._exposition = lifecycle, args, exposition
        self._returning, self._request_log = returning, request_log
        self.names = RequestNames()

    def add_to(self, app: FastAPI) -> None:
        get, post = ["GET"], ["POST"]
        routes: list[tuple[str, Callable[..., Any], list[str]]] = [
            ("/health", self.health, get),
            ("/ready", self.health, get),
            ("/ping", self.health, get),  # Amazon SageMaker's name
            ("/load", self.load, get),
            ("/server_info", self.server_info, get),
            ("/tokenizer_info", self.tokenizer_info, get),
            ("/version", self.version, get),
            ("/metrics", self.metrics, get),
            ("/v1/models", self.models, get),
            ("/v1/models/{name:path}", self.model, get),
            ("/v1/chat/completions", self.chat_completions, post),
            ("/v1/chat/completions/batch", self.chat_batch, post),
            ("/v1/completions", self.completions, post),
            ("/v1/embeddings", self.embeddings, post),
            ("/tokenize", self.tokenize, post),
            ("/detokenize", self.detokenize, post),
        ]
        if self._args.resume_s:
            routes.append((STREAMS + "{name}", self.stream, ["GET"]))
            routes.append((STREAMS + "{name}", self.end_stream, ["DELETE"]))
        if self._args.allow_runtime_lora:
            routes.append(("/v1/load_lora_adapter", self.load_lora_adapter, post))
            routes.append(("/v1/unload_lora_adapter", self.unload_lora_adapter, post))
        for path, handler, methods in routes:
            app.add_api_route(path, handler, methods=methods, response_model=None)
            if methods is get:
                app.add_api_route(path, handler, methods=["HEAD"], response_model=None, include_in_schema=False)
        app.add_api_route("/ping", self.health, methods=post, response_model=None, include_in_schema=False)

    async def health(self) -> Response:
        """200 while requests are computed, even by fewer replicas than at start; 503 while they wait or are refused."""
        refusal = self._lifecycle.refusal()
        if refusal is None:
            service = self._lifecycle.service
            num_replicas, outages = service.front.config.parallel.data_parallel_size, service.front.client.outages
            why = [{"replica": replica, "reason": reason} for replica, reason in outages.items()]
            if len(outages) == num_replicas:
                return json_response({"status": "restarting", "lost_replicas": why}, 503)
            health: dict[str, Any] = {"status": "degraded", "lost_replicas": why} if why else {"status": "ok"}
            journal = self._returning.journal
            if journal is not None and journal.problem is not None:
                health["journal"] = journal.problem
            if self._request_log is not None and self._request_log.problem is not None:
                health["request_log"] = self._request_log.problem
            return json_response(health)
        body = {"status": self._lifecycle.status, "error": refusal.detail}
        return json_response(body, refusal.status, refusal.headers)

    async def version(self) -> Response:
        """The server's version."""
        return json_response({"version": __version__})

    async def load(self) -> Response:
        """The number of samples in the engine, running and waiting."""
        stats = None if self._lifecycle.metrics is None else self._lifecycle.metrics.stats
        return json_response({"server_load": 0 if stats is None else stats.num_running + stats.num_waiting})

    async def server_info(self) -> Response:
        """Version, numeric profile, capacity and settings."""
        return json_response(self._lifecycle.info)

    async def tokenizer_info(self) -> Response:
        """The chat template and the tokens with a role."""
        return json_response(self._lifecycle.tokenizer_info)

    async def metrics(self, request: Request) -> Response:
        """Metrics in Prometheus format."""
        text, content_type = self._exposition.render(request.headers.get("accept", ""))
        return Response(text, headers={"content-type": content_type})

    async def models(self) -> Response:
        """The model, under each of its names."""
        return json_response(ModelList.of(self._lifecycle.service.models.cards))

    async def model(self, name: str) -> Response:
        """One of the model's names."""
        return json_response(self._lifecycle.service.models.find(name).card)

    async def chat_completions(self, request: Request) -> Response:
        """Answer a conversation, with tools, JSON schemas and reasoning; at once or as a stream of events."""
        service = self._lifecycle.service
        return await self.answer(request, ChatCompletionRequest, service.chat_completions, service.begin_chat)

    async def chat_batch(self, request: Request) -> Response:
        """Answer several conversations with the same options, one choice each, in order."""
        own = partial(claim, Exchange.in_scope(request.scope), names=self.names)
        service = ChatBatchService(self._lifecycle.service, own)
        return await self.answer(request, ChatBatchRequest, service.chat_batch)

    async def completions(self, request: Request) -> Response:
        """Continue one prompt or many, as text or token ids; at once or as a stream of events."""
        service = self._lifecycle.service
        return await self.answer(request, CompletionRequest, service.completions, service.begin_completion)

    async def embeddings(self, request: Request) -> Response:
        """Turn texts into vectors, as the model's files say; without any, of each last token, of length 1."""
        return await self.answer(request, EmbeddingsRequest, self._lifecycle.service.embeddings)

    async def stream(self, request: Request, name: str) -> Response:
        """The events of a stream that has begun: those after `Last-Event-ID`, or all of them."""
        exchange, event_id = Exchange.in_scope(request.scope), request.headers.get("last-event-id")
        if event_id is None:
            return self._returning.replay(exchange, name)
        return self._returning.resume(exchange, event_id, name)

    async def end_stream(self, request: Request, name: str) -> Response:
        """End a stream that goes on without its client."""
        return self._returning.stop(Exchange.in_scope(request.scope), name)

    async def tokenize(self, request: Request) -> Response:
        """The token ids of a text, or of a conversation as the model's chat template writes it."""
        return await self.answer(request, TokenizeRequest, self._lifecycle.service.tokenize)

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        return await self.answer(request, DetokenizeRequest, self._lifecycle.service.detokenize)

    async def load_lora_adapter(self, request: Request) -> Response:
        """Serve a LoRA adapter below the server's root under a name of its own."""
        wire, _ = read_request(Exchange.in_scope(request.scope).body, LoadAdapterRequest)
        return json_response(await self._lifecycle.service.models.load(wire))

    async def unload_lora_adapter(self, request: Request) -> Response:
        """No longer serve a LoRA adapter; answers when its running requests have ended."""
        wire, _ = read_request(Exchange.in_scope(request.scope).body, UnloadAdapterRequest)
        return json_response(await self._lifecycle.service.models.unload(wire))

    def _enter(self, exchange: Exchange, wire: object) -> None:
        """Say how much a request asks for and until when, and give it what its key has."""
        if isinstance(wire, VectorsRequest):
            exchange.num_samples = wire.num_inputs
            claim_vectors(exchange, wire)
        elif isinstance(wire, GenerationRequest):
            exchange.num_samples = num_samples(wire, self._args)
        else:
            return
        _limit(exchange, wire.timeout)

    async def answer(
        self,
        request: Request,
        kind: type[T],
        answer: Callable[..., Awaitable[Reply]],
        begin: Callable[..., Awaitable[Preparation]] | None = None,
    ) -> Response:
        """Decode the body, call `answer`, encode the reply. Cancelled when the client disconnects.

        With `begin`, which prepares an answer, it may be one that is kept, and goes on.
        """
        exchange = Exchange.in_scope(request.scope)
        body, is_large = exchange.body, len(exchange.body) > LARGE_BODY
        wire, warnings = await asyncio.to_thread(read_request, body, kind) if is_large else read_request(body, kind)
        exchange.warnings += warnings
        work: Callable[[], Awaitable[Reply]] = partial(answer, wire, exchange.warnings.append, is_large)
        self._enter(exchange, wire)
        if isinstance(wire, EmbeddingsRequest) and self._request_log is not None:
            work = self._request_log.watched_vectors(exchange, work)
        if begin is not None:
            is_stream = bool(getattr(wire, "stream", None))
            prepare: Begin = self.named(exchange, partial(begin, wire, exchange.warnings.append, is_large))
            work = partial(_complete, prepare, is_stream, is_timed=True)
            if self._request_log is not None:
                prepare = self._request_log.watched(exchange, is_stream, prepare)
                work = partial(_complete, prepare, is_stream)
            if (kept := self._returning.respond(exchange, is_stream, prepare)) is not None:
                return kept
        reply = await unless_client_leaves(request, work())
        if reply is None:
            return Response(status_code=CLIENT_LEFT)
        if not isinstance(reply, msgspec.Struct):
            exchange.count_tokens = reply.count_tokens
            return EventStreamResponse(reply)
        if isinstance(usage := getattr(reply, "usage", None), CountsTokens):
            exchange.count_tokens = usage.count_tokens
        return json_response(reply)

    def named(self, exchange: Exchange, prepare: Begin) -> Begin:
        """Return what prepares an answer, and remembers for the page whose it is."""

        async def begin(birth: Birth) -> Preparation:
            reply = await prepare(birth)
            if isinstance(reply, ReplyStream):
                claim(exchange, reply, self.names)
            return reply

        return begin


def _limit(exchange: Exchange, timeout_s: float | None) -> None:
    try:
        exchange.limit_to(timeout_s)
    except InvalidParameterError as error:
        raise as_api_error(error) from None


async def _complete(begin: Begin, is_stream: bool, *, is_timed: bool = False) -> Reply:
    """Prepare an answer; return it as a stream that has not started, or complete. Logged ones are not timed."""
    reply = await begin(Birth())
    if is_timed and isinstance(reply, ReplyStream):
        reply.is_timed = True
    return reply if is_stream else await reply.whole()


async def unless_client_leaves(request: Request, work: Awaitable[T]) -> T | None:
    """Return the result of `work`; cancel it and return None if the client disconnects first."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(wait_for_disconnect(request.receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        leaving.cancel()
        working.cancel()
        await asyncio.wait((working, leaving))


def json_response(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


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
    """Return FastAPI's page of its routes, with the bodies and replies: routes take raw requests, so it knows none."""
    page: Page = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
    all_examples = {**_EXAMPLES, **OLLAMA_EXAMPLES}
    of_methods = {**STORED_TYPES, **OLLAMA_TYPES, **RESPONSES_TYPES}
    kinds = [kind for pair in (*_TYPES.values(), *of_methods.values()) for kind in pair if kind is not None]
    types = list(dict.fromkeys((*_ERRORS.values(), SystemOneError, *kinds)))
    links, schemas = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    content = {kind: {"application/json": {"schema": link}} for kind, link in zip(types, links, strict=True)}
    for path, operations in page["paths"].items():
        for method, operation in operations.items():
            body_type, reply_type = _TYPES.get(path) or of_methods.get((method.upper(), path), (None, None))
            is_of_tokens = path in ("/tokenize", "/detokenize", "/tokenizer_info")
            api = "Ollama" if path.startswith("/api/") else "Anthropic" if path.startswith(MESSAGES) else "OpenAI"
            is_of_api = path.startswith(("/v1/", "/api/")) or path in VECTORS_TYPES
            operation["tags"] = ["tokens" if is_of_tokens else api if is_of_api else "operations"]
            success = dict(operation["responses"]["200"])
            if reply_type is not None:
                success["content"] = dict(content[reply_type])
            if path.endswith("/completions") or path in (MESSAGES, RESPONSES):
                success["content"] |= {"text/event-stream": {"schema": {"type": "string"}}}
            elif path in STREAMED:
                success["content"] |= {"application/x-ndjson": {"schema": {"type": "string"}}}
            elif path.startswith(STREAMS) and method == "get":
                success["content"] = {"text/event-stream": {"schema": {"type": "string"}}}
            # All errors of an API have one shape, but one route's; FastAPI's own validation errors never occur.
            kind = SystemOneError if path == SYSTEM_ONE else _ERRORS[api]
            error = {"description": "Why not.", "content": content[kind]}
            operation["responses"] = {"200": success, "default": error}
            if body_type is not None:
                examples = {name: {"value": value} for name, value in all_examples[path].items()}
                body = {"application/json": content[body_type]["application/json"] | {"examples": examples}}
                operation["requestBody"] = {"required": True, "content": body}
            elif (method, path) == ("post", "/v1/files"):
                operation["requestBody"] = {"required": True, "content": UPLOAD_FORM}
    page["tags"] = [{"name": name, "description": text} for name, text in _TAGS.items()]
    page["components"] = {"schemas": schemas, "securitySchemes": _SECURITY_SCHEMES}
    page["security"] = [{name: []} for name in _SECURITY_SCHEMES] + [{}]  # or none, if the server has no key
    return page
