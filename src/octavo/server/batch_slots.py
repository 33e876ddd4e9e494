"""`BatchSlots`: how many samples of batches run at once, so that interactive requests find room."""

import asyncio
from collections.abc import Callable

_POLL_S = 0.05  # how often the load of others is looked at again


class BatchSlots:
    """Taken in the order of asking, so that batches take turns. Owned by one event loop.

    Batches may fill what interactive requests leave of the engine, up to a limit, and always have a place, so that they
    go on under any load.
    """

    def __init__(self, limit: int, max_running: int, num_interactive: Callable[[], int]) -> None:
        self._limit, self._max_running, self._num_interactive = limit, max_running, num_interactive
        self._num_used = 0
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    async def take(self, num_samples: int) -> None:
        """Wait until there is room for these samples, or until they would be the only ones."""
        async with self._turn:
            while self._num_used and self._num_used + num_samples > self._num_usable:
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

    @property
    def _num_usable(self) -> int:
        return max(1, min(self._limit, self._max_running - self._num_interactive()))
