"""The routes of rerank, score, pooling and decisions."""

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request, Response

from octavo.server.http.errors import ApiError
from octavo.server.http.exchange import route_path
from octavo.server.lifecycle import EngineLifecycle
from octavo.server.vectors.decision_protocol import DECISIONS, SYSTEM_ONE, DecisionsRequest, SystemOneRequest
from octavo.server.vectors.decision_service import DecisionsService, as_unprocessable
from octavo.server.vectors.protocol import RERANK_PATHS, SCORE_PATHS, PoolingRequest, RerankRequest, ScoreRequest
from octavo.server.vectors.service import VectorsService

Answer = Callable[..., Awaitable[Response]]  # `Routes.answer`


class VectorsRoutes:
    """Handlers of raw requests, which `answer` decodes."""

    def __init__(self, lifecycle: EngineLifecycle, answer: Answer) -> None:
        self._lifecycle, self._answer = lifecycle, answer

    def add_to(self, app: FastAPI) -> None:
        routes: list[tuple[str, Callable[..., Any]]] = [
            *((path, self.rerank) for path in RERANK_PATHS),
            *((path, self.score) for path in SCORE_PATHS),
            ("/pooling", self.pooling),
            (DECISIONS, self.decisions),
            (SYSTEM_ONE, self.system_one),
        ]
        for path, handler in routes:
            app.add_api_route(path, handler, methods=["POST"], response_model=None)

    async def rerank(self, request: Request) -> Response:
        """Order documents by how well they fit a query."""
        return await self._answer(request, RerankRequest, self._service(request).rerank)

    async def score(self, request: Request) -> Response:
        """Score pairs of texts: by the model if it ranks, else by the cosine of their vectors."""
        return await self._answer(request, ScoreRequest, self._service(request).score)

    async def pooling(self, request: Request) -> Response:
        """What the model makes of each input: a vector, or a classifier's outputs."""
        return await self._answer(request, PoolingRequest, self._service(request).pooling)

    async def decisions(self, request: Request) -> Response:
        """Answer typed questions about a text or a conversation by probabilities, without writing text."""
        service = DecisionsService(self._lifecycle.service)
        return await self._answer(request, DecisionsRequest, service.decisions)

    async def system_one(self, request: Request) -> Response:
        """The same in another form: questions by name, about a text, an object or an array."""
        service = DecisionsService(self._lifecycle.service)
        try:
            return await self._answer(request, SystemOneRequest, service.system_one)
        except ApiError as error:
            raise as_unprocessable(error) from error

    def _service(self, request: Request) -> VectorsService:
        return VectorsService(self._lifecycle.service, route_path(request.scope))
