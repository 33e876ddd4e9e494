"""Answers in Ollama's form: lines of JSON, the last of which has times and counts.

They are made of the same deltas as OpenAI's chunks. A call is sent when it is complete: its arguments are an object.
"""

import json
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec

from octavo.engine.input_processor import ProcessedRequest
from octavo.engine.output_processor import CompletionDelta
from octavo.server.http.errors import ApiError, error_body
from octavo.server.http.routing import LINES
from octavo.server.http.sse import EventStreamResponse
from octavo.server.ollama.protocol import (
    AnswerMessage,
    Call,
    CalledFunction,
    OllamaChatReply,
    OllamaGenerateReply,
)
from octavo.server.openai.answers import AnswerStream
from octavo.server.openai.models import ServedModel
from octavo.server.openai.parsers.base import Content, Delta, Reasoning, ToolCallArguments, ToolCallStart
from octavo.server.openai.protocol import CompletionRequest
from octavo.server.openai.replies import ChatRows, TokenNames, TokenRow
from octavo.server.openai.reply_stream import ReplyHead, ReplyStream, WholeReply
from octavo.server.openai.timings import Phases

_NS = 1_000_000_000
encode = msgspec.json.Encoder().encode


def now() -> str:
    """Return the time as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class LinesResponse(EventStreamResponse):
    """A stream of lines of JSON. There are no comments among them, so silence is not broken."""

    media_type = LINES
    ping = b""

    def last_words(self, error: ApiError) -> bytes:
        return error_body(error, "/api/") + b"\n"


@dataclass(slots=True)
class Part:
    """What one line says."""

    content: str = ""
    thinking: str = ""
    calls: list[Call] = field(default_factory=list)
    rows: list[TokenRow] = field(default_factory=list)  # of logprobs

    @property
    def is_empty(self) -> bool:
        return not (self.content or self.thinking or self.calls or self.rows)


class CallCollector:
    """Puts the pieces of calls together."""

    def __init__(self) -> None:
        self._open: ToolCallStart | None = None
        self._arguments: list[str] = []

    def read(self, pieces: Sequence[Delta]) -> Part:
        """Return what new pieces say; a call that they begin is kept until its end."""
        part = Part()
        for piece in pieces:
            match piece:
                case Content(text):
                    part.content += text
                case Reasoning(text):
                    part.thinking += text
                case ToolCallStart():
                    self.finish(part, is_cut=False)
                    self._open = piece
                case ToolCallArguments(_, text):
                    self._arguments.append(text)
        return part

    def finish(self, part: Part, *, is_cut: bool) -> None:
        """Add the call that is open. One that the length limit has cut is left out: it says something else.

        What a model writes freely may be no object; then it is shown as text, as nobody can call with it.
        """
        call, text = self._open, "".join(self._arguments) or "{}"
        self._open = None
        self._arguments.clear()
        if call is None:
            return
        try:
            arguments = json.loads(text)
        except (ValueError, RecursionError):
            arguments = None
        if isinstance(arguments, dict):
            function = CalledFunction(index=call.index, name=call.name, arguments=arguments)
            part.calls.append(Call(id=call.id, function=function))
        elif not is_cut:
            part.content += f"{call.name}{text}"


class LineStream(ReplyStream[WholeReply]):
    """One sample in Ollama's form."""

    shown_model = ""  # the name that the client has used
    _done_reason = "stop"

    @abstractmethod
    def _read(self, delta: CompletionDelta) -> Part:
        """Return what new output says."""

    @abstractmethod
    def _line(self, part: Part, **fields: Any) -> WholeReply:
        """Return a line that says this; `fields` are those of all lines."""

    def _frames(self, delta: CompletionDelta) -> list[bytes]:
        part = self._read(delta)
        if delta.finish_reason == "length":
            self._done_reason = "length"
        return [] if part.is_empty else [encode(self._whole_line(part)) + b"\n"]

    def _last_frames(self) -> list[bytes]:
        return [encode(self._whole_line(Part(), **self._totals(), done=True)) + b"\n"]

    def _fold(self, deltas: Sequence[CompletionDelta]) -> WholeReply:
        [delta] = deltas
        if delta.finish_reason == "length":
            self._done_reason = "length"
        return self._whole_line(self._read(delta), **self._totals(), done=True)

    def _whole_line(self, part: Part, done: bool = False, **totals: Any) -> WholeReply:
        model = self.shown_model or self._head.model
        return self._line(part, model=model, created_at=now(), done=done, logprobs=part.rows or None, **totals)

    def _totals(self) -> dict[str, Any]:
        num_prompt, num_output = self.count_tokens()
        phases = Phases.of([live.state for live in self._lives])
        return {
            "done_reason": self._done_reason,
            "total_duration": round(phases.total_s * _NS),
            "load_duration": 0,
            "prompt_eval_count": num_prompt,
            "prompt_eval_duration": round(phases.prompt_s * _NS),
            "eval_count": num_output,
            "eval_duration": round(phases.output_s * _NS),
        }


class ChatLines(LineStream[WholeReply], AnswerStream[WholeReply]):
    """A parsed answer: text, thinking, calls."""

    def _read(self, delta: CompletionDelta) -> Part:
        answer = self._answers[0]
        part = self._collector.read(answer.read(delta))
        if delta.finish_reason is not None:
            self._collector.finish(part, is_cut=delta.finish_reason == "length")
        part.rows = answer.read_logprobs(delta)
        return part

    def start(self, notify: Callable[[], None]) -> None:
        self._collector = CallCollector()
        super().start(notify)


class OllamaChat(ChatLines[OllamaChatReply]):
    """The answer of `/api/chat`."""

    def _line(self, part: Part, **fields: Any) -> OllamaChatReply:
        message = AnswerMessage(
            role="assistant",
            content=part.content,
            thinking=part.thinking or None,
            tool_calls=part.calls or None,
        )
        return OllamaChatReply(message=message, **fields)


class OllamaPrompted(ChatLines[OllamaGenerateReply]):
    """The answer of `/api/generate` to a prompt for the chat template."""

    def _line(self, part: Part, **fields: Any) -> OllamaGenerateReply:
        return OllamaGenerateReply(response=part.content, thinking=part.thinking or None, **fields)


class OllamaRaw(LineStream[OllamaGenerateReply]):
    """The answer of `/api/generate` to a raw prompt."""

    def __init__(
        self, model: ServedModel, request: CompletionRequest, head: ReplyHead, prompts: Sequence[ProcessedRequest]
    ) -> None:
        super().__init__(model.engine, request, head, prompts, is_chat=False)
        self._rows: ChatRows | None = None
        if request.logprobs is not None:
            names, skips = TokenNames(model.engine.front.tokenizer), prompts[0].params.skip_special_tokens
            self._rows = ChatRows(names, request.logprobs, skips_special_tokens=skips)

    def _read(self, delta: CompletionDelta) -> Part:
        part = Part(content=delta.text)
        if self._rows is not None and delta.logprobs is not None:
            part.rows = self._rows.push(delta.token_ids, delta.logprobs, delta.text)
            if delta.finish_reason is not None:
                part.rows += self._rows.finish(is_cut=delta.finish_reason == "stop")
        return part

    def _line(self, part: Part, **fields: Any) -> OllamaGenerateReply:
        return OllamaGenerateReply(response=part.content, **fields)
