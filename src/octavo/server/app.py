"""The application: routes and what they share. Every answer that is not 2xx has the shape of `server/errors.py`."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from octavo._version import __version__
from octavo.metrics.http import HttpMetrics
from octavo.metrics.prometheus import Exposition
from octavo.server.args import ServerArgs
from octavo.server.errors import ApiError, as_api_error, bad_request
from octavo.server.lifecycle import EngineLifecycle
from octavo.server.openapi import describe
from octavo.server.routes import Routes, error_response


def create_app(lifecycle: EngineLifecycle, args: ServerArgs, http_metrics: HttpMetrics) -> FastAPI:
    """Return the ASGI application around an engine that may still be loading."""
    app = FastAPI(
        title="Octavo",
        version=__version__,
        summary="An OpenAI-compatible server",
        root_path=args.root_path,
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
    route = f"{request.method} {request.url.path}"
    if error.status_code == 404:
        return ApiError(404, f"Unknown request URL: {route}.", code="unknown_url")
    if error.status_code == 405:
        text = f"Method not allowed: {route}."
        return ApiError(405, text, code="method_not_allowed", headers=dict(error.headers or {}))
    return ApiError(error.status_code, str(error.detail))
