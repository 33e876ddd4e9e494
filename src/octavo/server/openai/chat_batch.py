"""Several conversations in one request, as vLLM's server takes them: one choice each, in order, never a stream."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from octavo.server.http.errors import ApiError, bad_request
from octavo.server.openai.answers import ChatStream
from octavo.server.openai.birth import Birth
from octavo.server.openai.params import Warn
from octavo.server.openai.protocol import ChatBatchRequest, ChatCompletionRequest
from octavo.server.openai.replies import ChatCompletion, CompletionTokensDetails, PromptTokensDetails, Usage
from octavo.server.openai.service import OpenAICompatibleService


class ChatBatchService:
    """Its method is as those of `OpenAICompatibleService`. `claim` is told of each answer before it starts."""

    def __init__(self, chats: OpenAICompatibleService, claim: Callable[[ChatStream], None]) -> None:
        self._chats, self._claim = chats, claim

    async def chat_batch(self, request: ChatBatchRequest, warn: Warn, is_large: bool) -> ChatCompletion:
        """Answer all conversations; if one is refused or fails, so is the request."""
        if request.stream:
            raise bad_request("stream: a batch of chats is not streamed", "stream", "unsupported_parameter")
        if request.n not in (None, 1):
            raise bad_request(f"n={request.n}: a batch of chats has one choice for each conversation", "n")
        most = self._chats.args.max_prompts
        if not 1 <= len(request.messages) <= most:
            raise bad_request(f"messages: {len(request.messages)} conversations; from 1 to {most}", "messages")
        options = {name: getattr(request, name) for name in request.__struct_fields__ if name != "messages"}
        streams = []
        for number, messages in enumerate(request.messages):
            if not messages:
                raise bad_request(f"messages[{number}] must not be empty", f"messages[{number}]")
            chat = ChatCompletionRequest(messages=messages, **options)
            try:
                streams.append(await self._chats.begin_chat(chat, warn, is_large, Birth()))
                self._claim(streams[-1])
            except ApiError as error:
                raise error.in_words(partial(_placed, number)) from error
        tasks = [asyncio.ensure_future(stream.whole()) for stream in streams]
        try:
            return _joined(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _joined(replies: Sequence[ChatCompletion]) -> ChatCompletion:
    choices = [msgspec.structs.replace(reply.choices[0], index=index) for index, reply in enumerate(replies)]
    usages = [reply.usage for reply in replies]
    usage = Usage(
        prompt_tokens=sum(each.prompt_tokens for each in usages),
        completion_tokens=sum(each.completion_tokens for each in usages),
        total_tokens=sum(each.total_tokens for each in usages),
        prompt_tokens_details=PromptTokensDetails(
            cached_tokens=sum(each.prompt_tokens_details.cached_tokens for each in usages)
        ),
        completion_tokens_details=CompletionTokensDetails(
            reasoning_tokens=sum(each.completion_tokens_details.reasoning_tokens for each in usages)
        ),
    )
    return msgspec.structs.replace(replies[0], choices=choices, usage=usage)


def _placed(number: int, text: str) -> str:
    """Return a text about a conversation with its number in the path."""
    return text.replace("messages[", f"messages[{number}][")
