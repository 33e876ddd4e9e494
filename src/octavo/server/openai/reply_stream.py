"""`ReplyStream`: one reply while it is generated, from deltas of the engine's samples to frames or a complete reply.

Most of a chunk is constant, so it is encoded once per stream: a token costs a join.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from octavo.engine.async_llm_engine import AsyncLLMEngine, LiveRequest
from octavo.engine.input_processor import ProcessedRequest
from octavo.engine.output_processor import CompletionDelta, CompletionState
from octavo.errors import RequestError, named_error
from octavo.server.http.errors import DONE, ApiError, as_api_error
from octavo.server.openai.parsers.base import ReasoningCounter
from octavo.server.openai.protocol import GenerationRequest, StreamOptions
from octavo.server.openai.replies import CompletionTokensDetails, PromptTokensDetails, Usage, prompt_tables
from octavo.server.openai.timings import PromptProgress, Timings, with_progress, with_timings

WholeReply = TypeVar("WholeReply", bound=msgspec.Struct)
encode = msgspec.json.Encoder().encode
_TEXT = "text"  # stands for any in the constant parts of a chunk


class ReplyHead(msgspec.Struct, frozen=True, kw_only=True):
    """The leading fields of a complete reply and of all chunks of a stream."""

    id: str
    model: str
    created: int
    system_fingerprint: str | None


class ReplyFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a reply before it starts."""

    name: str  # the id that clients see
    num_choices: int
    seeds: list[int]  # of each prompt, given or drawn
    model_key: str  # of what computes it: the same key, the same bytes


class Chunks:
    """Encodes the frames of one stream; with `include_usage` each has a field `usage`, null until there is one."""

    def __init__(self, head: ReplyHead, num_choices: int, *, is_chat: bool, include_usage: bool) -> None:
        kind, self._content_key = ("chat.completion.chunk", "delta") if is_chat else ("text_completion", "text")
        fields = {"id": head.id, "object": kind, "created": head.created, "model": head.model,
                  "system_fingerprint": head.system_fingerprint}  # fmt: skip
        self._opening = b"data: " + encode(fields)[:-1] + b',"choices":['
        self._closing = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._around_text = []  # by choice
        for index in range(num_choices):
            choice = encode(self._choice(index, {"content": _TEXT} if is_chat else _TEXT))
            before, _, after = choice.rpartition(encode(_TEXT))
            self._around_text.append((self._opening + before, after + self._closing))

    def _choice(self, index: int, content: object, logprobs: object = None, finish_reason: object = None) -> Any:
        return {"index": index, self._content_key: content, "logprobs": logprobs, "finish_reason": finish_reason}

    def text(self, index: int, text: str) -> bytes:
        """Return a chunk with text and nothing else, the usual case."""
        before, after = self._around_text[index]
        return before + encode(text) + after

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
        choice = self._choice(index, content, logprobs, finish_reason)
        return self._opening + encode(choice | more) + (self._closing if usage is None else _closing_with(usage))

    def usage(self, usage: Usage) -> bytes:
        """Return the chunk without choices that reports the usage of the whole reply."""
        return self._opening + _closing_with(usage)


class ReplyStream(ABC, Generic[WholeReply]):
    """The engine requests of one reply, one per prompt, and the processing of their deltas.

    Streamed: `start` it, then `take` the frames at each notification. Complete: `whole` takes all deltas at once at the
    end and merges what is read from them; both read deltas in the same way. Always close it: unfinished requests are
    aborted.
    """

    def __init__(
        self,
        engine: AsyncLLMEngine,
        request: GenerationRequest,
        head: ReplyHead,
        prompts: Sequence[ProcessedRequest],
        *,
        is_chat: bool,
    ) -> None:
        self._engine, self._head, self._prompts = engine, head, prompts
        options = request.stream_options or StreamOptions()
        self._includes_usage = bool(options.include_usage)  # in a last chunk
        self._repeats_usage = self._includes_usage and bool(options.continuous_usage_stats)  # in every chunk
        self._has_token_ids = bool(request.return_token_ids)
        self._has_prompt_logprobs = request.prompt_logprobs is not None
        self._is_plain = (  # chunks contain text and nothing else
            prompts[0].params.logprobs is None and not (self._repeats_usage or self._has_token_ids)
        )
        self._num_samples = prompts[0].params.n  # of each prompt
        self._num_choices = len(prompts) * self._num_samples
        self._chunks = Chunks(head, self._num_choices, is_chat=is_chat, include_usage=self._includes_usage)
        self._lives: list[LiveRequest] = []
        self._unfinished: dict[int, CompletionState] = {}  # samples whose end is not taken yet, by choice index
        self._reasoning: list[ReasoningCounter] = []  # of all choices
        self._has_output = True  # else only the prompt is returned, and the one token that was computed does not count
        self._num_ended = 0  # samples
        self._repeats_timings = bool(request.timings_per_token)
        self._shows_progress = bool(request.return_progress)
        self._progress: list[int] = []  # of each prompt: tokens that were reported
        self._nothing: object = {} if is_chat else ""  # the content of a chunk without any
        self.is_over = False
        self.is_timed = False  # whether it says how long it took, which the same request does not say again
        self.is_by_token = False  # whether frames depend on nothing but the request: not on how steps are merged

    @property
    def facts(self) -> ReplyFacts:
        adapter = self._prompts[0].samples[0].adapter
        name = "" if adapter is None else f" {adapter.content_hash}"
        return ReplyFacts(
            name=self._head.id,
            num_choices=self._num_choices,
            seeds=[seed for prompt in self._prompts if (seed := prompt.params.seed) is not None],
            model_key=f"{self._head.model} {self._head.system_fingerprint}{name}",
        )

    @property
    def core_ids(self) -> list[str]:
        """The ids of its samples in the core."""
        return [sample.request_id for prompt in self._prompts for sample in prompt.samples]

    def change_samples(self, priority: int | None, cache_salt: str | None) -> None:
        """Give all samples another priority, or another salt; before the start."""
        assert not self._lives
        changes = {"priority": priority, "cache_salt": cache_salt}
        given = {name: value for name, value in changes.items() if value is not None}
        self._prompts = [
            replace(prompt, samples=[msgspec.structs.replace(sample, **given) for sample in prompt.samples])
            for prompt in self._prompts
        ]

    @property
    def priority(self) -> int:
        """The priority that the client asked for, or the normal one."""
        return self._prompts[0].samples[0].priority

    @property
    def cache_salt(self) -> str | None:
        return self._prompts[0].samples[0].cache_salt

    @property
    def token_ids(self) -> list[list[int]]:
        """The tokens of each choice so far."""
        return [list(sample.token_ids) for live in self._lives for sample in live.state.samples]

    def start(self, notify: Callable[[], None]) -> None:
        """Run the requests; `notify` is called in the event loop whenever there may be something to take."""
        for prompt in self._prompts:
            self._lives.append(self._engine.open(prompt, notify))
            self._lives[-1].state.shows_progress = self._shows_progress
        self._progress = [-1] * len(self._lives)
        self._unfinished = dict(enumerate(sample for live in self._lives for sample in live.state.samples))

    def take(self) -> bytes:
        """Return the frames of everything new; several steps are merged.

        Raises ApiError, EngineDeadError: a sample failed or was aborted; the engine is dead.
        """
        if self.is_over:
            return b""
        deltas = self._new_deltas()
        frames = self._progress_frames() if self._shows_progress and self.is_timed else []
        for delta in deltas:
            frames += self._frames(delta)
        if self.is_timed and self._repeats_timings:
            frames = [with_timings(each, self._timings()) for each in frames]
        if not self._unfinished:
            self.is_over = True
            frames += self._last_frames()
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

    def _opening(self) -> list[bytes]:
        """Return what comes before all other chunks, once."""
        return []

    def _progress_frames(self) -> list[bytes]:
        """Return a chunk for each prompt of which more is computed."""
        frames: list[bytes] = []
        for number, live in enumerate(self._lives):
            progress = PromptProgress.of(live.state)
            if live.state.admitted is not None and progress.processed > self._progress[number]:
                self._progress[number] = progress.processed
                piece = self._chunks.piece(number * self._num_samples, self._nothing)
                opening = [] if self._has_prompt_logprobs else self._opening()  # which has these, so it waits
                frames += [*opening, with_progress(piece, progress)]
        return frames

    def _last_frames(self) -> list[bytes]:
        """Return what follows the last output of the last choice."""
        if not self._includes_usage:
            return [DONE]
        last = self._chunks.usage(self._usage())
        return [with_timings(last, self._timings()) if self.is_timed else last, DONE]

    @abstractmethod
    def _fold(self, deltas: Sequence[CompletionDelta]) -> WholeReply:
        """Return the complete reply, given one delta per choice, in order."""

    def _usage(self) -> Usage:
        num_prompt, num_output = self.count_tokens()
        if not self._has_output:
            num_output = 0
        num_cached = sum(live.state.num_cached_tokens for live in self._lives)
        num_reasoning = sum(reader.num_tokens for reader in self._reasoning)
        return Usage(
            prompt_tokens=num_prompt,
            completion_tokens=num_output,
            total_tokens=num_prompt + num_output,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=num_cached),
            completion_tokens_details=CompletionTokensDetails(reasoning_tokens=num_reasoning),
        )

    @property
    def _chunk_usage(self) -> Usage | None:
        return self._usage() if self._repeats_usage else None

    def _ending(self, delta: CompletionDelta, content: object, finish_reason: str) -> bytes:
        """Return the chunk with the finish reason of a choice."""
        usage, stop_reason = self._chunk_usage, delta.stop_reason
        last = self._chunks.piece(
            delta.index, content, usage=usage, finish_reason=finish_reason, stop_reason=stop_reason
        )
        self._num_ended += 1
        is_last = self._num_ended == self._num_choices and not (self._includes_usage or self._repeats_timings)
        return with_timings(last, self._timings()) if self.is_timed and is_last else last

    def _timings(self) -> Timings:
        num_output = self.count_tokens()[1] if self._has_output else 0
        return Timings.of([live.state for live in self._lives], num_output)

    @property
    def _whole_timings(self) -> Timings | UnsetType:
        """The timings of a complete reply, unset if it has none."""
        return self._timings() if self.is_timed else UNSET

    def _about_prompt(self, number: int) -> dict[str, Any]:
        state = self._lives[number].state
        about: dict[str, Any] = {"prompt_token_ids": state.processed.prompt_token_ids} if self._has_token_ids else {}
        if self._has_prompt_logprobs and state.prompt_logprobs is not None:
            about["prompt_logprobs"] = prompt_tables(state.prompt_logprobs)
        return about

    def _new_deltas(self) -> list[CompletionDelta]:
        """Return new output by choice index: prompt by prompt, sample by sample. Raises as `take`."""
        samples = self._unfinished.items()
        if self.is_by_token:
            deltas = [delta for index, sample in samples for delta in sample.take_each(index)]
        else:
            deltas = [delta for index, sample in samples if (delta := sample.take(index)) is not None]
        for delta in deltas:
            if delta.finish_reason == "error":
                kind, text = delta.error_type or RequestError.__name__, delta.error or "The request failed."
                raise as_api_error(named_error(kind, text))
            if delta.finish_reason == "abort":
                raise ApiError(503, "The request was aborted.", code="aborted", headers={"Retry-After": "1"})
            if delta.finish_reason is not None:
                del self._unfinished[delta.index]
        if not deltas:
            for live in self._lives:
                live.check()
        return deltas


def _closing_with(usage: Usage) -> bytes:
    return b'],"usage":' + encode(usage) + b"}\n\n"
