"""`POST /v1/embeddings`: texts to vectors, as the model's files say; without any, of the last token, of length 1."""

import asyncio
import base64
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from octavo.contracts.abstract import AbstractStructMeta
from octavo.engine.async_llm_engine import LiveRequest
from octavo.engine.input_processor import ProcessedRequest
from octavo.errors import RequestError, UserError, named_error
from octavo.inputs import Prompt
from octavo.outputs import RequestOutput
from octavo.sampling_params import PoolingParams, RequestPriority
from octavo.server.http.errors import ApiError, as_api_error, bad_request
from octavo.server.openai.models import ServedModel
from octavo.server.openai.params import split_prompts, truncated

MAX_INPUTS = 2048  # as OpenAI's


class VectorsRequest(msgspec.Struct, kw_only=True, metaclass=AbstractStructMeta):
    """What all requests have whose answers are numbers. `truncate_prompt_tokens`: -1: as many as fit."""

    model: str | None = None
    user: str | None = None
    timeout: float | None = None
    priority: int | None = None
    cache_salt: str | None = None
    truncate_prompt_tokens: int | None = None

    @property
    @abstractmethod
    def num_inputs(self) -> int:
        """How many answers are asked for, capped where the request would be rejected."""

    @property
    def options(self) -> dict[str, Any]:
        """Options of each prompt, for `ServedModel.process`."""
        priority = RequestPriority.NORMAL if self.priority is None else self.priority
        return {"priority": priority, "cache_salt": self.cache_salt}


class InputsRequest(VectorsRequest, kw_only=True):
    """One input or several, in a list; each is text or token ids."""

    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None

    @property
    def num_inputs(self) -> int:
        given = self.input
        is_list = isinstance(given, list) and bool(given) and not isinstance(given[0], int)
        return min(len(given), MAX_INPUTS) if is_list else 1


class EmbeddingsRequest(InputsRequest, kw_only=True):
    """`POST /v1/embeddings`."""


class Embedding(msgspec.Struct, frozen=True, kw_only=True):
    """A vector: numbers, or base64 of little-endian float32."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingsUsage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int

    def count_tokens(self) -> tuple[int, int]:
        return self.prompt_tokens, 0


class VectorsReply(msgspec.Struct, frozen=True, kw_only=True):
    """What all answers of numbers have."""

    usage: EmbeddingsUsage


class Embeddings(VectorsReply, frozen=True, kw_only=True):
    """The vectors, in the order of the inputs."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str


def prepare_embeddings(request: EmbeddingsRequest, model: ServedModel) -> list[ProcessedRequest]:
    """Tokenize and validate all inputs. May take a while for many or long ones. Raises ApiError, UserError."""
    rules = model.engine.front.inputs.pooling_rules
    if not rules.makes_vectors:
        raise bad_request("This model scores pairs of texts: ask /v1/rerank or /score.", "model", "unsupported_model")
    rules.check_dimensions(request.dimensions)
    return prepare_inputs(request, request.input, PoolingParams(dimensions=request.dimensions), model)


def prepare_inputs(
    request: VectorsRequest,
    given: str | list[str | int | list[int]],
    params: PoolingParams,
    model: ServedModel,
    field: str = "input",
) -> list[ProcessedRequest]:
    """Tokenize and validate the inputs in a field. Errors name the one at fault. Raises ApiError, UserError."""
    try:
        prompts = split_prompts(given, MAX_INPUTS)
    except ApiError as error:
        raise bad_request(error.detail.message.replace("prompt", field), field) from None
    processed = []
    for index, prompt in enumerate(prompts):
        name = field if len(prompts) == 1 else f"{field}[{index}]"
        if not prompt:
            raise bad_request(f"'{name}' must not be empty.", name)
        try:
            shortened = _shortened(prompt, request.truncate_prompt_tokens, model)
            processed.append(model.process(shortened, params, **request.options))
        except UserError as error:
            raise as_api_error(error, {"prompt": name, "prompt_token_ids": name}) from error
    return processed


def check_truncation(most: int | None, field: str = "truncate_prompt_tokens") -> None:
    """Raises ApiError, 400: a number of tokens that is neither one nor -1, as many as fit."""
    if most is not None and most != -1 and most < 1:
        raise bad_request(f"{field}={most}: at least 1, or -1", field)


def _shortened(prompt: Prompt, most: int | None, model: ServedModel) -> Prompt:
    """Return the prompt unchanged unless the request shortens it.

    Of text, its end goes, where files say how vectors are made, and what the tokenizer puts around it stays; otherwise,
    as of token ids, the beginning.
    """
    check_truncation(most)
    if most is None:
        return prompt
    front = model.engine.front
    if most == -1:
        most = front.inputs.limit.max_prompt_tokens
    if isinstance(prompt, str):
        if front.config.model.pooling.is_stated and most > 0:
            text = front.inputs.pooling_rules.prompt + prompt
            return {
                "prompt_token_ids": front.tokenizer.encode_cut(text, min(most, front.inputs.limit.max_prompt_tokens))
            }
        prompt = {"prompt_token_ids": front.tokenizer.encode(prompt)}
    return truncated(prompt, most)


async def embed(request: EmbeddingsRequest, prompts: Sequence[ProcessedRequest], model: ServedModel) -> Embeddings:
    """Compute all vectors. Raises ApiError, EngineDeadError. When cancelled, what is unfinished is aborted."""
    outputs = await answers_to(prompts, model)
    data = [
        Embedding(index=index, embedding=encoded(numbers_of(output), request.encoding_format))
        for index, output in enumerate(outputs)
    ]
    return Embeddings(data=data, model=model.card.id, usage=usage_of(prompts))


def usage_of(prompts: Sequence[ProcessedRequest]) -> EmbeddingsUsage:
    num_tokens = sum(len(prompt.prompt_token_ids) for prompt in prompts)
    return EmbeddingsUsage(prompt_tokens=num_tokens, total_tokens=num_tokens)


async def answers_to(prompts: Sequence[ProcessedRequest], model: ServedModel) -> list[RequestOutput]:
    """Return the outputs of all prompts, as one batch. Raises ApiError, EngineDeadError.

    When cancelled, what is unfinished is aborted.
    """
    settled = asyncio.Event()
    lives: list[LiveRequest] = []

    def wake_at_the_end() -> None:
        if len(lives) == len(prompts) and all(live.is_settled for live in lives):
            settled.set()

    try:
        for prompt in prompts:
            lives.append(model.engine.open(prompt, wake_at_the_end))  # noqa: PERF401 - `finally` knows those before
        await settled.wait()
        for live in lives:
            live.check()
        return [live.state.snapshot() for live in lives]
    finally:
        for live in lives:
            live.close()


def numbers_of(output: RequestOutput) -> list[float]:
    """Return the answer of a pooled request. Raises ApiError: it failed."""
    [sample] = output.outputs
    if sample.finish_reason == "error":
        kind, text = sample.error_type or RequestError.__name__, sample.error or "The request failed."
        raise as_api_error(named_error(kind, text))
    if output.embedding is None:
        raise ApiError(503, "The request was aborted.", code="aborted", headers={"Retry-After": "1"})
    return output.embedding


def encoded(vector: list[float], encoding: str | None) -> list[float] | str:
    return base64.b64encode(np.array(vector, dtype="<f4").tobytes()).decode() if encoding == "base64" else vector
