"""Routes of the Responses API."""

import asyncio
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from fastapi import FastAPI, Request
from fastapi import Response as HttpResponse

from octavo.server.args import ServerArgs
from octavo.server.http.errors import RESPONSES, bad_request
from octavo.server.http.exchange import Exchange, json_response
from octavo.server.http.routing import EVENTS, ApiRoute, add_routes
from octavo.server.kept.answers import Kept, digest
from octavo.server.kept.responses import ReturnResponse
from octavo.server.kept.returning import Returning, again
from octavo.server.lifecycle import EngineLifecycle
from octavo.server.openai.birth import Birth
from octavo.server.openai.params import is_large
from octavo.server.openai.protocol import read_request
from octavo.server.responses.background import BackgroundResponse, cancellation, job_key
from octavo.server.responses.protocol import (
    DeletedResponse,
    InputTokens,
    ItemList,
    Response,
    ResponseFault,
    ResponsesRequest,
)
from octavo.server.responses.service import ResponsesService
from octavo.server.responses.store import ResponseStore

if TYPE_CHECKING:
    from octavo.server.routes import Routes

_RUNNING = ("queued", "in_progress")
_ASKED = {"input": "What is a block?"}
_LIMITED = {**_ASKED, "max_output_tokens": 32}
_EXAMPLES = {"text": _LIMITED, "stream": {**_LIMITED, "stream": True}}


class ResponsesRoutes:
    """Handlers of raw requests, which `Routes.answer` decodes."""

    def __init__(
        self, lifecycle: EngineLifecycle, args: ServerArgs, routes: "Routes", store: ResponseStore, returning: Returning
    ) -> None:
        self._lifecycle, self._args, self._routes = lifecycle, args, routes
        self._store, self._returning = store, returning

    def add_to(self, app: FastAPI) -> None:
        count, by_id = f"{RESPONSES}/input_tokens", f"{RESPONSES}/{{response_id}}"
        table = [
            ApiRoute("POST", RESPONSES, self.responses, ResponsesRequest, Response, EVENTS, _EXAMPLES),
            ApiRoute("POST", count, self.input_tokens, ResponsesRequest, InputTokens, examples={"text": _ASKED}),
            ApiRoute("GET", by_id, self.get, reply=Response),
            ApiRoute("DELETE", by_id, self.delete, reply=DeletedResponse),
            ApiRoute("POST", f"{by_id}/cancel", self.cancel, reply=Response),
            ApiRoute("GET", f"{by_id}/input_items", self.input_items, reply=ItemList),
        ]
        add_routes(app, table)

    async def responses(self, request: Request) -> HttpResponse:
        """Answer items of a conversation, with tools, schemas and reasoning; at once or as a stream of events."""
        exchange = Exchange.in_scope(request.scope)
        service = self._service(exchange)
        if b'"background"' in exchange.body:
            wire, warnings = await asyncio.to_thread(read_request, exchange.body, ResponsesRequest)
            if wire.background:
                exchange.warnings += warnings
                return self._in_background(exchange, service, wire)
        return await self._routes.begin(request, ResponsesRequest, service.begin_response)

    async def input_tokens(self, request: Request) -> HttpResponse:
        """Count the tokens of the prompt that a request becomes."""
        service = self._service(Exchange.in_scope(request.scope))
        return await self._routes.answer(request, ResponsesRequest, service.input_tokens)

    async def get(self, request: Request, response_id: str) -> HttpResponse:
        """A response that is kept; with `stream=true` the events of one in the background after `starting_after`."""
        exchange = Exchange.in_scope(request.scope)
        if request.query_params.get("stream", "").lower() != "true":
            return json_response(await self._kept(exchange.owner, response_id))
        number = request.query_params.get("starting_after", "-1")
        if not number.removeprefix("-").isdecimal() or len(number) > 9:
            raise bad_request(f"starting_after={number[:100]!r}: the number of an event", "starting_after")
        await self._store.get(exchange.owner, response_id)
        job = self._job(exchange.owner, response_id)
        if job is None:
            text = "Its events are not kept: the response was not begun in the background, or their time is over."
            raise bad_request(text, "stream", "events_not_kept")
        return ReturnResponse(exchange, job, is_stream=True, counts=[max(0, int(number) + 1)])

    async def delete(self, request: Request, response_id: str) -> HttpResponse:
        """Forget a response; one in the background is ended."""
        owner = Exchange.in_scope(request.scope).owner
        if (job := self._job(owner, response_id)) is not None and job.stop is not None and not job.recording.is_over:
            job.stop(cancellation())
            await job.ended.wait()
        await self._store.delete(owner, response_id)
        return json_response(DeletedResponse(id=response_id))

    async def cancel(self, request: Request, response_id: str) -> HttpResponse:
        """End a response in the background. One that is over stays as it is."""
        owner = Exchange.in_scope(request.scope).owner
        response = await self._kept(owner, response_id)
        if not response.background:
            raise bad_request("Only a response that was created with background=true can be cancelled.", "response_id")
        job = self._job(owner, response_id)
        if response.status in _RUNNING and job is not None and job.stop is not None:
            job.stop(cancellation())
            await job.ended.wait()
            response = await self._kept(owner, response_id)
        return json_response(response)

    async def input_items(self, request: Request, response_id: str) -> HttpResponse:
        """The items of a response's request. Parameters: `after`, `limit` (to 100), `order` (`desc`, `asc`)."""
        query = request.query_params
        order, limit = query.get("order", "desc"), query.get("limit", "20")
        if order not in ("asc", "desc"):
            raise bad_request(f"order={order[:100]!r}: 'asc' or 'desc'", "order")
        if not limit.isdecimal() or len(limit) > 9:
            raise bad_request(f"limit={limit[:100]!r}: a number", "limit")
        owner, after = Exchange.in_scope(request.scope).owner, query.get("after")
        page = await self._store.input_items(
            owner, response_id, after=after, limit=int(limit), ascending=order == "asc"
        )
        return json_response(page)

    def _in_background(self, exchange: Exchange, service: ResponsesService, wire: ResponsesRequest) -> HttpResponse:
        begin = partial(service.begin_response, wire, exchange.warnings.append, is_large(exchange))
        kept, is_again = again(exchange.scope), True
        if kept is None:
            birth, is_again = Birth(), False
            key = job_key(exchange.owner, f"resp_{birth.name}")
            keep_s = max(self._args.idempotency_s, self._args.resume_s)
            kept = self._returning.answers.begin(exchange.owner, key, digest(exchange.body), keep_s)
            kept.birth = birth
        kept.warnings = exchange.warnings
        return BackgroundResponse(
            exchange,
            kept,
            self._returning,
            self._routes.named(exchange, begin),
            partial(service.keep, wire),
            is_stream=bool(wire.stream),
            is_again=is_again,
        )

    async def _kept(self, owner: str, response_id: str) -> Response:
        """Return a response as it is now: one that nobody computes any more has failed."""
        response = await self._store.get(owner, response_id)
        if response.status not in _RUNNING or self._job(owner, response_id) is not None:
            return response
        response = await self._store.get(owner, response_id)  # it may have ended in between
        if response.status not in _RUNNING:
            return response
        fault = ResponseFault(code="server_error", message="The server ended before the response was complete.")
        return msgspec.structs.replace(response, status="failed", error=fault)

    def _job(self, owner: str, response_id: str) -> Kept | None:
        return self._returning.answers.find(job_key(owner, response_id))

    def _service(self, exchange: Exchange) -> ResponsesService:
        return ResponsesService(self._lifecycle.service, self._store, exchange.owner)
