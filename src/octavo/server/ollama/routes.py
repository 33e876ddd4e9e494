"""Ollama's routes. They end where OpenAI's do: in `OpenAICompatibleService`, with answers in another form."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response

from octavo._version import __version__
from octavo.server.http.errors import ApiError
from octavo.server.http.exchange import CLIENT_LEFT, Exchange, json_response
from octavo.server.http.routing import LINES, ApiRoute, add_routes
from octavo.server.http.sse import respond, unless_client_leaves
from octavo.server.lifecycle import EngineLifecycle
from octavo.server.ollama.answers import LinesResponse, LineStream, OllamaChat, OllamaPrompted, OllamaRaw, now
from octavo.server.ollama.models import OllamaModelPages, find
from octavo.server.ollama.protocol import (
    AnswerMessage,
    AnswerRequest,
    OllamaChatReply,
    OllamaChatRequest,
    OllamaEmbeddingsReply,
    OllamaEmbeddingsRequest,
    OllamaEmbedReply,
    OllamaEmbedRequest,
    OllamaError,
    OllamaGenerateReply,
    OllamaGenerateRequest,
    OllamaModelInfo,
    OllamaModels,
    OllamaNameRequest,
    OllamaStatus,
    OllamaVersion,
)
from octavo.server.ollama.requests import chat_request, embeddings_request, prompted_chat, raw_completion
from octavo.server.openai.birth import Birth
from octavo.server.openai.embeddings import MAX_INPUTS
from octavo.server.openai.params import decoded, is_large
from octavo.server.openai.service import OpenAICompatibleService
from octavo.server.tenants.claim import RequestNames, claim

T = TypeVar("T")
Answer = LineStream[Any]

API_VERSION = "0.13.0"  # of Ollama: clients look whether it has what they need
# What errors of Octavo's own routes call the fields of Ollama's.
_NAMES: Mapping[str, str] = {
    "response_format.schema": "format",
    "response_format": "format",
    "reasoning_effort": "think",
    "repetition_penalty": "options.repeat_penalty",
    "max_tokens": "options.num_predict",
} | {
    name: f"options.{name}"
    for name in ("temperature", "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")
}


_LIMITED = {"options": {"num_predict": 64}}
_SAID = {"messages": [{"role": "user", "content": "What is a block?"}], **_LIMITED}
_CHATS = {"stream": _SAID, "JSON": {**_SAID, "stream": False, "format": "json"}}
_TEXTS = {"text": {"prompt": "What is a block?", "stream": False, **_LIMITED}}
_VECTORS = {"texts": {"input": ["Octavo is", "Hello, world!"]}}
_MAIN: dict[str, object] = {"the main model": {}}


class OllamaRoutes:
    """Handlers of raw requests. Every error is one of text; `server/http/errors.py` has its form."""

    def __init__(self, lifecycle: EngineLifecycle, names: RequestNames) -> None:
        self._lifecycle, self._names = lifecycle, names
        self._pages: OllamaModelPages | None = None  # of the service that is there, once there is a model

    def add_to(self, app: FastAPI) -> None:
        table = [
            ApiRoute("POST", "/api/chat", self.chat, OllamaChatRequest, OllamaChatReply, LINES, _CHATS),
            ApiRoute("POST", "/api/generate", self.generate, OllamaGenerateRequest, OllamaGenerateReply, LINES, _TEXTS),
            ApiRoute("POST", "/api/embed", self.embed, OllamaEmbedRequest, OllamaEmbedReply, examples=_VECTORS),
            ApiRoute(
                "POST", "/api/embeddings", self.embeddings, OllamaEmbeddingsRequest, OllamaEmbeddingsReply,
                examples={"text": {"prompt": "Octavo is"}},
            ),
            ApiRoute("POST", "/api/show", self.show, OllamaNameRequest, OllamaModelInfo, examples=_MAIN),
            ApiRoute("POST", "/api/pull", self.pull, OllamaNameRequest, OllamaStatus, LINES, _MAIN),
            ApiRoute("GET", "/api/tags", self.tags, reply=OllamaModels),
            ApiRoute("GET", "/api/ps", self.ps, reply=OllamaModels),
            ApiRoute("GET", "/api/version", self.version, reply=OllamaVersion),
        ]  # fmt: skip
        add_routes(app, table, "Ollama", OllamaError)

    async def chat(self, request: Request) -> Response:
        """Answer a conversation, with tools, images, thinking, schemas; as lines of JSON unless `stream` is false."""
        service, exchange = self._lifecycle.service, Exchange.in_scope(request.scope)
        wire = await decoded(exchange, OllamaChatRequest)
        name, warn = find(service, wire.model).card.id, exchange.warnings.append
        if not wire.messages:
            message = AnswerMessage(role="assistant", content="")
            return _loaded(OllamaChatReply(message=message, **_about_loading(wire.model or name)), wire.stream)

        async def begin() -> Answer:
            chat = chat_request(wire, name, service.formats, service.front, warn)
            return await service.begin_answer(OllamaChat, chat, warn, is_large(exchange), Birth())

        return await self._answer(request, wire, name, begin)

    async def generate(self, request: Request) -> Response:
        """Answer a prompt, or continue a raw one; as lines of JSON unless `stream` is false."""
        service, exchange = self._lifecycle.service, Exchange.in_scope(request.scope)
        wire = await decoded(exchange, OllamaGenerateRequest)
        name, warn = find(service, wire.model).card.id, exchange.warnings.append
        if not wire.prompt:
            return _loaded(OllamaGenerateReply(response="", **_about_loading(wire.model or name)), wire.stream)

        async def begin() -> Answer:
            if wire.raw or wire.suffix:
                text = raw_completion(wire, name, warn)
                return await service.begin_continuation(OllamaRaw, text, warn, is_large(exchange), Birth())
            chat = prompted_chat(wire, name, service.formats, service.front, warn)
            return await service.begin_answer(OllamaPrompted, chat, warn, is_large(exchange), Birth())

        return await self._answer(request, wire, name, begin)

    async def _answer(
        self, request: Request, wire: AnswerRequest, name: str, begin: Callable[[], Awaitable[Answer]]
    ) -> Response:
        exchange = Exchange.in_scope(request.scope)

        async def work() -> Answer | msgspec.Struct:
            answer = await begin()
            answer.shown_model = wire.model or name
            claim(exchange, answer, self._names)
            exchange.count_tokens = answer.count_tokens
            return answer if wire.stream is not False else await answer.whole()

        return await respond(request, _renaming(work()), LinesResponse)

    async def embed(self, request: Request) -> Response:
        """Turn texts into vectors; their ends are cut where they are too long, unless `truncate` is false."""
        exchange = Exchange.in_scope(request.scope)
        wire = await decoded(exchange, OllamaEmbedRequest)
        reply = await self._vectors(request, exchange, wire)
        return Response(status_code=CLIENT_LEFT) if reply is None else json_response(reply)

    async def embeddings(self, request: Request) -> Response:
        """Turn one text into a vector."""
        exchange = Exchange.in_scope(request.scope)
        wire = await decoded(exchange, OllamaEmbeddingsRequest)
        one = OllamaEmbedRequest(model=wire.model, input=wire.prompt, options=wire.options, keep_alive=wire.keep_alive)
        reply = await self._vectors(request, exchange, one)
        if reply is None:
            return Response(status_code=CLIENT_LEFT)
        return json_response(OllamaEmbeddingsReply(embedding=reply.embeddings[0] if reply.embeddings else []))

    async def _vectors(self, request: Request, exchange: Exchange, wire: OllamaEmbedRequest) -> OllamaEmbedReply | None:
        """Return the vectors; none for an empty input, which asks whether the model is loaded. None: nobody waits."""
        service, started_s, warn = self._lifecycle.service, time.monotonic(), exchange.warnings.append
        name = find(service, wire.model).card.id
        if not wire.input:
            return OllamaEmbedReply(model=wire.model or name, embeddings=[], total_duration=0, prompt_eval_count=0)
        exchange.num_samples = min(len(wire.input), MAX_INPUTS) if isinstance(wire.input, list) else 1

        async def work() -> OllamaEmbedReply:
            asked = await asyncio.to_thread(embeddings_request, wire, name, service.front, warn)
            found = await service.embeddings(asked, warn, is_large(exchange))
            num_tokens = found.usage.prompt_tokens
            exchange.count_tokens = lambda: (num_tokens, 0)
            return OllamaEmbedReply(
                model=wire.model or name,
                embeddings=[each.embedding for each in found.data if isinstance(each.embedding, list)],
                total_duration=round((time.monotonic() - started_s) * 1e9),
                prompt_eval_count=num_tokens,
            )

        return await unless_client_leaves(request, _renaming(work()))

    async def show(self, request: Request) -> Response:
        """What the model is and can."""
        service = self._lifecycle.service
        wire = await decoded(Exchange.in_scope(request.scope), OllamaNameRequest)
        return json_response(self._described(service).info(find(service, wire.model or wire.name)))

    async def pull(self, request: Request) -> Response:
        """Say that the model is there; another one is not fetched."""
        service = self._lifecycle.service
        wire = await decoded(Exchange.in_scope(request.scope), OllamaNameRequest)
        find(service, wire.model or wire.name)
        states = [OllamaStatus(status=status) for status in ("pulling manifest", "success")]
        if wire.stream is False:
            return json_response(states[-1])
        return Response(b"".join(msgspec.json.encode(state) + b"\n" for state in states), media_type=LINES)

    async def tags(self) -> Response:
        """The model under each of its names, with its tag."""
        return json_response(self._described(self._lifecycle.service).all(is_running=False))

    async def ps(self) -> Response:
        """The same: the model is always loaded."""
        return json_response(self._described(self._lifecycle.service).all(is_running=True))

    async def version(self) -> Response:
        """The version of Ollama whose API this is, and Octavo's."""
        return json_response(OllamaVersion(version=API_VERSION, octavo=__version__))

    def _described(self, service: OpenAICompatibleService) -> OllamaModelPages:
        if self._pages is None or self._pages.service is not service:
            self._pages = OllamaModelPages(service)
        return self._pages


async def _renaming(work: Awaitable[T]) -> T:
    """Await `work`; an error about a field has Ollama's name of it."""
    try:
        return await work
    except ApiError as error:
        ours = error.detail.param or ""
        if ours not in _NAMES:
            raise
        raise error.in_words(lambda text: text.replace(ours, _NAMES[ours])) from error


def _about_loading(name: str) -> dict[str, Any]:
    return {"model": name, "created_at": now(), "done": True, "done_reason": "load"}


def _loaded(reply: msgspec.Struct, is_stream: bool | None) -> Response:
    """Answer whether the model is loaded, which it is."""
    if is_stream is False:
        return json_response(reply)
    return Response(msgspec.json.encode(reply) + b"\n", media_type=LINES)
