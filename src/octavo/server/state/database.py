"""`StateDatabase`: the SQLite file of a folder, and the one thread that uses it.

Journaled ahead (WAL) and synced at each commit: what a caller was told is on disk, and a killed process leaves no half
of a transaction.
"""

import asyncio
import logging
import os
import sqlite3
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from octavo.errors import InvalidParameterError, StateError, anew

T = TypeVar("T")

_MEMORY = ":memory:"  # SQLite's name of it
_PAGES_AT_ONCE = 4096  # 16 MiB
_MAX_SAID = 100  # different texts of a problem


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """What is in a file, and the option that names its folder, for errors."""

    option: str
    version: int  # of the schema
    schema: str
    pragmas: tuple[str, ...] = ()  # set at each opening


# `body` is the object on the wire, as JSON; what is looked for has a column. A line without a record is unanswered.
STATE = Layout(
    option="state_dir",
    version=1,
    schema="""
CREATE TABLE files (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, purpose TEXT NOT NULL,
    num_bytes INTEGER NOT NULL, expires_at INTEGER, body BLOB NOT NULL
);
CREATE TABLE batches (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, status TEXT NOT NULL,
    input_file_id TEXT NOT NULL, output_seconds INTEGER, created_at INTEGER NOT NULL, body BLOB NOT NULL
);
CREATE TABLE lines (
    batch TEXT NOT NULL, line INTEGER NOT NULL, custom_id TEXT NOT NULL, start INTEGER NOT NULL,
    num_bytes INTEGER NOT NULL, is_failed INTEGER, record BLOB
);
CREATE UNIQUE INDEX lines_in_order ON lines (batch, line);
CREATE INDEX unanswered_lines ON lines (batch, line) WHERE record IS NULL;
""",
)


class StateDatabase:
    """Runs work on its thread, each piece in a transaction of its own."""

    def __init__(self, path: Path | None, layout: Layout = STATE) -> None:
        """Open or create the file; None: it lives in memory.

        Raises InvalidParameterError: it is damaged, or another version has written it.
        """
        self._name = _MEMORY if path is None else path.name
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="octavo-state")
        try:
            self._connection = self._thread.submit(_opened, path, layout).result()
        except BaseException:
            self._thread.shutdown()
            raise

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` in a transaction, which is on disk when this returns. Raises StateError: it was rolled back."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._in_transaction, work)

    def run_now(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """As `run`, for the time before there is an event loop."""
        return self._thread.submit(self._in_transaction, work).result()

    async def shrink(self) -> None:
        """Give back pages that nothing is in any more, a few thousand at a time. Raises StateError."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._shrink)

    def close(self) -> None:
        """Finish what was begun, and close the file."""
        self._thread.submit(self._connection.close).result()
        self._thread.shutdown()

    def _shrink(self) -> None:
        try:
            pages = f"PRAGMA incremental_vacuum({_PAGES_AT_ONCE})"
            self._connection.executescript(pages)  # `execute` would do one page
        except sqlite3.Error as error:
            raise StateError(f"{self._name} cannot be used: {error}") from error

    def _in_transaction(self, work: Callable[[sqlite3.Connection], T]) -> T:
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                result = work(self._connection)
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise
        except (sqlite3.Error, OSError) as error:
            raise StateError(f"{self._name} cannot be used: {error}") from error
        return result


class WriteQueue(Generic[T]):
    """What is to be written: items that come while others are written go together with the next transaction.

    Owned by one event loop. `store` writes a list of them; what it raises of StateError, those who wait get.
    """

    def __init__(self, store: Callable[[list[T]], Awaitable[None]]) -> None:
        self._store = store
        self._waiting: list[tuple[T, asyncio.Future[None]]] = []
        self._writing: asyncio.Task[None] | None = None

    def put(self, item: T) -> "asyncio.Future[None]":
        """Write an item, soon; done when that has happened. If cancelled, it may or may not be written."""
        stored: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, stored))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())
        return stored

    async def close(self) -> None:
        """Wait until all is written."""
        if self._writing is not None:
            await asyncio.wait((self._writing,))

    async def _write(self) -> None:
        while self._waiting:
            waiting, self._waiting = self._waiting, []
            # Who has cancelled may go on as if nothing came any more.
            waiting = [(item, stored) for item, stored in waiting if not stored.cancelled()]
            failure: StateError | None = None
            try:
                await self._store([item for item, _ in waiting])
            except StateError as error:
                failure = error
            for _, stored in waiting:
                if stored.done():
                    continue
                if failure is None:
                    stored.set_result(None)
                else:
                    stored.set_exception(anew(failure))


class WriteProblem:
    """Why a file is not written that no request needs; `/health` shows it while it lasts. Each text is logged once."""

    def __init__(self, logger: logging.Logger, consequence: str) -> None:
        self._logger, self._consequence = logger, consequence
        self._said: set[str] = set()
        self.text: str | None = None  # None: all is well

    def set(self, text: str) -> None:
        self.text = text
        if text not in self._said and len(self._said) < _MAX_SAID:
            self._said.add(text)
            self._logger.error("%s: %s (logged once)", self._consequence, text)

    def clear(self) -> None:
        self.text = None


def _opened(path: Path | None, layout: Layout) -> sqlite3.Connection:
    if path is None:
        connection = sqlite3.connect(_MEMORY, isolation_level=None)
        connection.executescript(layout.schema)
        return connection
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))  # SQLite's other files get this mode, too
        connection = sqlite3.connect(path, isolation_level=None)
        try:
            _prepare(connection, path, layout)
        except BaseException:
            connection.close()
            raise
    except (sqlite3.Error, OSError) as error:
        raise InvalidParameterError(layout.option, str(path.parent), f"{path.name} cannot be used: {error}") from error
    return connection


def _prepare(connection: sqlite3.Connection, path: Path, layout: Layout) -> None:
    connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # of a new file; `shrink` gives back what is free
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    for pragma in layout.pragmas:
        connection.execute(f"PRAGMA {pragma}")
    [version] = connection.execute("PRAGMA user_version").fetchone()
    if version == 0:
        connection.executescript(f"BEGIN IMMEDIATE; {layout.schema} PRAGMA user_version = {layout.version}; COMMIT;")
    elif version != layout.version:
        limit = f"{path.name} is of version {version}, this is Octavo's version {layout.version}; use another folder"
        raise InvalidParameterError(layout.option, str(path.parent), limit)
