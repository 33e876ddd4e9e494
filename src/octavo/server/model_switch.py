"""`ModelSwitch`: the application of a server with several models. It takes each request to the routes of its model.

A model has routes of its own, as on a server with one model, so that none of them knows of others. The request waits
here until its model is loaded; a stream begins meanwhile, and says why in comments, which clients ignore.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.errors import InvalidParameterError
from octavo.metrics.collect import HttpMetrics
from octavo.metrics.several import SeveralExpositions
from octavo.server.app import create_app, exposition_of, identity_of
from octavo.server.args import ServerArgs
from octavo.server.batches.service import BatchService
from octavo.server.engine_pool import EnginePool, ModelSlot, args_of
from octavo.server.http.errors import ApiError, error_frames
from octavo.server.http.exchange import OPEN_PATHS, Exchange, route_path, send_json
from octavo.server.http.sse import wait_for_disconnect
from octavo.server.kept.returning import Returning, again
from octavo.server.lifecycle import EngineLifecycle
from octavo.server.logged.log import RequestLog
from octavo.server.ollama.answers import now
from octavo.server.openai.models import ModelAliases, ModelCard, ModelList
from octavo.server.policy import is_cancellation
from octavo.server.responses.store import ResponseStore
from octavo.server.settings import Settings
from octavo.server.tenants.tenants import Tenants

_TELL_S = 1.0  # how often a stream that waits says why
_MODELS = "/v1/models"
_STORED = ("/v1/files", "/v1/batches")
_LISTS = ("/api/tags", "/api/ps")
_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no")]  # fmt: skip


class _Asked(msgspec.Struct):
    """What is read of a body here."""

    model: Any = None
    name: Any = None  # of some of Ollama's routes
    stream: Any = None

    @property
    def model_name(self) -> str | None:
        return next((each for each in (self.model, self.name) if isinstance(each, str)), None)


def with_several_models(
    lifecycle: EngineLifecycle,
    settings: Settings,
    metrics: HttpMetrics,
    returning: Returning,
    tenants: Tenants | None = None,
) -> "ModelSwitch":
    """Return the application for all models; `lifecycle` is the first one's, which may be loading already.

    Raises InvalidParameterError: two models have one name, an alias leads nowhere.
    """
    engine, args = settings.engine, settings.server
    slots = [ModelSlot(names=args.served_model_name or (engine.model_name,), args=engine, lifecycle=lifecycle)]
    for name in args.also_serve:
        other = replace(engine, model_name=name)
        unloaded = EngineLifecycle(other, args_of(args, name))
        unloaded.status, unloaded.observer = "unloaded", lifecycle.observer
        slots.append(ModelSlot(names=(name,), args=other, lifecycle=unloaded))
    aliases = ModelAliases(args.model_alias)
    keys = [key for slot in slots for key in set(slot.keys)]
    for slot in slots:
        if any(keys.count(key) > 1 for key in slot.keys):
            raise InvalidParameterError("also_serve", slot.name, "another model has this name, or ends with it")
    pool = EnginePool(slots, aliases, args.max_loaded, args.idle_unload_s)
    responses = ResponseStore(args)
    batches = None if args.state_dir is None else BatchService(pool, lifecycle.max_running, args, metrics)
    logs = {slot: log for slot in slots if (log := _request_log(slot, args)) is not None}
    apps: dict[ModelSlot, ASGIApp] = {}
    for slot in slots:
        is_first = slot is slots[0]  # whose application has what all share
        shared = replace(args, state_dir=None, request_log=None)
        apps[slot] = create_app(
            slot.lifecycle,
            shared,
            metrics,
            returning,
            settings.origins,
            tenants,
            responses=responses,
            engines=pool if is_first else None,
            batches=batches if is_first else None,
            request_logs=list(logs.values()) if is_first else [logs[slot]] if slot in logs else [],
        )
    parts = [exposition_of(slot.lifecycle, slot.name, args, metrics) for slot in slots]
    return ModelSwitch(pool, apps, SeveralExpositions(parts))


def _request_log(slot: ModelSlot, args: ServerArgs) -> RequestLog | None:
    """Return the log of a model's requests, in a folder named like it."""
    if args.request_log is None:
        return None
    folder = str(Path(args.request_log) / Path(slot.name).name)
    return RequestLog(replace(args, request_log=folder), lambda: identity_of(slot.lifecycle))


class ModelSwitch:
    """Stands where the routes of the only model are otherwise."""

    def __init__(self, pool: EnginePool, apps: Mapping[ModelSlot, ASGIApp], exposition: SeveralExpositions) -> None:
        self._pool, self._apps, self._exposition = pool, apps, exposition

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = route_path(scope) if scope["type"] == "http" else ""
        if scope["type"] != "http" or path.startswith(_STORED):
            await self._apps[self._pool.slots[0]](scope, receive, send)
            return
        if scope["method"] != "POST" or path in OPEN_PATHS or is_cancellation(scope):
            await self._page(path, scope, receive, send)
            return
        exchange = Exchange.in_scope(scope)
        asked = _asked(exchange.body)
        slot = self._pool.find(asked.model_name)
        way = WayIn(exchange, send, is_stream=asked.stream is True and path.startswith("/v1/"))
        if await way.is_free(self._pool, slot, receive):
            try:
                await self._apps[slot](scope, receive, way.send)
            finally:
                self._pool.release(slot)

    async def _page(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer what is about all models, or computes nothing; the rest is about the first that is loaded."""
        slots = self._pool.slots
        if path in OPEN_PATHS:
            refusal = self._pool.refusal()
            status, headers = (200, {}) if refusal is None else (refusal.status, refusal.headers)
            about = "ok" if refusal is None else slots[0].lifecycle.status
            await send_json(
                send, {"status": about, "models": {slot.name: slot.state for slot in slots}}, status, headers
            )
        elif path == "/metrics":
            accept = dict(scope["headers"]).get(b"accept", b"").decode("latin-1")
            text, content_type = self._exposition.render(accept)
            await Response(text, headers={"content-type": content_type})(scope, receive, send)
        elif path == _MODELS:
            await send_json(send, ModelList.of([card for slot in slots for card in _cards(slot)]), 200, {})
        elif path.startswith(f"{_MODELS}/"):
            name = path.removeprefix(f"{_MODELS}/")
            slot = self._pool.find(name)
            card = slot.lifecycle.service.models.find(name).card if slot.lifecycle.knows(name) else _cards(slot)[0]
            await send_json(send, card, 200, {})
        elif path in _LISTS:
            await send_json(send, {"models": await self._listed(path, scope, receive)}, 200, {})
        else:
            wanted = dict(parse_qsl(scope["query_string"].decode("latin-1"))).get("model")
            chosen = self._pool.find(wanted) if wanted else next((slot for slot in slots if slot.is_ready), slots[0])
            await self._apps[chosen](scope, receive, send)

    async def _listed(self, path: str, scope: Scope, receive: Receive) -> list[Any]:
        """Return what the routes of all loaded models list; of the others, their names where all are listed."""
        found: list[Any] = []
        for slot in self._pool.slots:
            if slot.is_ready:
                body = bytearray()

                async def collect(message: Message, body: bytearray = body) -> None:
                    body.extend(message.get("body", b""))

                await self._apps[slot]({**scope, "method": "GET"}, receive, collect)
                found += msgspec.json.decode(body)["models"]
            elif path == _LISTS[0]:
                about = {"modified_at": now(), "size": 0, "digest": "", "details": {}}
                found += [{"name": f"{name}:latest", "model": f"{name}:latest", **about} for name in slot.names]
        return found


class WayIn:
    """A request on its way to its model: it waits for it, and what its routes answer goes where it has got to."""

    def __init__(self, exchange: Exchange, send: Send, *, is_stream: bool) -> None:
        self._exchange, self._send, self._is_stream = exchange, send, is_stream
        self._path = route_path(exchange.scope)
        self._has_begun = False  # the stream: headers and comments are out
        self._refused: int | None = None  # status of an answer that comes too late to be one
        self._body = bytearray()  # of this answer

    async def is_free(self, pool: EnginePool, slot: ModelSlot, receive: Receive) -> bool:
        """Wait until the model is loaded, which is then acquired; False: the client has left. Raises as `acquire`."""
        if pool.acquire_now(slot):
            return True
        acquiring = asyncio.ensure_future(pool.acquire(slot))
        has_client = again(self._exchange.scope) is None  # else the server before has begun it, and nobody is there
        leaving = asyncio.ensure_future(wait_for_disconnect(receive) if has_client else asyncio.Event().wait())
        try:
            while True:
                await asyncio.wait((acquiring, leaving), timeout=_TELL_S, return_when=asyncio.FIRST_COMPLETED)
                if acquiring.done():
                    acquiring.result()
                    return True
                if leaving.done():
                    return False
                if self._is_stream:
                    await self._tell(pool.why_waiting(slot))
        except asyncio.CancelledError:
            if acquiring.done() and not acquiring.cancelled() and acquiring.exception() is None:
                pool.release(slot)
            raise
        finally:
            for task in (acquiring, leaving):
                task.cancel()
            await asyncio.gather(acquiring, leaving, return_exceptions=True)

    async def send(self, message: Message) -> None:
        """Send what the routes answer. When the stream has begun, an error is its end."""
        if not self._has_begun:
            await self._send(message)
        elif message["type"] == "http.response.start":
            self._refused = None if message["status"] == 200 else message["status"]
        elif self._refused is None:
            await self._send(message)
        else:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                error = _read_error(self._refused, bytes(self._body))
                await self._send({"type": "http.response.body", "body": error_frames(error, self._path)})

    async def _tell(self, why: str) -> None:
        if not self._has_begun:
            self._exchange.last_words = partial(error_frames, path=self._path)
            await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            self._has_begun = True
        comment = f": {' '.join(why.split())}\n\n".encode()
        await self._send({"type": "http.response.body", "body": comment, "more_body": True})


def _asked(body: bytes) -> _Asked:
    """Return what a body asks for; of one that is no such thing, nothing: the routes say what is wrong with it."""
    try:
        return msgspec.json.decode(body, type=_Asked)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _Asked()


def _cards(slot: ModelSlot) -> list[ModelCard]:
    if slot.is_ready:
        return slot.lifecycle.service.models.cards
    return [
        ModelCard(
            id=name,
            created=slot.created,
            root=slot.args.model_name,
            state=slot.state,
            max_model_len=msgspec.UNSET if slot.card is None else slot.card.max_model_len,
        )
        for name in slot.names
    ]


def _read_error(status: int, body: bytes) -> ApiError:
    """Return an error that the routes have written, in the shape of any API."""
    try:
        error = msgspec.json.decode(body)["error"]
        return ApiError(status, error["message"], param=error.get("param"), code=error.get("code"))
    except (msgspec.DecodeError, TypeError, KeyError):
        return ApiError(status, "The request was refused.")
