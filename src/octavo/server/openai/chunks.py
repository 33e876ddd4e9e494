"""Streamed chunks as bytes. Most of a chunk never changes, so it is prepared once per stream; a token costs a join."""

import time
import uuid

import msgspec

from octavo.server.openai.replies import ChatLogprobs, CompletionLogprobs, Usage

encode = msgspec.json.Encoder().encode


class ReplyHead(msgspec.Struct, frozen=True, kw_only=True):
    """What all chunks of one reply have in common."""

    id: str
    model: str
    created: int
    system_fingerprint: str | None

    @classmethod
    def new(cls, prefix: str, model: str, fingerprint: str | None, own_id: str | None = None) -> "ReplyHead":
        """Draw an id, unless the client has one of its own."""
        return cls(
            id=f"{prefix}-{own_id or uuid.uuid4().hex}",
            model=model,
            created=int(time.time()),
            system_fingerprint=fingerprint,
        )


class Chunks:
    """Makes the frames of one stream. With `shows_usage` each says `usage`, null where there is none yet."""

    def __init__(self, head: ReplyHead, kind: str, *, shows_usage: bool) -> None:
        fields = {"id": head.id, "object": kind, "created": head.created, "model": head.model,
                  "system_fingerprint": head.system_fingerprint}  # fmt: skip
        self._opening = b"data: " + encode(fields)[:-1] + b',"choices":['
        self._closing = b'],"usage":null}\n\n' if shows_usage else b"]}\n\n"

    def of_choice(self, choice: bytes, usage: Usage | None = None) -> bytes:
        """Return a chunk with one choice, given as JSON."""
        return self._opening + choice + (self._closing if usage is None else _closing_with(usage))

    def of_usage(self, usage: Usage) -> bytes:
        """Return the chunk without choices that tells the usage of the whole reply."""
        return self._opening + _closing_with(usage)


class ChatChunks(Chunks):
    """`chat.completion.chunk`."""

    def __init__(self, head: ReplyHead, num_choices: int, *, shows_usage: bool) -> None:
        super().__init__(head, "chat.completion.chunk", shows_usage=shows_usage)
        self._text_openings = [
            self._opening + b'{"index":%d,"delta":{"content":' % index for index in range(num_choices)
        ]
        self._text_closing = b'},"logprobs":null,"finish_reason":null}' + self._closing

    def text(self, index: int, text: str) -> bytes:
        """Return a piece of content, and nothing else: the one that nearly all chunks are."""
        return self._text_openings[index] + encode(text) + self._text_closing

    def delta(
        self,
        index: int,
        delta: dict[str, object],
        *,
        logprobs: ChatLogprobs | None = None,
        finish_reason: str | None = None,
        usage: Usage | None = None,
        **more: object,
    ) -> bytes:
        """Return any other piece; `more` are further fields of the choice."""
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason, **more}
        return self.of_choice(encode(choice), usage)


class CompletionChunks(Chunks):
    """`text_completion`."""

    def __init__(self, head: ReplyHead, num_choices: int, *, shows_usage: bool) -> None:
        super().__init__(head, "text_completion", shows_usage=shows_usage)
        self._text_openings = [self._opening + b'{"index":%d,"text":' % index for index in range(num_choices)]
        self._text_closing = b',"logprobs":null,"finish_reason":null}' + self._closing

    def text(self, index: int, text: str) -> bytes:
        """Return a piece of text, and nothing else."""
        return self._text_openings[index] + encode(text) + self._text_closing

    def piece(
        self,
        index: int,
        text: str,
        *,
        logprobs: CompletionLogprobs | None = None,
        finish_reason: str | None = None,
        usage: Usage | None = None,
        **more: object,
    ) -> bytes:
        """Return any other piece; `more` are further fields of the choice."""
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason, **more}
        return self.of_choice(encode(choice), usage)


def _closing_with(usage: Usage) -> bytes:
    return b'],"usage":' + encode(usage) + b"}\n\n"
