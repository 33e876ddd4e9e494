"""Responses in the background: computed by the exchange that began them, which outlives its client.

So they stay in the queue, their deadline holds, and shutdown ends them; with `--state-dir` and `--idempotency-s` the
next server computes again what a kill has interrupted (`server/kept/returning.py`).
"""

from collections.abc import Awaitable, Callable

import msgspec
from starlette.types import Receive, Scope, Send

from octavo.server.http.errors import ApiError, as_api_error
from octavo.server.http.exchange import Exchange, json_response
from octavo.server.kept.answers import Kept, digest
from octavo.server.kept.responses import Begin, OwnerResponse, outlive, send_kept
from octavo.server.kept.returning import Returning
from octavo.server.openai.birth import Birth
from octavo.server.responses.protocol import Response
from octavo.server.responses.stream import ResponseStream

_CANCELLED = "response_cancelled"


def job_key(owner: str, response_id: str) -> bytes:
    """Return the key under which the answer of a background response is kept."""
    return digest(owner.encode(), b"response", response_id.encode())


def cancellation() -> ApiError:
    return ApiError(410, "The response was cancelled.", code=_CANCELLED)


class BackgroundResponse(OwnerResponse):
    """Computes a response; its client gets the stream, or at once the response that has begun."""

    def __init__(
        self,
        exchange: Exchange,
        kept: Kept,
        keeper: Returning,
        begin: Begin,
        keep: Callable[[Response], Awaitable[None]],
        *,
        is_stream: bool,
        is_again: bool,
    ) -> None:
        super().__init__(exchange, kept, keeper, self._begin_job, is_stream=True, is_again=is_again)
        self._begin_response, self._keep, self._shows_stream = begin, keep, is_stream
        self._job: ResponseStream | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            try:
                await self._conclude()
            finally:
                self._kept.ended.set()

    async def _begin_job(self, birth: Birth) -> ResponseStream:
        job = await self._begin_response(birth)
        assert isinstance(job, ResponseStream)
        self._job = job
        await self._keep(job.response)
        return job

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self._job is not None
        if self._shows_stream:
            await send_kept(self._kept, True, None, scope, receive, send)
        else:
            begun = msgspec.structs.replace(self._job.response, status="queued", output=[], usage=None)
            await json_response(begun)(scope, receive, send)

    async def _outlive(self) -> bool:
        return await outlive(self._kept, None)  # whoever reads it

    async def _conclude(self) -> None:
        """Keep what has become of a response that has failed; the next server goes on with one that is left to it."""
        error = self._kept.recording.error
        if self._job is None or error is None or (self._kept.is_left and self._keeper.has_journal):
            return
        failure = as_api_error(error)
        self._job.fail("cancelled" if failure.detail.code == _CANCELLED else "failed", failure)
        await self._keep(self._job.response)
