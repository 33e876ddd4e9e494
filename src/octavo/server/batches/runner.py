"""`BatchRunner`: takes batches through their statuses, from wherever the last server left them."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial

import msgspec

from octavo.errors import StateError
from octavo.metrics.collect import HttpMetrics
from octavo.server.args import ServerArgs
from octavo.server.batches.files import FileStore
from octavo.server.batches.input import InputLine, LineReader, check_input, read_line
from octavo.server.batches.lines import InterruptedLineError, LineAnswerer, ReadLine, is_failed, unanswered, usage_of
from octavo.server.batches.protocol import Batch, LineError, LineResult
from octavo.server.batches.slots import BatchSlots
from octavo.server.batches.store import BatchStore, Record
from octavo.server.state.database import WriteQueue

logger = logging.getLogger(__name__)

_PAGE_LINES = 64  # that are looked up at a time
_RETRY_S = 2.0  # after which a batch goes on that the engine's end or a full disk has stopped


class BatchRunner:
    """One task per batch. Owned by one event loop."""

    def __init__(
        self,
        store: BatchStore,
        files: FileStore,
        args: ServerArgs,
        metrics: HttpMetrics,
        *,
        answerer: LineAnswerer,
        slots: BatchSlots,
        finalize: Callable[[Batch], Awaitable[None]],
        wait_for_engine: Callable[[], Awaitable[None]],
    ) -> None:
        self._store, self._files, self._args = store, files, args
        self._answerer, self._slots, self._finalize, self._wait_for_engine = answerer, slots, finalize, wait_for_engine
        self._metrics, self._records = metrics, WriteQueue(self._store_records)
        self._batches: dict[str, asyncio.Task[None]] = {}
        self._answering: dict[str, asyncio.Task[None]] = {}  # of batches in progress

    async def resume(self) -> None:
        """Go on with all batches that have not ended. Raises StateError."""
        for batch_id in await self._store.unfinished():
            self.begin(batch_id)

    def begin(self, batch_id: str) -> None:
        """Work on a batch until it ends."""
        if batch_id not in self._batches:
            task = self._batches[batch_id] = asyncio.create_task(self._work(batch_id))
            task.add_done_callback(lambda _: self._batches.pop(batch_id))

    def stop_answering(self, batch_id: str) -> None:
        """The batch is to be cancelled: its lines in flight are aborted."""
        if (answering := self._answering.get(batch_id)) is not None:
            answering.cancel()

    async def close(self) -> None:
        """Stop, and keep the answers that are there."""
        tasks = list(self._batches.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._records.close()

    async def _work(self, batch_id: str) -> None:
        has_ended = False
        while not has_ended:
            try:
                has_ended = await self._step(batch_id)
            except (InterruptedLineError, StateError, OSError) as error:
                logger.warning("batch %s goes on in %g s: %s", batch_id, _RETRY_S, error)
                await asyncio.sleep(_RETRY_S)
            except Exception:  # a bug of ours, which must not end other batches
                logger.exception("batch %s stops until the next start of the server", batch_id)
                return

    async def _step(self, batch_id: str) -> bool:
        """Take a batch to its next status; return whether it has ended."""
        batch = await self._store.load(batch_id)
        match batch.status:
            case "validating":
                await self._check(batch)
            case "in_progress":
                await self._wait_for_engine()
                await self._answer_in_time(batch)
            case "finalizing" | "cancelling":
                await self._finalize(batch)
            case _:
                counts, status = batch.request_counts, batch.status
                logger.info("batch %s: %s, %d of %d lines answered", batch_id, status, counts.completed, counts.total)
                return True
        return False

    async def _check(self, batch: Batch) -> None:
        path, endpoints = self._files.path(batch.input_file_id), (batch.endpoint,)
        limits = {"max_lines": self._args.max_batch_lines, "max_line_bytes": self._args.max_body_bytes}
        try:
            lines, errors = await asyncio.to_thread(check_input, path, endpoints, **limits)
        except FileNotFoundError:
            lines, errors = [], [LineError(code="file_missing", message="The input file is gone.")]
        if errors:
            await self._store.fail(batch.id, errors)
        else:
            await self._store.begin(batch.id, lines)

    async def _answer_in_time(self, batch: Batch) -> None:
        """Answer lines until all have an answer, the window has expired, or the batch is cancelled."""
        # `created_at` is a whole second, so `expires_at` is up to one early.
        answering = self._answering[batch.id] = asyncio.create_task(self._answer_all(batch))
        try:
            await asyncio.wait((answering,), timeout=max(0.0, batch.expires_at + 1 - time.time()))
        finally:
            del self._answering[batch.id]
            answering.cancel()
            await asyncio.wait((answering,))
        if not answering.cancelled() and (error := answering.exception()) is not None:
            raise _first(error)
        await self._store.end_answering(batch.id)

    async def _answer_all(self, batch: Batch) -> None:
        with contextlib.closing(LineReader(self._files.path(batch.input_file_id))) as reader:
            async with asyncio.TaskGroup() as group:
                after = -1
                while lines := await self._store.unanswered(batch.id, after, _PAGE_LINES):
                    for line in lines:
                        read = await asyncio.to_thread(self._read, reader, line)
                        num_samples = 1 if isinstance(read, LineResult) else read.num_samples
                        await self._slots.take(num_samples)
                        task = group.create_task(self._answer(batch.id, line, read))
                        # Not within the task, which may be cancelled before it begins.
                        task.add_done_callback(partial(self._release, num_samples))
                    after = lines[-1].line

    def _release(self, num_samples: int, _: "asyncio.Task[None]") -> None:
        self._slots.give_back(num_samples)

    def _read(self, reader: LineReader, line: InputLine) -> ReadLine | LineResult:
        """Return a line, or its result if its file is no longer what it was."""
        try:
            return self._answerer.read(read_line(reader.read(line)))
        except msgspec.MsgspecError:
            return unanswered(line.custom_id, "input_damaged", "The input file has changed since it was checked.")

    async def _answer(self, batch_id: str, line: InputLine, read: ReadLine | LineResult) -> None:
        result = read if isinstance(read, LineResult) else await self._answerer.answer(read)
        data = msgspec.json.encode(result)
        await self._records.put(Record(batch_id, line.line, data, is_failed(result), usage_of(result)))

    async def _store_records(self, records: list[Record]) -> None:
        num_answered, num_failed = await self._store.record(records)
        self._metrics.batch_lines["answered"] += num_answered
        self._metrics.batch_lines["failed"] += num_failed


def _first(error: BaseException) -> BaseException:
    """Return the first error of a group; the lines of the others are tried again with its own."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
