"""Requests on the wire: OpenAI's fields, and extensions sent by clients of vLLM and SGLang.

Unknown fields have no effect but a warning, as official clients send more with every version. `null` means "not given"
everywhere. `read_request` checks types; values are checked where they are used.
"""

import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from itertools import accumulate
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from octavo.server.http.errors import ApiError, bad_request

MAX_DEPTH = 128  # nested lists and objects
_NESTING = {b"[": 1, b"{": 1, b"]": -1, b"}": -1}
_STRUCTURE = re.compile(rb'"(?:[^"\\]|\\.)*+"?|[\[{]|[\]}]', re.DOTALL)
_WRONG = re.compile(r"(?P<what>.*?)(?: - at `\$(?P<path>.*)`)?", re.DOTALL)
_WORDS = {"str": "a string", "int": "an integer", "float": "a number", "bool": "true or false", "array": "an array",
          "object": "an object", "null": "null"}  # fmt: skip

_EXPECTS_INTEGER = re.compile(r"Expected `[^`]*\bint\b[^`]*`, got `float` - at `\$(?P<path>.*)`", re.DOTALL)
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")  # of a path
_MOST_FLOATS = 32  # fields of one request that are integers written as floats
_LARGEST = 2**53  # beyond it a float stands for many integers
# For a provider's own use, or without an effect on the answer: every request may carry them.
_WITHOUT_EFFECT = frozenset(
    (
        "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
        "prediction",
    )
)  # fmt: skip
_REPLACED = {"functions": "tools", "function_call": "tool_choice", "max_new_tokens": "max_tokens"}
_UNSUPPORTED = frozenset({"audio", "modalities", "web_search_options", "verbosity", "moderation", "length_penalty"})
_MAX_SHOWN = 40  # characters of an unknown name
_MAX_NAMED = 8  # unknown fields

T = TypeVar("T")


class ImageUrl(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Where an image is: in a `data:` URL, or elsewhere."""

    url: str
    detail: str | None = None


class VideoUrl(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Where a video is, and which of its frames the model sees: some per second, or a number of them."""

    url: str
    fps: float | None = None
    num_frames: int | None = None


class ContentPart(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A part of a message: text, or an image or video for models that take them."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: ImageUrl | str | None = None
    video_url: VideoUrl | str | None = None


class FunctionCall(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A call in an earlier answer; `arguments` is JSON in a string."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One call in an earlier answer."""

    function: FunctionCall
    id: str | None = None
    type: str | None = None


class ChatMessage(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One turn of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: FunctionCall | None = None  # before there were tools


class FunctionDefinition(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class GrammarFunction(FunctionDefinition, kw_only=True):
    """A function whose arguments follow a grammar (Lark). Other APIs have such; no chat can ask for one."""

    arguments_grammar: str


class ToolDefinition(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A tool: a function, which is the default type."""

    type: str | None = None
    function: FunctionDefinition


class NamedFunction(msgspec.Struct, kw_only=True):
    """The name in a `tool_choice`."""

    name: str


class AllowedTool(msgspec.Struct, kw_only=True):
    """One tool of a subset."""

    function: NamedFunction
    type: str = "function"


class AllowedTools(msgspec.Struct, kw_only=True):
    """A subset of the tools; `mode` is `auto` or `required`."""

    tools: list[AllowedTool]
    mode: str = "auto"


class ToolChoiceObject(msgspec.Struct, kw_only=True):
    """One function, or some of the tools with the type `allowed_tools`."""

    type: str = "function"
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    """A named schema."""

    schema: dict[str, Any] | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """`text`, `json_object` or `json_schema`; `schema` next to `json_object` is llama.cpp's spelling."""

    type: str
    json_schema: JsonSchemaFormat | None = None
    schema: dict[str, Any] | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """vLLM's field: exactly one of these. Absent and null differ: an object without any of them is misspelled."""

    json: dict[str, Any] | str | UnsetType | None = UNSET
    json_object: bool | UnsetType | None = UNSET
    regex: str | UnsetType | None = UNSET
    choice: list[str] | UnsetType | None = UNSET
    grammar: str | UnsetType | None = UNSET


class StreamOptions(msgspec.Struct, kw_only=True):
    """What a stream reports besides the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationRequest(msgspec.Struct, kw_only=True):
    """Fields shared by chats and completions."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    timeout: float | None = None  # seconds from arrival until the request is cancelled
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    user: str | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    speculative: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: int | None = None
    use_beam_search: bool | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None

    priority: int | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    timings_per_token: bool | None = None  # llama.cpp's: timings in every chunk
    return_progress: bool | None = None  # llama.cpp's: chunks that say how much of the prompt is computed
    return_tokens_as_token_ids: bool | None = None

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class ChatOptions(GenerationRequest, kw_only=True):
    """Fields of all chats, beside the conversation."""

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    tools: list[ToolDefinition] | None = None
    tool_choice: str | ToolChoiceObject | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: int | None = None

    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[dict[str, Any]] | None = None


class ChatCompletionRequest(ChatOptions, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: list[ChatMessage]


class ChatBatchRequest(ChatOptions, kw_only=True):
    """`POST /v1/chat/completions/batch`: several conversations with the same options."""

    messages: list[list[ChatMessage]]


class CompletionRequest(GenerationRequest, kw_only=True):
    """`POST /v1/completions`. A prompt is text or token ids; several go in a list."""

    prompt: str | list[str | int | list[int]]
    suffix: str | None = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """`POST /tokenize`: a text, or a conversation as the model's chat template writes it."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: str | ToolChoiceObject | None = None
    reasoning_effort: str | None = None
    documents: list[dict[str, Any]] | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """`POST /detokenize`."""

    tokens: list[int]
    model: str | None = None


def read_request(body: bytes, kind: type[T]) -> tuple[T, list[str]]:
    """Return a request, and warnings about its fields that have no effect."""
    if _is_too_deep(body):
        raise bad_request(f"The request's JSON is nested more than {MAX_DEPTH} levels deep.", code="invalid_json")
    try:
        try:
            value = msgspec.json.decode(body)
        except msgspec.ValidationError:  # a number out of range: this decoder says where, unless in an unknown field
            return msgspec.json.decode(body, type=kind), []
        try:
            return msgspec.convert(value, kind), list(unknown_fields(value, kind))
        except msgspec.ValidationError as error:
            return _with_whole_numbers(value, kind, error), list(unknown_fields(value, kind))
    except msgspec.ValidationError as error:
        raise type_error(str(error)) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"The request's body is not valid JSON: {error}", code="invalid_json") from error


def _is_too_deep(body: bytes) -> bool:
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:  # nearly always
        return False
    steps = (_NESTING.get(match[0], 0) for match in _STRUCTURE.finditer(body))
    return any(depth > MAX_DEPTH for depth in accumulate(steps))


def type_error(text: str) -> ApiError:
    """Translate an error of msgspec: "Expected `int | null`, got `str` - at `$.n`"."""
    found = _WRONG.fullmatch(text)
    assert found is not None
    what, path = found["what"], (found["path"] or "").lstrip(".")
    if missing := re.fullmatch(r"Object missing required field `(.*)`", what):
        param = f"{path}.{missing[1]}".lstrip(".")
        return bad_request(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
    what = re.sub(r"`([^`]*)`", _in_words, what)
    where = f"Invalid type for '{path}'" if path else "Invalid request body"
    return bad_request(f"{where}: {what[:1].lower()}{what[1:]}.", path or None, "invalid_type")


def _in_words(types: re.Match[str]) -> str:
    names = [_WORDS.get(name, name) for name in types[1].split(" | ")]
    return " or ".join(name for name in names if name != "null" or len(names) == 1)


def _with_whole_numbers(value: Any, kind: type[T], error: msgspec.ValidationError) -> T:
    """Convert again, with floats such as `16.0`, which some languages write, as the integers that they mean."""
    for _ in range(_MOST_FLOATS):
        found = _EXPECTS_INTEGER.fullmatch(str(error))
        if found is None or not _make_whole(value, found["path"]):
            break
        try:
            return msgspec.convert(value, kind)
        except msgspec.ValidationError as next_error:
            error = next_error
    raise error


def _make_whole(value: Any, path: str) -> bool:
    """Replace the float at `path`, and its neighbors in a list; return whether it is an integer."""
    *steps, last = [name or int(index) for name, index in _STEP.findall(path)]
    for step in steps:
        value = value[step]
    if not _is_whole(value[last]):
        return False
    for at in range(len(value)) if isinstance(value, list) else [last]:
        value[at] = int(value[at]) if _is_whole(value[at]) else value[at]
    return True


def _is_whole(value: object) -> bool:
    return isinstance(value, float) and value.is_integer() and abs(value) <= _LARGEST


def unknown_fields(value: Any, kind: type[Any]) -> Iterator[str]:
    """Yield a warning for each field of a valid body, or of a constraint in it, that has no effect."""
    known = kind.__struct_fields__
    names = [name for name in value if name not in known and name not in _WITHOUT_EFFECT]
    yield from _no_effect(names[:_MAX_NAMED], known)
    if len(names) > _MAX_NAMED:
        yield f"{len(names) - _MAX_NAMED} more unknown fields"
    # A misspelled part of a constraint leaves an answer free that should not be.
    for field, inner_kind in (("response_format", ResponseFormat), ("structured_outputs", StructuredOutputs)):
        if field in known and value.get(field) is not None:
            inner, known_inner = value[field], inner_kind.__struct_fields__
            for text in _no_effect([name for name in inner if name not in known_inner][:_MAX_NAMED], known_inner):
                yield f"{field}: {text}"
            if field == "response_format":
                yield from _unused_schemas(inner)


def _unused_schemas(response_format: Mapping[str, Any]) -> Iterator[str]:
    """Yield a warning for a schema that the type of the format does not use."""
    kind = response_format["type"]
    users = {"json_schema": ("json_schema",), "schema": ("json_schema", "json_object")}
    for name, used_by in users.items():
        if response_format.get(name) is not None and kind not in used_by:
            yield f"response_format.{name} has no effect with type {kind[:_MAX_SHOWN]!r}; use type 'json_schema'"


def _no_effect(names: list[str], known: tuple[str, ...]) -> Iterator[str]:
    for name in names:
        close = [_REPLACED[name]] if name in _REPLACED else get_close_matches(name, known, n=1, cutoff=0.6)
        if name in _UNSUPPORTED:
            yield f"{name!r} is not supported and has no effect"
        else:
            hint = f"; did you mean {close[0]!r}?" if close else ""
            yield f"unknown field {name[:_MAX_SHOWN]!r} has no effect{hint}"
