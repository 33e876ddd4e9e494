"""`BatchStore`: batches, and the answers of their lines, in the database of the state folder.

A batch moves through its statuses in transactions that check the one before, so it does not matter when the server is
killed: what a batch has reached is what the next server finds.
"""

import re
import sqlite3
import time
import uuid
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from octavo.server.args import ServerArgs
from octavo.server.batches.files import DAY_S, check_expiry, find_file, listed, quoted
from octavo.server.batches.input import InputLine
from octavo.server.batches.protocol import (
    UNFINISHED,
    Batch,
    BatchRequest,
    BatchStatus,
    LineError,
    LineErrors,
    Page,
    RequestCounts,
)
from octavo.server.http.errors import ApiError, bad_request
from octavo.server.openai.replies import Usage
from octavo.server.openai.service import ENDPOINTS
from octavo.server.state.database import StateDatabase

_WINDOW = re.compile(r"([1-9]\d{0,6})([smhd])")
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": DAY_S}
_MAX_WINDOW_S = 14 * DAY_S
_MAX_UNFINISHED = 1000  # batches
_MAX_METADATA, _MAX_KEY_CHARACTERS, _MAX_VALUE_CHARACTERS = 16, 64, 512  # as OpenAI's


class Record(NamedTuple):
    """The answer of a line, as it goes into a file."""

    batch_id: str
    line: int
    data: bytes
    is_failed: bool
    usage: Usage | None = None


class StoredLine(NamedTuple):
    """A line and its answer, if it has one."""

    line: int
    custom_id: str
    data: bytes | None
    is_failed: bool


class BatchStore:
    """Batches by owner, as `FileStore` has files."""

    def __init__(self, database: StateDatabase, args: ServerArgs) -> None:
        self._database, self._args = database, args

    async def create(self, owner: str, request: BatchRequest) -> Batch:
        """Accept a batch, whose input is checked later. Raises ApiError: 400, 404 for the file, 429 for too many."""
        window_s = _check(request)
        created_at = int(time.time())
        batch = Batch(
            id=f"batch_{uuid.uuid4().hex}",
            endpoint=request.endpoint,
            input_file_id=request.input_file_id,
            completion_window=request.completion_window,
            created_at=created_at,
            expires_at=created_at + window_s,
            metadata=request.metadata,
        )
        seconds = None if request.output_expires_after is None else request.output_expires_after.seconds

        def insert(db: sqlite3.Connection) -> None:
            find_file(db, owner, request.input_file_id, "input_file_id")
            where = f"status IN ({quoted(UNFINISHED)})"
            [num_unfinished] = db.execute(f"SELECT count(*) FROM batches WHERE {where}").fetchone()
            if num_unfinished >= _MAX_UNFINISHED:
                message = f"{num_unfinished} batches have not ended, the server's limit. Please try again later."
                raise ApiError(429, message, code="too_many_batches", headers={"Retry-After": "60"})
            columns = "id, owner, status, input_file_id, output_seconds, created_at, body"
            values = (
                batch.id,
                owner,
                batch.status,
                batch.input_file_id,
                seconds,
                created_at,
                msgspec.json.encode(batch),
            )
            db.execute(f"INSERT INTO batches ({columns}) VALUES (?, ?, ?, ?, ?, ?, ?)", values)

        await self._database.run(insert)
        return batch

    async def get(self, owner: str, batch_id: str) -> Batch:
        """Raises ApiError, 404."""
        return await self._database.run(lambda db: _find(db, owner, batch_id))

    async def page(self, owner: str, *, after: str | None, limit: int) -> Page[Batch]:
        """Return batches, the newest first. Raises ApiError: `after` is unknown."""
        return await self._database.run(
            lambda db: listed(db, "batches", Batch, owner, after=after, limit=limit, ascending=False, where={})
        )

    async def cancel(self, owner: str, batch_id: str) -> Batch:
        """Begin to cancel a batch, unless that has begun. Raises ApiError: 404; 400 if its lines have ended."""

        def begin(db: sqlite3.Connection) -> Batch:
            batch = _find(db, owner, batch_id)
            if batch.status in ("validating", "in_progress"):
                batch = replace(batch, status="cancelling", cancelling_at=int(time.time()))
                _save(db, batch)
            elif batch.status not in ("cancelling", "cancelled"):
                message = f"Batch {batch_id!r} cannot be cancelled: its status is '{batch.status}'."
                raise bad_request(message, "batch_id", "batch_not_cancellable")
            return batch

        return await self._database.run(begin)

    async def unfinished(self) -> list[str]:
        """Return the ids of batches to go on with, the oldest first."""
        query = f"SELECT id FROM batches WHERE status IN ({quoted(UNFINISHED)}) ORDER BY seq"
        return await self._database.run(lambda db: [batch_id for (batch_id,) in db.execute(query)])

    async def load(self, batch_id: str) -> Batch:
        return await self._database.run(lambda db: _load(db, batch_id))

    async def begin(self, batch_id: str, lines: Sequence[InputLine]) -> None:
        """The input is valid: `validating` becomes `in_progress`."""

        def insert(db: sqlite3.Connection) -> None:
            batch = _load(db, batch_id)
            if batch.status != "validating":  # cancelled meanwhile
                return
            columns = "INSERT INTO lines (batch, line, custom_id, start, num_bytes) VALUES (?, ?, ?, ?, ?)"
            db.executemany(columns, ((batch_id, *line) for line in lines))
            counts, now_s = RequestCounts(total=len(lines)), int(time.time())
            _save(db, replace(batch, status="in_progress", in_progress_at=now_s, request_counts=counts))

        await self._database.run(insert)

    async def fail(self, batch_id: str, errors: list[LineError]) -> None:
        """The input is not valid: `validating` becomes `failed`."""

        def end(db: sqlite3.Connection) -> None:
            batch = _load(db, batch_id)
            if batch.status == "validating":
                now_s, listed_errors = int(time.time()), LineErrors(data=errors)
                _save(db, replace(batch, status="failed", failed_at=now_s, errors=listed_errors))

        await self._database.run(end)

    async def unanswered(self, batch_id: str, after: int, limit: int) -> list[InputLine]:
        """Return the next lines without an answer; none unless the batch is in progress."""
        query = "SELECT line, custom_id, start, num_bytes FROM lines WHERE batch = ? AND line > ? AND record IS NULL"

        def read(db: sqlite3.Connection) -> list[InputLine]:
            if _load(db, batch_id).status != "in_progress":
                return []
            rows = db.execute(f"{query} ORDER BY line LIMIT ?", (batch_id, after, limit))
            return [InputLine(*row) for row in rows]

        return await self._database.run(read)

    async def record(self, records: Iterable[Record]) -> tuple[int, int]:
        """Keep results; return how many new ones are answers, and how many errors.

        A line has one: where there is one already, or the batch has ended, nothing changes.
        """
        update = "UPDATE lines SET record = ?, is_failed = ? WHERE batch = ? AND line = ? AND record IS NULL"

        def write(db: sqlite3.Connection) -> tuple[int, int]:
            counts = [0, 0]
            batches: dict[str, Batch] = {}
            for record in records:
                values = (record.data, record.is_failed, record.batch_id, record.line)
                if db.execute(update, values).rowcount:
                    counts[record.is_failed] += 1
                    batch = batches.get(record.batch_id) or _load(db, record.batch_id)
                    batches[batch.id] = _with(record, batch)
            for batch in batches.values():
                _save(db, batch)
            return counts[False], counts[True]

        return await self._database.run(write)

    async def end_answering(self, batch_id: str) -> None:
        """All lines are answered, or time is over: `in_progress` becomes `finalizing`."""

        def end(db: sqlite3.Connection) -> None:
            batch = _load(db, batch_id)
            if batch.status == "in_progress":
                _save(db, replace(batch, status="finalizing", finalizing_at=int(time.time())))

        await self._database.run(end)

    async def lines(self, batch_id: str, after: int, limit: int) -> list[StoredLine]:
        """Return the next lines with their answers."""
        query = (
            "SELECT line, custom_id, record, is_failed FROM lines WHERE batch = ? AND line > ? ORDER BY line LIMIT ?"
        )
        return await self._database.run(
            lambda db: [
                StoredLine(line, custom_id, data, bool(failed))
                for line, custom_id, data, failed in db.execute(query, (batch_id, after, limit))
            ]
        )

    async def sweep(self) -> None:
        """Forget batches that have ended and are as old as files get, and give back the room of what is gone."""
        where = f"created_at <= ? AND status NOT IN ({quoted(UNFINISHED)})"
        oldest_s = time.time() - self._args.max_file_days * DAY_S
        await self._database.run(lambda db: db.execute(f"DELETE FROM batches WHERE {where}", (oldest_s,)).rowcount)
        await self._database.shrink()


def ended(db: sqlite3.Connection, batch: Batch, status: BatchStatus) -> str:
    """Keep a batch whose output is written, without its lines, in the transaction of its files; return its owner."""
    _save(db, replace(batch, status=status, **{f"{status}_at": int(time.time())}))
    db.execute("DELETE FROM lines WHERE batch = ?", (batch.id,))
    [owner] = db.execute("SELECT owner FROM batches WHERE id = ?", (batch.id,)).fetchone()
    return str(owner)


def _check(request: BatchRequest) -> int:
    """Return the completion window in seconds. Raises ApiError, 400."""
    if request.endpoint not in ENDPOINTS:
        known = ", ".join(ENDPOINTS)
        raise bad_request(f"endpoint={request.endpoint[:100]!r}: this server has {known}.", "endpoint")
    found = _WINDOW.fullmatch(request.completion_window)
    window_s = int(found[1]) * _UNIT_S[found[2]] if found else 0
    if not 0 < window_s <= _MAX_WINDOW_S:
        shown = request.completion_window[:100]
        message = f"completion_window={shown!r}: such as '24h', '90m' or '2d', at most {_MAX_WINDOW_S // DAY_S}d."
        raise bad_request(message, "completion_window")
    metadata = request.metadata or {}
    if len(metadata) > _MAX_METADATA:
        raise bad_request(f"metadata: at most {_MAX_METADATA} pairs, not {len(metadata)}.", "metadata")
    if any(len(k) > _MAX_KEY_CHARACTERS or len(v) > _MAX_VALUE_CHARACTERS for k, v in metadata.items()):
        limit = f"keys of {_MAX_KEY_CHARACTERS} and values of {_MAX_VALUE_CHARACTERS} characters at most."
        raise bad_request(f"metadata: {limit}", "metadata")
    if request.output_expires_after is not None:
        check_expiry(request.output_expires_after.seconds, "output_expires_after.seconds")
    return window_s


def _find(db: sqlite3.Connection, owner: str, batch_id: str) -> Batch:
    row = db.execute("SELECT body FROM batches WHERE id = ? AND owner = ?", (batch_id, owner)).fetchone()
    if row is None:
        raise ApiError(404, f"No such batch: {batch_id[:100]!r}.", param="batch_id", code="not_found")
    return msgspec.json.decode(row[0], type=Batch)


def _load(db: sqlite3.Connection, batch_id: str) -> Batch:
    [body] = db.execute("SELECT body FROM batches WHERE id = ?", (batch_id,)).fetchone()
    return msgspec.json.decode(body, type=Batch)


def _with(record: Record, batch: Batch) -> Batch:
    """Return the batch with a result counted."""
    counts = batch.request_counts
    counts = RequestCounts(
        total=counts.total,
        completed=counts.completed + (not record.is_failed),
        failed=counts.failed + record.is_failed,
    )
    usage = batch.usage if record.usage is None else batch.usage.plus(record.usage)
    return replace(batch, request_counts=counts, usage=usage)


def _save(db: sqlite3.Connection, batch: Batch) -> None:
    values = (batch.status, msgspec.json.encode(batch), batch.id)
    db.execute("UPDATE batches SET status = ?, body = ? WHERE id = ?", values)
