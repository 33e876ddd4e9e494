"""Requests with an adapter: each waits until the ranks have its adapter in a slot, without holding up others.

A request whose adapter has a slot is queued like any other, and keeps the slot until it ends. Others are parked, by
adapter. When a slot has no users left, it goes to the best parked adapter that is loaded, together with all requests
parked for it.

No adapter starves: while adapters are parked without a free slot, as many slots are *drained*. Requests that arrive for
a draining adapter are parked after the others, so its slot is free once its current requests have ended. Slots with the
fewest users are drained first.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol

from octavo.contracts.engine import AdapterRef
from octavo.contracts.schedule import SlotFill
from octavo.errors import OctavoError
from octavo.scheduler.adapter_slots import AdapterSlots
from octavo.scheduler.request import Request, RequestStatus
from octavo.scheduler.request_queue import RequestQueue

Failures = list[tuple[Request, OctavoError]]


class AdapterStore(Protocol):
    """The adapters in the ranks' host caches, by content hash. Owned by the scheduler's thread."""

    @property
    def has_room(self) -> bool:
        """Whether `begin` has a place for an adapter that is not in the cache."""
        ...

    def begin(self, adapter: AdapterRef) -> bool:
        """Load an adapter if necessary, and keep it; return False while all places are taken by other kept adapters."""
        ...

    def has(self, content_hash: str) -> bool:
        """Return whether the adapter is loaded on all ranks."""
        ...

    def release(self, content_hash: str) -> None:
        """No longer keep an adapter. It stays until its place is needed."""
        ...

    def take_failed(self) -> Sequence[tuple[str, OctavoError]]:
        """Return the adapters, among those to keep, whose loading has failed since the last call, with the error."""
        ...


class AdaptedRequests:
    """Owned by the scheduler. `order` ranks requests at a time; `store` has the adapters in host memory."""

    def __init__(self, store: AdapterStore, num_slots: int, ageing_s: float) -> None:
        self._store = store
        self._slots = AdapterSlots(num_slots)
        self._ageing_s = ageing_s
        self._parked: dict[str, RequestQueue] = {}  # by adapter; never empty
        self._draining: dict[str, None] = {}  # adapters in slots, the first to be drained first
        self._num_parked = 0  # requests
        self._held: set[str] = set()  # adapters that the store keeps, or is loading, for us

    @property
    def num_parked(self) -> int:
        return self._num_parked

    def admit(self, request: Request) -> bool:
        """Give a request the slot of its adapter if it may be queued now; else park it and return False."""
        content_hash = _adapter_of(request).content_hash
        if self._has_slot_to_share(content_hash):
            request.adapter_slot = self._slots.add_user(content_hash)
            return True
        request.status = RequestStatus.WAITING_FOR_ADAPTER
        self._parked.setdefault(content_hash, RequestQueue(self._ageing_s)).add(request)
        self._num_parked += 1
        return False

    def _has_slot_to_share(self, content_hash: str) -> bool:
        if not self._slots.holds(content_hash) or content_hash in self._draining:
            return False
        return content_hash in self._slots.used or not self._parked  # an idle slot goes to the longest waiting

    def take_ready(self, now_s: float) -> tuple[list[Request], Failures]:
        """Return parked requests that may be queued now, and those whose adapter cannot be loaded, with the error."""
        if not self._parked:
            return [], []
        failures = self._take_failed()
        self._load_parked(now_s)
        return [*self._fill_slots(now_s), *self._balance(now_s)], failures

    def forget(self, request: Request, status: RequestStatus) -> None:
        """Drop a request that has ended; `status` is the one before."""
        if status is RequestStatus.WAITING_FOR_GRAMMAR:
            return  # not ours yet
        content_hash = _adapter_of(request).content_hash
        if status is RequestStatus.WAITING_FOR_ADAPTER:
            self._parked[content_hash].remove(request)
            self._num_parked -= 1
            if len(self._parked[content_hash]):
                return
            del self._parked[content_hash]
        elif self._slots.remove_user(content_hash):
            self._draining.pop(content_hash, None)
        # Even if requests for it are parked: others may be ahead of them.
        if content_hash in self._held and content_hash not in self._slots.used:
            self._held.discard(content_hash)
            self._store.release(content_hash)

    def take_fills(self) -> tuple[SlotFill, ...]:
        """Return the slots that the step being scheduled fills."""
        return self._slots.take_fills()

    def confirm(self, fills: Sequence[SlotFill]) -> None:
        """See `AdapterSlots.confirm`."""
        self._slots.confirm(fills)

    def repeat(self, fills: Sequence[SlotFill]) -> None:
        """See `AdapterSlots.repeat`."""
        self._slots.repeat(fills)

    def check_integrity(self) -> None:
        """Assert that only adapters with requests are held, and that no slot drains needlessly."""
        self._slots.check_integrity()
        assert all(map(len, self._parked.values()))
        assert self._num_parked == sum(map(len, self._parked.values()))
        assert self._held <= self._parked.keys() | self._slots.used.keys()
        assert self._draining.keys() <= self._slots.used.keys()

    def _take_failed(self) -> Failures:
        """Return the requests parked for adapters that cannot be loaded."""
        failures: Failures = []
        for content_hash, error in self._store.take_failed():
            self._held.discard(content_hash)
            if content_hash in self._parked:
                failures += [(request, error) for request in self._parked[content_hash].in_order(0.0)]
        return failures

    @property
    def _homeless(self) -> list[str]:
        """The parked adapters without a slot."""
        return [adapter for adapter in self._parked if not self._slots.holds(adapter)]

    def _load_parked(self, now_s: float) -> None:
        """Have the store load parked adapters, the best first, while it has places."""
        missing = [adapter for adapter in self._homeless if adapter not in self._held]
        if not missing or not self._store.has_room:
            return
        for content_hash in sorted(missing, key=lambda adapter: self._rank(adapter, now_s)):
            if not self._store.begin(_adapter_of(self._best(content_hash, now_s))):
                break
            self._held.add(content_hash)

    def _fill_slots(self, now_s: float) -> Iterator[Request]:
        """Give slots to the best parked adapters that are loaded; yield all of their requests."""
        while self._slots.has_room:
            loaded = [adapter for adapter in self._parked if self._slots.holds(adapter) or self._store.has(adapter)]
            if not loaded:
                return
            best = min(loaded, key=lambda adapter: self._rank(adapter, now_s))
            if not self._slots.holds(best):
                self._slots.assign(best)
            yield from self._unpark(best, now_s)

    def _balance(self, now_s: float) -> Iterator[Request]:
        """Drain as many slots as adapters wait for, no more; yield requests parked for slots that need not drain."""
        num_wanted = 0
        if not self._slots.has_room:
            num_wanted = sum(adapter not in self._held or self._store.has(adapter) for adapter in self._homeless)
        fewest_first = sorted(self._slots.used, key=self._slots.used.__getitem__)
        for adapter in fewest_first:
            if len(self._draining) >= num_wanted:
                break
            self._draining.setdefault(adapter)
        while len(self._draining) > num_wanted:
            adapter, _ = self._draining.popitem()
            yield from self._unpark(adapter, now_s)

    def _unpark(self, content_hash: str, now_s: float) -> list[Request]:
        """Give all requests parked for an adapter its slot."""
        queue = self._parked.pop(content_hash, None)
        requests = [] if queue is None else list(queue.in_order(now_s))
        for request in requests:
            request.status = RequestStatus.WAITING
            request.adapter_slot = self._slots.add_user(content_hash)
        self._num_parked -= len(requests)
        return requests

    def _best(self, content_hash: str, now_s: float) -> Request:
        best = self._parked[content_hash].peek(now_s)
        assert best is not None
        return best

    def _rank(self, content_hash: str, now_s: float) -> tuple[int, int]:
        best = self._best(content_hash, now_s)
        return self._parked[content_hash].aged_class(best, now_s), best.arrival_index


def _adapter_of(request: Request) -> AdapterRef:
    assert request.adapter is not None
    return request.adapter
