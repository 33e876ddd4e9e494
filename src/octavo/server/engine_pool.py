"""`EnginePool`: the engines of a server with several models, each with a core of its own, loaded when a request asks.

No more than `max_loaded` are loaded at once. Requests for others wait in line: the model that was used least recently
goes; if all are in use, one takes no new requests until it can go. So every model gets its turn, in the order in which
requests came. Owned by one event loop.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from octavo.config.args import EngineArgs
from octavo.server.args import ServerArgs
from octavo.server.http.errors import MODEL_FAILED, ApiError
from octavo.server.lifecycle import EngineLifecycle
from octavo.server.openai.models import ModelAliases, ModelCard
from octavo.server.openai.service import OpenAICompatibleService

logger = logging.getLogger(__name__)

_MOST_NAMED = 20  # models in an error
_SHORTEST_LOOK_S, _LONGEST_LOOK_S = 0.1, 60.0  # between two looks for models that nobody uses


@dataclass(slots=True, eq=False, kw_only=True)
class ModelSlot:
    """One model, whose engine comes and goes."""

    names: tuple[str, ...]  # the main one first
    args: EngineArgs
    lifecycle: EngineLifecycle
    num_users: int = 0  # requests that it may not go away from
    is_leaving: bool = False  # takes no more of them: another model needs its place
    used_s: float = 0.0  # when the last one ended
    serving: "asyncio.Task[None] | None" = None
    unloading: "asyncio.Task[None] | None" = None
    card: ModelCard | None = None  # as of the last time it was loaded
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def is_ready(self) -> bool:
        return self.lifecycle.status == "ready" and self.unloading is None

    @property
    def has_place(self) -> bool:
        """Whether it is loaded, or on the way to it or from it."""
        return self.serving is not None or self.unloading is not None

    @property
    def state(self) -> str:
        """What `/v1/models` says."""
        return "loaded" if self.is_ready else "loading" if self.serving is not None else "unloaded"

    @property
    def keys(self) -> list[str]:
        """What its names match, in any case."""
        return [key for name in (*self.names, self.args.model_name) for key in keys_of(name)]


class EnginePool:
    """Who may be loaded, and who waits."""

    def __init__(
        self, slots: Sequence[ModelSlot], aliases: ModelAliases, max_loaded: int, idle_unload_s: float | None
    ) -> None:
        self._aliases = aliases
        self.slots, self._max_loaded, self._idle_unload_s = list(slots), max_loaded, idle_unload_s
        self._line: list[tuple[ModelSlot, asyncio.Future[None]]] = []  # requests that wait, the first first
        self._has_begun = False  # the first model has been ready
        self._on_begin: Callable[[str], None] = logger.info
        self._on_failure: Callable[[], None] = lambda: None

    async def run(self) -> None:
        """Load the first model, which the server needs to begin; unload those that nobody uses, until cancelled."""
        first = self.slots[0].lifecycle
        self._on_begin, self._on_failure = first.on_ready, first.on_end
        for slot in self.slots:
            slot.lifecycle.on_ready, slot.lifecycle.on_end = partial(self._ready, slot), partial(self._ended, slot)
        self._load(self.slots[0])
        while True:
            limit_s = self._idle_unload_s
            await asyncio.sleep(_LONGEST_LOOK_S if limit_s is None else max(_SHORTEST_LOOK_S, limit_s / 4))
            for slot in self.slots:
                is_idle = slot.is_ready and not slot.num_users
                if limit_s is not None and is_idle and time.monotonic() - slot.used_s >= limit_s:
                    logger.info("%s is unloaded: nobody has used it for %g s", slot.name, limit_s)
                    self._unload(slot)

    async def close(self) -> None:
        """Shut down all engines."""
        tasks = [task for slot in self.slots for task in (slot.serving, slot.unloading) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(slot.lifecycle.close() for slot in self.slots))

    def refusal(self) -> ApiError | None:
        """Why the server has no model to answer with yet; None: it has begun."""
        return None if self._has_begun else self.slots[0].lifecycle.refusal()

    def find(self, name: str | None) -> ModelSlot:
        """Return the model of a name; none means the first. Raises ApiError, 404, listing the names."""
        if not name:
            return self.slots[0]
        found = self._named(name) or self._named(name.removesuffix(":latest"))  # as Ollama's clients write it
        if found is None and (target := self._aliases.target(name)) is not None:
            found = self._named(target) or self.slots[0]
        if found is None:
            shown = name if len(name) <= 100 else name[:100] + "..."
            known = ", ".join([each for slot in self.slots for each in slot.names][:_MOST_NAMED])
            text = f"The model '{shown}' does not exist. Available: {known}."
            raise ApiError(404, text, param="model", code="model_not_found")
        return found

    def why_waiting(self, slot: ModelSlot) -> str:
        """Return why a request for a model waits, in one line."""
        if slot.serving is not None and (refusal := slot.lifecycle.refusal()) is not None:
            return f"{slot.name}: {refusal.detail.message}"
        num_before = sum(other is not slot for other, _ in self._line)
        users = ", ".join(
            f"{other.name} ({'being unloaded' if other.unloading else f'{other.num_users} requests'})"
            for other in self.slots
            if other.has_place
        )
        return (
            f"{slot.name} waits for a place: at most {self._max_loaded} loaded, in use: {users}; {num_before} in line"
        )

    def acquire_now(self, slot: ModelSlot) -> bool:
        """Keep a model loaded until `release`, if it is and takes requests; return whether it does."""
        is_open = slot.is_ready and not slot.is_leaving
        slot.num_users += is_open
        return is_open

    async def acquire(self, slot: ModelSlot) -> None:
        """Wait until a model is loaded, and keep it loaded until `release`. Raises ApiError, 503: it cannot be."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append((slot, turn))
        self._advance()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.release(slot)
            raise
        finally:
            self._line = [(each, other) for each, other in self._line if other is not turn]
            self._advance()

    @asynccontextmanager
    async def serving(self, name: str | None) -> AsyncIterator[OpenAICompatibleService]:
        """Enter with the service of a model once it is loaded; it stays so. Raises ApiError as `find` and `acquire`."""
        slot = self.find(name)
        if not self.acquire_now(slot):
            await self.acquire(slot)
        try:
            yield slot.lifecycle.service
        finally:
            self.release(slot)

    def release(self, slot: ModelSlot) -> None:
        """A request no longer needs its model."""
        slot.num_users -= 1
        slot.used_s = time.monotonic()
        self._advance()

    def _advance(self) -> None:
        """Let those in whose model is ready, then see to the first one whose model is not."""
        for slot, turn in self._line:
            if slot.is_ready and not slot.is_leaving and not turn.done():
                slot.num_users += 1
                turn.set_result(None)
        for leaving in self.slots:
            if leaving.is_leaving and leaving.is_ready and not leaving.num_users:
                self._unload(leaving)
        wanted = next((slot for slot, turn in self._line if not turn.done() and not slot.has_place), None)
        if wanted is None:
            return
        placed = [slot for slot in self.slots if slot.has_place]
        if len(placed) < self._max_loaded:
            self._load(wanted)
        elif not any(slot.is_leaving or slot.unloading is not None for slot in placed):
            loaded = [slot for slot in placed if slot.is_ready]
            if loaded:
                victim = min(loaded, key=lambda slot: (slot.num_users > 0, slot.used_s))
                logger.info("%s makes room for %s", victim.name, wanted.name)
                victim.is_leaving = True
                self._advance()

    def _load(self, slot: ModelSlot) -> None:
        if slot.lifecycle.status == "unloaded":
            slot.lifecycle.start_loading()
        slot.serving = asyncio.create_task(slot.lifecycle.run())

    def _ready(self, slot: ModelSlot, message: str) -> None:
        slot.used_s, slot.card = time.monotonic(), slot.lifecycle.service.models.find(None).card
        if self._has_begun:
            logger.info("%s", message)
        else:
            self._has_begun = True
            self._on_begin(message)
        self._advance()

    def _unload(self, slot: ModelSlot) -> None:
        slot.unloading = asyncio.create_task(self._let_go(slot))

    async def _let_go(self, slot: ModelSlot) -> None:
        """Unload a model, so that it can be loaded again."""
        if slot.serving is not None:
            slot.serving.cancel()
            await asyncio.wait((slot.serving,))
        try:
            await slot.lifecycle.unload()
        finally:
            slot.serving = slot.unloading = None
            slot.is_leaving = False
            self._advance()

    def _ended(self, slot: ModelSlot) -> None:
        """A model could not be loaded, and those in line for it are told; or it has died, and the next one loads it."""
        if not self._has_begun:
            self._on_failure()
            return
        if slot.lifecycle.status == "failed":
            text = f"The model {slot.name} cannot be loaded: {slot.lifecycle.failure}"
            logger.error("%s", text)
            for other, turn in self._line:
                if other is slot and not turn.done():
                    turn.set_exception(ApiError(503, text, code=MODEL_FAILED, headers={"Retry-After": "10"}))
        self._unload(slot)

    def _named(self, name: str) -> ModelSlot | None:
        key = name.casefold().rstrip("/")
        return next((slot for slot in self.slots if key in slot.keys or slot.lifecycle.knows(name)), None)


def keys_of(name: str) -> tuple[str, str]:
    """Return what a name matches: itself and its last part."""
    return name.casefold(), Path(name).name.casefold()


def args_of(args: ServerArgs, name: str | None = None) -> ServerArgs:
    """Return the options of one model's routes: of the first model, or of the other one of this name."""
    aliases = [(value, value.partition("=")[2].casefold()) for value in args.model_alias]
    if name is None:
        others = {key for other in args.also_serve for key in keys_of(other)}
        return replace(args, model_alias=tuple(value for value, target in aliases if target not in others))
    own = tuple(value for value, target in aliases if target in keys_of(name))
    return replace(args, model_alias=own, served_model_name=(), lora_modules=(), allow_runtime_lora=False)
