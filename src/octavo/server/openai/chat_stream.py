"""Chat answers as a stream of chunks."""

from collections.abc import AsyncGenerator, Sequence
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
from octavo.server.sse import DONE, PING


async def stream_chat(engine: AsyncLLMEngine, plan: ChatPlan) -> AsyncGenerator[bytes, None]:
    """Yield frames: roles, text as it comes, how each sample ended, usage if asked for."""
    stream = ChatStream(plan)
    with Run(engine, [plan.prompt]) as run:
        frames: list[bytes] | None = None
        async for news in run.deltas(pings=True):
            if not news:
                yield PING
                continue
            frames = stream.opening(run) if frames is None else []
            for number, delta in news:
                frames += stream.frames(number, delta, run)
            if frames:
                yield b"".join(frames)
        yield stream.closing(run)


class ChatStream:
    """Makes the frames of one reply."""

    def __init__(self, plan: ChatPlan) -> None:
        num_choices = plan.prompt.params.n
        self._plan = plan
        self._answers = [ChatAnswer(index, plan) for index in range(num_choices)]
        self._chunks = ChatChunks(plan.head, num_choices, shows_usage=plan.wishes.includes_usage)
        self._is_plain = plan.wishes.is_plain and plan.make_rows is None

    def usage(self, run: Run) -> Usage:
        """Return the tokens so far."""
        run.num_reasoning_tokens = sum(answer.num_reasoning_tokens for answer in self._answers)
        return run.usage

    def opening(self, run: Run) -> list[bytes]:
        """Return the first chunk of each answer: who speaks."""
        role: dict[str, object] = {"role": "assistant", "content": ""}
        about = about_prompt(run.states[0], self._plan)
        usage = self.usage(run) if self._plan.wishes.has_usage_everywhere else None
        return [self._chunks.delta(answer.index, role, usage=usage, **about) for answer in self._answers]

    def frames(self, number: int, delta: CompletionDelta, run: Run) -> list[bytes]:
        """Return the chunks of new text; the last says, with an empty delta, how the answer ended."""
        answer = self._answers[number]
        pieces = answer.read(delta)
        if self._is_plain:
            frames = [self._plain(number, piece) for piece in pieces]
        else:
            frames = self._rich(answer, delta, pieces, run)
        if answer.finish_reason is not None:
            frames.append(self._ending(answer, run))
        return frames

    def closing(self, run: Run) -> bytes:
        """Return what comes after all answers."""
        return (self._chunks.of_usage(self.usage(run)) if self._plan.wishes.includes_usage else b"") + DONE

    def _plain(self, number: int, piece: Delta) -> bytes:
        if isinstance(piece, Content):
            return self._chunks.text(number, piece.text)
        return self._chunks.delta(number, wire_delta(piece))

    def _rich(self, answer: ChatAnswer, delta: CompletionDelta, pieces: Sequence[Delta], run: Run) -> list[bytes]:
        """Token ids and logprobs ride with the first chunk of their text, or alone."""
        rows = answer.read_logprobs(delta)
        wishes = self._plan.wishes
        more: dict[str, Any] = {"logprobs": ChatLogprobs(content=rows)} if rows else {}
        if wishes.has_token_ids:
            more["token_ids"] = delta.token_ids
        deltas = [wire_delta(piece) for piece in pieces] or ([{"content": ""}] if more else [])
        usage = self.usage(run) if wishes.has_usage_everywhere else None
        frames = []
        for wire in deltas:
            frames.append(self._chunks.delta(answer.index, wire, usage=usage, **more))
            more = {}
        return frames

    def _ending(self, answer: ChatAnswer, run: Run) -> bytes:
        usage = self.usage(run) if self._plan.wishes.has_usage_everywhere else None
        return self._chunks.delta(
            answer.index, {}, usage=usage, finish_reason=answer.finish_reason, stop_reason=answer.stop_reason
        )
