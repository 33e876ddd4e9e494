"""Chats and text completions: from a request to a stream that is ready to run, and from its deltas to the reply."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, TypeVar

import msgspec
from msgspec import UNSET

from octavo.engine.front import EngineFront
from octavo.engine.input_processor import ProcessedRequest
from octavo.engine.output_processor import CompletionDelta
from octavo.inputs import Prompt, parse_prompt
from octavo.server.http.errors import bad_request
from octavo.server.openai import replies
from octavo.server.openai.answer_plan import AnswerFormats, AnswerPlan
from octavo.server.openai.birth import Birth
from octavo.server.openai.chat_prompt import BegunAnswer, render_chat, token_ids_of, unread_parts
from octavo.server.openai.media import MediaReader
from octavo.server.openai.models import ServedModel
from octavo.server.openai.params import Warn, chat_params, completion_params, process_prompt, split_prompts, truncated
from octavo.server.openai.parsers.base import Content, Delta, Reasoning, ToolCallArguments, ToolCallStart
from octavo.server.openai.protocol import ChatCompletionRequest, CompletionRequest
from octavo.server.openai.reply_stream import ReplyHead, ReplyStream, WholeReply
from octavo.tokenizer.infill import Infill

CompletionT = TypeVar("CompletionT", bound=ReplyStream[Any])
CompletionKind = Callable[[ServedModel, CompletionRequest, ReplyHead, Sequence[ProcessedRequest]], CompletionT]


def prepare_chat(
    kind: "type[AnswerT]",
    request: ChatCompletionRequest,
    head: ReplyHead,
    model: ServedModel,
    formats: AnswerFormats,
    media: MediaReader | None,
    birth: Birth,
    warn: Warn,
) -> "AnswerT":
    """Render, tokenize and validate; return an answer of this kind. Slow for long conversations and images."""
    if request.add_special_tokens:
        text = "The chat template adds all special tokens; no others can be added."
        raise bad_request(text, "add_special_tokens", "unsupported_parameter")
    if request.chat_template is not None:  # a template is a program, and a request is untrusted
        raise bad_request("Chat templates in requests are not supported.", "chat_template", "unsupported_parameter")
    front = model.engine.front
    params = chat_params(request, front.inputs.default_params)
    answers = AnswerPlan.of(request, params.replace(seed=birth.seeds[0]) if birth.seeds else params, formats)
    if (template := front.tokenizer.chat_template) is not None:
        for text in unread_parts(request, template, has_tools=answers.tools is not None):
            warn(text)
    prompt = render_chat(request, answers.prompt_options, front, formats.reasoning, media, warn)
    token_ids = token_ids_of(prompt)
    answers = answers.after(token_ids, BegunAnswer.of(request, token_ids, front.tokenizer))
    processed = process_prompt(model, request, prompt, answers.params, warn)
    return kind(model, request, head, replace(processed, new_stop_finder=answers.new_stop_finder), answers, birth)


class AnswerStream(ReplyStream[WholeReply]):
    """The reply to a chat in the form of some API: its samples' answers are parsed, and the form is a subclass."""

    id_prefix: ClassVar[str] = "chatcmpl-"

    def __init__(
        self,
        model: ServedModel,
        request: ChatCompletionRequest,
        head: ReplyHead,
        prompt: ProcessedRequest,
        answers: AnswerPlan,
        birth: Birth,
    ) -> None:
        super().__init__(model.engine, request, head, [prompt], is_chat=True)
        self._request = request
        as_ids = bool(request.return_tokens_as_token_ids)
        self._answers = [
            ChatAnswer(answers, birth.call_ids(choice), tokens_as_ids=as_ids) for choice in range(self._num_choices)
        ]
        self._reasoning = [answer.reasoning for answer in self._answers if answer.reasoning is not None]


AnswerT = TypeVar("AnswerT", bound=AnswerStream[Any])


class ChatStream(AnswerStream[replies.ChatCompletion]):
    """OpenAI's form: roles first, then text, reasoning and calls as they arrive, finish reasons, usage."""

    _has_begun = False

    def _frames(self, delta: CompletionDelta) -> list[bytes]:
        """Return the chunks of new text, the roles before it; the last, with an empty delta, has the finish reason."""
        answer, chunks, frames = self._answers[delta.index], self._chunks, self._opening()
        pieces = answer.read(delta)
        if not self._is_plain:
            frames += self._rich(answer, delta, pieces)
        else:
            frames += [
                chunks.text(delta.index, piece.text)
                if isinstance(piece, Content)
                else chunks.piece(delta.index, wire_delta(piece))
                for piece in pieces
            ]
        if delta.finish_reason is not None:
            frames.append(self._ending(delta, {}, answer.finish_reason(delta)))
        return frames

    def _opening(self) -> list[bytes]:
        if self._has_begun:
            return []
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
            timings=self._whole_timings,
            **self._about_prompt(0),
        )

    def _choice(self, answer: "ChatAnswer", delta: CompletionDelta) -> replies.ChatChoice:
        return replies.ChatChoice(
            index=delta.index,
            message=wire_message(answer.read(delta)),
            finish_reason=answer.finish_reason(delta),
            stop_reason=delta.stop_reason,
            logprobs=None if delta.logprobs is None else replies.ChatLogprobs(content=answer.read_logprobs(delta)),
            token_ids=delta.token_ids if self._has_token_ids else UNSET,
        )


class ChatAnswer:
    """Parses the deltas of one sample."""

    def __init__(self, plan: AnswerPlan, draw: Callable[[], bytes], *, tokens_as_ids: bool) -> None:
        self._parser, self.reasoning = plan.readers(draw)
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


def wire_message(deltas: Sequence[Delta]) -> replies.AnswerMessage:
    """Return a whole answer. Alongside calls, empty text is null; absent reasoning and calls are left out."""
    texts: dict[object, str] = defaultdict(str)  # by kind; arguments by the number of their call
    for delta in deltas:
        if not isinstance(delta, ToolCallStart):
            texts[delta.index if isinstance(delta, ToolCallArguments) else type(delta)] += delta.text
    starts = [delta for delta in deltas if isinstance(delta, ToolCallStart)]
    calls = [
        replies.AnswerCall(id=call.id, function=replies.AnswerFunction(name=call.name, arguments=texts[call.index]))
        for call in starts
    ]
    content, reasoning = texts[Content] or (None if calls else ""), texts[Reasoning] or UNSET
    return replies.AnswerMessage(
        content=content, reasoning_content=reasoning, reasoning=reasoning, tool_calls=calls or UNSET
    )


def prepare_completion(
    kind: CompletionKind[CompletionT],
    request: CompletionRequest,
    head: ReplyHead,
    model: ServedModel,
    formats: AnswerFormats,
    max_prompts: int,
    birth: Birth,
    warn: Warn,
) -> CompletionT:
    """Tokenize and validate all prompts; return an answer of this kind. May take a while for long ones."""
    infill = _infill(request, formats) if request.suffix else None
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise bad_request("'best_of' is not supported unless it equals 'n'.", "best_of", "unsupported_parameter")
    front = model.engine.front
    params = completion_params(request, front.inputs.default_params)
    texts = split_prompts(request.prompt, max_prompts)
    if infill is not None:
        params = params.replace(stop_token_ids=sorted({*params.stop_token_ids, *infill.ends}))
        texts = [_to_fill(text, infill, front, request) for text in texts]
    all_params = [params.replace(seed=seed) for seed in birth.seeds] or [params] * len(texts)
    prompts = [
        process_prompt(model, request, _with_ids(text, front, request), each, warn)
        for text, each in zip(texts, all_params, strict=True)
    ]
    return kind(model, request, head, prompts)


def _infill(request: CompletionRequest, formats: AnswerFormats) -> Infill:
    """Return how the model fills in what stands between prompt and suffix. Raises ApiError: it cannot."""
    if formats.infill is None:
        text = "'suffix' needs a model that fills in the middle of a text; the models served here only continue one."
        raise bad_request(text, "suffix", "unsupported_parameter")
    for name in ("echo", "truncate_prompt_tokens"):
        if getattr(request, name):
            raise bad_request(f"{name!r} is not supported beside 'suffix'.", name, "unsupported_parameter")
    return formats.infill


def _to_fill(prompt: Prompt, infill: Infill, front: EngineFront, request: CompletionRequest) -> Prompt:
    """Return the prompt that asks for what stands between this one and the request's suffix."""
    before, after = parse_prompt(prompt), request.suffix or ""
    for text in (before, after):
        if isinstance(text, str):
            front.inputs.limit.check_text(text)
    return {"prompt_token_ids": infill.prompt(front.tokenizer, before, after)}


def _with_ids(prompt: Prompt, front: EngineFront, request: CompletionRequest) -> Prompt:
    """Return the prompt unchanged unless the request has options for its tokens."""
    adds_special_tokens = request.add_special_tokens is not False
    if isinstance(prompt, str) and (request.truncate_prompt_tokens is not None or not adds_special_tokens):
        if request.truncate_prompt_tokens is None:
            front.inputs.limit.check_text(prompt)
        prompt = {"prompt_token_ids": front.tokenizer.encode(prompt, adds_special_tokens)}
    return prompt if isinstance(prompt, str) else truncated(prompt, request.truncate_prompt_tokens)


class CompletionStream(ReplyStream[replies.Completion]):
    """The reply to a completion: per sample the echo, text as it arrives, the finish reason; then usage."""

    def __init__(
        self, model: ServedModel, request: CompletionRequest, head: ReplyHead, prompts: Sequence[ProcessedRequest]
    ) -> None:
        super().__init__(model.engine, request, head, prompts, is_chat=False)
        front, num_top = model.engine.front, request.logprobs
        names = replies.TokenNames(front.tokenizer, as_ids=bool(request.return_tokens_as_token_ids))
        self._has_output = request.max_tokens != 0
        decode = partial(front.tokenizer.decode, skip_special_tokens=False)
        echoed = prompts if request.echo else ()
        self._echoed = [decode(each.prompt_token_ids) if each.prompt is None else each.prompt for each in echoed]
        self._rows = [
            None if num_top is None else replies.CompletionRows(names, num_top) for _ in range(self._num_choices)
        ]
        self._begun: set[int] = set()  # choices whose echo was sent

    def _frames(self, delta: CompletionDelta) -> list[bytes]:
        index, frames = delta.index, []
        if index not in self._begun:
            self._begun.add(index)
            frames += self._chunk(index, *self._echo(index), self._about_prompt(index // self._num_samples))
        text, logprobs = self._read(delta)
        if self._is_plain:
            frames += [self._chunks.text(index, text)] if text else []
        else:
            frames += self._chunk(index, text, logprobs, {"token_ids": delta.token_ids} if self._has_token_ids else {})
        if delta.finish_reason is not None:
            frames.append(self._ending(delta, "", self._finish_reason(delta)))
        return frames

    def _chunk(
        self, index: int, text: str, logprobs: replies.CompletionLogprobs | None, more: dict[str, Any]
    ) -> list[bytes]:
        """Return a chunk if there is anything to send."""
        if not (text or more or (logprobs is not None and logprobs.tokens)):
            return []
        return [self._chunks.piece(index, text, logprobs=logprobs, usage=self._chunk_usage, **more)]

    def _fold(self, deltas: Sequence[CompletionDelta]) -> replies.Completion:
        return replies.Completion(
            **msgspec.structs.asdict(self._head),
            choices=[self._choice(delta) for delta in deltas],
            usage=self._usage(),
            timings=self._whole_timings,
        )

    def _choice(self, delta: CompletionDelta) -> replies.CompletionChoice:
        parts = (self._echo(delta.index), self._read(delta))
        rows = [logprobs for _, logprobs in parts if logprobs is not None]
        return replies.CompletionChoice(
            index=delta.index,
            text="".join(text for text, _ in parts),
            finish_reason=self._finish_reason(delta),
            stop_reason=delta.stop_reason,
            logprobs=None if self._rows[delta.index] is None else replies.joined(rows),
            token_ids=delta.token_ids if self._has_token_ids else UNSET,
            **self._about_prompt(delta.index // self._num_samples),
        )

    def _echo(self, index: int) -> tuple[str, replies.CompletionLogprobs | None]:
        """Return the prompt as the beginning of a choice's text, once; empty if not requested."""
        if not self._echoed:
            return "", None
        number, rows = index // self._num_samples, self._rows[index]
        text, state = self._echoed[number], self._lives[number].state
        if rows is None:
            return text, None
        assert state.prompt_logprobs is not None
        return text, rows.push(state.processed.prompt_token_ids, state.prompt_logprobs)

    def _read(self, delta: CompletionDelta) -> tuple[str, replies.CompletionLogprobs | None]:
        """Return new text and its logprobs; empty if only the prompt was requested."""
        if not self._has_output:
            return "", None
        rows = self._rows[delta.index]
        if rows is None or delta.logprobs is None:
            return delta.text, None
        return delta.text, rows.push(delta.token_ids, delta.logprobs)

    def _finish_reason(self, delta: CompletionDelta) -> str:
        assert delta.finish_reason is not None
        return delta.finish_reason if self._has_output else "length"
