"""Clients that come back: with `Last-Event-ID` for the rest of a stream, with `Idempotency-Key` for the same answer.

An answer that is kept is computed by the exchange that began it, which goes on without its client: it stays in the
queue, its deadline holds, and shutdown ends it. Every client reads it as one of its readers, the first one too.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.metrics.collect import HttpMetrics
from octavo.server.args import ServerArgs
from octavo.server.errors import ApiError, bad_request
from octavo.server.exchange import Exchange, route_path
from octavo.server.kept_answers import Kept, KeptAnswers, digest
from octavo.server.openai.birth import Birth
from octavo.server.recording import Reader, parse_event_id
from octavo.server.sse import EventStreamResponse, FrameSource, wait_for_disconnect

_MIB = 2**20
MAX_CHOICES = 64  # of a stream whose events have ids: an id counts the events of each
_KEY = re.compile(rb"[\x20-\x7e]{1,255}")
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,160}")  # a client's request id may be any text; an event's id is one line


class Reply(FrameSource, Protocol):
    """An answer that has been prepared and not started."""

    is_by_token: bool

    @property
    def name(self) -> str:
        """The id that clients see."""

    @property
    def num_choices(self) -> int:
        """The number of its choices."""

    async def whole(self) -> msgspec.Struct:
        """Compute it as one object."""


Begin = Callable[[Birth], Awaitable[Reply]]  # prepares the answer to a request


class Returning:
    """Decides which answers are kept, and finds those that a client comes back for."""

    def __init__(self, args: ServerArgs, metrics: HttpMetrics) -> None:
        self._resume_s, self._idempotency_s = args.resume_s, args.idempotency_s
        self.metrics = metrics
        self.answers = KeptAnswers(args.keep_mib * _MIB, metrics)

    def respond(self, exchange: Exchange, is_stream: bool, begin: Begin) -> Response | None:
        """Return what answers a request whose answer is kept, or that asks for one; None: an ordinary request.

        Does not wait, so of two requests with one key the second finds the first.
        Raises ApiError: 400, 404, 409, 422: what it asks for is not here.
        """
        headers = dict(exchange.scope["headers"])
        request = digest(route_path(exchange.scope).encode(), exchange.body)
        event_id, key = headers.get(b"last-event-id"), headers.get(b"idempotency-key")
        if event_id is not None:
            return self.resume(exchange, event_id.decode("latin-1"), request=request)
        key = self._checked(key, exchange)
        if key is not None and (kept := self.answers.of_key(key, request)) is not None:
            self.metrics.num_replayed += 1
            return ReturnResponse(exchange, kept, is_stream=is_stream)
        keep_s = max(self._resume_s if is_stream else 0.0, self._idempotency_s if key is not None else 0.0)
        if not keep_s:
            return None
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

    def name(self, kept: Kept, name: str, num_choices: int) -> None:
        """Give a stream's events their ids, if it can be resumed."""
        if not self._resume_s:
            return
        if num_choices > MAX_CHOICES:
            kept.warnings.append(f"a stream of more than {MAX_CHOICES} choices cannot be resumed: no event has an id")
        else:
            self.answers.name(kept, name if _NAME.fullmatch(name) else f"stream-{kept.birth.name}")

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


class ReturnResponse(Response):
    """A kept answer, for one client: its stream, or its body when it is complete."""

    def __init__(self, exchange: Exchange, kept: Kept, *, is_stream: bool, counts: list[int] | None = None) -> None:
        super().__init__()
        self._kept, self._is_stream, self._counts = kept, is_stream, counts
        exchange.num_samples = 0  # it computes nothing
        exchange.warnings = kept.warnings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_kept(self._kept, self._is_stream, self._counts, scope, receive, send)


class OwnerResponse(Response):
    """Computes an answer that is kept, and sends it to the client that began it while that one is there."""

    def __init__(self, exchange: Exchange, kept: Kept, returning: Returning, begin: Begin, *, is_stream: bool) -> None:
        super().__init__()
        self._exchange, self._kept, self._returning, self._begin = exchange, kept, returning, begin
        self._is_stream = is_stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kept, recording, work = self._kept, self._kept.recording, None
        kept.stop, is_wanted = self._exchange.end_now, True
        try:
            reply = await self._begin(kept.birth)
            self._exchange.count_tokens = reply.count_tokens
            if self._is_stream:
                reply.is_by_token = True
                self._returning.name(kept, reply.name, reply.num_choices)
                recording.start(reply, reply.num_choices)
            else:
                work = asyncio.ensure_future(self._record_whole(reply))
            recording.show()
            await send_kept(kept, self._is_stream, None, scope, receive, send)
            is_wanted = await outlive(kept)
        except BaseException as error:
            recording.fail(error if isinstance(error, Exception) else self._exchange.why_ended())
            raise
        finally:
            if work is not None:
                work.cancel()
                await asyncio.wait((work,))
            recording.close()
            recording.fail(self._exchange.why_ended())
            self._returning.answers.end(kept, is_answered=recording.error is None)
            if not is_wanted:
                self._returning.answers.drop(kept)

    async def _record_whole(self, reply: Reply) -> None:
        try:
            self._kept.recording.put(msgspec.json.encode(await reply.whole()))
        except Exception as error:  # noqa: BLE001 - the readers raise it
            self._kept.recording.fail(error)


async def send_kept(
    kept: Kept, is_stream: bool, counts: list[int] | None, scope: Scope, receive: Receive, send: Send
) -> None:
    """Send a kept answer until it is over or the client leaves. Raises what ended it before anything was sent."""
    reader = Reader(kept.recording, counts)
    if is_stream:
        await EventStreamResponse(reader)(scope, receive, send)
        return
    news = asyncio.Event()
    leaving = asyncio.ensure_future(wait_for_disconnect(receive))
    leaving.add_done_callback(lambda _: news.set())
    reader.start(news.set)
    try:
        while not (body := reader.take()) and not leaving.done():
            await news.wait()
            news.clear()
        if body:
            await Response(body, media_type="application/json")(scope, receive, send)
    finally:
        reader.close()
        leaving.cancel()
        await asyncio.wait((leaving,))


async def outlive(kept: Kept) -> bool:
    """Wait until the answer is over; return False if nobody has read it for its time, or nobody could."""
    recording, change = kept.recording, asyncio.Event()
    recording.on_change = change.set
    while not recording.is_over:
        change.clear()
        is_read = recording.has_readers
        try:
            async with asyncio.timeout(None if is_read else 0.0 if recording.is_evicted else kept.keep_s):
                await change.wait()
        except TimeoutError:
            if not recording.has_readers:
                return False
    return True
