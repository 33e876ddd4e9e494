"""Ollama's requests as the requests that Octavo's own routes take: from here on there is one engine and one plan."""

from collections.abc import Sequence
from typing import Any

import msgspec

from octavo.engine.front import EngineFront
from octavo.server.http.errors import bad_request
from octavo.server.ollama.protocol import (
    AnswerRequest,
    Message,
    ModelRequest,
    OllamaChatRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    Options,
)
from octavo.server.openai.answer_plan import AnswerFormats
from octavo.server.openai.embeddings import EmbeddingsRequest
from octavo.server.openai.params import NO_LIMIT, Warn
from octavo.server.openai.protocol import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    ContentPart,
    FunctionCall,
    ResponseFormat,
    ToolCall,
    read_request,
)

_RENAMED = {"repeat_penalty": "repetition_penalty"}
# Of other samplers, and of how Ollama loads a model: Octavo's operators decide that.
_UNUSED = frozenset(
    (
        "num_ctx", "num_keep", "num_batch", "num_gpu", "main_gpu", "num_thread", "numa", "low_vram", "f16_kv",
        "logits_all", "vocab_only", "use_mmap", "use_mlock", "embedding_only", "draft_num_predict", "tfs_z",
        "typical_p", "repeat_last_n", "mirostat", "mirostat_tau", "mirostat_eta", "penalize_newline",
    )
)  # fmt: skip
_SWITCHES = ("enable_thinking", "thinking")  # what templates call the variable that turns reasoning on and off
_ELSEWHERE = ("data:", "http://", "https://")
_MAX_CHARACTERS_PER_TOKEN = 256  # text beyond it cannot reach the tokens that are kept
_MAX_WARNINGS = 8  # about entries of `options`


def chat_request(
    wire: OllamaChatRequest, name: str, formats: AnswerFormats, front: EngineFront, warn: Warn
) -> ChatCompletionRequest:
    """Return a chat as OpenAI's; `name` is that of a served model. Raises ApiError, 400."""
    messages = _with_call_ids([_message(message) for message in wire.messages or ()])
    fields = _shared(wire, warn) | _thinking(wire, name, formats, front, warn, has_tools=bool(wire.tools))
    return ChatCompletionRequest(model=name, messages=messages, tools=wire.tools or None, **fields, **_rows(wire))


def prompted_chat(
    wire: OllamaGenerateRequest, name: str, formats: AnswerFormats, front: EngineFront, warn: Warn
) -> ChatCompletionRequest:
    """Return a prompt for the chat template as a chat. Raises ApiError, 400."""
    _check_prompt(wire, warn)
    messages = [ChatMessage(role="system", content=wire.system)] if wire.system else []
    messages.append(_message(Message(role="user", content=wire.prompt, images=wire.images)))
    fields = _shared(wire, warn) | _thinking(wire, name, formats, front, warn, has_tools=False)
    return ChatCompletionRequest(model=name, messages=messages, **fields, **_rows(wire))


def raw_completion(wire: OllamaGenerateRequest, name: str, warn: Warn) -> CompletionRequest:
    """Return a text to continue as OpenAI's completion. Raises ApiError, 400."""
    _check_prompt(wire, warn)
    if wire.images:
        raise bad_request("'images' need a prompt for the chat template: leave out 'raw'.", "images")
    for field in ("system", "think"):
        if getattr(wire, field):
            warn(f"{field} has no effect on a raw prompt")
    fields = {"max_tokens": NO_LIMIT, **_shared(wire, warn)}
    logprobs = (wire.top_logprobs or 0) if wire.logprobs else None
    return CompletionRequest(model=name, prompt=wire.prompt or "", suffix=wire.suffix, logprobs=logprobs, **fields)


def embeddings_request(wire: OllamaEmbedRequest, name: str, front: EngineFront, warn: Warn) -> EmbeddingsRequest:
    """Return the inputs as OpenAI's request; those that are too long for the model's context lose their ends."""
    _options(wire, warn)
    texts = [wire.input or ""] if isinstance(wire.input, str | None) else wire.input
    inputs: list[str | int | list[int]] = list(texts)
    if wire.truncate is not False:
        inputs = [_fitting(text, front) for text in texts]
    return EmbeddingsRequest(model=name, input=inputs, dimensions=wire.dimensions)


def _fitting(text: str, front: EngineFront) -> str | list[int]:
    """Return a text, or the tokens of one that is too long, cut before the special tokens at its end."""
    most = front.config.model.max_model_len - 1  # a place is left for an output
    if len(text) * 4 < most:  # characters have up to four bytes, and tokens at least one
        return text
    token_ids = front.tokenizer.encode(text[: most * _MAX_CHARACTERS_PER_TOKEN])
    if len(token_ids) <= most:
        return text
    end = token_ids[-1:] if token_ids[-1] in front.tokenizer.special_token_ids else []
    return token_ids[: most - len(end)] + end


def _shared(wire: AnswerRequest, warn: Warn) -> dict[str, Any]:
    return _options(wire, warn) | {"stream": wire.stream is not False, "response_format": _response_format(wire.format)}


def _rows(wire: AnswerRequest) -> dict[str, Any]:
    return {"logprobs": wire.logprobs, "top_logprobs": wire.top_logprobs}


def _options(wire: ModelRequest, warn: Warn) -> dict[str, Any]:
    """Return the sampling parameters among `options`, under OpenAI's names; what has no effect is named."""
    keep = wire.keep_alive
    if keep is not None and not (keep.startswith("-") if isinstance(keep, str) else keep < 0):
        warn("keep_alive has no effect: the model stays loaded")
    entries = wire.options or {}
    for name in sorted(_UNUSED & entries.keys()):
        warn(f"options.{name} has no effect")
    used = {name: value for name, value in entries.items() if name not in _UNUSED}
    options, warnings = read_request(msgspec.json.encode(used), Options)
    for text in warnings[:_MAX_WARNINGS]:
        warn(f"options: {text}")
    given = {_RENAMED.get(name, name): value for name, value in msgspec.structs.asdict(options).items()}
    limit, top_k = given.pop("num_predict"), given.pop("top_k")
    if limit is not None:
        given["max_tokens"] = limit if limit > 0 else NO_LIMIT
    if top_k is not None:
        given["top_k"] = max(top_k, 0)  # off
    return {name: value for name, value in given.items() if value is not None}


def _response_format(given: dict[str, Any] | str | None) -> ResponseFormat | None:
    if isinstance(given, dict):
        return ResponseFormat(type="json_object", schema=given)
    if given not in (None, "", "json"):
        raise bad_request("format must be 'json' or a JSON schema.", "format")
    return ResponseFormat(type="json_object") if given else None


def _thinking(
    wire: AnswerRequest, name: str, formats: AnswerFormats, front: EngineFront, warn: Warn, *, has_tools: bool
) -> dict[str, Any]:
    """Return the fields that turn reasoning on or off. Raises ApiError, 400, if it is asked for and there is none."""
    if wire.think is None:
        return {}
    fields: dict[str, Any]
    if isinstance(wire.think, str):
        is_wanted, fields = wire.think != "none", {"reasoning_effort": wire.think}
    else:
        is_wanted, template = wire.think, front.tokenizer.chat_template
        read = () if template is None else [each for each in _SWITCHES if template.reads(each, with_tools=has_tools)]
        fields = {"chat_template_kwargs": dict.fromkeys(read, is_wanted)} if read else {}
    if is_wanted and formats.reasoning is None:
        raise bad_request(f'"{name}" does not support thinking', "think", "unsupported_parameter")
    if not (is_wanted or fields or formats.reasoning is None):
        warn("think: false has no effect: the model's chat template cannot turn reasoning off")
    return fields


def _message(message: Message) -> ChatMessage:
    """Return a message as OpenAI's, with images before the text, as Ollama puts them."""
    content: str | list[ContentPart] | None = message.content
    if message.images:
        content = [ContentPart(type="image_url", image_url=_image_url(image)) for image in message.images]
        content += [ContentPart(type="text", text=message.content)] if message.content else []
    calls = [
        ToolCall(id=call.id, type="function", function=FunctionCall(name=call.function.name, arguments=arguments))
        for call in message.tool_calls or ()
        for arguments in [call.function.arguments]
    ]
    return ChatMessage(
        role=message.role,
        content=content,
        reasoning_content=message.thinking or None,
        tool_calls=calls or None,
        name=message.tool_name,
        tool_call_id=message.tool_call_id,
    )


def _image_url(image: str) -> str:
    return image if image.startswith(_ELSEWHERE) else f"data:;base64,{image}"


def _with_call_ids(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return a conversation in which each call has an id and each result names one: templates may write them.

    Results come in the order of the calls, or say by a tool's name which of them they answer.
    """
    waiting: list[ToolCall] = []
    num_calls = 0
    for message in messages:
        for call in message.tool_calls or ():
            call.id = call.id or f"call{num_calls:05d}"  # nine characters, which Mistral's templates demand
            num_calls += 1
            waiting.append(call)
        if message.role == "tool" and waiting:
            of_name = [call for call in waiting if call.function.name == message.name]
            answered = next((call for call in waiting if call.id == message.tool_call_id), (of_name or waiting)[0])
            waiting.remove(answered)
            message.tool_call_id, message.name = answered.id, message.name or answered.function.name
    return list(messages)


def _check_prompt(wire: OllamaGenerateRequest, warn: Warn) -> None:
    if wire.template:
        raise bad_request("Templates in requests are not supported.", "template", "unsupported_parameter")
    if wire.context:
        warn("context has no effect: send the conversation to /api/chat")
