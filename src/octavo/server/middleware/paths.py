"""Finds the route that a request's path means, for all layers within: proxies and base URLs vary.

A proxy may strip the server's prefix or keep it; clients repeat slashes, end with one, or leave `/v1` out.
"""

import re

from starlette.types import ASGIApp, Receive, Scope, Send

_SLASHES = re.compile("//+")
_MODELS = "/models/"  # what follows is a model's name, which may be a path with slashes of its own
# OpenAI's routes, served without /v1 as well, as llama.cpp's server does. A model's name follows the last one.
_UNVERSIONED = ("/chat/completions", "/completions", "/models")


class PathMiddleware:
    """Sets `root_path`, and `path` to the prefix and the route, the form that ASGI prescribes."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            route = route_of(scope["path"], self._root_path)
            scope.update(root_path=self._root_path, path=self._root_path + route)
        await self._app(scope, receive, send)


def route_of(path: str, root_path: str) -> str:
    """Return the path as routes spell it: /llm//v1/models/ is /v1/models under the prefix /llm."""
    path = "/" + path.lstrip("/")
    if root_path and (path + "/").startswith(root_path + "/"):  # whole segments: /llmx is not below /llm
        path = path[len(root_path) :]
    head, models, name = path.partition(_MODELS)
    head = _SLASHES.sub("/", "/" + head + models)
    route = head + name if name.strip("/") else "/" + head.strip("/")
    is_unversioned = route in _UNVERSIONED or route.startswith(_MODELS)
    return "/v1" + route if is_unversioned else route
