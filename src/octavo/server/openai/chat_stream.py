"""Chat answers as a stream of chunks."""

from collections.abc import Callable, Sequence
from typing import Any

from octavo.engine.async_llm_engine import AsyncLLMEngine
from octavo.engine.request_state import CompletionDelta
from octavo.server.openai.chat_answer import ChatAnswer, about_prompt
from octavo.server.openai.chat_plan import ChatPlan
from octavo.server.openai.chunks import ChatChunks
from octavo.server.openai.deltas import wire_delta
from octavo.server.openai.parsers.base import Content, Delta
from octavo.server.openai.replies import ChatLogprobs, Usage
from octavo.server.openai.run import Run
from octavo.server.sse import DONE


class ChatStream:
    """Makes the frames of one reply: roles, text as it comes, how each sample ended, usage if asked for."""

    def __init__(self, engine: AsyncLLMEngine, plan: ChatPlan) -> None:
        num_choices = plan.prompt.params.n
        self._engine = engine
        self._plan = plan
        self._answers = [ChatAnswer(index, plan) for index in range(num_choices)]
        self._chunks = ChatChunks(plan.head, num_choices, shows_usage=plan.wishes.includes_usage)
        self._is_plain = plan.wishes.is_plain and plan.make_rows is None
        self._has_begun = False
        self.is_over = False
        self.run: Run | None = None

    def start(self, notify: Callable[[], None]) -> None:
        self.run = Run(self._engine, [self._plan.prompt], notify)

    def take(self) -> bytes:
        assert self.run is not None
        if self.is_over:
            return b""
        news = self.run.take()
        frames = self._opening(self.run) if news and not self._has_begun else []
        self._has_begun = self._has_begun or bool(news)
        for delta in news:
            frames += self._frames(delta, self.run)
        self.is_over = self.run.is_over
        if self.is_over:
            frames.append(self._closing(self.run))
        return b"".join(frames)

    def count_tokens(self) -> tuple[int, int]:
        return (0, 0) if self.run is None else self.run.count_tokens()

    def close(self) -> None:
        if self.run is not None:
            self.run.close()

    def _usage(self, run: Run) -> Usage:
        """Return the tokens so far."""
        run.num_reasoning_tokens = sum(answer.num_reasoning_tokens for answer in self._answers)
        return run.usage

    def _opening(self, run: Run) -> list[bytes]:
        """Return the first chunk of each answer: who speaks."""
        role: dict[str, object] = {"role": "assistant", "content": ""}
        about = about_prompt(run.states[0], self._plan)
        usage = self._usage(run) if self._plan.wishes.has_usage_everywhere else None
        return [self._chunks.delta(answer.index, role, usage=usage, **about) for answer in self._answers]

    def _frames(self, delta: CompletionDelta, run: Run) -> list[bytes]:
        """Return the chunks of new text; the last says, with an empty delta, how the answer ended."""
        answer = self._answers[delta.index]
        pieces = answer.read(delta)
        if not self._is_plain:
            frames = self._rich(answer, delta, pieces, run)
        else:
            frames = [
                self._chunks.text(delta.index, piece.text)
                if isinstance(piece, Content)
                else self._chunks.delta(delta.index, wire_delta(piece))
                for piece in pieces
            ]
        if answer.finish_reason is not None:
            frames.append(self._ending(answer, run))
        return frames

    def _closing(self, run: Run) -> bytes:
        """Return what comes after all answers."""
        return (self._chunks.of_usage(self._usage(run)) if self._plan.wishes.includes_usage else b"") + DONE

    def _rich(self, answer: ChatAnswer, delta: CompletionDelta, pieces: Sequence[Delta], run: Run) -> list[bytes]:
        """Token ids and logprobs ride with the first chunk of their text, or alone."""
        rows = answer.read_logprobs(delta)
        wishes = self._plan.wishes
        more: dict[str, Any] = {"logprobs": ChatLogprobs(content=rows)} if rows else {}
        if wishes.has_token_ids:
            more["token_ids"] = delta.token_ids
        deltas = [wire_delta(piece) for piece in pieces] or ([{"content": ""}] if more else [])
        usage = self._usage(run) if wishes.has_usage_everywhere else None
        frames = []
        for wire in deltas:
            frames.append(self._chunks.delta(answer.index, wire, usage=usage, **more))
            more = {}
        return frames

    def _ending(self, answer: ChatAnswer, run: Run) -> bytes:
        usage = self._usage(run) if self._plan.wishes.has_usage_everywhere else None
        return self._chunks.delta(
            answer.index, {}, usage=usage, finish_reason=answer.finish_reason, stop_reason=answer.stop_reason
        )
