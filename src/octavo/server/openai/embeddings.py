"""`POST /v1/embeddings`: texts to vectors, the model's hidden state of each last token, of length 1."""

import asyncio
import base64
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from octavo.engine.async_llm_engine import LiveRequest
from octavo.engine.input_processor import ProcessedRequest
from octavo.errors import RequestError, named_error
from octavo.inputs import Prompt
from octavo.sampling_params import PoolingParams, RequestPriority
from octavo.server.errors import ApiError, as_api_error, bad_request
from octavo.server.openai.models import ServedModel
from octavo.server.openai.params import split_prompts, truncated

MAX_INPUTS = 2048  # as OpenAI's


class EmbeddingsRequest(msgspec.Struct, kw_only=True):
    """`POST /v1/embeddings`. An input is text or token ids; several go in a list."""

    input: str | list[str | int | list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None
    timeout: float | None = None
    priority: int | None = None
    cache_salt: str | None = None
    truncate_prompt_tokens: int | None = None


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """A vector: numbers, or base64 of little-endian float32."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingsUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(msgspec.Struct, frozen=True, kw_only=True):
    """The vectors, in the order of the inputs."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingsUsage


def num_inputs(request: EmbeddingsRequest) -> int:
    """Return how many vectors a request asks for, capped where it would be rejected."""
    given = request.input
    is_list = isinstance(given, list) and bool(given) and not isinstance(given[0], int)
    return min(len(given), MAX_INPUTS) if is_list else 1


def prepare_embeddings(request: EmbeddingsRequest, model: ServedModel) -> list[ProcessedRequest]:
    """Tokenize and validate all inputs. May take a while for many or long ones. Raises ApiError, UserError."""
    if request.dimensions is not None:
        text = "'dimensions' needs a model whose vectors may be shortened; nothing in this one's files says so."
        raise bad_request(text, "dimensions", "unsupported_parameter")
    try:
        prompts = split_prompts(request.input, MAX_INPUTS)
    except ApiError as error:
        raise bad_request(error.detail.message.replace("prompt", "input"), "input") from None
    priority = RequestPriority.NORMAL if request.priority is None else request.priority
    options: dict[str, Any] = {"priority": priority, "cache_salt": request.cache_salt}
    return [model.process(_shortened(prompt, request, model), PoolingParams(), **options) for prompt in prompts]


def _shortened(prompt: Prompt, request: EmbeddingsRequest, model: ServedModel) -> Prompt:
    """Return the prompt unchanged unless the request shortens it."""
    if request.truncate_prompt_tokens is None:
        return prompt
    if isinstance(prompt, str):
        prompt = {"prompt_token_ids": model.engine.front.tokenizer.encode(prompt)}
    return truncated(prompt, request.truncate_prompt_tokens)


async def embed(request: EmbeddingsRequest, prompts: Sequence[ProcessedRequest], model: ServedModel) -> Embeddings:
    """Compute all vectors. Raises ApiError, EngineDeadError. When cancelled, what is unfinished is aborted."""
    settled = asyncio.Event()
    lives: list[LiveRequest] = []

    def wake_at_the_end() -> None:
        if len(lives) == len(prompts) and all(live.is_settled for live in lives):
            settled.set()

    try:
        for prompt in prompts:
            lives.append(model.engine.open(prompt, wake_at_the_end))  # noqa: PERF401 - `finally` knows those before
        await settled.wait()
        data = [
            Embedding(index=index, embedding=_encoded(_vector(live), request.encoding_format))
            for index, live in enumerate(lives)
        ]
    finally:
        for live in lives:
            live.close()
    num_tokens = sum(len(prompt.prompt_token_ids) for prompt in prompts)
    usage = EmbeddingsUsage(prompt_tokens=num_tokens, total_tokens=num_tokens)
    return Embeddings(data=data, model=model.card.id, usage=usage)


def _vector(live: LiveRequest) -> list[float]:
    live.check()
    output = live.state.snapshot()
    [sample] = output.outputs
    if sample.finish_reason == "error":
        kind, text = sample.error_type or RequestError.__name__, sample.error or "The request failed."
        raise as_api_error(named_error(kind, text))
    if output.embedding is None:
        raise ApiError(503, "The request was aborted.", code="aborted", headers={"Retry-After": "1"})
    return output.embedding


def _encoded(vector: list[float], encoding: str | None) -> list[float] | str:
    return base64.b64encode(np.array(vector, dtype="<f4").tobytes()).decode() if encoding == "base64" else vector
