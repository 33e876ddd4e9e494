"""Anthropic's routes."""

from typing import TYPE_CHECKING

from fastapi import FastAPI, Request, Response

from octavo.server.anthropic.protocol import CountTokensRequest, Message, MessagesRequest, TokenCount
from octavo.server.anthropic.service import MessagesService
from octavo.server.http.errors import MESSAGES, MessagesError
from octavo.server.http.routing import EVENTS, ApiRoute, add_routes
from octavo.server.lifecycle import EngineLifecycle

if TYPE_CHECKING:
    from octavo.server.routes import Routes

_QUESTION = {"messages": [{"role": "user", "content": "What is a block?"}]}
_ASKED = {**_QUESTION, "max_tokens": 64}
_EXAMPLES = {"message": _ASKED, "stream": {**_ASKED, "stream": True}}


class MessagesRoutes:
    """Handlers of raw requests, which `Routes` decodes."""

    def __init__(self, lifecycle: EngineLifecycle, routes: "Routes") -> None:
        self._lifecycle, self._routes = lifecycle, routes

    def add_to(self, app: FastAPI) -> None:
        count, examples = f"{MESSAGES}/count_tokens", {"message": _QUESTION}
        table = [
            ApiRoute("POST", MESSAGES, self.messages, MessagesRequest, Message, EVENTS, _EXAMPLES),
            ApiRoute("POST", count, self.count_tokens, CountTokensRequest, TokenCount, examples=examples),
        ]
        add_routes(app, table, "Anthropic", MessagesError)

    async def messages(self, request: Request) -> Response:
        """Answer a conversation in the form of Anthropic's API; at once or as a stream of events."""
        return await self._routes.begin(request, MessagesRequest, self._service.begin_message)

    async def count_tokens(self, request: Request) -> Response:
        """Count the tokens of the prompt that a conversation becomes."""
        return await self._routes.answer(request, CountTokensRequest, self._service.count_tokens)

    @property
    def _service(self) -> MessagesService:
        return MessagesService(self._lifecycle.service)
