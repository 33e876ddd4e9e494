"""Text completions as a stream of chunks."""

from collections.abc import Callable
from typing import Any

from octavo.engine.async_llm_engine import AsyncLLMEngine
from octavo.engine.request_state import CompletionDelta
from octavo.server.openai.chunks import CompletionChunks
from octavo.server.openai.completion_plan import CompletionPlan
from octavo.server.openai.continuation import Continuation, continuations, usage_of
from octavo.server.openai.replies import CompletionLogprobs, Usage
from octavo.server.openai.run import Run
from octavo.server.sse import DONE


class CompletionStream:
    """Makes the frames of one reply: text as it comes, how each sample ended, usage if asked for."""

    def __init__(self, engine: AsyncLLMEngine, plan: CompletionPlan) -> None:
        self._engine = engine
        self._plan = plan
        self._chunks = CompletionChunks(plan.head, plan.num_choices, shows_usage=plan.wishes.includes_usage)
        self._samples: list[StreamedContinuation] = []
        self.run: Run | None = None
        self.is_over = False

    def start(self, notify: Callable[[], None]) -> None:
        self.run = run = Run(self._engine, self._plan.prompts, notify)
        samples = continuations(self._plan, run)
        self._samples = [StreamedContinuation(sample, self._plan, self._chunks, run) for sample in samples]

    def take(self) -> bytes:
        assert self.run is not None
        if self.is_over:
            return b""
        frames = [frame for delta in self.run.take() for frame in self._samples[delta.index].frames(delta)]
        self.is_over = self.run.is_over
        if self.is_over:
            if self._plan.wishes.includes_usage:
                frames.append(self._chunks.of_usage(usage_of(self._plan, self.run)))
            frames.append(DONE)
        return b"".join(frames)

    def count_tokens(self) -> tuple[int, int]:
        return (0, 0) if self.run is None else self.run.count_tokens()

    def close(self) -> None:
        if self.run is not None:
            self.run.close()


class StreamedContinuation:
    """Makes the frames of one sample."""

    def __init__(self, sample: Continuation, plan: CompletionPlan, chunks: CompletionChunks, run: Run) -> None:
        self._sample = sample
        self._plan = plan
        self._wishes = plan.wishes
        self._chunks = chunks
        self._run = run
        self._is_plain = plan.wishes.is_plain and plan.num_top is None
        self._has_begun = False

    def frames(self, delta: CompletionDelta) -> list[bytes]:
        frames: list[bytes] = []
        if not self._has_begun:
            self._has_begun = True
            frames += self._piece(*self._sample.echo(), self._sample.about_prompt())
        text, logprobs = self._sample.read(delta)
        if self._is_plain:
            frames += [self._chunks.text(self._sample.index, text)] if text else []
        else:
            frames += self._piece(text, logprobs, {"token_ids": delta.token_ids} if self._wishes.has_token_ids else {})
        if self._sample.finish_reason is not None:
            frames.append(self._ending())
        return frames

    def _piece(self, text: str, logprobs: CompletionLogprobs | None, more: dict[str, Any]) -> list[bytes]:
        """Return a chunk if there is anything to say."""
        if not (text or more or (logprobs is not None and logprobs.tokens)):
            return []
        return [self._chunks.piece(self._sample.index, text, logprobs=logprobs, usage=self._usage, **more)]

    def _ending(self) -> bytes:
        sample = self._sample
        return self._chunks.piece(
            sample.index, "", usage=self._usage, finish_reason=sample.finish_reason, stop_reason=sample.stop_reason
        )

    @property
    def _usage(self) -> Usage | None:
        return usage_of(self._plan, self._run) if self._wishes.has_usage_everywhere else None
