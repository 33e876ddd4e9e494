"""`OpenAICompatibleService`: the one place that turns wire requests into engine requests and back."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from octavo._version import __version__
from octavo.engine.async_llm_engine import AsyncLLMEngine
from octavo.errors import UserError
from octavo.server.args import ServerArgs
from octavo.server.errors import as_api_error, bad_request
from octavo.server.openai.answer_formats import AnswerFormats
from octavo.server.openai.chat import whole_chat
from octavo.server.openai.chat_plan import plan_chat
from octavo.server.openai.chat_stream import ChatStream
from octavo.server.openai.chunks import ReplyHead
from octavo.server.openai.completion_plan import plan_completion
from octavo.server.openai.completion_stream import CompletionStream
from octavo.server.openai.completions import whole_completion
from octavo.server.openai.form import needs_grammar
from octavo.server.openai.models import ModelNames
from octavo.server.openai.params import wire_names
from octavo.server.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
)
from octavo.server.openai.replies import ChatCompletion, Completion, DetokenizeReply, TokenizeReply
from octavo.server.openai.tokens import detokenize, tokenize

T = TypeVar("T")

_MANY_PROMPTS = 16
_MAX_ID_CHARACTERS = 128


class OpenAICompatibleService:
    """Built once, when the engine is ready, and passed to whoever serves.

    `is_large` says that a request's body is so long that working on it would keep the event loop from its streams.
    All methods raise ApiError: for a stream, before its first frame only what can be known then.
    """

    def __init__(self, engine: AsyncLLMEngine, models: ModelNames, args: ServerArgs) -> None:
        self.models = models
        self._engine = engine
        self._args = args
        self._fingerprint = f"octavo-{__version__}-{engine.front.client.profile}"
        self._formats = AnswerFormats(
            engine.front.tokenizer,
            tool_call_parser_name=args.tool_call_parser,
            reasoning_parser_name=args.reasoning_parser,
        )

    async def chat_completions(
        self, request: ChatCompletionRequest, *, is_large: bool = False
    ) -> ChatCompletion | ChatStream:
        """Answer a conversation: a reply, or a stream that is yet to start if the request wants one."""
        head = self._begin(request, "chatcmpl")
        plan = await _settle(partial(plan_chat, request, head, self._engine.front, self._formats), request, is_large)
        return ChatStream(self._engine, plan) if request.stream else await whole_chat(self._engine, plan)

    async def completions(self, request: CompletionRequest, *, is_large: bool = False) -> Completion | CompletionStream:
        """Go on with one prompt or many: a reply, or a stream that is yet to start if the request wants one."""
        head = self._begin(request, "cmpl")
        is_large = is_large or (isinstance(request.prompt, list) and len(request.prompt) > _MANY_PROMPTS)
        work = partial(plan_completion, request, head, self._engine.front, max_prompts=self._args.max_prompts)
        plan = await _settle(work, request, is_large)
        return CompletionStream(self._engine, plan) if request.stream else await whole_completion(self._engine, plan)

    async def tokenize(self, request: TokenizeRequest, *, is_large: bool = False) -> TokenizeReply:
        """Return the ids of a text or of a conversation."""
        self.models.find(request.model)
        return await _settle(partial(tokenize, request, self._engine.front), request, is_large)

    async def detokenize(self, request: DetokenizeRequest, *, is_large: bool = False) -> DetokenizeReply:
        """Return the text of ids."""
        self.models.find(request.model)
        return await _settle(partial(detokenize, request, self._engine.front), request, is_large)

    def _begin(self, request: GenerationRequest, prefix: str) -> ReplyHead:
        if request.n is not None and request.n > self._args.max_n:
            raise bad_request(f"n={request.n}: at most {self._args.max_n}", "n")
        if request.request_id is not None and len(request.request_id) > _MAX_ID_CHARACTERS:
            raise bad_request(f"request_id: at most {_MAX_ID_CHARACTERS} characters", "request_id")
        return ReplyHead.new(prefix, self.models.find(request.model), self._fingerprint, request.request_id)


async def _settle(work: Callable[[], T], request: object, is_large: bool) -> T:
    """Do what comes before the engine: render, tokenise, validate. What may take a while leaves the event loop."""
    is_slow = is_large or (isinstance(request, GenerationRequest) and needs_grammar(request))
    try:
        return await asyncio.to_thread(work) if is_slow else work()
    except UserError as error:
        names = wire_names(request) if isinstance(request, GenerationRequest) else {}
        raise as_api_error(error, names) from error
