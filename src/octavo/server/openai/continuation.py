"""One sample of a completion on its way from text to what the client sees."""

from typing import Any

from octavo.engine.request_state import CompletionDelta, RequestState
from octavo.server.openai.completion_plan import CompletionPlan
from octavo.server.openai.logprobs import CompletionRows, prompt_tables
from octavo.server.openai.replies import CompletionLogprobs, Usage, make_usage
from octavo.server.openai.run import Run


class Continuation:
    """The echo first, if it is wanted, then what the model adds."""

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


def usage_of(plan: CompletionPlan, run: Run) -> Usage:
    """Return the tokens so far; the one that is computed where only the prompt was wanted does not count."""
    usage = run.usage
    if plan.has_output:
        return usage
    return make_usage(usage.prompt_tokens, 0, usage.prompt_tokens_details.cached_tokens)


def continuations(plan: CompletionPlan, run: Run) -> list[Continuation]:
    """Return one for each sample, prompt by prompt."""
    states = [state for state in run.states for _ in range(plan.num_samples)]
    return [Continuation(index, plan, state) for index, state in enumerate(states)]
