"""`OpenAICompatibleService`: the one place that turns wire requests into engine requests and back."""

from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import TypeVar

import msgspec

from octavo.engine.async_llm_engine import AsyncLLMEngine
from octavo.engine.input_processor import ProcessedRequest
from octavo.errors import OctavoError
from octavo.server.errors import as_api_error
from octavo.server.openai.chat import stream_chat, whole_chat
from octavo.server.openai.chunks import ReplyHead
from octavo.server.openai.models import ModelNames
from octavo.server.openai.params import chat_params, wire_names
from octavo.server.openai.protocol import ChatCompletionRequest, ChatMessage
from octavo.server.openai.run import Run

Frames = AsyncGenerator[bytes, None]
T = TypeVar("T")

_LARGE = 64 * 1024  # characters: from here on, tokenising is no longer done in the event loop


class OpenAICompatibleService:
    """Built once, when the engine is ready, and passed to whoever serves."""

    def __init__(self, engine: AsyncLLMEngine, models: ModelNames, *, fingerprint: str | None = None) -> None:
        self._engine = engine
        self.models = models
        self._fingerprint = fingerprint

    async def chat_completions(self, request: ChatCompletionRequest) -> msgspec.Struct | Frames:
        """Answer a conversation: a reply, or the frames of a stream if the request wants one.

        Raises:
            ApiError: whatever is wrong; for a stream, only what is found before its first frame.
        """
        head = ReplyHead.new("chatcmpl", self.models.find(request.model), self._fingerprint)
        try:
            processed = await self._off_loop_if_large(request, partial(self._process_chat, request))
            run = Run(self._engine, [processed])
        except OctavoError as error:
            raise as_api_error(error, wire_names(request)) from error
        if request.stream:
            return stream_chat(run, head, request)
        return await whole_chat(run, head)

    def _process_chat(self, request: ChatCompletionRequest) -> ProcessedRequest:
        front = self._engine.front
        params = chat_params(request, front.inputs.default_params)
        messages = [plain_message(message) for message in request.messages]
        options = dict(request.chat_template_kwargs or {})
        prompt = front.inputs.chat_prompt(messages, **options)
        return front.process(prompt, params, priority=_priority(request.priority), cache_salt=request.cache_salt)

    async def _off_loop_if_large(self, request: msgspec.Struct, work: Callable[[], T]) -> T:
        return work()


def plain_message(message: ChatMessage) -> dict[str, object]:
    """Return a message as chat templates read it."""
    plain: dict[str, object] = msgspec.to_builtins(message)
    return plain


def _priority(priority: int | None) -> int:
    from octavo.sampling_params import RequestPriority

    return RequestPriority.NORMAL if priority is None else priority
