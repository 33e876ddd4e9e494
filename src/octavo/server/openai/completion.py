"""Text completions: from a request to a stream that is ready to run, and from its deltas to the reply."""

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from octavo.engine.front import EngineFront
from octavo.engine.input_processor import ProcessedRequest
from octavo.engine.output_processor import CompletionDelta
from octavo.inputs import Prompt
from octavo.server.errors import bad_request
from octavo.server.openai import replies
from octavo.server.openai.models import ServedModel
from octavo.server.openai.params import Warn, completion_params, process_prompt, split_prompts, truncated
from octavo.server.openai.protocol import CompletionRequest
from octavo.server.openai.replies import CompletionLogprobs
from octavo.server.openai.reply_stream import ReplyHead, ReplyStream, make_usage


def prepare_completion(
    request: CompletionRequest, head: ReplyHead, model: ServedModel, max_prompts: int, warn: Warn
) -> "CompletionStream":
    """Tokenize and validate all prompts. May take a while for long ones."""
    if request.suffix:
        text = "'suffix' needs a model that fills in the middle of a text; the models served here only continue one."
        raise bad_request(text, "suffix", "unsupported_parameter")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise bad_request("'best_of' is not supported unless it equals 'n'.", "best_of", "unsupported_parameter")
    front = model.engine.front
    params = completion_params(request, front.inputs.default_params)
    prompts = [
        process_prompt(model, request, _with_ids(prompt, front, request), params, warn)
        for prompt in split_prompts(request.prompt, max_prompts)
    ]
    return CompletionStream(model, request, head, prompts)


def _with_ids(prompt: Prompt, front: EngineFront, request: CompletionRequest) -> Prompt:
    """Return the prompt unchanged unless the request has options for its tokens."""
    adds_special_tokens = request.add_special_tokens is not False
    if isinstance(prompt, str) and (request.truncate_prompt_tokens is not None or not adds_special_tokens):
        if request.truncate_prompt_tokens is None:
            front.inputs.limit.check_text(prompt)
        prompt = {"prompt_token_ids": front.tokenizer.encode(prompt, adds_special_tokens)}
    return prompt if isinstance(prompt, str) else truncated(prompt, request.truncate_prompt_tokens)


def _text_of(prompt: ProcessedRequest, front: EngineFront) -> str:
    if prompt.prompt is not None:
        return prompt.prompt
    return front.tokenizer.decode(prompt.prompt_token_ids, skip_special_tokens=False)


class CompletionStream(ReplyStream[replies.Completion]):
    """The reply to a completion: per sample the echo, text as it arrives, the finish reason; then usage."""

    def __init__(
        self, model: ServedModel, request: CompletionRequest, head: ReplyHead, prompts: Sequence[ProcessedRequest]
    ) -> None:
        super().__init__(model.engine, request, head, prompts, is_chat=False)
        front, num_top = model.engine.front, request.logprobs
        names = replies.TokenNames(front.tokenizer, as_ids=bool(request.return_tokens_as_token_ids))
        self._has_output = request.max_tokens != 0  # else only the prompt is returned
        self._echoed = [_text_of(prompt, front) for prompt in prompts] if request.echo else ()
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

    def _chunk(self, index: int, text: str, logprobs: CompletionLogprobs | None, more: dict[str, Any]) -> list[bytes]:
        """Return a chunk if there is anything to send."""
        if not (text or more or (logprobs is not None and logprobs.tokens)):
            return []
        return [self._chunks.piece(index, text, logprobs=logprobs, usage=self._chunk_usage, **more)]

    def _fold(self, deltas: Sequence[CompletionDelta]) -> replies.Completion:
        return replies.Completion(
            **msgspec.structs.asdict(self._head),
            choices=[self._choice(delta) for delta in deltas],
            usage=self._usage(),
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

    def _echo(self, index: int) -> tuple[str, CompletionLogprobs | None]:
        """Return the prompt as the beginning of a choice's text, once; empty if not requested."""
        if not self._echoed:
            return "", None
        number, rows = index // self._num_samples, self._rows[index]
        text, state = self._echoed[number], self._lives[number].state
        if rows is None:
            return text, None
        assert state.prompt_logprobs is not None
        return text, rows.push(state.processed.prompt_token_ids, state.prompt_logprobs)

    def _read(self, delta: CompletionDelta) -> tuple[str, CompletionLogprobs | None]:
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

    def _usage(self) -> replies.Usage:
        """Return the tokens so far, without the one computed when only the prompt was requested."""
        usage = super()._usage()
        if self._has_output:
            return usage
        return make_usage(usage.prompt_tokens, 0, usage.prompt_tokens_details.cached_tokens)
