"""The adapters in the host caches of all ranks: which are loaded, and which to evict for another. Without torch."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

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


class HostAdapters:
    """By content hash; owned by the scheduler's thread. The ranks load while steps run: `call` is `Executor.call`."""

    def __init__(self, call: Callable[..., Future[Any]], capacity: int) -> None:
        self._call, self._capacity = call, capacity
        self._places: OrderedDict[str, _Place] = OrderedDict()  # the least recently kept first
        self._loading: set[str] = set()
        self._evicted: list[str] = []  # what ranks drop with the next load; also one that failed, as others may have it
        self._loads: Counter[str] = Counter()  # by name, since the last report
        self._evictions: Counter[str] = Counter()

    @property
    def has_room(self) -> bool:
        """Whether `begin_load` has a place for an adapter that is not in the cache."""
        return len(self._places) < self._capacity or self._dispensable is not None

    def begin_load(self, adapter: AdapterRef) -> bool:
        """Load an adapter if necessary, and keep it; return False while all places are taken by other kept adapters."""
        place = self._places.get(adapter.content_hash)
        if place is not None:
            place.is_kept = True
            self._places.move_to_end(adapter.content_hash)
            return True
        if len(self._places) >= self._capacity:
            if (last_kept := self._dispensable) is None:
                return False
            dropped = self._drop(last_kept)
            self._evictions[dropped.adapter.name] += dropped.is_loaded
        evicted, self._evicted = self._evicted, []
        self._places[adapter.content_hash] = _Place(adapter, self._call("load_adapter", adapter, evicted))
        self._loading.add(adapter.content_hash)
        return True

    def has(self, content_hash: str) -> bool:
        """Return whether the adapter is loaded on all ranks."""
        place = self._places.get(content_hash)
        return place is not None and place.is_loaded

    def release(self, content_hash: str) -> None:
        """No longer keep an adapter. It stays until its place is needed."""
        self._places[content_hash].is_kept = False

    def take_failed(self) -> Sequence[tuple[str, OctavoError]]:
        """Return the adapters, among those to keep, whose loading has failed since the last call, with the error."""
        failed: list[tuple[str, OctavoError]] = []
        for content_hash in [name for name in self._loading if self._places[name].loading.done()]:
            self._loading.discard(content_hash)
            place = self._places[content_hash]
            error = place.loading.exception()
            if error is None:
                self._loads[place.adapter.name] += 1
                continue
            self._drop(content_hash)
            if not isinstance(error, OctavoError):
                what = f"{type(error).__name__}: {error}"
                error = EngineError(f"adapter {place.adapter.name!r} cannot be loaded: {what}")
            if place.is_kept:
                failed.append((content_hash, error))
        return failed

    def wait(self, timeout_s: float) -> None:
        """Wait until an adapter is loaded, for at most `timeout_s`; not at all if none is being loaded."""
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

    def _drop(self, content_hash: str) -> _Place:
        self._loading.discard(content_hash)
        self._evicted.append(content_hash)
        return self._places.pop(content_hash)
