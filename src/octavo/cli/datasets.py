"""Prompts of `octavo bench serve` that are not random: ShareGPT's conversations, or the lines of a file."""

from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from octavo.errors import InvalidParameterError

Message = dict[str, Any]
Prompt = str | list[int] | list[Message]  # text, token ids, or a conversation

_CHARACTERS_PER_TOKEN = 4  # of English text; without a tokenizer, lengths are estimates
# Of conversations that are used, in such tokens, as other benchmarks choose them.
_SHORTEST, _LONGEST_PROMPT, _LONGEST = 4, 1024, 2048


class Sample(NamedTuple):
    """One prompt, and how many tokens its answer should have; None: not said."""

    prompt: Prompt
    output_len: int | None


class _Turn(msgspec.Struct):
    value: str = ""


class _Conversation(msgspec.Struct):
    conversations: list[_Turn] = []


class _Line(msgspec.Struct):
    """A line of a file; the other names of fields are those that other benchmarks write."""

    prompt: str | list[int] | None = None
    messages: list[Message] | None = None
    output_len: int | None = None
    max_tokens: int | None = None
    output_tokens: int | None = None


def read_sharegpt(path: str) -> list[Sample]:
    """Return the first question of each conversation, with the length of the first answer, estimated.

    Raises InvalidParameterError: the file cannot be read, or has no conversation of a usual length.
    """
    try:
        conversations = msgspec.json.decode(_read(path), type=list[_Conversation])
    except msgspec.DecodeError as error:
        limit = f'not ShareGPT\'s format, [{{"conversations": [{{"value": ...}}, ...]}}, ...]: {error}'
        raise InvalidParameterError("dataset_path", path, limit) from error
    samples = []
    for turns in (each.conversations for each in conversations):
        if len(turns) < 2:
            continue
        question, answer = turns[0].value, turns[1].value
        num_prompt, num_output = len(question) // _CHARACTERS_PER_TOKEN, len(answer) // _CHARACTERS_PER_TOKEN
        is_usual = num_prompt <= _LONGEST_PROMPT and num_prompt + num_output <= _LONGEST
        if is_usual and min(num_prompt, num_output) >= _SHORTEST:
            samples.append(Sample(question, num_output))
    if not samples:
        raise InvalidParameterError("dataset_path", path, "has no conversation of 4 to 2,048 tokens")
    return samples


def read_lines(path: str) -> list[Sample]:
    """Return the prompts of a file of JSON lines: `{"prompt": ...}` or `{"messages": [...]}`, and `output_len`.

    Raises InvalidParameterError: the file cannot be read, or what is wrong with which line.
    """
    samples = []
    for number, text in enumerate(_read(path).splitlines(), start=1):
        if not text.strip():
            continue
        try:
            line = msgspec.json.decode(text, type=_Line)
        except msgspec.DecodeError as error:
            raise InvalidParameterError("dataset_path", path, f"line {number}: {error}") from error
        prompt = line.prompt if line.messages is None else line.messages
        if not prompt or (line.prompt is not None and line.messages is not None):
            limit = f"line {number}: must have either a prompt or messages, and not be empty"
            raise InvalidParameterError("dataset_path", path, limit)
        given = (length for length in (line.output_len, line.max_tokens, line.output_tokens) if length is not None)
        output_len = next(given, None)
        if output_len is not None and output_len < 1:
            raise InvalidParameterError("dataset_path", path, f"line {number}: output_len must be at least 1")
        samples.append(Sample(prompt, output_len))
    if not samples:
        raise InvalidParameterError("dataset_path", path, "has no prompt")
    return samples


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InvalidParameterError("dataset_path", path, f"cannot be read: {error.strerror or error}") from error
