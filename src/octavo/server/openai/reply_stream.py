"""`ReplyStream`: one reply while it is generated, from deltas of the engine's samples to frames or a complete reply.

Most of a chunk is constant, so it is encoded once per stream: a token costs a join.
"""

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import msgspec

from octavo.engine.async_llm_engine import AsyncLLMEngine, LiveRequest
from octavo.engine.input_processor import ProcessedRequest
from octavo.engine.request_state import CompletionDelta, CompletionState
from octavo.errors import RequestError, named_error
from octavo.server.errors import ApiError, as_api_error
from octavo.server.openai.logprobs import TokenNames, prompt_tables
from octavo.server.openai.params import ResponseOptions
from octavo.server.openai.replies import Usage, make_usage
from octavo.server.sse import DONE

WholeReply = TypeVar("WholeReply", bound=msgspec.Struct)
encode = msgspec.json.Encoder().encode


class ReplyHead(msgspec.Struct, frozen=True, kw_only=True):
    """The leading fields of a complete reply and of all chunks of a stream."""

    id: str
    model: str
    created: int
    system_fingerprint: str | None

    @classmethod
    def new(cls, prefix: str, model: str, fingerprint: str | None, own_id: str | None = None) -> "ReplyHead":
        """Generate an id unless the client sends its own."""
        return cls(
            id=f"{prefix}-{own_id or uuid.uuid4().hex}",
            model=model,
            created=int(time.time()),
            system_fingerprint=fingerprint,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyPlan:
    """One validated request: what chats and completions share."""

    head: ReplyHead
    prompts: Sequence[ProcessedRequest]
    options: ResponseOptions
    names: TokenNames
    num_top: int | None  # logprobs per token; None: no logprobs

    @property
    def num_samples(self) -> int:
        """Samples of each prompt."""
        return self.prompts[0].params.n

    @property
    def is_plain(self) -> bool:
        """Whether chunks contain text and nothing else."""
        return self.num_top is None and not (self.options.continuous_usage or self.options.token_ids)


class Chunks:
    """Encodes the frames of one stream; a subclass is one kind of chunk.

    With `include_usage` each frame has a field `usage`, null until there is one.
    """

    kind: ClassVar[str]
    content_key: ClassVar[str]  # of a choice
    text_opening: ClassVar[bytes]  # of the content if it is text and nothing else
    text_closing: ClassVar[bytes]

    def __init__(self, head: ReplyHead, num_choices: int, *, include_usage: bool) -> None:
        fields = {"id": head.id, "object": self.kind, "created": head.created, "model": head.model,
                  "system_fingerprint": head.system_fingerprint}  # fmt: skip
        self._opening = b"data: " + encode(fields)[:-1] + b',"choices":['
        self._closing = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._text_openings = [
            self._opening + b'{"index":%d,' % index + self.text_opening for index in range(num_choices)
        ]
        self._text_closing = self.text_closing + b',"logprobs":null,"finish_reason":null}' + self._closing

    def text(self, index: int, text: str) -> bytes:
        """Return a chunk with text and nothing else, the usual case."""
        return self._text_openings[index] + encode(text) + self._text_closing

    def piece(
        self,
        index: int,
        content: object,
        *,
        logprobs: msgspec.Struct | None = None,
        finish_reason: str | None = None,
        usage: Usage | None = None,
        **more: object,
    ) -> bytes:
        """Return any other chunk; `more` are further fields of the choice."""
        choice = {"index": index, self.content_key: content, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._opening + encode(choice | more) + (self._closing if usage is None else _closing_with(usage))

    def of_usage(self, usage: Usage) -> bytes:
        """Return the chunk without choices that reports the usage of the whole reply."""
        return self._opening + _closing_with(usage)


class ReplyStream(ABC, Generic[WholeReply]):
    """The engine requests of one reply, one per prompt, and the processing of their deltas.

    Streamed: `start` it, then `take` the frames at each notification. Complete: `whole` takes all deltas at once at the
    end and merges what is read from them; both read deltas in the same way. Always close it: unfinished requests are
    aborted.
    """

    def __init__(self, engine: AsyncLLMEngine, plan: ReplyPlan, chunks: Chunks) -> None:
        self._engine = engine
        self._prompts, self._options = plan.prompts, plan.options
        self._chunks = chunks
        self._lives: list[LiveRequest] = []
        self._unfinished: dict[int, CompletionState] = {}  # samples whose end is not taken yet, by choice index
        self.is_over = False

    def start(self, notify: Callable[[], None]) -> None:
        """Run the requests; `notify` is called in the event loop whenever there may be something to take."""
        for prompt in self._prompts:
            self._lives.append(self._engine.open(prompt, notify))
        self._unfinished = dict(enumerate(sample for live in self._lives for sample in live.samples))

    def take(self) -> bytes:
        """Return the frames of everything new; several steps are merged.

        Raises:
            ApiError, EngineDeadError: a sample failed or was aborted; the engine is dead.
        """
        if self.is_over:
            return b""
        frames: list[bytes] = []
        for delta in self._new_deltas():
            frames += self._frames(delta)
        if not self._unfinished:
            self.is_over = True
            if self._options.include_usage:
                frames.append(self._chunks.of_usage(self._usage()))
            frames.append(DONE)
        return b"".join(frames)

    async def whole(self) -> WholeReply:
        """Wait for all samples and return the complete reply. Raises as `take`."""
        settled = asyncio.Event()

        def wake_at_the_end() -> None:
            if all(live.is_settled for live in self._lives):
                settled.set()

        try:
            self.start(wake_at_the_end)
            await settled.wait()
            deltas: list[CompletionDelta] = []
            while self._unfinished:  # repeats only if the engine is dead, which raises
                deltas += self._new_deltas()
            return self._fold(deltas)
        finally:
            self.close()

    def count_tokens(self) -> tuple[int, int]:
        """Return the tokens of all prompts, and those generated so far."""
        states = [live.state for live in self._lives]
        return sum(s.num_prompt_tokens for s in states), sum(s.num_output_tokens for s in states)

    def close(self) -> None:
        for live in self._lives:
            live.close()

    @abstractmethod
    def _frames(self, delta: CompletionDelta) -> list[bytes]:
        """Return the chunks for new output of one choice."""

    @abstractmethod
    def _fold(self, deltas: Sequence[CompletionDelta]) -> WholeReply:
        """Return the complete reply, given one delta per choice, in order."""

    @property
    def _num_reasoning_tokens(self) -> int:
        return 0

    def _usage(self) -> Usage:
        """Return the tokens so far."""
        num_cached = sum(live.state.num_cached_tokens for live in self._lives)
        return make_usage(*self.count_tokens(), num_cached, self._num_reasoning_tokens)

    @property
    def _chunk_usage(self) -> Usage | None:
        """What each chunk reports."""
        return self._usage() if self._options.continuous_usage else None

    def _ending(self, delta: CompletionDelta, content: object, finish_reason: str) -> bytes:
        """Return the chunk with the finish reason of a choice."""
        return self._chunks.piece(
            delta.index,
            content,
            usage=self._chunk_usage,
            finish_reason=finish_reason,
            stop_reason=delta.stop_reason,
        )

    def _about_prompt(self, number: int) -> dict[str, Any]:
        """Return the fields about one prompt."""
        state = self._lives[number].state
        about: dict[str, Any] = {}
        if self._options.token_ids:
            about["prompt_token_ids"] = state.prompt_token_ids
        if self._options.prompt_logprobs and state.prompt_logprobs is not None:
            about["prompt_logprobs"] = prompt_tables(state.prompt_logprobs)
        return about

    def _new_deltas(self) -> list[CompletionDelta]:
        """Return new output by choice index: prompt by prompt, sample by sample. Raises as `take`."""
        deltas = [delta for index, sample in self._unfinished.items() if (delta := sample.take(index)) is not None]
        for delta in deltas:
            if delta.finish_reason is not None:
                _check_end(delta)
                del self._unfinished[delta.index]
        if not deltas:
            for live in self._lives:
                live.check()
        return deltas


def _check_end(delta: CompletionDelta) -> None:
    if delta.finish_reason == "error":
        raise as_api_error(named_error(delta.error_type or RequestError.__name__, delta.error or "The request failed."))
    if delta.finish_reason == "abort":
        raise ApiError(503, "The request was aborted.", code="aborted", headers={"Retry-After": "1"})


def _closing_with(usage: Usage) -> bytes:
    return b'],"usage":' + encode(usage) + b"}\n\n"
