"""The ASGI application: routes, error handlers, middleware, and the uvicorn server that runs it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp

from octavo._version import __version__
from octavo.metrics.http import HttpMetrics
from octavo.metrics.prometheus import Exposition
from octavo.server.args import ServerArgs
from octavo.server.draining import DrainingServer
from octavo.server.errors import ApiError, as_api_error, bad_request
from octavo.server.http_protocol import HttpLimits, limited_protocol
from octavo.server.lifecycle import EngineLifecycle
from octavo.server.middleware.admission import Admission, AdmissionMiddleware
from octavo.server.middleware.auth import ApiKeyMiddleware
from octavo.server.middleware.body import BodyMiddleware
from octavo.server.middleware.deadline import DeadlineMiddleware
from octavo.server.middleware.exchange import ExchangeMiddleware
from octavo.server.middleware.paths import PathMiddleware
from octavo.server.middleware.replies import route_path
from octavo.server.openapi import describe
from octavo.server.pages import Pages
from octavo.server.routes import Routes, error_response
from octavo.server.settings import Settings

# Routes of known APIs that clients may try.
_NOT_OFFERED_YET = ("responses", "messages", "embeddings", "rerank", "score", "audio", "images", "batches", "files")
EXPOSED_HEADERS = ("X-Request-Id", "X-Octavo-Warnings", "Retry-After")


def create_app(lifecycle: EngineLifecycle, args: ServerArgs, http_metrics: HttpMetrics) -> FastAPI:
    """Return the ASGI application around an engine that may still be loading."""
    app = FastAPI(
        title="Octavo",
        version=__version__,
        summary="An OpenAI-compatible server",
        docs_url=None,  # FastAPI's own pages load their scripts from the internet
        redoc_url=None,
        lifespan=_lifespan(lifecycle),
    )
    exposition = Exposition(
        http_metrics,
        lambda: lifecycle.metrics,
        lifecycle.served_name,
        with_vllm_names=args.vllm_metrics,
        with_each_expert=args.expert_metrics,
    )
    Routes(lifecycle, args, exposition).add_to(app)
    Pages(args.root_path).add_to(app)
    describe(app)
    for kind in (HTTPException, RequestValidationError, ApiError, Exception):
        app.add_exception_handler(kind, _error_handler(http_metrics))
    return app


def _lifespan(lifecycle: EngineLifecycle) -> Callable[[FastAPI], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(lifecycle.run())
        yield
        task.cancel()
        await lifecycle.close()

    return lifespan


def _error_handler(metrics: HttpMetrics) -> Callable[[Request, Exception], Awaitable[Response]]:
    async def answer_error(request: Request, error: Exception) -> Response:
        api_error = _as_api_error(request, error)
        metrics.rejections[api_error.detail.code or "other"] += 1
        return error_response(api_error)

    return answer_error


def _as_api_error(request: Request, error: Exception) -> ApiError:
    if isinstance(error, RequestValidationError):
        return bad_request("The request's parameters are not valid.")
    if not isinstance(error, HTTPException):
        return as_api_error(error)
    path = route_path(request.scope)
    route = f"{request.method} {path}"
    if error.status_code == 404:
        return ApiError(404, _not_found(route, path, request.app), code="unknown_url")
    if error.status_code == 405:
        routes = [each for each in _routes(request.app) if each.path_regex.match(path)]
        methods = ", ".join(sorted({method for each in routes for method in each.methods or ()}))
        text = f"Method not allowed: {route}. Allowed: {methods}."
        return ApiError(405, text, code="method_not_allowed", headers={"Allow": methods})
    return ApiError(error.status_code, str(error.detail))


def _not_found(route: str, path: str, app: FastAPI) -> str:
    routes = _routes(app)
    meant = [each.path for each in routes if len(each.path) > 1 and path.endswith(each.path.removeprefix("/v1"))]
    if meant:
        return f"Unknown request URL: {route}. Is {max(meant, key=len)} meant? Check the base URL of the client."
    if path.rpartition("/v1/")[2].partition("/")[0] not in _NOT_OFFERED_YET:
        return f"Unknown request URL: {route}. /docs lists every route."
    offered = " and ".join(
        each.path for each in routes if "POST" in (each.methods or ()) and each.path.startswith("/v1/")
    )
    return f"{route} is not offered yet. {offered} are; /docs lists every route."


def _routes(app: FastAPI) -> list[Route]:
    return [each for each in app.routes if isinstance(each, Route)]


def with_middleware(
    app: ASGIApp, args: ServerArgs, keys: Iterable[str], admission: Admission, metrics: HttpMetrics
) -> ASGIApp:
    """Wrap the routes. Outermost first: path, id and log, CORS, API key, admission, deadline, body."""
    app = BodyMiddleware(app, args.max_body_bytes, metrics)
    app = DeadlineMiddleware(app, args.request_timeout_s, metrics)
    app = AdmissionMiddleware(app, admission, metrics)
    app = ApiKeyMiddleware(app, keys, metrics)
    if args.cors_allow_origins:  # outside the auth middleware: a browser's preflight carries no key
        app = CORSMiddleware(
            app,
            allow_origins=args.cors_allow_origins,
            allow_methods=("GET", "HEAD", "POST"),
            allow_headers=("*",),
            expose_headers=EXPOSED_HEADERS,
        )
    app = ExchangeMiddleware(app, metrics, logs_access=args.access_log)
    return PathMiddleware(app, args.root_path)


def make_server(app: ASGIApp, settings: Settings, keys: tuple[str, ...], metrics: HttpMetrics) -> DrainingServer:
    """Return a server for the application, not yet running."""
    args = settings.server
    admission = Admission(settings.engine.max_num_seqs, args.max_waiting)
    limits = HttpLimits(
        max_header_bytes=args.max_header_bytes,
        read_timeout_s=args.read_timeout_s,
        write_timeout_s=args.write_timeout_s,
    )
    config = uvicorn.Config(
        with_middleware(app, args, keys, admission, metrics),
        loop="uvloop", http=limited_protocol(limits, metrics), ws="none", log_config=None, access_log=False,
        server_header=False, timeout_keep_alive=args.keep_alive_s,
        ssl_certfile=args.ssl_certfile, ssl_keyfile=args.ssl_keyfile,
    )  # fmt: skip
    return DrainingServer(config, admission, args.drain_timeout_s)
