"""Reads a request's sampling parameters, output constraint and prompts.

OpenAI's `response_format`, vLLM's `structured_outputs` and the older `guided_*` are three ways to give a constraint.
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from msgspec import UNSET

from octavo.engine.input_processor import ProcessedRequest
from octavo.errors import InvalidParameterError
from octavo.inputs import Prompt, TokensPrompt
from octavo.multimodal.placeholders import MultiModalPrompt
from octavo.sampling_params import SEED_BITS, RequestPriority, SamplingParams
from octavo.server.args import ServerArgs
from octavo.server.http.errors import as_api_error, bad_request
from octavo.server.http.exchange import Exchange
from octavo.server.openai.models import ServedModel
from octavo.server.openai.protocol import (
    ChatBatchRequest,
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    ResponseFormat,
    read_request,
)
from octavo.server.openai.tools import closed, tool_wire_names
from octavo.structured_output import StructuredOutput

LARGE_BODY = 8 * 1024  # bytes, tokenized in a few milliseconds; from here on, processed outside the event loop
NO_LIMIT = -1  # of tokens, as clients of llama.cpp write it
_GUIDED = tuple(name for name in GenerationRequest.__struct_fields__ if name.startswith("guided_"))
# Fields with the same name and meaning on the wire and in `SamplingParams`.
_SAME = {spec.name for spec in fields(SamplingParams)} & {*GenerationRequest.__struct_fields__} - {"max_tokens"}

T = TypeVar("T")
Warn = Callable[[str], None]  # called with parts of the request that have no effect
Constraint = tuple[str, object, str]  # a field of StructuredOutput, its value, its path on the wire


def is_large(exchange: Exchange) -> bool:
    """Whether processing a body in the event loop would stall the streams."""
    return len(exchange.body) > LARGE_BODY


async def decoded(exchange: Exchange, kind: type[T]) -> T:
    """Decode the body of a request, and warn of its fields that have no effect. Raises ApiError, 400."""
    body = exchange.body
    wire, warnings = (
        await asyncio.to_thread(read_request, body, kind) if is_large(exchange) else read_request(body, kind)
    )
    exchange.warnings += warnings
    return wire


def chat_params(request: ChatCompletionRequest, defaults: SamplingParams) -> SamplingParams:
    """Return the parameters of a chat request; without a limit, it may use the rest of the context."""
    if request.top_logprobs and not request.logprobs:
        raise bad_request("'top_logprobs' needs 'logprobs': true.", "top_logprobs")
    cap = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    return defaults.replace(**_given(request), max_tokens=None if cap == NO_LIMIT else cap, logprobs=logprobs)


def completion_params(request: CompletionRequest, defaults: SamplingParams) -> SamplingParams:
    """Return the parameters of a completion request; a limit of 0 computes one token, which the reply omits."""
    cap = 16 if request.max_tokens is None else request.max_tokens
    given = _given(request)
    if request.echo and request.logprobs is not None and request.prompt_logprobs is None:
        given["prompt_logprobs"] = request.logprobs
    limit = {0: 1, NO_LIMIT: None}.get(cap, cap)
    return defaults.replace(**given, max_tokens=limit, logprobs=request.logprobs)


def num_samples(wire: GenerationRequest, args: ServerArgs) -> int:
    """Return how many samples a request asks for, capped where it would be rejected."""
    if isinstance(wire, ChatBatchRequest):
        return min(len(wire.messages), args.max_prompts)
    prompt = wire.prompt if isinstance(wire, CompletionRequest) else ""
    is_batch = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    num_prompts = min(len(prompt), args.max_prompts) if is_batch else 1
    return num_prompts * min(max(wire.n or 1, 1), args.max_n)


def wire_names(request: GenerationRequest) -> dict[str, str]:
    """Return the wire names of `SamplingParams` fields whose names differ, for errors found later."""
    constraints = {f"structured_output.{field}": path for field, _, path in _constraints(request)}
    if not isinstance(request, ChatCompletionRequest):
        return {"prompt_token_ids": "prompt"} | constraints
    names = {"prompt": "messages", "prompt_token_ids": "messages", "logprobs": "top_logprobs"}
    return names | {"max_tokens": _limit_name(request)} | tool_wire_names(request) | constraints


def _limit_name(request: GenerationRequest) -> str:
    return "max_tokens" if getattr(request, "max_completion_tokens", None) is None else "max_completion_tokens"


def _given(request: GenerationRequest) -> dict[str, Any]:
    if request.use_beam_search:
        raise bad_request("Beam search is not supported.", "use_beam_search", "unsupported_parameter")
    values = {name: getattr(request, name) for name in _SAME} | {"structured_output": requested_constraint(request)}
    if request.seed is not None and -(2 ** (SEED_BITS - 1)) <= request.seed < 0:
        values["seed"] = request.seed + 2**SEED_BITS  # negative 64-bit integers are valid seeds, too
    if request.stop is not None:  # an empty string ends nothing
        values["stop"] = [text for text in ([request.stop] if isinstance(request.stop, str) else request.stop) if text]
    if request.top_p == 0:  # the limit of a smaller and smaller nucleus: the most likely token alone
        values |= {"top_p": None, "top_k": 1}
    return {name: value for name, value in values.items() if value is not None}


def requested_constraint(request: GenerationRequest) -> StructuredOutput | None:
    """Return a request's constraint; None for free text."""
    constraints = _constraints(request)
    if not constraints:
        return None
    if len(constraints) > 1:
        paths = [path for _, _, path in constraints]
        raise bad_request(f"Only one of {', '.join(paths)} may be given.", paths[1])
    ((field, value, path),) = constraints
    if value == []:
        raise bad_request(f"'{path}' must not be empty.", path)
    try:
        constraint = StructuredOutput(**{field: value})  # type: ignore[arg-type]  # it checks itself
    except InvalidParameterError as error:
        raise as_api_error(error, {field: path}) from error
    if constraint.json_schema is None:
        return constraint
    wanted = request.response_format
    is_strict = wanted is not None and wanted.json_schema is not None and bool(wanted.json_schema.strict)
    return StructuredOutput(json_schema=closed(json.loads(str(constraint.json_schema)), strict=is_strict))


def is_constrained(request: GenerationRequest) -> bool:
    """Whether there may be a constraint to validate, which may take a while."""
    return any(getattr(request, name, None) for name in ("tools", "response_format", "structured_outputs", *_GUIDED))


def _constraints(request: GenerationRequest) -> list[Constraint]:
    kinds = [(name.removeprefix("guided_"), getattr(request, name), name) for name in _GUIDED]
    if (outputs := request.structured_outputs) is not None:
        values = {name: getattr(outputs, name) for name in outputs.__struct_fields__}
        if all(value is UNSET for value in values.values()):
            raise bad_request(f"'structured_outputs' needs one of {', '.join(values)}.", "structured_outputs")
        kinds = [(kind, value, f"structured_outputs.{kind}") for kind, value in values.items()] + kinds
    return _response_format(request.response_format) + [
        ("json_schema" if kind == "json" else kind, value, path)
        for kind, value, path in kinds
        if value not in (UNSET, False, None)
    ]


def _response_format(wanted: ResponseFormat | None) -> list[Constraint]:
    if wanted is None or wanted.type == "text":
        return []
    if wanted.type == "json_object":
        if wanted.schema is not None:
            return [("json_schema", wanted.schema, "response_format.schema")]
        return [("json_object", True, "response_format")]
    if wanted.type != "json_schema":
        known = "one of text, json_object, json_schema"
        raise bad_request(f"response_format.type={wanted.type!r}: {known}", "response_format.type")
    schema = wanted.json_schema.schema if wanted.json_schema is not None else wanted.schema
    path = "response_format.json_schema.schema"
    if schema is None:
        raise bad_request(f"Missing required parameter: '{path}'.", path, "missing_required_parameter")
    return [("json_schema", schema, path)]


def split_prompts(given: str | list[str | int | list[int]], limit: int) -> list[Prompt]:
    """Return the prompts of a request: one text, one list of ids, or a list of either."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise bad_request("'prompt' must not be empty.", "prompt")
    token_ids = [item for item in given if isinstance(item, int)]
    if len(token_ids) == len(given):
        return [{"prompt_token_ids": token_ids}]
    prompts: list[Prompt] = []
    for item in given:
        if isinstance(item, int):
            raise bad_request("'prompt' mixes token ids with other kinds of prompts.", "prompt")
        prompts.append(item if isinstance(item, str) else {"prompt_token_ids": item})
    if len(prompts) > limit:
        raise bad_request(f"{len(prompts)} prompts: at most {limit} per request.", "prompt")
    return prompts


def truncated(prompt: Mapping[str, Any], max_tokens: int | None) -> TokensPrompt:
    """Return the last `max_tokens` tokens of a prompt; all if there is no limit. Raises ApiError, 400: one below 1."""
    if max_tokens is not None and max_tokens < 1:
        raise bad_request(f"truncate_prompt_tokens={max_tokens}: at least 1", "truncate_prompt_tokens")
    token_ids: list[int] = prompt["prompt_token_ids"]
    return {"prompt_token_ids": token_ids if max_tokens is None else token_ids[-max_tokens:]}


def process_prompt(
    model: ServedModel,
    request: GenerationRequest,
    prompt: Prompt | MultiModalPrompt,
    params: SamplingParams,
    warn: Warn,
) -> ProcessedRequest:
    """Validate one prompt of a request; warn if the context has no room for all tokens asked for. Raises UserError."""
    priority = RequestPriority.NORMAL if request.priority is None else request.priority
    processed = model.process(prompt, params, priority=priority, cache_salt=request.cache_salt)
    name = _limit_name(request)
    cap, room = getattr(request, name), processed.params.max_tokens
    if cap is not None and room is not None and cap > room:
        warn(f"{name} is lowered to {room}, which the model's context leaves after the prompt")
    return processed
