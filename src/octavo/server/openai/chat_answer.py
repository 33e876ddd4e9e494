"""One sample of a chat on its way from text to what the client sees."""

from collections.abc import Sequence
from typing import Any

from octavo.engine.request_state import CompletionDelta, RequestState
from octavo.server.openai.chat_plan import ChatPlan
from octavo.server.openai.logprobs import prompt_tables
from octavo.server.openai.parsers.base import Delta, Reasoning, ToolCallStart
from octavo.server.openai.replies import TokenRow


class ChatAnswer:
    """Reads the deltas of one sample, to its end."""

    def __init__(self, index: int, plan: ChatPlan) -> None:
        self.index = index
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        reader = plan.make_reader()
        self._parser = reader.parser
        self._thinking = reader.thinking
        self._shows_reasoning = plan.shows_reasoning
        self._rows = plan.make_rows and plan.make_rows()
        self._has_calls = False

    @property
    def num_reasoning_tokens(self) -> int:
        return 0 if self._thinking is None else self._thinking.num_tokens

    def read(self, delta: CompletionDelta) -> Sequence[Delta]:
        """Return what new text settles."""
        pieces = self._parser.push(delta.text)
        if delta.finish_reason is not None:
            pieces = [*pieces, *self._parser.finish()]
        if self._thinking is not None:
            self._thinking.push(delta.token_ids)
        for piece in pieces:
            if isinstance(piece, ToolCallStart):
                self._has_calls = True
        if not self._shows_reasoning:
            pieces = [piece for piece in pieces if not isinstance(piece, Reasoning)]
        if delta.finish_reason is not None:
            self.stop_reason = delta.stop_reason
            self.finish_reason = (
                "tool_calls" if self._has_calls and delta.finish_reason == "stop" else delta.finish_reason
            )
        return pieces

    def read_logprobs(self, delta: CompletionDelta) -> list[TokenRow]:
        """Return the rows of text that is shown with this delta; none where none were asked for."""
        if self._rows is None or delta.logprobs is None:
            return []
        rows = self._rows.push(delta.token_ids, delta.logprobs, delta.text)
        if delta.finish_reason is not None:
            rows += self._rows.finish(is_cut=delta.finish_reason == "stop")
        return rows


def about_prompt(state: RequestState, plan: ChatPlan) -> dict[str, Any]:
    """Return what the client wants to know of its prompt."""
    about: dict[str, Any] = {}
    if plan.wishes.has_token_ids:
        about["prompt_token_ids"] = state.prompt_token_ids
    if state.prompt_logprobs is not None:
        about["prompt_logprobs"] = prompt_tables(state.prompt_logprobs)
    return about
