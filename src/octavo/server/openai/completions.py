"""Text completions: whole, and as a stream of chunks."""

from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from octavo.engine.async_llm_engine import AsyncLLMEngine
from octavo.engine.request_state import CompletionDelta, RequestState
from octavo.server.openai.chunks import CompletionChunks
from octavo.server.openai.completion_plan import CompletionPlan
from octavo.server.openai.logprobs import CompletionRows, joined, prompt_tables
from octavo.server.openai.replies import Completion, CompletionChoice, CompletionLogprobs
from octavo.server.openai.run import Run
from octavo.server.sse import DONE, PING


class Continuation:
    """One sample of one prompt: the echo first, if it is wanted, then what the model adds."""

    def __init__(self, index: int, plan: CompletionPlan, state: RequestState) -> None:
        self.index = index
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self._plan = plan
        self._state = state
        self._rows = None if plan.num_top is None else CompletionRows(plan.names, plan.num_top)

    def echo(self) -> tuple[str, CompletionLogprobs | None]:
        """Return the prompt as the beginning of the text; empty when it is not wanted. Once, with the first tokens."""
        if not self._plan.is_echoed:
            return "", None
        text = self._plan.prompt_texts[self.index // self._plan.num_samples]
        if self._rows is None:
            return text, None
        assert self._state.prompt_logprobs is not None
        return text, self._rows.push(self._state.prompt_token_ids, self._state.prompt_logprobs)

    def read(self, delta: CompletionDelta) -> tuple[str, CompletionLogprobs | None]:
        """Return new text and its logprobs; nothing of either where only the prompt was wanted."""
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        if not self._plan.has_output:
            self.finish_reason = delta.finish_reason and "length"
            return "", None
        if self._rows is None or delta.logprobs is None:
            return delta.text, None
        return delta.text, self._rows.push(delta.token_ids, delta.logprobs)

    def about_prompt(self) -> dict[str, Any]:
        """Return what the client wants to know of its prompt beside the text."""
        about: dict[str, Any] = {}
        if self._plan.wishes.has_token_ids:
            about["prompt_token_ids"] = self._state.prompt_token_ids
        if self._plan.has_prompt_logprobs and self._state.prompt_logprobs is not None:
            about["prompt_logprobs"] = prompt_tables(self._state.prompt_logprobs)
        return about


class WholeContinuation:
    """Collects one sample."""

    def __init__(self, sample: Continuation, plan: CompletionPlan) -> None:
        self._sample = sample
        self._texts: list[str] = []
        self._logprobs: list[CompletionLogprobs] | None = None if plan.num_top is None else []
        self._token_ids: list[int] | None = [] if plan.wishes.has_token_ids else None
        self._has_begun = False

    def add(self, delta: CompletionDelta) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._keep(*self._sample.echo())
        self._keep(*self._sample.read(delta))
        if self._token_ids is not None:
            self._token_ids += delta.token_ids

    def _keep(self, text: str, logprobs: CompletionLogprobs | None) -> None:
        self._texts.append(text)
        if self._logprobs is not None and logprobs is not None:
            self._logprobs.append(logprobs)

    def choice(self) -> CompletionChoice:
        """Return it as the client sees it; it must have ended."""
        sample = self._sample
        assert sample.finish_reason is not None
        return CompletionChoice(
            index=sample.index,
            text="".join(self._texts),
            finish_reason=sample.finish_reason,
            stop_reason=sample.stop_reason,
            logprobs=None if self._logprobs is None else joined(self._logprobs),
            token_ids=msgspec.UNSET if self._token_ids is None else self._token_ids,
            **sample.about_prompt(),
        )


async def whole_completion(engine: AsyncLLMEngine, plan: CompletionPlan) -> Completion:
    """Wait for all samples of all prompts; return the reply."""
    with Run(engine, plan.prompts) as run:
        samples = [WholeContinuation(sample, plan) for sample in _samples(plan, run)]
        async for news in run.deltas():
            for number, delta in news:
                samples[number].add(delta)
        head = plan.head
        return Completion(
            id=head.id,
            created=head.created,
            model=head.model,
            system_fingerprint=head.system_fingerprint,
            choices=[sample.choice() for sample in samples],
            usage=run.usage,
        )


async def stream_completion(engine: AsyncLLMEngine, plan: CompletionPlan) -> AsyncGenerator[bytes, None]:
    """Yield frames: text as it comes, how each sample ended, usage if asked for."""
    chunks = CompletionChunks(plan.head, plan.num_choices, shows_usage=plan.wishes.includes_usage)
    with Run(engine, plan.prompts) as run:
        samples = [StreamedContinuation(sample, plan, chunks, run) for sample in _samples(plan, run)]
        async for news in run.deltas(pings=True):
            frames = [frame for number, delta in news for frame in samples[number].frames(delta)]
            if frames or not news:
                yield b"".join(frames) if news else PING
        yield (chunks.of_usage(run.usage) if plan.wishes.includes_usage else b"") + DONE


class StreamedContinuation:
    """Makes the frames of one sample."""

    def __init__(self, sample: Continuation, plan: CompletionPlan, chunks: CompletionChunks, run: Run) -> None:
        self._sample = sample
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
    def _usage(self) -> Any:
        return self._run.usage if self._wishes.has_usage_everywhere else None


def _samples(plan: CompletionPlan, run: Run) -> list[Continuation]:
    states = [state for state in run.states for _ in range(plan.num_samples)]
    return [Continuation(index, plan, state) for index, state in enumerate(states)]
