"""How batches go on: from every status, after a full disk, an engine that went away, a bug; and what lines share."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path

import msgspec
import pytest

from octavo.metrics.collect import HttpMetrics
from octavo.server.args import ServerArgs
from octavo.server.batches.files import FileStore
from octavo.server.batches.lines import InterruptedLineError, LineAnswerer, ReadLine
from octavo.server.batches.output import finalize
from octavo.server.batches.protocol import Batch, BatchLine, BatchRequest, LineResponse, LineResult
from octavo.server.batches.runner import BatchRunner
from octavo.server.batches.slots import BatchSlots
from octavo.server.batches.store import BatchStore, Record
from octavo.server.http.errors import ApiError
from octavo.server.http.upload import Upload
from octavo.server.state.database import StateDatabase

COMPLETION = "/v1/completions"
NUM_LINES = 12
Answer = Callable[[ReadLine], Awaitable[LineResult]]


async def at_once(line: ReadLine) -> LineResult:
    response = LineResponse(status_code=200, request_id="req_1", body={"text": line.custom_id})
    return LineResult(id="batch_req_1", custom_id=line.custom_id, response=response, error=None)


async def never(line: ReadLine) -> LineResult:
    await asyncio.Event().wait()
    raise AssertionError


class FakeAnswerer(LineAnswerer):
    """Reads lines as they are read, and answers them as the test wants."""

    def __init__(self, answer: Answer) -> None:
        def no_service() -> None:
            raise AssertionError

        super().__init__(no_service, ServerArgs())  # type: ignore[arg-type]
        self._answer = answer

    async def answer(self, line: ReadLine) -> LineResult:
        return await self._answer(line)


class Server:
    """Files and batches of one server after the other, without HTTP and without an engine."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.args, self.metrics = folder, ServerArgs(), HttpMetrics()
        self._open()

    def _open(self) -> None:
        self.database = StateDatabase(self.folder / "db")
        self.files = FileStore(self.database, self.folder / "files", self.args)
        self.store = BatchStore(self.database, self.args)
        self.slots = BatchSlots(4, 8, lambda: 0)

    def restart(self) -> None:
        self.database.close()
        self._open()

    def runner(self, answer: Answer = at_once, finish: Callable[[Batch], Awaitable[None]] | None = None) -> BatchRunner:
        return BatchRunner(
            self.store, self.files, self.args, self.metrics,
            answerer=FakeAnswerer(answer), slots=self.slots, wait_for_engine=partial(asyncio.sleep, 0),
            finalize=finish or partial(finalize, database=self.database, store=self.store, files=self.files),
        )  # fmt: skip

    async def create(self, num_lines: int = NUM_LINES) -> Batch:
        lines = [
            json.dumps({"custom_id": f"{n}", "method": "POST", "url": COMPLETION, "body": {"prompt": "x"}})
            for n in range(num_lines)
        ]
        part, content = self.files.new_part(), "\n".join(lines).encode()
        part.write_bytes(content)
        upload = Upload(fields={"purpose": "batch"}, filename="in", num_bytes=len(content))
        file = await self.files.add_upload("", upload, part)
        return await self.store.create(
            "", BatchRequest(input_file_id=file.id, endpoint=COMPLETION, completion_window="24h")
        )

    async def status(self, batch_id: str) -> str:
        return (await self.store.load(batch_id)).status

    async def reach(self, batch_id: str, *statuses: str) -> Batch:
        async with asyncio.timeout(10.0):
            while (batch := await self.store.load(batch_id)).status not in statuses:
                await asyncio.sleep(0.005)
        return batch

    async def finish(self, runner: BatchRunner, batch_id: str) -> Batch:
        """Run all that is unfinished; return the batch when it has ended. Its files have every line once."""
        await runner.resume()
        batch = await self.reach(batch_id, "completed", "cancelled", "expired", "failed")
        await runner.close()
        ids = [
            json.loads(line)["custom_id"]
            for file_id in (batch.output_file_id, batch.error_file_id)
            if file_id is not None
            for line in self.files.path(file_id).read_bytes().splitlines()
        ]
        assert sorted(ids, key=int) == [f"{n}" for n in range(batch.request_counts.total)]
        assert batch.request_counts.completed + batch.request_counts.failed == batch.request_counts.total
        assert await self.database.run(lambda db: db.execute("SELECT count(*) FROM lines").fetchone()) == (0,)
        assert {path.name for path in (self.folder / "files").iterdir()} == {
            file.id for file in (await self.files.page("", after=None, limit=99, ascending=True, purpose=None)).data
        }
        assert self.slots._num_used == 0
        return batch


@pytest.fixture
async def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Server]:
    monkeypatch.setattr("octavo.server.batches.runner._RETRY_S", 0.01)
    made = Server(tmp_path)
    yield made
    made.database.close()


async def some(num_lines: int, line: ReadLine) -> LineResult:
    return await (at_once(line) if int(line.custom_id) < num_lines else never(line))


async def test_a_batch_goes_on_from_every_status(server: Server) -> None:
    batch = await server.create()
    assert await server.status(batch.id) == "validating"
    server.restart()
    first = server.runner(partial(some, 3))
    await first.resume()
    while (await server.store.load(batch.id)).request_counts.completed < 3:
        await asyncio.sleep(0.005)
    assert await server.status(batch.id) == "in_progress"
    await first.close()
    assert server.slots._num_used == 0
    server.restart()
    answered: list[str] = []

    async def count(line: ReadLine) -> LineResult:
        answered.append(line.custom_id)
        return await at_once(line)

    async def stay(batch: Batch) -> None:
        await asyncio.Event().wait()

    second = server.runner(count, stay)
    await second.resume()
    await server.reach(batch.id, "finalizing")
    await second.close()
    assert sorted(answered, key=int) == [f"{n}" for n in range(3, NUM_LINES)]
    server.restart()
    ended = await server.finish(server.runner(never), batch.id)
    assert (ended.status, ended.request_counts.completed) == ("completed", NUM_LINES)


async def test_a_cancelled_batch_stays_so_when_the_server_ends_meanwhile(server: Server) -> None:
    batch = await server.create()
    first = server.runner(partial(some, 2))
    await first.resume()
    while (await server.store.load(batch.id)).request_counts.completed < 2:
        await asyncio.sleep(0.005)
    await server.store.cancel("", batch.id)
    await first.close()
    server.restart()
    ended = await server.finish(server.runner(at_once), batch.id)
    assert (ended.status, ended.request_counts.completed) == ("cancelled", 2)
    before = await server.create()
    await server.store.cancel("", before.id)  # before its input was looked at
    assert (await server.finish(server.runner(), before.id)).request_counts.total == 0


async def test_a_full_disk_delays_answers_and_loses_none(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    batch = await server.create()
    [num_pages] = await server.database.run(lambda db: db.execute("PRAGMA page_count").fetchone())
    long = LineResponse(status_code=200, request_id="req_1", body={"text": "x" * 50_000})

    async def answer(line: ReadLine) -> LineResult:
        return LineResult(id="batch_req_1", custom_id=line.custom_id, response=long, error=None)

    set_limit = "PRAGMA max_page_count = {}".format
    await server.database.run(lambda db: db.execute(set_limit(num_pages + 20)).fetchone())
    runner = server.runner(answer)
    await runner.resume()
    async with asyncio.timeout(10.0):
        while "database or disk is full" not in caplog.text:
            await asyncio.sleep(0.005)
    await server.database.run(lambda db: db.execute(set_limit(2**30)).fetchone())
    ended = await server.finish(runner, batch.id)
    assert (ended.status, ended.request_counts.completed) == ("completed", NUM_LINES)


async def test_what_was_due_while_no_server_ran_expires(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = await server.create()
    first = server.runner(partial(some, 2))
    await first.resume()
    while (await server.store.load(batch.id)).request_counts.completed < 2:
        await asyncio.sleep(0.005)
    await first.close()
    monkeypatch.setattr("time.time", lambda: batch.expires_at + 5.0)
    server.restart()
    ended = await server.finish(server.runner(at_once), batch.id)
    assert (ended.status, ended.request_counts.completed) == ("expired", 2)
    assert ended.output_file_id is not None


async def test_the_database_gives_back_the_room_of_answers(server: Server) -> None:
    async def answer(line: ReadLine) -> LineResult:
        response = LineResponse(status_code=200, request_id="req_1", body={"text": "x" * 100_000})
        return LineResult(id="batch_req_1", custom_id=line.custom_id, response=response, error=None)

    await server.finish(server.runner(answer), (await server.create()).id)
    await server.store.sweep()
    [num_pages] = await server.database.run(lambda db: db.execute("PRAGMA page_count").fetchone())
    assert num_pages * 4096 < 200_000
    assert [batch.status for batch in (await server.store.page("", after=None, limit=9)).data] == ["completed"]


async def test_output_that_cannot_be_written_is_written_again(server: Server) -> None:
    batch = await server.create()
    num_tries = 0

    async def fail_first(batch: Batch) -> None:
        nonlocal num_tries
        num_tries += 1
        folder = server.folder / "files"
        if num_tries == 1:
            folder.rename(server.folder / "away")
        try:
            await finalize(batch, server.database, server.store, server.files)
        finally:
            if num_tries == 1:
                (server.folder / "away").rename(folder)

    assert (await server.finish(server.runner(finish=fail_first), batch.id)).status == "completed"
    assert num_tries == 2


async def test_lines_that_an_engine_has_left_are_tried_again(server: Server) -> None:
    batch, num_tries = await server.create(), 0

    async def answer(line: ReadLine) -> LineResult:
        nonlocal num_tries
        num_tries += 1
        if num_tries in (3, 9):
            raise InterruptedLineError("the engine was closed")
        return await at_once(line)

    ended = await server.finish(server.runner(answer), batch.id)
    assert (ended.status, ended.request_counts.completed) == ("completed", NUM_LINES)
    assert server.metrics.batch_lines == {"answered": NUM_LINES, "failed": 0}


async def test_a_bug_in_one_batch_ends_no_other(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    bad, good = await server.create(2), await server.create()

    async def answer(line: ReadLine) -> LineResult:
        if not caplog.records:
            raise ZeroDivisionError
        return await at_once(line)

    runner = server.runner(answer)
    runner.begin(bad.id)
    while "stops until the next start" not in caplog.text:
        await asyncio.sleep(0.005)
    runner.begin(good.id)
    await server.reach(good.id, "completed")
    assert await server.status(bad.id) == "in_progress"
    await runner.close()
    assert (await server.finish(server.runner(), bad.id)).status == "completed"


@pytest.mark.parametrize("damage", ["missing", "changed"])
async def test_an_input_that_is_no_longer_what_it_was(server: Server, damage: str) -> None:
    batch = await server.create()
    path = server.files.path(batch.input_file_id)
    if damage == "missing":
        path.rename(path.with_name("away"))
        runner = server.runner()
        runner.begin(batch.id)
        ended = await server.reach(batch.id, "failed")
        assert ended.errors is not None
        assert [error.code for error in ended.errors.data] == ["file_missing"]
        await runner.close()
        return
    first = server.runner(never)
    await first.resume()
    await server.reach(batch.id, "in_progress")
    await first.close()
    path.write_bytes(path.read_bytes()[:300])
    ended = await server.finish(server.runner(), batch.id)
    assert (ended.status, ended.request_counts.completed) == ("completed", 3)


async def test_an_answer_that_comes_too_late_changes_nothing(server: Server) -> None:
    """Neither in a batch that has ended, nor when the line has one already, nor when nobody waits for it any more."""
    batch = await server.create(2)
    runner = server.runner(never)
    await runner.resume()
    await server.reach(batch.id, "in_progress")
    records = runner._records
    await records.put(Record(batch.id, 0, b'{"custom_id":"0"}', False))
    await records.put(Record(batch.id, 0, b'{"custom_id":"again"}', True))
    records.put(Record(batch.id, 1, b'{"custom_id":"1"}', False)).cancel()
    await records.close()
    counts = (await server.store.load(batch.id)).request_counts
    assert (counts.completed, counts.failed) == (1, 0)
    await server.store.cancel("", batch.id)
    runner.stop_answering(batch.id)
    ended = await server.finish(runner, batch.id)
    assert (ended.status, ended.request_counts.completed, ended.request_counts.failed) == ("cancelled", 1, 1)
    await records.put(Record(batch.id, 1, b'{"custom_id":"1"}', False))
    assert await server.store.load(batch.id) == ended


async def test_slots_are_taken_in_turn() -> None:
    slots = BatchSlots(4, 6, lambda: 0)
    for _ in range(4):
        await slots.take(1)
    waiting = [asyncio.create_task(slots.take(num)) for num in (2, 1)]
    slots.give_back(1)
    await asyncio.sleep(0.01)
    assert not any(task.done() for task in waiting)  # the second has to wait for the first
    slots.give_back(1)
    await asyncio.wait(waiting[:1])
    slots.give_back(3)
    await asyncio.wait(waiting)
    slots.give_back(2)
    await slots.take(100)  # more than there are run alone


async def test_slots_leave_room_for_interactive_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    num_interactive, now_s = 1, 1000.0
    monkeypatch.setattr("octavo.server.batches.slots.monotonic", lambda: now_s)
    monkeypatch.setattr("octavo.server.batches.slots._POLL_S", 0.001)
    slots = BatchSlots(32, 40, lambda: num_interactive)

    async def take_all() -> int:
        """Take slots while there are any; return how many are in use."""
        with contextlib.suppress(TimeoutError):
            while True:
                async with asyncio.timeout(0.02):
                    await slots.take(1)
        return slots._num_used

    assert await take_all() == 4  # an eighth
    num_interactive, now_s = 0, 1001.9
    assert await take_all() == 4  # others may come back
    now_s = 1002.1
    assert await take_all() == 32
    slots.give_back(32)
    num_interactive = 60
    assert await take_all() == 1  # there is always room for one
    num_interactive = 39
    slots.give_back(1)
    assert await take_all() == 1


def test_lines_have_the_lowest_priority_whatever_they_ask_for() -> None:
    answerer = FakeAnswerer(at_once)
    for body in (b'{"prompt": "x", "priority": 0}', b'{"prompt": "x"}'):
        line = answerer.read(BatchLine(custom_id="a", method="POST", url=COMPLETION, body=msgspec.Raw(body)))
        assert not isinstance(line.wire, ApiError)
        assert line.wire.priority == 4
        assert line.num_samples == 1
    wrong = answerer.read(
        BatchLine(custom_id="a", method="POST", url=COMPLETION, body=msgspec.Raw(b'{"prompt": "x", "priority": 9}'))
    )
    assert not isinstance(wrong.wire, ApiError)
    assert wrong.wire.priority == 9  # for the service to refuse
