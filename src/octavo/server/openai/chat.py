"""Chat answers: whole, and as a stream of chunks."""

from collections.abc import AsyncGenerator, Sequence

from octavo.engine.request_state import CompletionDelta
from octavo.server.openai.chunks import ChatChunks, ReplyHead
from octavo.server.openai.parsers.base import Content, ContentOnly, Delta, OutputParser, ParsedMessage
from octavo.server.openai.protocol import ChatCompletionRequest
from octavo.server.openai.replies import AnswerMessage, ChatChoice, ChatCompletion
from octavo.server.openai.run import Run
from octavo.server.sse import DONE


class ChatAnswer:
    """One sample of a chat, on its way from text to deltas."""

    def __init__(self, index: int, parser: OutputParser) -> None:
        self.index = index
        self._parser = parser
        self.message = ParsedMessage()
        self.finish_reason = ""
        self.stop_reason: str | int | None = None

    def read(self, delta: CompletionDelta) -> Sequence[Delta]:
        """Return what the new text settles."""
        deltas = self._parser.push(delta.text)
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
            return [*deltas, *self._parser.finish()]
        return deltas


async def whole_chat(run: Run, head: ReplyHead) -> ChatCompletion:
    """Wait for all samples; return the reply."""
    answers = [ChatAnswer(index, ContentOnly()) for index in range(run.num_choices)]
    with run:
        async for news in run.deltas():
            for number, delta in news:
                answers[number].message.add(answers[number].read(delta))
        return ChatCompletion(
            id=head.id,
            created=head.created,
            model=head.model,
            system_fingerprint=head.system_fingerprint,
            choices=[_choice(answer) for answer in answers],
            usage=run.usage,
        )


def _choice(answer: ChatAnswer) -> ChatChoice:
    return ChatChoice(
        index=answer.index,
        message=AnswerMessage(content=answer.message.content),
        finish_reason=answer.finish_reason,
        stop_reason=answer.stop_reason,
    )


async def stream_chat(run: Run, head: ReplyHead, request: ChatCompletionRequest) -> AsyncGenerator[bytes, None]:
    """Yield the frames of a stream: roles, text as it comes, how each sample ended, usage if asked for."""
    options = request.stream_options
    includes_usage = options is not None and bool(options.include_usage)
    chunks = ChatChunks(head, run.num_choices, shows_usage=includes_usage)
    answers = [ChatAnswer(index, ContentOnly()) for index in range(run.num_choices)]
    opening = [chunks.delta(answer.index, {"role": "assistant", "content": ""}) for answer in answers]
    with run:
        async for news in run.deltas():
            frames, opening = opening, []
            for number, delta in news:
                frames += _frames(chunks, answers[number], delta)
            if frames:
                yield b"".join(frames)
        yield (chunks.of_usage(run.usage) if includes_usage else b"") + DONE


def _frames(chunks: ChatChunks, answer: ChatAnswer, delta: CompletionDelta) -> list[bytes]:
    frames = [chunks.text(answer.index, piece.text) for piece in answer.read(delta) if isinstance(piece, Content)]
    if delta.finish_reason is not None:
        frames.append(chunks.delta(answer.index, {}, finish_reason=delta.finish_reason, stop_reason=delta.stop_reason))
    return frames
