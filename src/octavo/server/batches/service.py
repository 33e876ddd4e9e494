"""`BatchService`: files and batches of a server with a state folder, from its start to its end."""

import asyncio
import logging
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Protocol

from octavo.errors import StateError
from octavo.metrics.collect import HttpMetrics
from octavo.server.args import ServerArgs
from octavo.server.batches.files import FileStore
from octavo.server.batches.lines import LineAnswerer
from octavo.server.batches.output import finalize
from octavo.server.batches.protocol import Batch, BatchRequest
from octavo.server.batches.runner import BatchRunner
from octavo.server.batches.slots import BatchSlots
from octavo.server.batches.store import BatchStore
from octavo.server.http.errors import ApiError
from octavo.server.openai.service import OpenAICompatibleService
from octavo.server.state.database import StateDatabase

logger = logging.getLogger(__name__)

_SWEEP_S = 60.0
_POLL_S = 0.1  # how often to see whether the model is loaded


class Models(Protocol):
    """The model of a server, or several."""

    def refusal(self) -> ApiError | None:
        """Return why no line can be answered yet, if so."""

    def serving(self, name: str | None) -> AbstractAsyncContextManager[OpenAICompatibleService]:
        """Return what is entered with the service of a model."""


class BatchService:
    """Opened with the folder locked (`server/state/folder.py`). Owned by one event loop while it runs."""

    def __init__(self, models: Models, max_running: int, args: ServerArgs, metrics: HttpMetrics) -> None:
        """`max_running`: samples of one model. Raises InvalidParameterError: the database cannot be used."""
        assert args.state_dir is not None
        folder = Path(args.state_dir)
        self._models, self._max_running, self._args, self._metrics = models, max_running, args, metrics
        self._database = StateDatabase(folder / "batches.sqlite3")
        self.files = FileStore(self._database, folder / "files", args)
        self.batches = BatchStore(self._database, args)
        self._runner: BatchRunner | None = None  # once the model is loaded

    async def create(self, owner: str, request: BatchRequest) -> Batch:
        """Accept a batch. Raises ApiError."""
        batch = await self.batches.create(owner, request)
        if self._runner is not None:
            self._runner.begin(batch.id)
        return batch

    async def cancel(self, owner: str, batch_id: str) -> Batch:
        """Begin to cancel a batch. Raises ApiError."""
        batch = await self.batches.cancel(owner, batch_id)
        if self._runner is not None:
            self._runner.stop_answering(batch_id)
        return batch

    async def run(self) -> None:
        """Work until cancelled."""
        await self._wait_for_engine()
        runner = self._runner = self._make_runner()
        try:
            has_resumed = False
            while True:
                try:
                    if not has_resumed:
                        await runner.resume()
                        has_resumed = True
                    await self.files.sweep()
                    await self.batches.sweep()
                except StateError as error:
                    logger.error("files and batches are not looked after for now: %s", error)
                await asyncio.sleep(_SWEEP_S)
        finally:
            await runner.close()

    def close(self) -> None:
        self._database.close()

    def _make_runner(self) -> BatchRunner:
        limit = self._args.max_batch_running or max(1, self._max_running // 2)
        return BatchRunner(
            self.batches,
            self.files,
            self._args,
            self._metrics,
            answerer=LineAnswerer(self._models.serving, self._args),
            slots=BatchSlots(limit, self._max_running, lambda: self._metrics.num_admitted),
            finalize=partial(finalize, database=self._database, store=self.batches, files=self.files),
            wait_for_engine=self._wait_for_engine,
        )

    async def _wait_for_engine(self) -> None:
        while self._models.refusal() is not None:
            await asyncio.sleep(_POLL_S)
