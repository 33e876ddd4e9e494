"""`OpenAICompatibleService`: converts wire requests to engine requests and back."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TypeVar

from octavo._version import __version__
from octavo.engine.async_llm_engine import MANY_BAD_WORDS, AsyncLLMEngine
from octavo.engine.front import EngineFront
from octavo.errors import UserError
from octavo.server.args import ServerArgs
from octavo.server.errors import as_api_error, bad_request
from octavo.server.openai.adapters import ServedAdapters
from octavo.server.openai.answer_plan import AnswerFormats
from octavo.server.openai.chat import ChatStream, plan_chat
from octavo.server.openai.chat_prompt import prompt_options, render_chat
from octavo.server.openai.completion import CompletionStream, plan_completion
from octavo.server.openai.content_parts import MediaReader, has_media, token_ids_of
from octavo.server.openai.models import ModelNames
from octavo.server.openai.params import Warn, needs_grammar, truncated, wire_names
from octavo.server.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
)
from octavo.server.openai.replies import ChatCompletion, Completion, DetokenizeReply, TokenizeReply
from octavo.server.openai.reply_stream import ReplyHead
from octavo.server.openai.tools import shown_tools

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MANY_PROMPTS = 16
_MAX_FETCHES = 32  # of images and videos from elsewhere, at once
_MAX_ID_CHARACTERS = 128


class OpenAICompatibleService:
    """Created once the engine is ready.

    `is_large` marks a body so long that processing it in the event loop would stall the streams. Before a method
    returns, it passes `warn` the parts of a request that have no effect. All methods raise ApiError; errors that occur
    while a stream runs are raised by its `take`.
    """

    def __init__(self, engine: AsyncLLMEngine, models: ModelNames, args: ServerArgs) -> None:
        self.models = models
        self.adapters = ServedAdapters(engine, models, args.lora_root)
        self.front = engine.front
        self._engine = engine
        self._args = args
        self._media_reader = MediaReader.of(args)
        # Of their own: threads that wait for other servers must not keep requests from being prepared.
        self._fetchers = ThreadPoolExecutor(_MAX_FETCHES, thread_name_prefix="fetch")
        self._fingerprint = f"octavo-{__version__}-{engine.front.client.profile}"
        self._formats = AnswerFormats(
            engine.front.tokenizer,
            tool_call_parser_name=args.tool_call_parser,
            reasoning_parser_name=args.reasoning_parser,
        )

    async def _media(self, request: ChatCompletionRequest | TokenizeRequest) -> MediaReader | None:
        """Return what reads the request's images and videos, those from elsewhere fetched; None: the model sees not."""
        if self.front.config.model.vision is None:
            return None
        loop, reader = asyncio.get_running_loop(), self._media_reader
        try:
            parts = list(reader.remote_parts(request.messages or ()))
            data = await asyncio.gather(*(loop.run_in_executor(self._fetchers, fetch) for _, fetch in parts))
        except UserError as error:
            raise as_api_error(error, {}) from error
        return replace(reader, fetched={path: one for (path, _), one in zip(parts, data, strict=True)})

    async def chat_completions(
        self, request: ChatCompletionRequest, *, warn: Warn = logger.warning, is_large: bool = False
    ) -> ChatCompletion | ChatStream:
        """Complete a conversation: a complete reply, or a stream that has not started."""
        head = self._begin(request, "chatcmpl")
        media = await self._media(request)
        work = partial(
            plan_chat,
            request,
            head,
            self.front,
            self._formats,
            media,
            warn,
            self.models.adapter(request.model),
        )
        plan = await _settle(work, request, is_large)
        stream = ChatStream(self._engine, plan)
        return stream if request.stream else await stream.whole()

    async def completions(
        self, request: CompletionRequest, *, warn: Warn = logger.warning, is_large: bool = False
    ) -> Completion | CompletionStream:
        """Complete one prompt or many: a complete reply, or a stream that has not started."""
        head = self._begin(request, "cmpl")
        is_large = is_large or (isinstance(request.prompt, list) and len(request.prompt) > _MANY_PROMPTS)
        work = partial(
            plan_completion,
            request,
            head,
            self.front,
            warn,
            max_prompts=self._args.max_prompts,
            adapter=self.models.adapter(request.model),
        )
        plan = await _settle(work, request, is_large)
        stream = CompletionStream(self._engine, plan)
        return stream if request.stream else await stream.whole()

    async def tokenize(
        self, request: TokenizeRequest, *, warn: Warn = logger.warning, is_large: bool = False
    ) -> TokenizeReply:
        """Return the token ids of a text or of a conversation."""
        self.models.find(request.model)
        media = await self._media(request)
        return await _settle(partial(tokenize, request, self.front, self._formats, media, warn), request, is_large)

    async def detokenize(
        self, request: DetokenizeRequest, *, warn: Warn = logger.warning, is_large: bool = False
    ) -> DetokenizeReply:
        """Return the text of token ids."""
        self.models.find(request.model)
        return await _settle(partial(detokenize, request, self.front), request, is_large)

    def _begin(self, request: GenerationRequest, prefix: str) -> ReplyHead:
        if request.n is not None and request.n > self._args.max_n:
            raise bad_request(f"n={request.n}: at most {self._args.max_n}", "n")
        limit = self._args.max_temperature
        if request.temperature is not None and request.temperature > limit:
            text = f"temperature={request.temperature:g}: at most {limit:g} (the server's --max-temperature)"
            raise bad_request(text, "temperature")
        if request.request_id is not None and len(request.request_id) > _MAX_ID_CHARACTERS:
            raise bad_request(f"request_id: at most {_MAX_ID_CHARACTERS} characters", "request_id")
        return ReplyHead.new(prefix, self.models.find(request.model), self._fingerprint, request.request_id)


async def _settle(work: Callable[[], T], request: object, is_large: bool) -> T:
    """Prepare a request: render, tokenize, validate. Slow work leaves the event loop."""
    is_slow = is_large or (isinstance(request, GenerationRequest) and needs_grammar(request))
    is_slow = is_slow or has_media(getattr(request, "messages", None))
    is_slow = is_slow or (isinstance(request, GenerationRequest) and len(request.bad_words or ()) > MANY_BAD_WORDS)
    try:
        return await asyncio.to_thread(work) if is_slow else work()
    except UserError as error:
        names = wire_names(request) if isinstance(request, GenerationRequest) else {}
        raise as_api_error(error, names) from error


def tokenize(
    request: TokenizeRequest, front: EngineFront, formats: AnswerFormats, media: MediaReader | None, warn: Warn
) -> TokenizeReply:
    """Return the ids of a text, or of a conversation as a chat renders it."""
    if (request.prompt is None) == (request.messages is None):
        raise bad_request("Exactly one of 'prompt' and 'messages' is required.", "prompt")
    tokenizer = front.tokenizer
    if request.messages is not None:
        options = prompt_options(request, shown_tools(request))
        prompt = render_chat(request, request.messages, options, front, formats.reasoning, media, warn)
        token_ids = token_ids_of(prompt)
    else:
        token_ids = tokenizer.encode(request.prompt or "", add_special_tokens=request.add_special_tokens is not False)
        token_ids = truncated({"prompt_token_ids": token_ids}, request.truncate_prompt_tokens)["prompt_token_ids"]
    texts = [tokenizer.token_text(token_id) for token_id in token_ids] if request.return_token_strs else None
    return TokenizeReply(
        count=len(token_ids), max_model_len=front.config.model.max_model_len, tokens=token_ids, token_strs=texts
    )


def detokenize(request: DetokenizeRequest, front: EngineFront) -> DetokenizeReply:
    """Return the text of token ids."""
    vocab_size = front.config.model.vocab_size
    for index, token_id in enumerate(request.tokens):
        if not 0 <= token_id < vocab_size:
            text = f"tokens[{index}]={token_id}: token ids of this model are 0 to {vocab_size - 1}"
            raise bad_request(text, f"tokens[{index}]")
    return DetokenizeReply(prompt=front.tokenizer.decode(request.tokens, skip_special_tokens=False))
