"""Whole text completions."""

import msgspec

from octavo.engine.async_llm_engine import AsyncLLMEngine
from octavo.engine.request_state import CompletionDelta
from octavo.server.openai.completion_plan import CompletionPlan
from octavo.server.openai.continuation import Continuation, continuations, usage_of
from octavo.server.openai.logprobs import joined
from octavo.server.openai.replies import Completion, CompletionChoice, CompletionLogprobs
from octavo.server.openai.run import run_to_end


async def whole_completion(engine: AsyncLLMEngine, plan: CompletionPlan) -> Completion:
    """Wait for all samples of all prompts; return the reply."""
    run, deltas = await run_to_end(engine, plan.prompts)
    samples = [WholeContinuation(sample, plan) for sample in continuations(plan, run)]
    for delta in deltas:
        samples[delta.index].add(delta)
    head = plan.head
    return Completion(
        id=head.id,
        created=head.created,
        model=head.model,
        system_fingerprint=head.system_fingerprint,
        choices=[sample.choice() for sample in samples],
        usage=usage_of(plan, run),
    )


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
