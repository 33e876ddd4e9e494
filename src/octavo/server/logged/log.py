"""`RequestLog`: finished requests with their seeds and answers, on disk, for `octavo replay`.

Bounded in age and size. A thread writes, what came meanwhile with the next transaction; a log that cannot be written
costs no request: that is said once in the log of the server, and in `/health` while it lasts.
"""

import asyncio
import logging
import random
import sqlite3
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import msgspec

from octavo.errors import StateError
from octavo.server.args import ServerArgs
from octavo.server.http.errors import ApiError, as_api_error
from octavo.server.http.exchange import CLIENT_LEFT, Exchange, route_path
from octavo.server.http.sse import FrameSource, OwnEnding
from octavo.server.kept.responses import Begin, Reply
from octavo.server.logged.requests import FILE_NAME, LOG, Contents, Facts, Identity
from octavo.server.openai.birth import Birth
from octavo.server.openai.embeddings import Embeddings
from octavo.server.openai.reply_stream import ReplyFacts
from octavo.server.state.database import StateDatabase, WriteProblem, WriteQueue
from octavo.server.state.folder import private_folder

logger = logging.getLogger(__name__)

_MIB, _DAY_S = 2**20, 86_400.0
_SWEEP_S = 3600.0  # how often to look for what is too old, in a server without requests
_MAX_WAITING_BYTES = 64 * _MIB  # of answers that are over and not written yet
_ROW_BYTES = 1024  # of a request in the file, beside its contents
_encode = msgspec.msgpack.Encoder().encode
Answer = Callable[[], Awaitable[msgspec.Struct | FrameSource]]


class RequestLog:
    """Owned by one event loop; its file is used by a thread of its own. Several servers may share a folder."""

    def __init__(self, args: ServerArgs, identify: Callable[[], Identity]) -> None:
        """Open or create the log. `identify` says what computes the answers; it is called once, by the thread.

        Raises InvalidParameterError: the folder or the file cannot be used.
        """
        assert args.request_log is not None
        self._only, self._sample = args.request_log_only, args.request_log_sample
        self._max_bytes, self._max_age_s = args.request_log_mib * _MIB, args.request_log_days * _DAY_S
        self._identify = identify
        self._identity: bytes | None = None
        self._database = StateDatabase(private_folder("request_log", args.request_log) / FILE_NAME, LOG)
        self._writes = WriteQueue(self._write)
        self._unidentified: list[tuple[Facts, Contents]] = []  # the model went before anybody asked who it is
        self._num_waiting_bytes = 0  # and of those that are being written
        self._failure = WriteProblem(logger, "requests are not logged")

    @property
    def problem(self) -> str | None:
        """Why requests are not logged; None: all is well."""
        return self._failure.text

    async def run(self) -> None:
        """Remove what is too old, until cancelled."""
        while True:
            await self._write([])
            await asyncio.sleep(_SWEEP_S)

    async def close(self) -> None:
        """Write what is left."""
        await self._writes.close()
        self._database.close()

    def watched(self, exchange: Exchange, is_stream: bool, begin: Begin) -> Begin:
        """Return what prepares a request and logs it when it has ended, if it is one of those that are logged."""
        if not self._is_chosen():
            return begin

        async def begin_watched(birth: Birth) -> Reply:
            started_s = time.time()
            try:
                reply = await begin(birth)
            except ApiError as error:
                self._refused(exchange, is_stream, birth, started_s, error)
                raise
            return LoggedReply(reply, birth, exchange, self, is_stream=is_stream, started_s=started_s)

        return begin_watched

    def watched_vectors(self, exchange: Exchange, embed: Answer) -> Answer:
        """As `watched`, of a request for vectors, which has no seed. One that is cancelled is not logged."""
        if not self._is_chosen():
            return embed

        async def embed_watched() -> Embeddings:
            birth, started_s = Birth(), time.time()
            try:
                reply = await embed()
                assert isinstance(reply, Embeddings)
            except ApiError as error:
                self._refused(exchange, False, birth, started_s, error)
                raise
            num_tokens = reply.usage.prompt_tokens
            facts = _facts(exchange, birth, False, started_s, status=200, error=None, num_prompt_tokens=num_tokens)
            self.put(facts, Contents(body=exchange.body, answer=msgspec.json.encode(reply), token_ids=[]))
            return reply

        return embed_watched

    def put(self, facts: Facts, contents: Contents) -> None:
        """Log a request, soon. Never raises: an answer is sent whether it is logged or not."""
        if self._only == "failed" and facts.status in (200, CLIENT_LEFT):
            return
        num_bytes = contents.num_bytes + _ROW_BYTES
        if num_bytes > self._max_bytes:
            self._failure.set("a request and its answer are larger than --request-log-mib")
        elif self._num_waiting_bytes + num_bytes > _MAX_WAITING_BYTES:
            self._failure.set("requests end faster than the disk takes them")
        else:
            self._num_waiting_bytes += num_bytes
            self._writes.put((facts, contents))

    def _is_chosen(self) -> bool:
        return random.random() < self._sample  # which is below 1

    def _refused(self, exchange: Exchange, is_stream: bool, birth: Birth, started_s: float, error: ApiError) -> None:
        facts = _facts(exchange, birth, is_stream, started_s, status=error.status, error=error.detail.message)
        self.put(facts, Contents(body=exchange.body, answer=error.body, token_ids=[]))

    async def _write(self, requests: list[tuple[Facts, Contents]]) -> None:
        requests, self._unidentified = self._unidentified + requests, []
        try:
            await self._database.run(partial(self._store, requests))
            if not requests:
                await self._database.shrink()
        except ApiError as error:  # when the model is back, they are written
            self._unidentified = requests
            self._failure.set(str(error))
            return
        except (StateError, OSError) as error:
            self._failure.set(str(error))
        else:
            if requests:
                self._failure.clear()
        self._num_waiting_bytes -= sum(contents.num_bytes + _ROW_BYTES for _, contents in requests)

    def _store(self, requests: Sequence[tuple[Facts, Contents]], db: sqlite3.Connection) -> None:
        """Make room, then add requests; in the thread."""
        sizes = [contents.num_bytes + _ROW_BYTES for _, contents in requests]
        _remove_oldest(db, self._max_bytes - sum(sizes), time.time() - self._max_age_s)
        if not requests:
            return
        if self._identity is None:
            self._identity = msgspec.json.encode(self._identify())
        db.execute("INSERT OR IGNORE INTO identities (body) VALUES (?)", (self._identity,))
        [identity] = db.execute("SELECT id FROM identities WHERE body = ?", (self._identity,)).fetchone()
        for (facts, contents), num_bytes in zip(requests, sizes, strict=True):
            columns = "request_id, reply_id, ended_s, num_bytes, identity, facts"
            values = (facts.request_id, facts.reply_id, facts.ended_s, num_bytes, identity, _encode(facts))
            number = db.execute(f"INSERT INTO requests ({columns}) VALUES (?, ?, ?, ?, ?, ?)", values).lastrowid
            parts = (number, contents.body, contents.answer, _encode(contents.token_ids))
            db.execute("INSERT INTO contents VALUES (?, ?, ?, ?)", parts)
        db.execute("UPDATE totals SET num_bytes = num_bytes + ?", (sum(sizes),))


class LoggedReply:
    """A `Reply` that is logged when it is over, or closed before that. A stream has an event per token.

    Steps of a busy engine would be merged otherwise, in ways that no replay can repeat.
    """

    def __init__(
        self, reply: Reply, birth: Birth, exchange: Exchange, log: RequestLog, *, is_stream: bool, started_s: float
    ) -> None:
        self._reply, self._exchange, self._log = reply, exchange, log
        self._birth = birth.of_reply(reply.facts.seeds, reply.facts.model_key)
        self._is_stream, self._started_s = is_stream, started_s
        self._parts: list[bytes] = []
        self._error: Exception | None = None
        self.is_by_token = reply.is_by_token = is_stream

    @property
    def facts(self) -> ReplyFacts:
        return self._reply.facts

    @property
    def token_ids(self) -> list[list[int]]:
        return self._reply.token_ids

    @property
    def is_over(self) -> bool:
        return self._reply.is_over

    def start(self, notify: Callable[[], None]) -> None:
        self._reply.start(notify)

    def take(self) -> bytes:
        try:
            data = self._reply.take()
        except Exception as error:
            self._error = error
            raise
        if data:
            self._parts.append(data)
        return data

    def ending(self, error: ApiError) -> bytes:
        """Return the end of the stream that fails; empty: it ends as others do."""
        reply: object = self._reply
        return reply.ending(error) if isinstance(reply, OwnEnding) else b""

    async def whole(self) -> msgspec.Struct:
        is_complete = False
        try:
            whole = await self._reply.whole()
            self._parts.append(msgspec.json.encode(whole))
            is_complete = True
        except Exception as error:
            self._error = error
            raise
        finally:
            self._end(is_complete=is_complete)
        return whole

    def count_tokens(self) -> tuple[int, int]:
        return self._reply.count_tokens()

    def close(self) -> None:
        is_complete = self._reply.is_over
        self._reply.close()
        self._end(is_complete=is_complete)

    def _end(self, *, is_complete: bool) -> None:
        status, text = (200, None) if is_complete else self._why_it_ended()
        num_prompt, num_output = self._reply.count_tokens()
        facts = _facts(
            self._exchange, self._birth, self._is_stream, self._started_s, status=status, error=text,
            reply_id=self.facts.name, num_prompt_tokens=num_prompt, num_output_tokens=num_output,
        )  # fmt: skip
        answer = b"".join(self._parts)
        self._log.put(facts, Contents(body=self._exchange.body, answer=answer, token_ids=self._reply.token_ids))

    def _why_it_ended(self) -> tuple[int, str]:
        if self._error is None and self._exchange.was_abandoned:
            return CLIENT_LEFT, "The client left."
        error = self._exchange.why_ended() if self._error is None else as_api_error(self._error)
        return error.status, error.detail.message


def _facts(exchange: Exchange, birth: Birth, is_stream: bool, started_s: float, **rest: Any) -> Facts:
    return Facts(
        request_id=exchange.request_id,
        path=route_path(exchange.scope),
        owner=exchange.owner,
        is_stream=is_stream,
        started_s=started_s,
        ended_s=time.time(),
        birth=birth,
        **rest,
    )


def _remove_oldest(db: sqlite3.Connection, max_bytes: int, oldest_s: float) -> None:
    """Remove requests that are too old, and the oldest ones until the rest fits."""
    [num_bytes] = db.execute("SELECT num_bytes FROM totals").fetchone()
    before = num_bytes
    oldest = "SELECT seq, num_bytes, ended_s FROM requests ORDER BY seq LIMIT 1"
    while (row := db.execute(oldest).fetchone()) is not None:
        number, size, ended_s = row
        if num_bytes <= max_bytes and ended_s >= oldest_s:
            break
        db.execute("DELETE FROM requests WHERE seq = ?", (number,))
        db.execute("DELETE FROM contents WHERE seq = ?", (number,))
        num_bytes -= size
    db.execute("UPDATE totals SET num_bytes = num_bytes + ?", (num_bytes - before,))
