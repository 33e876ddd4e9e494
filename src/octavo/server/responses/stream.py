"""`ResponseStream`: the deltas of a chat as a response, streamed or complete; one `ItemWriter` writes both.

Events are numbered without gaps. A stream ends with `response.completed`, `response.incomplete` or `response.failed`.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, ClassVar

import msgspec

from octavo.engine.output_processor import CompletionDelta
from octavo.server.http.errors import ApiError
from octavo.server.openai.answers import AnswerStream
from octavo.server.openai.parsers.base import Content, Delta
from octavo.server.openai.replies import TokenRow
from octavo.server.openai.token_usage import ResponseUsage
from octavo.server.responses.protocol import (
    IncompleteDetails,
    Response,
    ResponseFault,
)
from octavo.server.responses.translate import ResponsesChat
from octavo.server.responses.writer import ItemWriter

_encode = msgspec.json.Encoder().encode
_IN_PROGRESS = "in_progress"


class ResponseStream(AnswerStream[Response]):
    """The Responses form of a reply.

    `keep` stores a response before a client learns that it is complete.
    """

    id_prefix: ClassVar[str] = "resp_"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        assert isinstance(self._request, ResponsesChat)
        self._chat = self._request
        self.keep: Callable[[Response], Awaitable[None]] | None = None
        self._is_streamed = False
        self._frames_so_far: list[bytes] = []
        self._num_events = 0
        self._rows: list[TokenRow] = []  # of tokens whose text has not come
        self._notify: Callable[[], None] = lambda: None
        self._keeping: asyncio.Future[None] | None = None
        self._held = b""  # the end, until it is kept
        self.response = self._response(_IN_PROGRESS)
        self._writer = ItemWriter(
            self._head.id.removeprefix(self.id_prefix),
            self._chat.names,
            self._emit,
            shows_summaries=self._chat.shows_summaries,
            covers_thoughts=self._chat.covers_thoughts,
        )

    def start(self, notify: Callable[[], None]) -> None:
        self._notify = notify
        super().start(notify)

    def take(self) -> bytes:
        if self._keeping is None:
            data = super().take()
            if not self.is_over or self.keep is None:
                return data
            self.is_over = False
            self._held, self._keeping = data, asyncio.ensure_future(self.keep(self.response))
            self._keeping.add_done_callback(lambda _: self._notify())
            return b""
        if not self._keeping.done():
            return b""
        data, self._held, self.is_over = self._held, b"", True
        return data

    async def whole(self) -> Response:
        response = await super().whole()
        if self.keep is not None:
            await self.keep(response)
        return response

    def ending(self, error: ApiError) -> bytes:
        """Return the end of a stream that fails after it has begun."""
        self.fail("failed", error)
        return self._taken()

    def fail(self, status: str, error: ApiError) -> None:
        """End the response with what there is of it: `failed` or `cancelled`."""
        self._writer.end(is_cut=True)
        detail = error.detail
        fault = ResponseFault(code=detail.code or "server_error", message=detail.message)
        self.response = self._response(status, usage=ResponseUsage.of(self._usage()), error=fault)
        self._emit(f"response.{status}", response=self.response)

    def _new_deltas(self) -> list[CompletionDelta]:
        if self._prompts[0].params.logprobs is not None:
            self.is_by_token = True  # so rows of thoughts are not mixed up with those of text
        return super()._new_deltas()

    def _frames(self, delta: CompletionDelta) -> list[bytes]:
        if not self._is_streamed:
            self._is_streamed = True
            for kind in ("created", _IN_PROGRESS):
                self._emit(f"response.{kind}", response=self.response)
        self._write(delta)
        if delta.finish_reason is not None:
            self._emit(f"response.{self.response.status}", response=self.response)
        return [self._taken()]

    def _last_frames(self) -> list[bytes]:
        return []

    def _fold(self, deltas: Sequence[CompletionDelta]) -> Response:
        for delta in deltas:
            self._write(delta)
        return self.response

    def _write(self, delta: CompletionDelta) -> None:
        """Write what a delta has of the output; with the last one, conclude the response."""
        answer, writer = self._answers[0], self._writer
        pieces = answer.read(delta)
        self._rows += answer.read_logprobs(delta)
        for piece in pieces:
            writer.write(piece, self._rows_of(piece))
        if delta.finish_reason is None:
            return
        is_cut = answer.finish_reason(delta) == "length"
        writer.say_nothing()
        writer.end(is_cut=is_cut)
        self.response = self._response(
            "incomplete" if is_cut else "completed",
            usage=ResponseUsage.of(self._usage()),
            incomplete_details=IncompleteDetails(reason="max_output_tokens") if is_cut else None,
            completed_at=int(time.time()) if self.is_timed and not is_cut else None,
        )

    def _rows_of(self, piece: Delta) -> list[TokenRow]:
        """Return the logprobs that belong to a piece of text: of the last tokens that cover it. Others are dropped."""
        rows, self._rows = self._rows, []
        if not isinstance(piece, Content):
            return []
        num_bytes, first = len(piece.text.encode("utf-8", "surrogatepass")), len(rows)
        while num_bytes > 0 and first > 0:
            first -= 1
            num_bytes -= len(rows[first].bytes)
        return rows[first:]

    def _response(self, status: str, **fields: Any) -> Response:
        params = self._prompts[0].params
        return Response(
            id=self._head.id,
            created_at=self._head.created,
            model=self._head.model,
            status=status,
            output=self._writer.items if status != _IN_PROGRESS else [],
            temperature=params.temperature,
            top_p=params.top_p,
            **self._chat.echoed(),
            **fields,
        )

    def _emit(self, kind: str, /, **fields: Any) -> None:
        """Number an event and encode it at once: what is in it goes on changing."""
        if self._is_streamed:
            event = {"type": kind, "sequence_number": self._num_events, **fields}
            self._num_events += 1
            self._frames_so_far.append(b"event: " + kind.encode() + b"\ndata: " + _encode(event) + b"\n\n")

    def _taken(self) -> bytes:
        frames, self._frames_so_far = self._frames_so_far, []
        return b"".join(frames)
