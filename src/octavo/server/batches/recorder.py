"""`BatchRecorder`: puts answers of lines into the database, those that arrive during a sync with the next one."""

import asyncio

from octavo.errors import StateError, anew
from octavo.metrics.collect import HttpMetrics
from octavo.server.batches.store import BatchStore, Record


class BatchRecorder:
    """Owned by one event loop. A sync takes milliseconds and serves all that wait for it."""

    def __init__(self, store: BatchStore, metrics: HttpMetrics) -> None:
        self._store, self._metrics = store, metrics
        self._waiting: list[tuple[Record, asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None

    async def put(self, record: Record) -> None:
        """Return when the record is on disk. Raises StateError. When cancelled, it may or may not be kept."""
        stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((record, stored))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())
        await stored

    async def close(self) -> None:
        """Wait for what is being written."""
        if self._writing is not None:
            await asyncio.wait((self._writing,))

    async def _write(self) -> None:
        while self._waiting:
            waiting, self._waiting = self._waiting, []
            # A batch whose lines were cancelled may be writing its files: nothing may come after that.
            waiting = [(record, stored) for record, stored in waiting if not stored.cancelled()]
            try:
                num_answered, num_failed = await self._store.record([record for record, _ in waiting])
            except StateError as error:
                for _, stored in waiting:
                    if not stored.done():
                        stored.set_exception(anew(error))
            else:
                self._metrics.batch_lines["answered"] += num_answered
                self._metrics.batch_lines["failed"] += num_failed
                for _, stored in waiting:
                    if not stored.done():
                        stored.set_result(None)
