"""`Journal`: requests that were accepted and answers that are kept, on disk, for the server that comes after a kill.

Many requests share a sync. A journal that cannot be written costs no request: that is said once in the log, and in
`/health` while it lasts.
"""

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from octavo.errors import InvalidParameterError, StateError
from octavo.server.kept.recording import Event
from octavo.server.openai.birth import Birth
from octavo.server.state.database import Layout, StateDatabase, WriteProblem, WriteQueue

logger = logging.getLogger(__name__)

_LAYOUT = Layout(
    option="state_dir",
    version=1,
    schema="""
CREATE TABLE answers (
    serial TEXT PRIMARY KEY, num_attempts INTEGER NOT NULL, entry BLOB NOT NULL, body BLOB NOT NULL, answer BLOB
) WITHOUT ROWID;
CREATE TABLE alive (seconds REAL NOT NULL);
INSERT INTO alive VALUES (0.0);
""",
    pragmas=("secure_delete = ON",),  # prompts do not stay in free pages
)
_ALIVE_S = 10.0  # how often the journal notes that the server lives, while there are requests
_PAGE_BYTES = 4096
_SPARE_BYTES = 2**20  # of the file, for tables and what is being replaced
MAX_ATTEMPTS = 3  # to compute a request again: it may be what kills the server
MAX_OUTAGE_S = 3600.0  # after which nobody waits for an answer any more


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One accepted request; its body is beside it."""

    serial: str
    path: str
    owner: str
    key: bytes | None
    request: bytes  # digest of path and body
    is_stream: bool
    name: str | None  # of the stream, if its events have ids
    birth: Birth


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """All of an answer that is over."""

    ended_s: float
    num_choices: int
    events: list[Event]
    warnings: list[str]


class Unfinished(msgspec.Struct, frozen=True, kw_only=True):
    """A request that was running when the server was killed."""

    entry: Entry
    body: bytes


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What the server before has left, in the order in which it was accepted."""

    unfinished: list[Unfinished]
    finished: list[tuple[Entry, Answer]]


_encode = msgspec.msgpack.Encoder().encode
Work = Callable[[sqlite3.Connection], object]


class Journal:
    """Owned by one event loop. No method raises for what is wrong with the file: see `problem`."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        """Nothing is opened before `load`.

        `max_bytes` limits the bodies of running requests together; answers, of which others see to it, need no more.
        """
        self._path, self._max_body_bytes = path, max_bytes
        max_pages = (2 * max_bytes + _SPARE_BYTES) // _PAGE_BYTES
        self._layout = replace(_LAYOUT, pragmas=(*_LAYOUT.pragmas, f"max_page_count = {max_pages}"))
        self._database: StateDatabase | None = None
        self._writes = WriteQueue(self._write)
        self._body_bytes: dict[str, int] = {}  # of unfinished requests
        self._noting: asyncio.Task[None] | None = None
        self._failure = WriteProblem(logger, "a request is not journaled, and would not outlive the server")
        self._loss: str | None = None  # at the start

    @property
    def problem(self) -> str | None:
        """Why requests are not journaled, or what was lost at the start; None: all is well."""
        return self._failure.text or self._loss

    def load(self) -> Found:
        """Open the file, return what is in it, and begin to write. A damaged file is set aside."""
        found = Found(unfinished=[], finished=[])
        for is_second_try in (False, True):
            try:
                self._database = StateDatabase(self._path, self._layout)
                found = self._database.run_now(_read)
                break
            except (InvalidParameterError, StateError, TypeError, ValueError, msgspec.MsgspecError) as error:
                why = error.__cause__ or error
                self._close_database()
                if is_second_try or isinstance(why, OSError):
                    self._failure.set(f"{self._path.name} cannot be used: {why}")
                    break
                self._loss = f"{self._path.name} was damaged, and is set aside: {why}"
                logger.error("requests of the server before are lost: %s", self._loss)
                with suppress(OSError):  # then the second try says why
                    _set_aside(self._path)
        self._body_bytes = {each.entry.serial: len(each.body) for each in found.unfinished}
        self._noting = asyncio.create_task(self._note_life())
        return found

    def add(self, entry: Entry, body: bytes) -> "asyncio.Future[None]":
        """Write a request; done when it is on disk, or when it cannot be."""
        if sum(self._body_bytes.values()) + len(body) > self._max_body_bytes:
            self._failure.set("there are more bodies of running requests than --keep-mib allows")
            done = asyncio.get_running_loop().create_future()
            done.set_result(None)
            return done
        self._body_bytes[entry.serial] = len(body)
        values = (entry.serial, _encode(entry), body)
        return self._put(lambda db: db.execute("INSERT INTO answers VALUES (?, 0, ?, ?, NULL)", values))

    def finish(self, serial: str, answer: Answer) -> None:
        """Replace a request's body by its answer."""
        if self._body_bytes.pop(serial, None) is not None:
            values = (_encode(answer), serial)
            self._put(lambda db: db.execute("UPDATE answers SET answer = ?, body = x'' WHERE serial = ?", values))

    def remove(self, serial: str) -> None:
        """Forget a request, running or answered."""
        self._body_bytes.pop(serial, None)
        self._put(lambda db: db.execute("DELETE FROM answers WHERE serial = ?", (serial,)))

    async def close(self) -> None:
        """Write what was asked for, and note that the server was not killed. Idempotent."""
        if self._noting is not None:
            self._noting.cancel()
            self._noting = None
            self._put(lambda db: db.execute("UPDATE answers SET num_attempts = 0"))
            await self._writes.close()
            self._close_database()

    def _put(self, work: Work) -> "asyncio.Future[None]":
        return self._writes.put(work)

    async def _note_life(self) -> None:
        while True:
            await asyncio.sleep(_ALIVE_S)
            if self._body_bytes:
                await self._write([])

    async def _write(self, works: list[Work]) -> None:
        """Write in one transaction; one by one if that fails, so that only what does not fit is lost."""
        if len(works) > 1:
            with suppress(StateError, InvalidParameterError):
                await self._commit(works)
                return
        for each in [[work] for work in works] or [[]]:
            try:
                await self._commit(each)
            except (StateError, InvalidParameterError) as error:
                self._failure.set(f"{self._path.name} cannot be written: {error.__cause__ or error}")

    async def _commit(self, works: list[Work]) -> None:
        def write(db: sqlite3.Connection) -> None:
            for work in works:
                work(db)
            db.execute("UPDATE alive SET seconds = ?", (time.time(),))

        if self._database is None:
            self._database = await asyncio.to_thread(StateDatabase, self._path, self._layout)
        await self._database.run(write)
        if works:
            self._failure.clear()

    def _close_database(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None


def _read(connection: sqlite3.Connection) -> Found:
    """Return what the server before has left, count another attempt, and drop what was too often or too long ago."""
    [problem] = connection.execute("PRAGMA quick_check(1)").fetchone()
    if problem != "ok":
        raise ValueError(problem)
    now_s = time.time()
    [alive_s] = connection.execute("SELECT seconds FROM alive").fetchone()
    unfinished, finished, dropped = [], [], []
    with closing(connection.execute("SELECT serial, num_attempts, entry, body, answer FROM answers")) as rows:
        for serial, num_attempts, data, body, answer in rows:
            entry = msgspec.msgpack.decode(data, type=Entry)
            if answer is not None:
                finished.append((entry, msgspec.msgpack.decode(answer, type=Answer)))
            elif num_attempts >= MAX_ATTEMPTS or now_s - alive_s > MAX_OUTAGE_S:
                reason = f"it was running at {num_attempts} kills of the server"
                if num_attempts < MAX_ATTEMPTS:
                    reason = f"the server was away for {(now_s - alive_s) / 60:.0f} minutes"
                logger.warning("request %s is not computed again: %s", entry.birth.name, reason)
                dropped.append((serial,))
            else:
                unfinished.append(Unfinished(entry=entry, body=body))
    connection.executemany("DELETE FROM answers WHERE serial = ?", dropped)
    connection.execute("UPDATE answers SET num_attempts = num_attempts + 1 WHERE answer IS NULL")
    unfinished.sort(key=lambda each: each.entry.birth.created)
    finished.sort(key=lambda each: each[1].ended_s)
    return Found(unfinished=unfinished, finished=finished)


def _set_aside(path: Path) -> None:
    """Rename a file that cannot be read, over an earlier one, and remove what belongs to it."""
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    path.replace(path.with_name(path.name + ".damaged"))
