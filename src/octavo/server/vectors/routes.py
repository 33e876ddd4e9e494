"""The routes of rerank, score, pooling and decisions."""

from typing import TYPE_CHECKING

from fastapi import FastAPI, Request, Response

from octavo.server.http.errors import ApiError
from octavo.server.http.exchange import route_path
from octavo.server.http.routing import ApiRoute, add_routes
from octavo.server.lifecycle import EngineLifecycle
from octavo.server.vectors.decision_protocol import (
    DECISIONS,
    SYSTEM_ONE,
    DecisionsReply,
    DecisionsRequest,
    SystemOneError,
    SystemOneReply,
    SystemOneRequest,
)
from octavo.server.vectors.decision_service import DecisionsService, as_unprocessable
from octavo.server.vectors.protocol import (
    RERANK_PATHS,
    SCORE_PATHS,
    PoolingReply,
    PoolingRequest,
    RerankReply,
    RerankRequest,
    ScoreReply,
    ScoreRequest,
)
from octavo.server.vectors.service import VectorsService

if TYPE_CHECKING:
    from octavo.server.routes import Routes

_RANKED = {"query": "What is a block?", "documents": ["A block holds tokens.", "It rains."], "top_n": 1}
_PAIRS = {"text_1": "What is a block?", "text_2": ["A block.", "Rain."]}
_INPUTS = {"texts": {"input": ["Octavo is", "Hello, world!"]}}
_MAIL = "WIN a FREE phone, click here!"
_DECISIONS = {"predicate": {"input": _MAIL, "questions": [{"type": "predicate", "instructions": "Is this spam?"}]}}
_NAMED = {"noul": {"state": _MAIL, "questions": {"spam": {"type": "noul", "instructions": "Is this spam?"}}}}


class VectorsRoutes:
    """Handlers of raw requests, which `Routes` decodes."""

    def __init__(self, lifecycle: EngineLifecycle, routes: "Routes") -> None:
        self._lifecycle, self._answer = lifecycle, routes.answer

    def add_to(self, app: FastAPI) -> None:
        ranked, pairs = {"documents": _RANKED}, {"pairs": _PAIRS}
        table = [
            *(ApiRoute("POST", at, self.rerank, RerankRequest, RerankReply, examples=ranked) for at in RERANK_PATHS),
            *(ApiRoute("POST", at, self.score, ScoreRequest, ScoreReply, examples=pairs) for at in SCORE_PATHS),
            ApiRoute("POST", "/pooling", self.pooling, PoolingRequest, PoolingReply, examples=_INPUTS),
            ApiRoute("POST", DECISIONS, self.decisions, DecisionsRequest, DecisionsReply, examples=_DECISIONS),
        ]
        add_routes(app, table)
        named = ApiRoute("POST", SYSTEM_ONE, self.system_one, SystemOneRequest, SystemOneReply, examples=_NAMED)
        add_routes(app, [named], error=SystemOneError)

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
