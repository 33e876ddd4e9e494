"""Anthropic's routes, and their part of the OpenAPI page."""

from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI, Request, Response

from octavo.server.anthropic.protocol import CountTokensRequest, Message, MessagesRequest, TokenCount
from octavo.server.anthropic.service import MessagesService
from octavo.server.http.errors import MESSAGES
from octavo.server.lifecycle import EngineLifecycle

COUNT_TOKENS = f"{MESSAGES}/count_tokens"
_QUESTION = [{"role": "user", "content": "What is a block?"}]

# The body and the reply; examples of the body.
MESSAGES_TYPES: Mapping[str, tuple[type, type]] = MappingProxyType(
    {MESSAGES: (MessagesRequest, Message), COUNT_TOKENS: (CountTokensRequest, TokenCount)}
)
MESSAGES_EXAMPLES: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        MESSAGES: {
            "message": {"messages": _QUESTION, "max_tokens": 64},
            "stream": {"messages": _QUESTION, "max_tokens": 64, "stream": True},
        },
        COUNT_TOKENS: {"message": {"messages": _QUESTION}},
    }
)

Answer = Callable[..., Awaitable[Response]]  # `Routes.answer`


class MessagesRoutes:
    """Handlers of raw requests, which `answer` decodes."""

    def __init__(self, lifecycle: EngineLifecycle, answer: Answer) -> None:
        self._lifecycle, self._answer = lifecycle, answer

    def add_to(self, app: FastAPI) -> None:
        for path, handler in ((MESSAGES, self.messages), (COUNT_TOKENS, self.count_tokens)):
            app.add_api_route(path, handler, methods=["POST"], response_model=None)

    async def messages(self, request: Request) -> Response:
        """Answer a conversation in the form of Anthropic's API; at once or as a stream of events."""
        service = self._service
        return await self._answer(request, MessagesRequest, service.messages, service.begin_message)

    async def count_tokens(self, request: Request) -> Response:
        """Count the tokens of the prompt that a conversation becomes."""
        return await self._answer(request, CountTokensRequest, self._service.count_tokens)

    @property
    def _service(self) -> MessagesService:
        return MessagesService(self._lifecycle.service)
