"""API keys: every route needs one, except those in `OPEN_PATHS`."""

import hashlib
import hmac
from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.metrics.http import HttpMetrics
from octavo.server.errors import ApiError
from octavo.server.middleware.replies import OPEN_PATHS, refuse, route_path
from octavo.server.pages import PUBLIC_PATHS


class ApiKeyMiddleware:
    """Accepts the key as `Authorization: Bearer KEY` or `x-api-key: KEY`. Without keys, all requests pass."""

    def __init__(self, app: ASGIApp, keys: Iterable[str], metrics: HttpMetrics) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._digests or route_path(scope) in OPEN_PATHS | PUBLIC_PATHS:
            await self._app(scope, receive, send)
            return
        key = key_of(scope["headers"])
        if key is None:
            message = "No API key was sent. Send it as `Authorization: Bearer KEY` or as `x-api-key: KEY`."
            await refuse(send, _unauthorized(message, "missing_api_key"), self._metrics)
        elif not self._is_valid(key):
            await refuse(send, _unauthorized("The API key is not valid.", "invalid_api_key"), self._metrics)
        else:
            await self._app(scope, receive, send)

    def _is_valid(self, key: bytes) -> bool:
        """Compare with every key in constant time, so that timing does not leak them."""
        digest = _digest(key)
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0


def key_of(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """Return the key in a request's headers; None if there is none."""
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.partition(b" ")
            if scheme.lower() == b"bearer" and key.strip():
                return key.strip()
        elif name == b"x-api-key" and value.strip():
            return value.strip()
    return None


def _digest(key: bytes) -> bytes:
    """Digests have equal lengths, so comparing them does not leak the key's length."""
    return hashlib.sha256(key).digest()


def _unauthorized(message: str, code: str) -> ApiError:
    return ApiError(401, message, code=code, headers={"WWW-Authenticate": "Bearer"})
