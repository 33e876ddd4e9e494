"""Responses with answers that are kept: to the client that began one, and to those that come back for it."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.server.http.exchange import Exchange, route_path
from octavo.server.http.sse import EventStreamResponse, FrameSource, wait_for_disconnect
from octavo.server.kept.answers import Kept
from octavo.server.kept.recording import Reader
from octavo.server.openai.birth import Birth
from octavo.server.openai.reply_stream import ReplyFacts

if TYPE_CHECKING:
    from octavo.server.kept.returning import Returning


class Reply(FrameSource, Protocol):
    """An answer that has been prepared and not started."""

    is_by_token: bool

    @property
    def facts(self) -> ReplyFacts:
        """What is known of it."""

    @property
    def token_ids(self) -> list[list[int]]:
        """The tokens of each choice so far."""

    async def whole(self) -> msgspec.Struct:
        """Compute it as one object."""


Begin = Callable[[Birth], Awaitable[Reply]]  # prepares the answer to a request


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

    def __init__(
        self,
        exchange: Exchange,
        kept: Kept,
        keeper: "Returning",
        begin: Begin,
        *,
        is_stream: bool,
        is_again: bool = False,
    ) -> None:
        """`is_again`: the server before has begun it, and its client is away."""
        super().__init__()
        self._exchange, self._kept, self._keeper, self._begin = exchange, kept, keeper, begin
        self._is_stream, self._is_again = is_stream, is_again

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kept, recording, work = self._kept, self._kept.recording, None
        kept.stop, is_wanted = self._exchange.end_now, True
        try:
            reply = await self._begin(kept.birth)
            facts = reply.facts
            kept.birth.check_model(facts.model_key)
            self._exchange.count_tokens = reply.count_tokens
            if self._is_stream:
                reply.is_by_token = True
                self._keeper.name(kept, facts.name, facts.num_choices)
            written = None if self._is_again else self._write(reply)
            if self._is_stream:
                recording.start(reply, facts.num_choices)
            else:
                work = asyncio.ensure_future(self._record_whole(reply))
            if written is not None:  # meanwhile it is computed, but nobody sees it who could ask for the rest
                await written
            recording.show()
            if not self._is_again:
                await self._serve(scope, receive, send)
            is_wanted = await self._outlive()
        except BaseException as error:
            recording.fail(error if isinstance(error, Exception) else self._exchange.why_ended())
            raise
        finally:
            if work is not None:
                work.cancel()
                await asyncio.wait((work,))
            recording.close()
            recording.fail(self._exchange.why_ended())
            self._keeper.conclude(kept, is_wanted=is_wanted)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the client that began it."""
        await send_kept(self._kept, self._is_stream, None, scope, receive, send)

    async def _outlive(self) -> bool:
        """Wait for the end; return False if nobody does."""
        return await outlive(self._kept, self._kept.keep_s)

    def _write(self, reply: Reply) -> "asyncio.Future[None] | None":
        path, body = route_path(self._exchange.scope), self._exchange.body
        return self._keeper.write(self._kept, reply, path, body, self._is_stream)

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


async def outlive(kept: Kept, patience_s: float | None) -> bool:
    """Wait until the answer is over; return False if nobody has read it for `patience_s`, or nobody could."""
    recording, change = kept.recording, asyncio.Event()
    recording.on_change = change.set
    while not recording.is_over:
        change.clear()
        is_awaited = recording.has_readers or patience_s is None
        try:
            async with asyncio.timeout(None if is_awaited else 0.0 if recording.is_evicted else patience_s):
                await change.wait()
        except TimeoutError:
            if not recording.has_readers:
                return False
    return True
