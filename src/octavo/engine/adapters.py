"""The adapters in the host caches of all ranks: which are loaded, and which to evict for another."""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from octavo.contracts.engine import AdapterEvents, AdapterRef
from octavo.errors import EngineDeadError, EngineError, OctavoError


@dataclass(slots=True)
class _Place:
    """An adapter that is loaded, or being loaded."""

    adapter: AdapterRef
    loading: Future[Any]
    is_kept: bool = True

    @property
    def is_loaded(self) -> bool:
        return self.loading.done() and self.loading.exception() is None


class Ranks(Protocol):
    """The part of an executor that this needs."""

    def call(self, method: str, *arguments: Any) -> Future[Any]:
        """See `Executor.call`."""
        ...


class HostAdapters:
    """Implements `contracts.lora.AdapterStore`. The ranks load adapters while steps run."""

    def __init__(self, executor: Ranks, capacity: int) -> None:
        self._executor = executor
        self._capacity = capacity
        self._places: OrderedDict[str, _Place] = OrderedDict()  # by content hash, the least recently kept first
        self._loading: set[str] = set()
        self._evicted: list[str] = []  # that ranks still have, until the next load
        self._loads: Counter[str] = Counter()  # by name, since the last report
        self._evictions: Counter[str] = Counter()

    @property
    def has_room(self) -> bool:
        return len(self._places) < self._capacity or self._dispensable is not None

    def begin(self, adapter: AdapterRef) -> bool:
        place = self._places.get(adapter.content_hash)
        if place is not None:
            place.is_kept = True
            self._places.move_to_end(adapter.content_hash)
            return True
        if len(self._places) >= self._capacity:
            if (last_kept := self._dispensable) is None:
                return False
            self._evict(last_kept)
        evicted, self._evicted = self._evicted, []
        loading = self._executor.call("load_adapter", adapter, evicted)
        self._places[adapter.content_hash] = _Place(adapter, loading)
        self._loading.add(adapter.content_hash)
        return True

    def has(self, content_hash: str) -> bool:
        place = self._places.get(content_hash)
        return place is not None and place.is_loaded

    def release(self, content_hash: str) -> None:
        self._places[content_hash].is_kept = False

    def take_failed(self) -> Sequence[tuple[str, OctavoError]]:
        failed: list[tuple[str, OctavoError]] = []
        for content_hash in [name for name in self._loading if self._places[name].loading.done()]:
            self._loading.discard(content_hash)
            place = self._places[content_hash]
            error = place.loading.exception()
            if error is None:
                self._loads[place.adapter.name] += 1
                continue
            self._drop(content_hash)
            if place.is_kept:
                failed.append((content_hash, _as_octavo_error(place.adapter, error)))
        return failed

    def wait(self, timeout_s: float) -> None:
        """Wait until an adapter is loaded, or `timeout_s`; at once if none is being loaded.

        Raises:
            EngineDeadError: a rank has died.
        """
        loading = next((self._places[name].loading for name in self._loading), None)
        if loading is None:
            return
        try:
            error = loading.exception(timeout_s)  # on ranks in other processes, this is what receives
        except TimeoutError:
            return
        if isinstance(error, EngineDeadError):
            raise error

    def take_events(self) -> AdapterEvents | None:
        """Return what has happened since the last call; None: nothing."""
        if not (self._loads or self._evictions):
            return None
        events = AdapterEvents(loads=dict(self._loads), evictions=dict(self._evictions))
        self._loads.clear()
        self._evictions.clear()
        return events

    @property
    def _dispensable(self) -> str | None:
        """The adapter to evict next: the least recently used of those that are neither loading nor kept."""
        return next((name for name, place in self._places.items() if not place.is_kept and place.loading.done()), None)

    def _evict(self, content_hash: str) -> None:
        place = self._places[content_hash]
        self._evictions[place.adapter.name] += place.is_loaded
        self._drop(content_hash)

    def _drop(self, content_hash: str) -> None:
        """Let the ranks drop an adapter with the next load; also one that failed, as others may have it."""
        del self._places[content_hash]
        self._loading.discard(content_hash)
        self._evicted.append(content_hash)


def _as_octavo_error(adapter: AdapterRef, error: BaseException) -> OctavoError:
    if isinstance(error, OctavoError):
        return error
    return EngineError(f"adapter {adapter.name!r} cannot be loaded: {type(error).__name__}: {error}")
