"""`MessageStream`: the deltas of a chat as blocks of a message, streamed or complete.

A complete message is the fold of the same events that a stream sends.
"""

import json
from base64 import b64encode
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any, ClassVar

import msgspec

from octavo.engine.output_processor import CompletionDelta
from octavo.server.anthropic.protocol import Message, MessageUsage, OutputTokensDetails, ReplyBlock
from octavo.server.anthropic.translate import MessagesChat
from octavo.server.openai.answers import AnswerStream
from octavo.server.openai.parsers.base import Content, Delta, Reasoning, ToolCallArguments, ToolCallStart

_REASONS = {"tool_calls": "tool_use", "length": "max_tokens", "stop": "end_turn"}
_encode = msgspec.json.Encoder().encode

Event = dict[str, Any]


class BlockWriter:
    """Writes the blocks of one message, one after the other: a new kind of delta ends the block before it."""

    def __init__(self, *, shows_thoughts: bool) -> None:
        self._shows_thoughts = shows_thoughts
        self._index = -1
        self._open: type[Delta] | None = None  # what the open block is made of
        self._thought = blake2b(digest_size=48)

    def write(self, piece: Delta) -> list[Event]:
        """Return the events of one more piece of the answer."""
        match piece:
            case Content(text):
                start = self._opened(Content, ReplyBlock(type="text", text=""))
                return [*start, self._delta("text_delta", text=text)]
            case Reasoning(text):
                start = self._opened(Reasoning, ReplyBlock(type="thinking", thinking="", signature=""))
                self._thought.update(text.encode("utf-8", "surrogatepass"))
                return [*start, self._delta("thinking_delta", thinking=text)] if self._shows_thoughts else start
            case ToolCallStart(_, id_, name):
                ended, self._open = self.end(), ToolCallStart
                return [*ended, self._start(ReplyBlock(type="tool_use", id=id_, name=name, input={}))]
            case ToolCallArguments(_, text):
                return [self._delta("input_json_delta", partial_json=text)]

    def end(self) -> list[Event]:
        """End the open block, if there is one. That of a thought ends with its signature, which clients keep."""
        events: list[Event] = []
        if self._open is Reasoning:
            events.append(self._delta("signature_delta", signature=b64encode(self._thought.digest()).decode()))
        if self._open is not None:
            events.append({"type": "content_block_stop", "index": self._index})
        self._open = None
        return events

    def _opened(self, kind: type[Delta], block: ReplyBlock) -> list[Event]:
        """Return the events that let a block of this kind be open: none if it is."""
        if self._open is kind:
            return []
        ended, self._open = self.end(), kind
        self._thought = blake2b(digest_size=48)
        return [*ended, self._start(block)]

    def _start(self, block: ReplyBlock) -> Event:
        self._index += 1
        return {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, kind: str, **fields: str) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": {"type": kind, **fields}}


class MessageStream(AnswerStream[Message]):
    """Anthropic's form of a reply: the start of the message, its blocks, why it stopped with its usage, the end."""

    id_prefix: ClassVar[str] = "msg_"
    _has_begun = False

    def _frames(self, delta: CompletionDelta) -> list[bytes]:
        frames = []
        if not self._has_begun:
            self._has_begun = True
            self._writer = self._new_writer()
            usage = msgspec.structs.replace(
                self._message_usage(), output_tokens=0, output_tokens_details=OutputTokensDetails()
            )
            frames.append(_frame({"type": "message_start", "message": self._message([], None, None, usage)}))
        answer = self._answers[0]
        frames += [_frame(event) for piece in answer.read(delta) for event in self._writer.write(piece)]
        if delta.finish_reason is not None:
            frames += map(_frame, self._writer.end())
            reason, sequence = self._stop(delta)
            stop = {"stop_reason": reason, "stop_sequence": sequence}
            frames.append(_frame({"type": "message_delta", "delta": stop, "usage": self._message_usage()}))
            frames.append(_frame({"type": "message_stop"}))
        return frames

    def _last_frames(self) -> list[bytes]:
        return []

    def _fold(self, deltas: Sequence[CompletionDelta]) -> Message:
        [delta] = deltas
        writer = self._new_writer()
        events = [event for piece in self._answers[0].read(delta) for event in writer.write(piece)]
        return self._message(folded([*events, *writer.end()]), *self._stop(delta), self._message_usage())

    def _new_writer(self) -> BlockWriter:
        assert isinstance(self._request, MessagesChat)
        return BlockWriter(shows_thoughts=self._request.shows_thoughts)

    def _message(
        self, content: list[ReplyBlock], reason: str | None, sequence: str | None, usage: MessageUsage
    ) -> Message:
        return Message(
            id=self._head.id,
            model=self._head.model,
            content=content,
            stop_reason=reason,
            stop_sequence=sequence,
            usage=usage,
        )

    def _message_usage(self) -> MessageUsage:
        usage = self._usage()
        num_cached = usage.prompt_tokens_details.cached_tokens
        num_thoughts = usage.completion_tokens_details.reasoning_tokens
        return MessageUsage(
            input_tokens=usage.prompt_tokens - num_cached,
            output_tokens=usage.completion_tokens,
            cache_read_input_tokens=num_cached,
            output_tokens_details=OutputTokensDetails(thinking_tokens=num_thoughts),
        )

    def _stop(self, delta: CompletionDelta) -> tuple[str, str | None]:
        """Return why the answer ended, and the stop sequence that ended it."""
        reason = self._answers[0].finish_reason(delta)
        if reason == "stop" and isinstance(delta.stop_reason, str):
            return "stop_sequence", delta.stop_reason
        wanted, room = self._request.max_tokens, self._prompts[0].params.max_tokens
        if reason == "length" and wanted is not None and room is not None and wanted > room:
            return "model_context_window_exceeded", None
        return _REASONS.get(reason, reason), None


def folded(events: Iterable[Event]) -> list[ReplyBlock]:
    """Return the blocks that a client makes of a stream's events."""
    blocks: list[ReplyBlock] = []
    arguments: dict[int, str] = {}
    for event in events:
        match event["type"]:
            case "content_block_start":
                blocks.append(event["content_block"])
            case "content_block_delta":
                block, delta = blocks[event["index"]], event["delta"]
                match delta["type"]:
                    case "text_delta":
                        block.text = f"{block.text}{delta['text']}"
                    case "thinking_delta":
                        block.thinking = f"{block.thinking}{delta['thinking']}"
                    case "signature_delta":
                        block.signature = delta["signature"]
                    case "input_json_delta":
                        arguments[event["index"]] = arguments.get(event["index"], "") + delta["partial_json"]
    for index, text in arguments.items():
        blocks[index].input = _input(text)
    return blocks


def _input(text: str) -> dict[str, Any]:
    """Return the arguments of a call; what is no JSON object, as one that the length limit has cut, under one key."""
    if not text.strip():
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": text}


def _frame(event: Event) -> bytes:
    kind: str = event["type"]
    return b"event: " + kind.encode() + b"\ndata: " + _encode(event) + b"\n\n"
