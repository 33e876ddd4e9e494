"""Waiting requests, in order of admission."""

import heapq
from collections.abc import Iterator

from octavo.sampling_params import RequestPriority
from octavo.scheduler.request import Request

_MAX_DEAD_ENTRIES = 64  # in addition to one per live entry


class RequestQueue:
    """One heap per priority class, ordered by arrival; heads are compared, and waiting promotes a head class by class.

    Only heads are inspected, so a long queue costs a step nothing. A preempted request returns with its old arrival
    index, at the front of its class. Removal is lazy: finished entries are skipped at the top.
    """

    def __init__(self, ageing_s: float) -> None:
        self._ageing_s = ageing_s
        self._classes: list[list[tuple[int, Request]]] = [[] for _ in RequestPriority]
        self._num_removed = 0

    def __len__(self) -> int:
        return sum(map(len, self._classes)) - self._num_removed

    def add(self, request: Request) -> None:
        heapq.heappush(self._classes[request.priority], (request.arrival_index, request))

    def remove(self, request: Request) -> None:
        """Remove a waiting request, whose status must be final already."""
        assert request.status.is_final
        self._num_removed += 1
        if self._num_removed > len(self) + _MAX_DEAD_ENTRIES:
            self._drop_removed()

    def peek(self, now_s: float) -> Request | None:
        """Return the request to admit next: the best (aged class, arrival) among the heads."""
        heads = [head for head in map(self._head, self._classes) if head is not None]
        return min(heads, key=lambda request: self._aged_order(request, now_s), default=None)

    def pop(self, request: Request) -> None:
        """Remove the request that `peek` returned."""
        _, popped = heapq.heappop(self._classes[request.priority])
        assert popped is request

    def aged_class(self, request: Request, now_s: float) -> int:
        """Return a request's current class: one better for each `ageing_s` since its arrival."""
        waited_s = max(0.0, now_s - request.arrival_time_s)
        return request.priority - int(waited_s / self._ageing_s)

    def in_order(self, now_s: float) -> Iterator[Request]:
        """Yield all waiting requests, in order. For debugging and tests; sorts."""
        waiting = [request for entries in self._classes for _, request in entries if not request.status.is_final]
        yield from sorted(waiting, key=lambda request: self._aged_order(request, now_s))

    def _drop_removed(self) -> None:
        """Compact the heaps: entries aborted while nothing is admitted must not pile up."""
        for entries in self._classes:
            entries[:] = [entry for entry in entries if not entry[1].status.is_final]
            heapq.heapify(entries)
        self._num_removed = 0

    def _head(self, entries: list[tuple[int, Request]]) -> Request | None:
        while entries and entries[0][1].status.is_final:
            heapq.heappop(entries)
            self._num_removed -= 1
        return entries[0][1] if entries else None

    def _aged_order(self, request: Request, now_s: float) -> tuple[int, int]:
        return self.aged_class(request, now_s), request.arrival_index
