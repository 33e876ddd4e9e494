"""The ASGI application: routes, error handlers, middleware; and the uvicorn server that runs and drains it."""

import asyncio
import logging
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from types import FrameType
from typing import Protocol

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp

from octavo._version import __version__
from octavo.metrics.collect import HttpMetrics
from octavo.metrics.prometheus import Exposition
from octavo.server.anthropic.routes import MessagesRoutes
from octavo.server.args import ServerArgs
from octavo.server.batches.routes import StoredRoutes
from octavo.server.batches.service import BatchService
from octavo.server.http.errors import ApiError, as_api_error, bad_request, error_body
from octavo.server.http.exchange import ExchangeMiddleware, route_path
from octavo.server.http.protocol import limited_protocol
from octavo.server.kept.returning import Returning
from octavo.server.lifecycle import EngineLifecycle
from octavo.server.logged.log import RequestLog
from octavo.server.logged.requests import Identity
from octavo.server.ollama.routes import OllamaRoutes
from octavo.server.pages import add_pages
from octavo.server.policy import Admission, RequestPolicy
from octavo.server.responses.routes import ResponsesRoutes
from octavo.server.responses.store import ResponseStore
from octavo.server.routes import Routes
from octavo.server.settings import Settings
from octavo.server.systemd import STOPPING, notify
from octavo.server.tenants.tenants import Tenants
from octavo.server.tracing import Tracing, TracingMiddleware
from octavo.server.ui.routes import UiRoutes
from octavo.server.ui.watch import EngineWatch
from octavo.server.vectors.routes import VectorsRoutes

logger = logging.getLogger(__name__)

_LAST_WORDS_S = 2  # for connections to flush pending data, once all requests have ended
# Routes of known APIs that clients may try.
_NOT_OFFERED_YET = ("audio", "images")
_STORED = ("batches", "files")


class Engines(Protocol):
    """The engine of a server, or several."""

    async def run(self) -> None:
        """See to them, until cancelled or none is left."""

    async def close(self) -> None:
        """Shut them down."""


def create_app(
    lifecycle: EngineLifecycle,
    args: ServerArgs,
    http_metrics: HttpMetrics,
    returning: Returning | None = None,
    origins: Mapping[str, str] | None = None,
    tenants: Tenants | None = None,
    responses: ResponseStore | None = None,
    engines: Engines | None = None,
    batches: BatchService | None = None,
    request_logs: Sequence[RequestLog] = (),
) -> FastAPI:
    """Return the ASGI application around an engine that may still be loading.

    `origins`: of options that were set; `engines`, `batches`, `request_logs` (its own first): those of all, if this is
    one of several.
    """

    returning = returning or Returning(args, http_metrics)
    responses = responses or ResponseStore(args)
    engines = engines or lifecycle
    if batches is None and args.state_dir is not None:
        batches = BatchService(lifecycle, lifecycle.max_running, args, http_metrics)
    if not request_logs and args.request_log is not None:
        request_logs = [RequestLog(args, lambda: identity_of(lifecycle))]

    app = FastAPI(
        title="Octavo",
        version=__version__,
        summary="An OpenAI-compatible server",
        docs_url=None,  # FastAPI's own pages load their scripts from the internet
        redoc_url=None,
        lifespan=_lifespan(engines, batches, request_logs, returning, responses),
    )
    exposition = exposition_of(lifecycle, lifecycle.served_name, args, http_metrics)
    routes = Routes(lifecycle, args, exposition, returning, request_logs[0] if request_logs else None)
    routes.add_to(app)
    MessagesRoutes(lifecycle, routes).add_to(app)
    VectorsRoutes(lifecycle, routes).add_to(app)
    OllamaRoutes(lifecycle, routes.names).add_to(app)
    ResponsesRoutes(lifecycle, args, routes, responses, returning).add_to(app)
    if batches is not None:
        StoredRoutes(batches, args).add_to(app)
    add_pages(app, args.root_path)
    watch = EngineWatch(lifecycle, http_metrics, routes.names, None if tenants is None else tenants.describe)
    UiRoutes(lifecycle, args, origins or {}, watch).add_to(app)

    async def answer_error(request: Request, error: Exception) -> Response:
        api_error = _as_api_error(request, error)
        http_metrics.rejections[api_error.detail.code or "other"] += 1
        body = error_body(api_error, route_path(request.scope))
        return Response(body, api_error.status, api_error.headers, media_type="application/json")

    for kind in (HTTPException, RequestValidationError, ApiError, Exception):
        app.add_exception_handler(kind, answer_error)
    return app


def _lifespan(
    engines: Engines,
    batches: BatchService | None,
    request_logs: Sequence[RequestLog],
    returning: Returning,
    responses: ResponseStore,
) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    """Return what runs beside the application, and is closed in the order in which one uses the other."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        returning.restore()
        tasks = [asyncio.create_task(engines.run())]
        if batches is not None:
            tasks.append(asyncio.create_task(batches.run()))
        tasks += [asyncio.create_task(log.run()) for log in request_logs]
        yield
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        if batches is not None:
            batches.close()
        await returning.close()
        responses.close()
        for log in request_logs:
            await log.close()
        await engines.close()

    return lifespan


def exposition_of(lifecycle: EngineLifecycle, name: str, args: ServerArgs, metrics: HttpMetrics) -> Exposition:
    """Return the metrics of a server, or of one of its models."""
    names = {"with_vllm_names": args.vllm_metrics, "with_each_expert": args.expert_metrics}
    return Exposition(metrics, lambda: lifecycle.metrics, name, **names)


def identity_of(lifecycle: EngineLifecycle) -> Identity:
    """Return what computes the answers of a model. Raises ApiError, 503: it is not loaded."""
    settings = lifecycle.info.settings
    return Identity.of(lifecycle.service.front, settings["model_name"], settings)


def _as_api_error(request: Request, error: Exception) -> ApiError:
    if isinstance(error, RequestValidationError):
        return bad_request("The request's parameters are not valid.")
    if not isinstance(error, HTTPException):
        return as_api_error(error)
    path = route_path(request.scope)
    asked = f"{request.method} {path}"
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    if error.status_code == 404:
        return ApiError(404, _not_found(asked, path, routes), code="unknown_url")
    if error.status_code == 405:
        fitting = [route for route in routes if route.path_regex.match(path)]
        methods = ", ".join(sorted({method for route in fitting for method in route.methods or ()}))
        text = f"Method not allowed: {asked}. Allowed: {methods}."
        return ApiError(405, text, code="method_not_allowed", headers={"Allow": methods})
    return ApiError(error.status_code, str(error.detail))


def _not_found(asked: str, path: str, routes: Sequence[Route]) -> str:
    meant = [route.path for route in routes if len(route.path) > 1 and path.endswith(route.path.removeprefix("/v1"))]
    if meant:
        return f"Unknown request URL: {asked}. Is {max(meant, key=len)} meant? Check the base URL of the client."
    kind = path.rpartition("/v1/")[2].partition("/")[0]
    if kind in _STORED and not any(route.path == f"/v1/{kind}" for route in routes):
        return f"{asked} is offered by servers with a folder to keep files in: octavo serve --state-dir DIR."
    if kind not in _NOT_OFFERED_YET:
        return f"Unknown request URL: {asked}. /docs lists every route."
    known = [route.path for route in routes if "POST" in (route.methods or ()) and route.path.startswith("/v1/")]
    return f"{asked} is not offered yet. {' and '.join(known)} are; /docs lists every route."


def with_middleware(
    app: ASGIApp,
    args: ServerArgs,
    keys: Iterable[str],
    admission: Admission,
    metrics: HttpMetrics,
    tenants: Tenants | None = None,
) -> ASGIApp:
    """Wrap the routes. Outermost first: route, id and log; CORS; API key, admission, deadline, body."""
    app = RequestPolicy(app, args, keys, admission, metrics, tenants)
    if args.cors_allow_origins:  # outside the policy: a browser's preflight carries no key
        app = CORSMiddleware(
            app,
            allow_origins=args.cors_allow_origins,
            allow_methods=("GET", "HEAD", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=("X-Request-Id", "X-Octavo-Warnings", "Retry-After"),
        )
    return ExchangeMiddleware(app, args, metrics)


def make_server(
    app: ASGIApp,
    settings: Settings,
    keys: tuple[str, ...],
    metrics: HttpMetrics,
    tenants: Tenants | None = None,
    tracing: Tracing | None = None,
) -> "DrainingServer":
    args = settings.server
    admission = Admission(settings.engine.max_num_seqs, args.max_waiting)
    app = with_middleware(app, args, keys, admission, metrics, tenants)
    config = uvicorn.Config(
        app if tracing is None else TracingMiddleware(app, tracing),
        loop="uvloop", http=limited_protocol(args, metrics), ws="none", log_config=None, access_log=False,
        server_header=False, timeout_keep_alive=args.keep_alive_s,
        ssl_certfile=args.ssl_certfile, ssl_keyfile=args.ssl_keyfile,
    )  # fmt: skip
    server = DrainingServer(config, admission, args.drain_timeout_s)
    if tenants is not None:
        server.on_hangup = tenants.reload
    return server


class DrainingServer(uvicorn.Server):
    """On a signal, `run` drains and returns to its caller instead of letting the signal kill the process.

    The first SIGTERM or SIGINT starts draining: HTTP keeps responding, new work is rejected, requests in flight get
    `drain_timeout_s` to finish before they are cancelled. A second signal cancels them at once.
    """

    def __init__(self, config: uvicorn.Config, admission: Admission, drain_timeout_s: float) -> None:
        config.timeout_graceful_shutdown = _LAST_WORDS_S
        super().__init__(config)
        self._admission, self._drain_timeout_s = admission, drain_timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self.num_cut = 0  # requests that were cancelled
        self.on_hangup: Callable[[], None] | None = None  # called in the event loop on SIGHUP; None: SIGHUP ends it

    def stop(self) -> None:
        """Stop at once: nothing is left to do, or the engine is dead, so no request can continue."""
        self._admission.end_lookers()
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()

    def shut_down(self) -> None:
        """Drain; when called again, cancel what is still running. Runs in the event loop."""
        if self._draining is None:
            self._draining = asyncio.create_task(self._drain())
        else:
            self._draining.cancel()
            self._draining = asyncio.create_task(self._end("told to end at once"))

    async def _drain(self) -> None:
        self._admission.is_draining = True
        notify(STOPPING)
        logger.info("shutting down: %d requests may finish within %g s; a second signal ends them",
                    len(self._admission), self._drain_timeout_s)  # fmt: skip
        if await self._is_idle_within(self._drain_timeout_s):
            self.stop()
        else:
            await self._end(f"not finished within {self._drain_timeout_s:g} s")

    async def _end(self, reason: str) -> None:
        num_cut = self._admission.end_all()
        self.num_cut += num_cut
        if num_cut:
            logger.warning("%d requests cancelled: %s", num_cut, reason)
        await self._is_idle_within(_LAST_WORDS_S)
        self.stop()

    async def _is_idle_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._admission.is_idle.wait()
        except TimeoutError:
            return False
        return True

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        if self.on_hangup is not None:
            before[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._on_signal)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            if self._loop is not None and self.on_hangup is not None:
                self._loop.call_soon_threadsafe(self.on_hangup)
        elif self._loop is None:  # not serving yet
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self.shut_down)
