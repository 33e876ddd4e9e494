"""The routes of OpenAI's API, of operators and of probes: decode the body to a wire type, call the service, encode."""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response

from octavo._version import __version__
from octavo.errors import InvalidParameterError
from octavo.metrics.prometheus import Exposition
from octavo.server.args import ServerArgs
from octavo.server.http.errors import as_api_error
from octavo.server.http.exchange import STREAMS, Exchange, json_response
from octavo.server.http.routing import EVENTS, ApiRoute, add_routes
from octavo.server.http.sse import FrameSource, respond
from octavo.server.kept.responses import Begin, Reply
from octavo.server.kept.returning import Returning
from octavo.server.lifecycle import EngineLifecycle, ServerInfo, TokenizerInfo
from octavo.server.logged.log import RequestLog
from octavo.server.openai.birth import Birth
from octavo.server.openai.chat_batch import ChatBatchService
from octavo.server.openai.embeddings import Embeddings, EmbeddingsRequest, VectorsRequest
from octavo.server.openai.models import AdapterReply, LoadAdapterRequest, ModelCard, ModelList, UnloadAdapterRequest
from octavo.server.openai.params import decoded, is_large, num_samples
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
from octavo.server.tenants.claim import RequestNames, claim, claim_vectors

T = TypeVar("T")

_SAID = {"role": "user", "content": "What is a block?"}
_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "temperature": {"type": "integer"}},
    "required": ["city", "temperature"],
}
_IN_A_SCHEMA = {
    "messages": [{"role": "user", "content": "It is 21 degrees in Oslo."}],
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "weather", "strict": True, "schema": _SCHEMA},
    },
}
_CHATS = {
    "chat": {"messages": [_SAID], "max_tokens": 64},
    "stream": {"messages": [_SAID], "stream": True},
    "JSON schema": _IN_A_SCHEMA,
}
_BATCH = {"two": {"messages": [[_SAID], [_SAID]], "max_tokens": 16}}
_TEXTS = {"text": {"prompt": "Octavo is", "max_tokens": 32, "temperature": 0}}
_VECTORS = {"texts": {"input": ["Octavo is", "Hello, world!"]}}
_TOKENIZED = {
    "text": {"prompt": "Hello, world!"},
    "chat": {"messages": [{"role": "user", "content": "Hello!"}]},
}
_DETOKENIZED = {"tokens": {"tokens": [72, 105]}}
_LOAD = {"below --lora-root": {"lora_name": "support", "lora_path": "support-v2"}}
_GO = {"by name": {"lora_name": "support"}}


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
        operations = [
            ApiRoute("GET", "/health", self.health),
            ApiRoute("GET", "/ready", self.health),
            ApiRoute("GET", "/ping", self.health),  # Amazon SageMaker's name
            ApiRoute("GET", "/load", self.load),
            ApiRoute("GET", "/server_info", self.server_info, reply=ServerInfo),
            ApiRoute("GET", "/version", self.version),
            ApiRoute("GET", "/metrics", self.metrics),
        ]
        tokens = [
            ApiRoute("GET", "/tokenizer_info", self.tokenizer_info, reply=TokenizerInfo),
            ApiRoute("POST", "/tokenize", self.tokenize, TokenizeRequest, TokenizeReply, examples=_TOKENIZED),
            ApiRoute("POST", "/detokenize", self.detokenize, DetokenizeRequest, DetokenizeReply, examples=_DETOKENIZED),
        ]
        chats, texts = "/v1/chat/completions", "/v1/completions"
        openai = [
            ApiRoute("GET", "/v1/models", self.models, reply=ModelList),
            ApiRoute("GET", "/v1/models/{name:path}", self.model, reply=ModelCard),
            ApiRoute("POST", chats, self.chat_completions, ChatCompletionRequest, ChatCompletion, EVENTS, _CHATS),
            ApiRoute("POST", f"{chats}/batch", self.chat_batch, ChatBatchRequest, ChatCompletion, examples=_BATCH),
            ApiRoute("POST", texts, self.completions, CompletionRequest, Completion, EVENTS, _TEXTS),
            ApiRoute("POST", "/v1/embeddings", self.embeddings, EmbeddingsRequest, Embeddings, examples=_VECTORS),
        ]
        if self._args.resume_s:
            openai.append(ApiRoute("GET", STREAMS + "{name}", self.stream, stream=EVENTS))
            openai.append(ApiRoute("DELETE", STREAMS + "{name}", self.end_stream))
        if self._args.allow_runtime_lora:
            load, unload = self.load_lora_adapter, self.unload_lora_adapter
            openai += [
                ApiRoute("POST", "/v1/load_lora_adapter", load, LoadAdapterRequest, AdapterReply, examples=_LOAD),
                ApiRoute("POST", "/v1/unload_lora_adapter", unload, UnloadAdapterRequest, AdapterReply, examples=_GO),
            ]
        add_routes(app, operations, "operations")
        add_routes(app, tokens, "tokens")
        add_routes(app, openai)
        app.add_api_route("/ping", self.health, methods=["POST"], response_model=None, include_in_schema=False)

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
        return await self.begin(request, ChatCompletionRequest, self._lifecycle.service.begin_chat)

    async def chat_batch(self, request: Request) -> Response:
        """Answer several conversations with the same options, one choice each, in order."""
        own = partial(claim, Exchange.in_scope(request.scope), names=self.names)
        service = ChatBatchService(self._lifecycle.service, own)
        return await self.answer(request, ChatBatchRequest, service.chat_batch)

    async def completions(self, request: Request) -> Response:
        """Continue one prompt or many, as text or token ids; at once or as a stream of events."""
        return await self.begin(request, CompletionRequest, self._lifecycle.service.begin_completion)

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

    async def answer(
        self, request: Request, kind: type[T], answer: Callable[..., Awaitable[msgspec.Struct]]
    ) -> Response:
        """Decode the body, call `answer`, encode the reply. Cancelled when the client disconnects."""
        exchange = Exchange.in_scope(request.scope)
        wire = await self._entered(exchange, kind)
        work: Callable[[], Awaitable[msgspec.Struct | FrameSource]] = partial(
            answer, wire, exchange.warnings.append, is_large(exchange)
        )
        if isinstance(wire, EmbeddingsRequest) and self._request_log is not None:
            work = self._request_log.watched_vectors(exchange, work)
        return await respond(request, work())

    async def begin(self, request: Request, kind: type[T], begin: Callable[..., Awaitable[Reply]]) -> Response:
        """As `answer`, with what prepares a text that is streamed or whole. It may be kept, and goes on then."""
        exchange = Exchange.in_scope(request.scope)
        wire, log = await self._entered(exchange, kind), self._request_log
        is_stream = bool(getattr(wire, "stream", None))
        prepare = self.named(exchange, partial(begin, wire, exchange.warnings.append, is_large(exchange)))
        if log is not None:
            prepare = log.watched(exchange, is_stream, prepare)
        if (kept := self._returning.respond(exchange, is_stream, prepare)) is not None:
            return kept
        return await respond(request, _complete(prepare, is_stream, is_timed=log is None))

    def named(self, exchange: Exchange, prepare: Begin) -> Begin:
        """Return what prepares an answer, and remembers for the page whose it is."""

        async def begin(birth: Birth) -> Reply:
            reply = await prepare(birth)
            if isinstance(reply, ReplyStream):
                claim(exchange, reply, self.names)
            return reply

        return begin

    async def _entered(self, exchange: Exchange, kind: type[T]) -> T:
        """Decode the body; say how much it asks for and until when, and give it what its key has."""
        wire = await decoded(exchange, kind)
        timeout_s: float | None = None
        if isinstance(wire, VectorsRequest):
            exchange.num_samples, timeout_s = wire.num_inputs, wire.timeout
            claim_vectors(exchange, wire)
        elif isinstance(wire, GenerationRequest):
            exchange.num_samples, timeout_s = num_samples(wire, self._args), wire.timeout
        try:
            exchange.limit_to(timeout_s)
        except InvalidParameterError as error:
            raise as_api_error(error) from None
        return wire


async def _complete(begin: Begin, is_stream: bool, *, is_timed: bool) -> Reply | msgspec.Struct:
    """Prepare an answer; return it as a stream that has not started, or complete. Logged ones are not timed."""
    reply = await begin(Birth())
    if is_timed and isinstance(reply, ReplyStream):
        reply.is_timed = True
    return reply if is_stream else await reply.whole()
