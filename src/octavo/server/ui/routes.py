"""The routes of the page: its files, and what it shows of the model and the settings."""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response

from octavo.server.args import ServerArgs
from octavo.server.http.errors import ApiError
from octavo.server.http.sse import EventStreamResponse
from octavo.server.lifecycle import EngineLifecycle
from octavo.server.ui.files import index_page, static_files
from octavo.server.ui.watch import EngineWatch, Watcher

# Fields of requests that the page shows with the model's own defaults.
_PARAMETERS = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """One option in effect, and where its value comes from: a flag, a variable, a file, or `default`."""

    name: str
    value: Any
    origin: str


class About(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /ui/about`."""

    version: str
    profile: str
    models: list[str]  # names of the model and its adapters, the main one first
    defaults: dict[str, float | int | None]  # of requests' parameters
    max_model_len: int
    takes_images: bool
    settings: list[Setting]  # without secrets


class UiRoutes:
    """Serves the page. Only its files are open to browsers without a key."""

    def __init__(
        self, lifecycle: EngineLifecycle, args: ServerArgs, origins: Mapping[str, str], watch: EngineWatch
    ) -> None:
        self._lifecycle, self._origins, self._watch = lifecycle, origins, watch
        self._index = index_page(args.root_path)
        self._is_offered = args.ui

    def add_to(self, app: FastAPI) -> None:
        if not self._is_offered:
            return
        app.add_api_route("/ui/engine", self.engine, methods=["GET"], response_model=None, include_in_schema=False)
        pages: dict[str, Callable[..., Any]] = {"/": self.index, "/ui/about": self.about, "/ui/{name:path}": self.file}
        for path, handler in pages.items():
            app.add_api_route(path, handler, methods=["GET", "HEAD"], response_model=None, include_in_schema=False)

    async def index(self, request: Request) -> Response:
        return self._index.response(request)

    async def file(self, request: Request, name: str) -> Response:
        if (found := static_files().get(name)) is None:
            raise ApiError(404, f"The page has no file {name[:100]!r}.", code="unknown_url")
        return found.response(request)

    async def engine(self) -> Response:
        """The engine's state, as events, until the client leaves."""
        if (refusal := self._lifecycle.refusal()) is not None:
            raise refusal
        return EventStreamResponse(Watcher(self._watch))

    async def about(self) -> Response:
        """What the page needs to know of the model, its defaults and the settings."""
        service, info = self._lifecycle.service, self._lifecycle.info
        params = service.front.inputs.default_params
        about = About(
            version=info.version,
            profile=info.profile,
            models=[card.id for card in service.models.cards],
            defaults={name: getattr(params, name) for name in _PARAMETERS},
            max_model_len=info.max_model_len,
            takes_images=service.front.inputs.takes_images,
            settings=[
                Setting(name=name, value=value, origin=self._origins.get(name, "default"))
                for name, value in info.settings.items()
            ],
        )
        return Response(msgspec.json.encode(about), media_type="application/json")
