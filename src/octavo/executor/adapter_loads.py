"""Adapters that ranks in other processes are loading. One is loaded when it is on every rank."""

import math
import time
from collections.abc import Callable
from concurrent.futures import Future

from octavo.contracts.engine import AdapterRef
from octavo.contracts.ranks import AdapterLoaded, RankFailure


class LoadFuture(Future[None]):
    """The loading of one adapter. There is no background thread: asking for the result receives replies."""

    def __init__(self, adapter: AdapterRef, receive: Callable[[float | None], object]) -> None:
        super().__init__()
        self.adapter = adapter
        self.failures: dict[int, RankFailure | None] = {}  # by rank that has replied
        self._receive = receive

    def exception(self, timeout: float | None = None) -> BaseException | None:
        deadline_s = math.inf if timeout is None else time.monotonic() + timeout
        while not self.done() and (left_s := deadline_s - time.monotonic()) > 0.0:
            self._receive(None if timeout is None else left_s)
        return super().exception(0)


class AdapterLoads:
    """All loads under way, by content hash."""

    def __init__(self, num_ranks: int, as_error: Callable[[int, RankFailure], BaseException]) -> None:
        self._num_ranks = num_ranks
        self._as_error = as_error
        self._loads: dict[str, LoadFuture] = {}

    def add(self, load: LoadFuture) -> None:
        """Add a load that was sent to all ranks."""
        self._loads[load.adapter.content_hash] = load

    def settle(self, rank: int, reply: AdapterLoaded) -> None:
        """Record a rank's reply. A load that failed on one rank has failed; the others may have the adapter."""
        load = self._loads[reply.content_hash]
        load.failures[rank] = reply.failure
        if len(load.failures) < self._num_ranks:
            return
        del self._loads[reply.content_hash]
        failed = [(at, failure) for at, failure in sorted(load.failures.items()) if failure is not None]
        if failed:
            load.set_exception(self._as_error(*failed[0]))
        else:
            load.set_result(None)
