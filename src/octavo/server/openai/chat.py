"""Chats: from a request to a stream that is ready to run, and from its deltas to the reply."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
from msgspec import UNSET

from octavo.engine.input_processor import ProcessedRequest
from octavo.engine.output_processor import CompletionDelta
from octavo.server.errors import bad_request
from octavo.server.openai import replies
from octavo.server.openai.answer_plan import AnswerFormats, AnswerPlan
from octavo.server.openai.chat_prompt import BegunAnswer, render_chat, token_ids_of, unread_parts
from octavo.server.openai.media import MediaReader
from octavo.server.openai.models import ServedModel
from octavo.server.openai.params import Warn, chat_params, process_prompt
from octavo.server.openai.parsers.base import Content, Delta, ParsedMessage, Reasoning, ToolCallArguments, ToolCallStart
from octavo.server.openai.protocol import ChatCompletionRequest
from octavo.server.openai.reply_stream import ReplyHead, ReplyStream


def prepare_chat(
    request: ChatCompletionRequest,
    head: ReplyHead,
    model: ServedModel,
    formats: AnswerFormats,
    media: MediaReader | None,
    warn: Warn,
) -> "ChatStream":
    """Render, tokenize and validate. May take a while for long conversations, and for images."""
    if request.add_special_tokens:
        text = "The chat template adds all special tokens; no others can be added."
        raise bad_request(text, "add_special_tokens", "unsupported_parameter")
    if request.chat_template is not None:  # a template is a program, and a request is untrusted
        raise bad_request("Chat templates in requests are not supported.", "chat_template", "unsupported_parameter")
    front = model.engine.front
    answers = AnswerPlan.of(request, chat_params(request, front.inputs.default_params), formats)
    if (template := front.tokenizer.chat_template) is not None:
        for text in unread_parts(request, template, has_tools=answers.tools is not None):
            warn(text)
    prompt = render_chat(request, answers.prompt_options, front, formats.reasoning, media, warn)
    token_ids = token_ids_of(prompt)
    answers = answers.after(token_ids, BegunAnswer.of(request, token_ids, front.tokenizer))
    processed = process_prompt(model, request, prompt, answers.params, warn)
    return ChatStream(model, request, head, replace(processed, new_stop_finder=answers.new_stop_finder), answers)


class ChatStream(ReplyStream[replies.ChatCompletion]):
    """The reply to a chat: roles first, then text, reasoning and calls as they arrive, finish reasons, usage."""

    def __init__(
        self,
        model: ServedModel,
        request: ChatCompletionRequest,
        head: ReplyHead,
        prompt: ProcessedRequest,
        answers: AnswerPlan,
    ) -> None:
        super().__init__(model.engine, request, head, [prompt], is_chat=True)
        as_ids = bool(request.return_tokens_as_token_ids)
        self._answers = [ChatAnswer(answers, tokens_as_ids=as_ids) for _ in range(self._num_choices)]
        self._has_begun = False

    def _frames(self, delta: CompletionDelta) -> list[bytes]:
        """Return the chunks of new text; the last one, with an empty delta, has the finish reason."""
        roles = None if self._has_begun else self._roles()
        answer, chunks = self._answers[delta.index], self._chunks
        pieces = answer.read(delta)
        if not self._is_plain:
            frames = self._rich(answer, delta, pieces)
        else:
            frames = [
                chunks.text(delta.index, piece.text)
                if isinstance(piece, Content)
                else chunks.piece(delta.index, wire_delta(piece))
                for piece in pieces
            ]
        if delta.finish_reason is not None:
            frames.append(self._ending(delta, {}, answer.finish_reason(delta)))
        return frames if roles is None else roles + frames

    def _roles(self) -> list[bytes]:
        """Return the first chunk of each answer, with its role."""
        self._has_begun = True
        role, about, usage = {"role": "assistant", "content": ""}, self._about_prompt(0), self._chunk_usage
        return [self._chunks.piece(index, role, usage=usage, **about) for index in range(len(self._answers))]

    def _rich(self, answer: "ChatAnswer", delta: CompletionDelta, pieces: Sequence[Delta]) -> list[bytes]:
        """Token ids and logprobs go with the first chunk of their text, or alone."""
        rows = answer.read_logprobs(delta)
        more: dict[str, Any] = {"logprobs": replies.ChatLogprobs(content=rows)} if rows else {}
        if self._has_token_ids:
            more["token_ids"] = delta.token_ids
        usage = self._chunk_usage
        frames = []
        for wire in [wire_delta(piece) for piece in pieces] or ([{"content": ""}] if more else []):
            frames.append(self._chunks.piece(delta.index, wire, usage=usage, **more))
            more = {}
        return frames

    def _fold(self, deltas: Sequence[CompletionDelta]) -> replies.ChatCompletion:
        return replies.ChatCompletion(
            **msgspec.structs.asdict(self._head),
            choices=[self._choice(self._answers[delta.index], delta) for delta in deltas],
            usage=self._usage(),
            **self._about_prompt(0),
        )

    def _choice(self, answer: "ChatAnswer", delta: CompletionDelta) -> replies.ChatChoice:
        message = ParsedMessage()
        message.add(answer.read(delta))
        return replies.ChatChoice(
            index=delta.index,
            message=wire_message(message),
            finish_reason=answer.finish_reason(delta),
            stop_reason=delta.stop_reason,
            logprobs=None if delta.logprobs is None else replies.ChatLogprobs(content=answer.read_logprobs(delta)),
            token_ids=delta.token_ids if self._has_token_ids else UNSET,
        )

    @property
    def _num_reasoning_tokens(self) -> int:
        return sum(answer.reasoning.num_tokens for answer in self._answers if answer.reasoning is not None)


class ChatAnswer:
    """Parses the deltas of one sample."""

    def __init__(self, plan: AnswerPlan, *, tokens_as_ids: bool) -> None:
        self._parser, self.reasoning = plan.readers()
        self._tokenizer = plan.formats.tokenizer
        self._shows_reasoning = plan.shows_reasoning
        self._rows: replies.ChatRows | None = None
        if (num_top := plan.params.logprobs) is not None:
            names = replies.TokenNames(self._tokenizer, as_ids=tokens_as_ids)
            self._rows = replies.ChatRows(names, num_top, skips_special_tokens=plan.params.skip_special_tokens)
        self._has_calls = False

    def read(self, delta: CompletionDelta) -> Sequence[Delta]:
        """Return the parsed pieces of the answer that new text completes."""
        pieces = self._parser.push(delta.text)
        if delta.finish_reason is not None:
            pieces = [*pieces, *self._parser.finish(is_cut=delta.finish_reason == "length")]
        if self.reasoning is not None:
            self.reasoning.count_tokens(delta.token_ids, self._tokenizer)
        for piece in pieces:
            if isinstance(piece, ToolCallStart):
                self._has_calls = True
        if not self._shows_reasoning:
            pieces = [piece for piece in pieces if not isinstance(piece, Reasoning)]
        return pieces

    def read_logprobs(self, delta: CompletionDelta) -> list[replies.TokenRow]:
        if self._rows is None or delta.logprobs is None:
            return []
        rows = self._rows.push(delta.token_ids, delta.logprobs, delta.text)
        if delta.finish_reason is not None:
            rows += self._rows.finish(is_cut=delta.finish_reason == "stop")
        return rows

    def finish_reason(self, last: CompletionDelta) -> str:
        """Return the finish reason for clients; the answer must have been read."""
        assert last.finish_reason is not None
        return "tool_calls" if self._has_calls and last.finish_reason == "stop" else last.finish_reason


def wire_delta(delta: Delta) -> dict[str, object]:
    """Return the `delta` of a chunk: a call begins with its name; reasoning is sent under both names in use."""
    match delta:
        case Content(text):
            return {"content": text}
        case Reasoning(text):
            return {"reasoning_content": text, "reasoning": text}
        case ToolCallStart(index, id_, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": id_, "type": "function", "function": function}]}
        case ToolCallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def wire_message(message: ParsedMessage) -> replies.AnswerMessage:
    """Return a whole answer. Alongside calls, empty text is null; absent reasoning and calls are left out."""
    calls = [
        replies.AnswerCall(id=call.id, function=replies.AnswerFunction(name=call.name, arguments=call.arguments))
        for call in message.tool_calls
    ]
    return replies.AnswerMessage(
        content=None if calls and not message.content else message.content,
        reasoning_content=message.reasoning or UNSET,
        reasoning=message.reasoning or UNSET,
        tool_calls=calls or UNSET,
    )
