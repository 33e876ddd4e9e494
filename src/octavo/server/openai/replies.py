"""Complete replies on the wire. `reply_stream.py` encodes the chunks of streams."""

from typing import Any

import msgspec


class PromptTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt tokens by source."""

    cached_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Output tokens by purpose."""

    reasoning_tokens: int = 0


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens. The prompt counts once, however many samples."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """An alternative token."""

    token: str
    logprob: float
    bytes: list[int]


class TokenRow(msgspec.Struct, frozen=True, kw_only=True):
    """One token of a chat answer; the bytes of all rows concatenate to the text."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """One row per token."""

    content: list[TokenRow]
    refusal: None = None


class AnswerFunction(msgspec.Struct, frozen=True, kw_only=True):
    """A function call; `arguments` is JSON text as the model wrote it."""

    name: str
    arguments: str


class AnswerCall(msgspec.Struct, frozen=True, kw_only=True):
    """A tool call by the model."""

    id: str
    function: AnswerFunction
    type: str = "function"


class AnswerMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The assistant's message. Reasoning is sent under both names that clients look for."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[AnswerCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One sample."""

    index: int
    message: AnswerMessage
    finish_reason: str
    logprobs: ChatLogprobs | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """The response of `POST /v1/chat/completions`."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"
    system_fingerprint: str | None = None
    service_tier: str | None = None
    prompt_logprobs: list[Any] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Four lists of equal length; the first token of an echoed prompt has no logprob."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One sample of one prompt; the samples of the first prompt come first."""

    index: int
    text: str
    finish_reason: str
    logprobs: CompletionLogprobs | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: list[Any] | msgspec.UnsetType = msgspec.UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The response of `POST /v1/completions`."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    object: str = "text_completion"
    system_fingerprint: str | None = None


class TokenizeReply(msgspec.Struct, frozen=True, kw_only=True):
    """The response of `POST /tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeReply(msgspec.Struct, frozen=True, kw_only=True):
    """The response of `POST /detokenize`."""

    prompt: str


def make_usage(num_prompt: int, num_completion: int, num_cached: int, num_reasoning: int = 0) -> Usage:
    return Usage(
        prompt_tokens=num_prompt,
        completion_tokens=num_completion,
        total_tokens=num_prompt + num_completion,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=num_cached),
        completion_tokens_details=CompletionTokensDetails(reasoning_tokens=num_reasoning),
    )
