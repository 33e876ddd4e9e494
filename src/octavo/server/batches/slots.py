"""`BatchSlots`: how many samples of batches run at once, so that interactive requests find room and short steps."""

import asyncio
from collections.abc import Callable
from time import monotonic

_POLL_S = 0.05  # how often the load of others is looked at again
_QUIET_S = 2.0  # without interactive requests, before batches take all that they may
_PART = 8  # of the limit is left to batches until then: every running sample lengthens the steps of all


class BatchSlots:
    """Taken in the order of asking, so that batches take turns. Owned by one event loop.

    While there are interactive requests, batches fill what these leave of the engine, up to a part of their limit. They
    always have a place, so that they go on under any load.
    """

    def __init__(self, limit: int, max_running: int, num_interactive: Callable[[], int]) -> None:
        self._limit, self._max_running, self._num_interactive = limit, max_running, num_interactive
        self._num_used = 0
        self._busy_s = -_QUIET_S  # when there was an interactive request last
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    async def take(self, num_samples: int) -> None:
        """Wait until there is room for these samples, or until they would be the only ones."""
        async with self._turn:
            while self._num_used + num_samples > self._num_usable() and self._num_used:
                self._freed.clear()
                try:
                    async with asyncio.timeout(_POLL_S):
                        await self._freed.wait()
                except TimeoutError:
                    continue
            self._num_used += num_samples

    def give_back(self, num_samples: int) -> None:
        self._num_used -= num_samples
        self._freed.set()

    def _num_usable(self) -> int:
        num_interactive, now_s = self._num_interactive(), monotonic()
        if num_interactive:
            self._busy_s = now_s
        is_quiet = now_s - self._busy_s >= _QUIET_S
        limit = self._limit if is_quiet else max(1, self._limit // _PART)
        return min(limit, self._max_running - num_interactive)
