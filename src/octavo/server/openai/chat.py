"""Whole chat answers."""

import msgspec

from octavo.engine.async_llm_engine import AsyncLLMEngine
from octavo.engine.request_state import CompletionDelta
from octavo.server.openai.chat_answer import ChatAnswer, about_prompt
from octavo.server.openai.chat_plan import ChatPlan
from octavo.server.openai.deltas import wire_message
from octavo.server.openai.parsers.base import ParsedMessage
from octavo.server.openai.replies import ChatChoice, ChatCompletion, ChatLogprobs, TokenRow
from octavo.server.openai.run import run_to_end


async def whole_chat(engine: AsyncLLMEngine, plan: ChatPlan) -> ChatCompletion:
    """Wait for all samples; return the reply."""
    answers = [WholeAnswer(index, plan) for index in range(plan.prompt.params.n)]
    run, deltas = await run_to_end(engine, [plan.prompt])
    for delta in deltas:
        answers[delta.index].add(delta)
    run.num_reasoning_tokens = sum(answer.num_reasoning_tokens for answer in answers)
    head = plan.head
    return ChatCompletion(
        id=head.id,
        created=head.created,
        model=head.model,
        system_fingerprint=head.system_fingerprint,
        choices=[answer.choice() for answer in answers],
        usage=run.usage,
        **about_prompt(run.states[0], plan),
    )


class WholeAnswer:
    """Collects one answer."""

    def __init__(self, index: int, plan: ChatPlan) -> None:
        self._answer = ChatAnswer(index, plan)
        self._message = ParsedMessage()
        self._rows: list[TokenRow] | None = None if plan.make_rows is None else []
        self._token_ids: list[int] | None = [] if plan.wishes.has_token_ids else None

    @property
    def num_reasoning_tokens(self) -> int:
        return self._answer.num_reasoning_tokens

    def add(self, delta: CompletionDelta) -> None:
        self._message.add(self._answer.read(delta))
        if self._rows is not None:
            self._rows += self._answer.read_logprobs(delta)
        if self._token_ids is not None:
            self._token_ids += delta.token_ids

    def choice(self) -> ChatChoice:
        """Return it as the client sees it; it must have ended."""
        assert self._answer.finish_reason is not None
        return ChatChoice(
            index=self._answer.index,
            message=wire_message(self._message, shows_reasoning=True),
            finish_reason=self._answer.finish_reason,
            stop_reason=self._answer.stop_reason,
            logprobs=None if self._rows is None else ChatLogprobs(content=self._rows),
            token_ids=msgspec.UNSET if self._token_ids is None else self._token_ids,
        )
