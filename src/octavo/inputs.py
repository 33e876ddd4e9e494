"""The kinds of prompt that users can pass, and the one place that tells them apart."""

from collections.abc import Mapping, Sequence
from typing import TypedDict

from octavo.errors import InvalidParameterError


class TokensPrompt(TypedDict):
    """A prompt that is already tokenized."""

    prompt_token_ids: list[int]


class TextPrompt(TypedDict):
    """A text prompt in dict form."""

    prompt: str


Prompt = str | TokensPrompt | TextPrompt
ChatMessage = Mapping[str, object]


def parse_prompt(prompt: object) -> str | list[int]:
    """Return a prompt's text or token ids; raise InvalidParameterError for other than a string or known mapping."""
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, Mapping):
        if set(prompt) == {"prompt"} and isinstance(prompt["prompt"], str):
            return prompt["prompt"]
        if set(prompt) == {"prompt_token_ids"}:
            return _token_ids(prompt["prompt_token_ids"])
    raise InvalidParameterError("prompt", prompt, 'a string, {"prompt": ...} or {"prompt_token_ids": [...]}')


def as_prompt_list(prompts: object) -> list[Prompt]:
    """Return `prompts` as a list; a single prompt becomes a list of one. A bare list of integers is ambiguous."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]  # type: ignore[list-item]  # parse_prompt checks the mapping's keys
    if isinstance(prompts, Sequence):
        if prompts and isinstance(prompts[0], int):
            raise InvalidParameterError("prompts", "a list of integers", 'token ids go in {"prompt_token_ids": [...]}')
        return list(prompts)
    raise InvalidParameterError("prompts", prompts, "a prompt or a list of prompts")


def _token_ids(value: object) -> list[int]:
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        raise InvalidParameterError("prompt_token_ids", value, "must be a list of integers")
    for token_id in value:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise InvalidParameterError("prompt_token_ids", token_id, "every entry must be an integer")
    return list(value)
