"""`FileStore`: clients' files. Contents are files below the state folder, what is known of them is in its database.

A content is complete on disk before the database knows it, and is removed after the database has forgotten it: a file
that the database does not know is what a killed server has left, and goes at the next start.
"""

import asyncio
import contextlib
import os
import sqlite3
import time
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from octavo.server.args import ServerArgs
from octavo.server.batches.protocol import UNFINISHED, Page, StoredFile
from octavo.server.http.errors import ApiError, bad_request
from octavo.server.http.upload import Upload
from octavo.server.state.database import StateDatabase

T = TypeVar("T")


def quoted(names: Iterable[str]) -> str:
    """Return names, from the code only, as SQL's literals."""
    return ", ".join(f"'{name}'" for name in sorted(names))


DAY_S = 86400
_MIN_EXPIRY_S, _MAX_EXPIRY_S = 3600, 30 * DAY_S  # as OpenAI's
_IN_USE = f"(SELECT input_file_id FROM batches WHERE status IN ({quoted(UNFINISHED)}))"


class FileStore:
    """Files by owner: what one has, another one does not see. An owner is the digest of an API key, or empty."""

    def __init__(self, database: StateDatabase, folder: Path, args: ServerArgs) -> None:
        self._database, self._folder, self._args = database, folder, args
        folder.mkdir(mode=0o700, exist_ok=True)
        known = database.run_now(lambda db: {name for (name,) in db.execute("SELECT id FROM files")})
        self._remove(path.name for path in folder.iterdir() if path.name not in known)

    def path(self, file_id: str) -> Path:
        """Where the content of a file is, or will be."""
        return self._folder / file_id

    def new_part(self) -> Path:
        """Return the path of a content that is not complete yet."""
        return self._folder / f"part-{uuid.uuid4().hex}"

    def new_file(
        self, *, num_bytes: int, filename: str, purpose: str, seconds: int | None, now_s: int | None = None
    ) -> StoredFile:
        """Describe a file; `seconds` until it expires, never later than the server's limit."""
        created_at = int(time.time()) if now_s is None else now_s
        seconds = min(seconds or _MAX_EXPIRY_S, int(self._args.max_file_days * DAY_S))
        return StoredFile(
            id=f"file-{uuid.uuid4().hex}",
            bytes=num_bytes,
            created_at=created_at,
            expires_at=created_at + seconds,
            filename=filename,
            purpose=purpose,
        )

    async def add_upload(self, owner: str, upload: Upload, part: Path) -> StoredFile:
        """Keep an uploaded file. Raises ApiError: fields that are not valid, or no room for another file."""
        purpose, seconds = upload.fields.get("purpose"), _seconds_of(upload.fields)
        if purpose is None:
            raise bad_request("Missing required parameter: 'purpose'.", "purpose", "missing_required_parameter")
        if purpose != "batch":
            raise bad_request(f"purpose={purpose[:100]!r}: this server keeps files for 'batch' only.", "purpose")
        if upload.num_bytes == 0:
            raise bad_request("The file is empty.", "file", "empty_file")
        filename = upload.filename or "upload"
        file = self.new_file(num_bytes=upload.num_bytes, filename=filename, purpose=purpose, seconds=seconds)

        def add(db: sqlite3.Connection) -> None:
            self.check_room(db, upload.num_bytes)
            self.keep(db, owner, file, part)

        await self._database.run(add)
        return file

    def check_room(self, db: sqlite3.Connection, num_bytes: int) -> None:
        """Raise ApiError, 413, if a file of this size would exceed the limits of the folder."""
        [num_files, num_used] = db.execute("SELECT count(*), coalesce(sum(num_bytes), 0) FROM files").fetchone()
        if num_files >= self._args.max_files:
            message = f"The server keeps {num_files} files, its limit (--max-files). Delete some."
            raise ApiError(413, message, param="file", code="too_many_files")
        if num_used + num_bytes > self._args.max_stored_bytes:
            message = f"{num_bytes} bytes do not fit: {num_used} of {self._args.max_stored_bytes} bytes are in use "
            raise ApiError(413, message + "(the server's --max-stored-bytes). Delete files.", param="file", code="full")

    def keep(self, db: sqlite3.Connection, owner: str, file: StoredFile, part: Path) -> None:
        """Give a complete, synced content its place, within a transaction that makes the file known."""
        part.rename(self.path(file.id))
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        db.execute(
            "INSERT INTO files (id, owner, purpose, num_bytes, expires_at, body) VALUES (?, ?, ?, ?, ?, ?)",
            (file.id, owner, file.purpose, file.bytes, file.expires_at, msgspec.json.encode(file)),
        )

    async def get(self, owner: str, file_id: str) -> StoredFile:
        """Raises ApiError, 404."""
        return await self._database.run(lambda db: find_file(db, owner, file_id))

    async def page(
        self, owner: str, *, after: str | None, limit: int, ascending: bool, purpose: str | None
    ) -> Page[StoredFile]:
        """Return files in the order of their creation, of one purpose or all. Raises ApiError: `after` is unknown."""
        conditions: dict[str, object] = {"expires_at >": int(time.time())}
        if purpose is not None:
            conditions["purpose ="] = purpose
        return await self._database.run(
            lambda db: listed(
                db, "files", StoredFile, owner, after=after, limit=limit, ascending=ascending, where=conditions
            )
        )

    async def delete(self, owner: str, file_id: str) -> None:
        """Forget a file. Raises ApiError: 404; 400 if a batch that has not ended reads it."""

        def forget(db: sqlite3.Connection) -> None:
            find_file(db, owner, file_id)
            if db.execute(f"SELECT 1 WHERE ? IN {_IN_USE}", (file_id,)).fetchone():
                message = f"File {file_id!r} is the input of a batch that has not ended. Cancel the batch first."
                raise bad_request(message, "file_id", "file_in_use")
            db.execute("DELETE FROM files WHERE id = ?", (file_id,))

        await self._database.run(forget)
        await asyncio.to_thread(self._remove, (file_id,))

    async def sweep(self) -> None:
        """Remove the files that have expired, unless a batch that has not ended reads them."""

        def forget(db: sqlite3.Connection) -> list[str]:
            where = f"expires_at <= ? AND id NOT IN {_IN_USE}"
            rows = db.execute(f"DELETE FROM files WHERE {where} RETURNING id", (int(time.time()),))
            return [file_id for (file_id,) in rows.fetchall()]

        expired = await self._database.run(forget)
        await asyncio.to_thread(self._remove, expired)

    def _remove(self, names: Iterable[str]) -> None:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                (self._folder / name).unlink()


def listed(
    db: sqlite3.Connection,
    table: str,
    kind: type[T],
    owner: str,
    *,
    after: str | None,
    limit: int,
    ascending: bool,
    where: Mapping[str, object],
) -> Page[T]:
    """Return an owner's objects after the one named `after`, in the order of their creation or the reverse.

    `where` has values by condition, as in `{"status =": "failed"}`. Raises ApiError, 400: there is no such `after`.
    """
    conditions, values = ["owner = ?", *(f"{condition} ?" for condition in where)], [owner, *where.values()]
    if after is not None:
        row = db.execute(f"SELECT seq FROM {table} WHERE id = ? AND owner = ?", (after, owner)).fetchone()
        if row is None:
            raise bad_request(f"after={after[:100]!r}: there is no such object to begin after.", "after", "not_found")
        conditions.append("seq > ?" if ascending else "seq < ?")
        values.append(row[0])
    order = f"ORDER BY seq {'ASC' if ascending else 'DESC'} LIMIT ?"
    rows = db.execute(
        f"SELECT id, body FROM {table} WHERE {' AND '.join(conditions)} {order}", (*values, limit + 1)
    ).fetchall()
    shown = rows[:limit]
    return Page(
        data=[msgspec.json.decode(body, type=kind) for _, body in shown],
        first_id=shown[0][0] if shown else None,
        last_id=shown[-1][0] if shown else None,
        has_more=len(rows) > limit,
    )


def find_file(db: sqlite3.Connection, owner: str, file_id: str, param: str = "file_id") -> StoredFile:
    """Return a file of this owner. Raises ApiError, 404."""
    where = "id = ? AND owner = ? AND expires_at > ?"
    row = db.execute(f"SELECT body FROM files WHERE {where}", (file_id, owner, int(time.time()))).fetchone()
    if row is None:
        raise ApiError(404, f"No such file: {file_id[:100]!r}.", param=param, code="not_found")
    return msgspec.json.decode(row[0], type=StoredFile)


def check_expiry(seconds: int, param: str) -> int:
    """Return how long a file is to be kept. Raises ApiError, 400."""
    if not _MIN_EXPIRY_S <= seconds <= _MAX_EXPIRY_S:
        raise bad_request(f"{param}={seconds}: between {_MIN_EXPIRY_S} and {_MAX_EXPIRY_S} seconds.", param)
    return seconds


def _seconds_of(fields: dict[str, str]) -> int | None:
    """Return the seconds of a form's `expires_after`; None: it has none. Raises ApiError, 400."""
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise bad_request("expires_after[anchor] must be 'created_at'.", "expires_after[anchor]")
    if seconds is None or not (seconds.isascii() and seconds.isdigit()):
        raise bad_request("expires_after[seconds] must be an integer.", "expires_after[seconds]")
    return check_expiry(int(seconds), "expires_after[seconds]")
