"""`ResponseStore`: responses with their input, for clients that go on from them or ask for them again.

Bounded in size and age. Those not used for longest go first; a response counts as used later than those that go on from
it, so that no chain loses a part. In memory, or a file in the folder of `--state-dir`.
"""

import logging
import sqlite3
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from octavo.errors import StateError
from octavo.server.args import ServerArgs
from octavo.server.http.errors import ApiError, bad_request
from octavo.server.responses.protocol import ItemList, Response
from octavo.server.state.database import Layout, StateDatabase, WriteProblem

logger = logging.getLogger(__name__)

_MIB, _DAY_S = 2**20, 86_400.0
_ROW_BYTES = 512  # of a response in the file, beside its contents
_MAX_LISTED = 100
_INPUT = "in"  # in the ids of input items
_FILE_NAME = "responses.sqlite3"
LAYOUT = Layout(
    option="state_dir",
    version=1,
    schema="""
CREATE TABLE responses (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, previous TEXT, created_s REAL NOT NULL, used INTEGER NOT NULL,
    num_bytes INTEGER NOT NULL, body BLOB NOT NULL, input BLOB NOT NULL
);
CREATE INDEX responses_by_use ON responses (used);
CREATE TABLE totals (num_bytes INTEGER NOT NULL, uses INTEGER NOT NULL);
INSERT INTO totals VALUES (0, 0);
""",
    pragmas=("secure_delete = ON",),  # conversations do not stay in free pages
)

Item = Mapping[str, Any]


class ResponseStore:
    """Finds responses of one owner, the digest of an API key, by their ids. All methods may raise StateError."""

    def __init__(self, args: ServerArgs) -> None:
        """Open or create the store. Raises InvalidParameterError: its file cannot be used."""
        self._max_bytes, self._max_age_s = args.response_store_mib * _MIB, args.response_store_days * _DAY_S
        path = None if args.state_dir is None else Path(args.state_dir) / _FILE_NAME
        self._database = StateDatabase(path, LAYOUT)
        self._failure = WriteProblem(logger, "responses are not kept")

    @property
    def keeps_any(self) -> bool:
        return self._max_bytes > 0

    async def put(self, owner: str, response: Response, items: Sequence[Item]) -> None:
        """Keep a response, or what it has become. Never raises: an answer is sent whether it is kept or not."""
        body, given = msgspec.json.encode(response), msgspec.json.encode(items)
        num_bytes = len(body) + len(given) + _ROW_BYTES
        if num_bytes > self._max_bytes:
            self._failure.set("a response and its input are larger than --response-store-mib")
            return

        def write(db: sqlite3.Connection) -> None:
            _remove(db, response.id)
            [total, uses] = db.execute("SELECT num_bytes, uses FROM totals").fetchone()
            total = _make_room(db, total, self._max_bytes - num_bytes, time.time() - self._max_age_s)
            db.execute(
                "INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (response.id, owner, response.previous_response_id, time.time(), uses, num_bytes, body, given),
            )
            db.execute("UPDATE totals SET num_bytes = ?, uses = ?", (total + num_bytes, uses + 1))
            _use(db, owner, response.id)

        try:
            await self._database.run(write)
        except StateError as error:
            self._failure.set(str(error))
        else:
            self._failure.clear()

    async def get(self, owner: str, response_id: str) -> Response:
        """Return a response. Raises ApiError, 404."""
        body, _ = await self._row(owner, response_id)
        return msgspec.json.decode(body, type=Response)

    async def delete(self, owner: str, response_id: str) -> None:
        """Forget a response. Raises ApiError, 404."""
        await self._row(owner, response_id)
        await self._database.run(lambda db: _remove(db, response_id))

    async def input_items(
        self, owner: str, response_id: str, *, after: str | None, limit: int, ascending: bool
    ) -> ItemList:
        """Return the items of a request, a page of them. Raises ApiError: 404, 400."""
        if not 1 <= limit <= _MAX_LISTED:
            raise bad_request(f"limit={limit}: from 1 to {_MAX_LISTED}", "limit")
        _, given = await self._row(owner, response_id)
        items: list[dict[str, Any]] = msgspec.json.decode(given)
        if not ascending:
            items.reverse()
        if after is not None:
            ids = [item.get("id") for item in items]
            if after not in ids:
                raise bad_request(f"after={after[:100]!r}: there is no such item to begin after.", "after", "not_found")
            items = items[ids.index(after) + 1 :]
        shown = items[:limit]
        return ItemList(
            data=shown,
            first_id=shown[0]["id"] if shown else None,
            last_id=shown[-1]["id"] if shown else None,
            has_more=len(items) > limit,
        )

    async def history(self, owner: str, response_id: str) -> list[Item]:
        """Return all items of a conversation up to a response, oldest first. Raises ApiError, 400: a part is gone."""

        def read(db: sqlite3.Connection) -> list[tuple[bytes, bytes]] | None:
            rows: list[tuple[bytes, bytes]] = []
            each: str | None = response_id
            while each is not None:
                found = db.execute(
                    "SELECT previous, input, body FROM responses WHERE id = ? AND owner = ?", (each, owner)
                ).fetchone()
                if found is None:
                    return None
                each, *row = found
                rows.append((row[0], row[1]))
            _use(db, owner, response_id)
            return rows

        rows = await self._database.run(read)
        if rows is None:
            raise not_found_before(response_id)
        items: list[Item] = []
        for given, body in reversed(rows):
            items += msgspec.json.decode(given)
            items += msgspec.json.decode(body)["output"]
        return items

    async def item(self, owner: str, item_id: str) -> Item | None:
        """Return an item of the input or output of a response; None: it is not kept."""
        name, _, number = item_id.partition("_")[2].rpartition("_")
        if (row := await self._find(owner, f"resp_{name}")) is None:
            return None
        body, given = row
        items = msgspec.json.decode(given) if number.startswith(_INPUT) else msgspec.json.decode(body)["output"]
        return next((item for item in items if item.get("id") == item_id), None)

    def close(self) -> None:
        self._database.close()

    async def _row(self, owner: str, response_id: str) -> tuple[bytes, bytes]:
        """Return a response and its input. Raises ApiError, 404."""
        if (row := await self._find(owner, response_id)) is None:
            raise not_found(response_id)
        return row

    async def _find(self, owner: str, response_id: str) -> tuple[bytes, bytes] | None:
        query = "SELECT body, input FROM responses WHERE id = ? AND owner = ?"

        def read(db: sqlite3.Connection) -> tuple[bytes, bytes] | None:
            row: tuple[bytes, bytes] | None = db.execute(query, (response_id, owner)).fetchone()
            return row

        return await self._database.run(read)


def with_ids(items: Sequence[Item], name: str) -> list[Item]:
    """Return input items, each with an id: one of its own, or one that says where it is kept."""
    return [
        {**item, "type": kind, "id": item.get("id") or f"{_prefix(kind)}_{name}_{_INPUT}{number}"}
        for number, item in enumerate(items)
        if isinstance(kind := item.get("type", "message"), str)
    ]


def _prefix(kind: str) -> str:
    return {"message": "msg", "reasoning": "rs", "function_call": "fc"}.get(kind, "item")


def not_found(response_id: str) -> ApiError:
    return ApiError(404, f"Response with id '{response_id[:100]}' not found.", param="response_id", code="not_found")


def not_found_before(response_id: str) -> ApiError:
    """The error for a request that would go on from a response that is not here."""
    text = f"Previous response with id '{response_id[:100]}' not found."
    return ApiError(400, text, param="previous_response_id", code="previous_response_not_found")


def _use(db: sqlite3.Connection, owner: str, response_id: str) -> None:
    """Note the use of a response, and then of those before it."""
    [uses] = db.execute("SELECT uses FROM totals").fetchone()
    each: str | None = response_id
    while each is not None:
        row = db.execute("SELECT previous FROM responses WHERE id = ? AND owner = ?", (each, owner)).fetchone()
        if row is None:
            break
        db.execute("UPDATE responses SET used = ? WHERE id = ?", (uses, each))
        uses += 1
        [each] = row
    db.execute("UPDATE totals SET uses = ?", (uses,))


def _remove(db: sqlite3.Connection, response_id: str) -> None:
    row = db.execute("SELECT num_bytes FROM responses WHERE id = ?", (response_id,)).fetchone()
    if row is not None:
        db.execute("DELETE FROM responses WHERE id = ?", (response_id,))
        db.execute("UPDATE totals SET num_bytes = num_bytes - ?", (row[0],))


def _make_room(db: sqlite3.Connection, total: int, room: int, oldest_s: float) -> int:
    """Remove what is too old, and what has not been used for longest until the rest fits; return what is left."""
    while (
        row := db.execute("SELECT id, num_bytes, created_s FROM responses ORDER BY used LIMIT 1").fetchone()
    ) is not None:
        response_id, num_bytes, created_s = row
        if total <= room and created_s >= oldest_s:
            break
        db.execute("DELETE FROM responses WHERE id = ?", (response_id,))
        total -= num_bytes
    return total
