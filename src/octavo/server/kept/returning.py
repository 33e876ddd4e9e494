"""Clients that come back: with `Last-Event-ID` for the rest of a stream, with `Idempotency-Key` for the same answer.

An answer that is kept is computed by the exchange that began it, which goes on without its client: it stays in the
queue, its deadline holds, and shutdown ends it. Every client reads it as one of its readers, the first one too.
"""

import asyncio
import logging
import re
import time
from pathlib import Path

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Scope

from octavo.errors import EngineDeadError
from octavo.metrics.collect import HttpMetrics
from octavo.server.args import ServerArgs
from octavo.server.http.errors import ApiError, bad_request
from octavo.server.http.exchange import Exchange, route_path
from octavo.server.kept.answers import Kept, KeptAnswers, digest
from octavo.server.kept.journal import Answer, Entry, Journal, Unfinished
from octavo.server.kept.recording import parse_event_id
from octavo.server.kept.responses import Begin, OwnerResponse, Reply, ReturnResponse

logger = logging.getLogger(__name__)

_MIB = 2**20
_AGAIN = "again"  # in a scope's state, which no client can set
MAX_CHOICES = 64  # of a stream whose events have ids: an id counts the events of each
_KEY = re.compile(rb"[\x20-\x7e]{1,255}")
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,160}")  # a client's request id may be any text; an event's id is one line


class Returning:
    """Decides which answers are kept, and finds those that a client comes back for."""

    def __init__(self, args: ServerArgs, metrics: HttpMetrics) -> None:
        self._resume_s, self._idempotency_s = args.resume_s, args.idempotency_s
        self.metrics = metrics
        self.answers = KeptAnswers(args.keep_mib * _MIB, metrics)
        self._unfinished: list[tuple[Kept, Unfinished]] = []
        self._tasks: list[asyncio.Task[None]] = []  # each computes one of them again
        self.journal: Journal | None = None
        if args.state_dir is not None:
            self.journal = Journal(Path(args.state_dir) / "answers.sqlite3", args.keep_mib * _MIB)
            self.answers.on_drop = self._forget

    def restore(self) -> None:
        """Keep what the server before has kept; `recover` computes the rest."""
        if self.journal is None:
            return
        found = self.journal.load()
        for entry, answer in found.finished:
            keep_s = self._keep_s(entry.is_stream, entry.key)
            left_s = min(keep_s, keep_s - (time.time() - answer.ended_s))
            if self._may_restore(entry, left_s):
                self.answers.restore(entry, left_s, answer)
        for unfinished in found.unfinished:
            keep_s = self._keep_s(unfinished.entry.is_stream, unfinished.entry.key)
            if self._may_restore(unfinished.entry, keep_s):
                self._unfinished.append((self.answers.restore(unfinished.entry, keep_s), unfinished))

    def _may_restore(self, entry: Entry, left_s: float) -> bool:
        """Whether there is time left for an answer, and its key is free: a removal may not have reached the disk."""
        if left_s > 0.0 and not (entry.key is not None and self.answers.has_key(entry.key)):
            return True
        assert self.journal is not None
        self.journal.remove(entry.serial)
        return False

    def recover(self, app: ASGIApp) -> None:
        """Compute again what the server before has not finished, now that there is an engine."""
        if self._unfinished:
            logger.info("%d requests of the server before are computed again", len(self._unfinished))
        for kept, unfinished in self._unfinished:
            self._tasks.append(asyncio.create_task(self._compute_again(app, kept, unfinished)))
        self._unfinished.clear()

    async def close(self) -> None:
        """Stop, and let the next server find what is kept."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.journal is not None:
            await self.journal.close()

    def respond(self, exchange: Exchange, is_stream: bool, begin: Begin) -> Response | None:
        """Return what answers a request whose answer is kept, or that asks for one; None: an ordinary request.

        Does not wait, so of two requests with one key the second finds the first.
        Raises ApiError: 400, 404, 409, 422: what it asks for is not here.
        """
        if (kept := again(exchange.scope)) is not None:
            kept.warnings = exchange.warnings
            return OwnerResponse(exchange, kept, self, begin, is_stream=is_stream, is_again=True)
        headers = dict(exchange.scope["headers"])
        event_id, key = headers.get(b"last-event-id"), self._checked(headers.get(b"idempotency-key"), exchange)
        keep_s = self._keep_s(is_stream, key)
        if event_id is None and not keep_s:
            return None
        request = digest(route_path(exchange.scope).encode(), exchange.body)
        if event_id is not None:
            return self.resume(exchange, event_id.decode("latin-1"), request=request)
        if key is not None and (kept := self.answers.of_key(key, request)) is not None:
            self.metrics.num_replayed += 1
            return ReturnResponse(exchange, kept, is_stream=is_stream)
        kept = self.answers.begin(exchange.owner, key, request, keep_s)
        kept.warnings = exchange.warnings
        return OwnerResponse(exchange, kept, self, begin, is_stream=is_stream)

    def resume(self, exchange: Exchange, event_id: str, name: str | None = None, request: bytes = b"") -> Response:
        """Return the rest of a stream, of which a client has this event; of the stream `name`, if it asks for that.

        The response is empty, 204, if the client has all of it, which ends the attempts of an EventSource.
        `request` is the digest of a request that is sent again.
        """
        of_name, counts = parse_event_id(event_id)
        if name not in (None, of_name):
            raise bad_request(f"Last-Event-ID={event_id!r}: not an event of {name!r}", "Last-Event-ID")
        kept = self._of_name(exchange, of_name)
        if request and kept.request != request:
            text = "This Last-Event-ID belongs to another request: another body, or another route."
            raise ApiError(422, text, param="Last-Event-ID", code="stream_mismatch")
        if kept.recording.is_over and kept.recording.has_all(counts):
            return Response(status_code=204)
        self.metrics.num_resumed += 1
        return ReturnResponse(exchange, kept, is_stream=True, counts=counts)

    def replay(self, exchange: Exchange, name: str) -> Response:
        """Return a stream from its first event on."""
        return ReturnResponse(exchange, self._of_name(exchange, name), is_stream=True)

    def stop(self, exchange: Exchange, name: str) -> Response:
        """End a stream, for all its readers, and forget it."""
        kept = self._of_name(exchange, name)
        if kept.stop is not None and not kept.recording.is_over:
            kept.stop(ApiError(410, "The stream was ended by its client.", code="stream_ended"))
        self.answers.drop(kept)
        return Response(status_code=204)

    @property
    def has_journal(self) -> bool:
        """Whether the next server computes again what this one has not finished."""
        return self.journal is not None

    def name(self, kept: Kept, name: str, num_choices: int) -> None:
        """Give a stream's events their ids, if it can be resumed."""
        if not self._resume_s:
            return
        if num_choices > MAX_CHOICES:
            kept.warnings.append(f"a stream of more than {MAX_CHOICES} choices cannot be resumed: no event has an id")
        else:
            self.answers.name(kept, name if _NAME.fullmatch(name) else f"stream-{kept.birth.name}")

    def write(self, kept: Kept, reply: Reply, path: str, body: bytes, is_stream: bool) -> "asyncio.Future[None] | None":
        """Journal a request that was accepted. Returns what is done when a kill of the server no longer loses it."""
        kept.birth = kept.birth.of_reply(reply.facts.seeds, reply.facts.model_key)
        if self.journal is None:
            return None
        entry = Entry(
            serial=kept.serial,
            path=path,
            owner=kept.owner,
            key=kept.key,
            request=kept.request,
            is_stream=is_stream,
            name=kept.recording.name,
            birth=kept.birth,
        )
        return self.journal.add(entry, body)

    def conclude(self, kept: Kept, *, is_wanted: bool = True) -> None:
        """An answer is over, or nobody waits for it: keep it for its time, or forget it."""
        recording = kept.recording
        kept.is_left = is_wanted and recording.error is not None and is_end_of_server(recording.error)
        self.answers.end(kept, is_answered=recording.error is None)
        if not is_wanted:
            self.answers.drop(kept)
        if self.journal is None or kept.is_left or recording.is_evicted:
            return
        if recording.error is not None:
            self.journal.remove(kept.serial)
            return
        answer = Answer(
            ended_s=time.time(),
            num_choices=recording.num_choices,
            events=recording.events,
            warnings=kept.warnings,
        )
        self.journal.finish(kept.serial, answer)

    async def _compute_again(self, app: ASGIApp, kept: Kept, unfinished: Unfinished) -> None:
        """Send a request of the server before through the application once more. Its client is not there."""
        entry = unfinished.entry
        messages: list[Message] = [{"type": "http.request", "body": unfinished.body, "more_body": False}]

        async def receive() -> Message:
            return messages.pop() if messages else {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            """Nobody reads it here: the recording has it."""

        scope: Scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": entry.path, "raw_path": entry.path.encode(), "query_string": b"", "root_path": "",
            "headers": [(b"content-type", b"application/json")], "client": None, "server": None,
            "state": {_AGAIN: kept},
        }  # fmt: skip
        try:
            await app(scope, receive, send)
        finally:
            if not kept.recording.is_over:  # it was refused before anything began
                kept.recording.fail(ApiError(503, "The request could not be computed again.", code="aborted"))
                self.conclude(kept)

    def _forget(self, kept: Kept) -> None:
        if self.journal is not None and not kept.is_left:
            self.journal.remove(kept.serial)

    def _keep_s(self, is_stream: bool, key: bytes | None) -> float:
        """Return how long an answer is kept for its client; 0: it is not."""
        return max(self._resume_s if is_stream else 0.0, self._idempotency_s if key is not None else 0.0)

    def _of_name(self, exchange: Exchange, name: str) -> Kept:
        if not self._resume_s:
            text = "This server keeps no streams for clients that come back: its --resume-s is 0."
            raise ApiError(404, text, code="stream_not_found", param="Last-Event-ID")
        return self.answers.of_name(exchange.owner, name)

    def _checked(self, key: bytes | None, exchange: Exchange) -> bytes | None:
        """Return the digest that stands for a client's key."""
        if key is None:
            return None
        if not self._idempotency_s:
            exchange.warnings.append("Idempotency-Key has no effect: the server's --idempotency-s is 0")
            return None
        if not _KEY.fullmatch(key):
            raise bad_request("Idempotency-Key: 1 to 255 printable ASCII characters", "Idempotency-Key")
        return digest(exchange.owner.encode(), key)


def is_end_of_server(error: Exception) -> bool:
    """Whether an answer ended because the server does: the next one computes it again."""
    return isinstance(error, EngineDeadError) or (
        isinstance(error, ApiError) and error.detail.code in ("draining", "engine_dead", "aborted")
    )


def again(scope: Scope) -> Kept | None:
    """Return the answer of the server before that a request computes again; None: it comes from a client."""
    kept: Kept | None = scope["state"].get(_AGAIN)
    return kept
