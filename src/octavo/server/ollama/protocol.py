"""Ollama's API on the wire: requests and replies. Unknown fields have no effect but a warning, as with OpenAI's.

Ollama's clients send what they have in its units: durations are nanoseconds, images are base64.
"""

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from octavo.server.openai.protocol import ToolDefinition
from octavo.server.openai.replies import TokenRow


class CalledFunction(msgspec.Struct, kw_only=True):
    """A call of a function: unlike OpenAI's, `arguments` is an object. In a request it may be JSON text as well."""

    name: str
    arguments: dict[str, Any] | str | None = None
    index: int | None = None


class Call(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A tool call in an answer, or in the history of a request. Older clients send no `id`."""

    function: CalledFunction
    id: str | None = None


class Message(msgspec.Struct, kw_only=True):
    """One turn of a conversation."""

    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[Call] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class Options(msgspec.Struct, kw_only=True):
    """The entries of `options` that have an effect."""

    num_predict: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class ModelRequest(msgspec.Struct, kw_only=True):
    """What all requests to a model may have."""

    model: str | None = None
    options: dict[str, Any] | None = None
    keep_alive: float | str | None = None


class AnswerRequest(ModelRequest, kw_only=True):
    """What chats and completions share. `format`: `json`, or a JSON schema. Answers are streamed by default."""

    stream: bool | None = None
    format: dict[str, Any] | str | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class OllamaChatRequest(AnswerRequest, kw_only=True):
    """`POST /api/chat`. Without messages it asks whether the model is loaded."""

    messages: list[Message] | None = None
    tools: list[ToolDefinition] | None = None


class OllamaGenerateRequest(AnswerRequest, kw_only=True):
    """`POST /api/generate`: a prompt for the chat template, or a text to continue if it is `raw`."""

    prompt: str | None = None
    system: str | None = None
    images: list[str] | None = None
    raw: bool | None = None
    suffix: str | None = None
    template: str | None = None
    context: list[int] | None = None


class OllamaEmbedRequest(ModelRequest, kw_only=True):
    """`POST /api/embed`. Inputs that are too long are truncated unless `truncate` is false."""

    input: str | list[str] | None = None
    truncate: bool | None = None
    dimensions: int | None = None


class OllamaEmbeddingsRequest(ModelRequest, kw_only=True):
    """`POST /api/embeddings`, the older route for one vector."""

    prompt: str | None = None


class OllamaNameRequest(msgspec.Struct, kw_only=True):
    """`POST /api/show` and `/api/pull`; `name` is what `model` was called before."""

    model: str | None = None
    name: str | None = None
    stream: bool | None = None
    verbose: bool | None = None
    insecure: bool | None = None


class OllamaError(msgspec.Struct, frozen=True, kw_only=True):
    """The body of every response other than 2xx, and the last line of a stream that fails."""

    error: str


class AnswerMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The assistant's message, or the next piece of it."""

    role: str
    content: str
    thinking: str | None = None
    tool_calls: list[Call] | None = None


class Durations(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the last line of an answer adds: why it ended, times in nanoseconds, and tokens, cached ones included."""

    done_reason: str | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET  # 0: the model is loaded before the server takes requests
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class Line(Durations, frozen=True, kw_only=True, omit_defaults=True):
    """A line of a streamed answer, or a whole one, which looks like a last line with all of the text."""

    model: str
    created_at: str
    done: bool
    logprobs: list[TokenRow] | None = None


class OllamaChatReply(Line, frozen=True, kw_only=True, omit_defaults=True):
    """A line of `POST /api/chat`."""

    message: AnswerMessage


class OllamaGenerateReply(Line, frozen=True, kw_only=True, omit_defaults=True):
    """A line of `POST /api/generate`."""

    response: str
    thinking: str | None = None


class OllamaEmbedReply(msgspec.Struct, frozen=True, kw_only=True):
    """The response of `POST /api/embed`."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int = 0
    prompt_eval_count: int


class OllamaEmbeddingsReply(msgspec.Struct, frozen=True, kw_only=True):
    """The response of `POST /api/embeddings`."""

    embedding: list[float]


class Details(msgspec.Struct, frozen=True, kw_only=True):
    """What kind of model it is."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class ListedModel(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One entry of `/api/tags`, or of `/api/ps` with the last three fields; sizes are bytes of the files."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: Details
    expires_at: str | None = None
    size_vram: int | None = None
    context_length: int | None = None


class OllamaModels(msgspec.Struct, frozen=True, kw_only=True):
    """The response of `GET /api/tags` and `GET /api/ps`."""

    models: list[ListedModel]


class OllamaModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The response of `POST /api/show`."""

    modelfile: str
    parameters: str
    template: str
    details: Details
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaVersion(msgspec.Struct, frozen=True, kw_only=True):
    """The response of `GET /api/version`: the version of Ollama whose API this is, and Octavo's own."""

    version: str
    octavo: str


class OllamaStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A line of `POST /api/pull`."""

    status: str
