"""Reads a request's sampling parameters, output constraint, response options and prompts.

OpenAI's `response_format`, vLLM's `structured_outputs` and the older `guided_*` are three ways to give a constraint.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from msgspec import UNSET

from octavo.contracts.engine import AdapterRef
from octavo.engine.front import EngineFront
from octavo.engine.input_processor import ProcessedRequest
from octavo.errors import InvalidParameterError
from octavo.inputs import Prompt, TokensPrompt
from octavo.multimodal.prompt import MultiModalPrompt
from octavo.sampling_params import SEED_BITS, RequestPriority, SamplingParams
from octavo.server.errors import as_api_error, bad_request
from octavo.server.openai.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    ResponseFormat,
    StructuredOutputs,
)
from octavo.server.openai.schemas import closed
from octavo.server.openai.tools import tool_wire_names
from octavo.structured_output import StructuredOutput

DEFAULT_COMPLETION_TOKENS = 16
NO_LIMIT = -1  # of tokens, as clients of llama.cpp write it

# Fields with the same name and meaning on the wire and in `SamplingParams`.
_SAME = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "seed", "stop", "min_tokens", "ignore_eos", "stop_token_ids", "include_stop_str_in_output",
    "skip_special_tokens", "speculative", "allowed_token_ids", "bad_words", "prompt_logprobs",
)  # fmt: skip

Warn = Callable[[str], None]  # called with parts of the request that have no effect
Constraint = tuple[str, object, str]  # a field of StructuredOutput, its value, its path on the wire


@dataclass(frozen=True, kw_only=True, slots=True)
class ResponseOptions:
    """What replies contain besides the text, whether complete or streamed."""

    include_usage: bool  # a final chunk reports it; complete replies always do
    continuous_usage: bool  # every chunk reports it
    token_ids: bool
    tokens_as_ids: bool  # tokens in logprobs are named `token_id:N`
    prompt_logprobs: bool  # in a separate field

    @classmethod
    def of(cls, request: GenerationRequest) -> Self:
        """Return the options of a request. Raises ApiError, 400: options of a stream without a stream."""
        options = request.stream_options
        if options is not None and not request.stream:
            raise bad_request("'stream_options' needs 'stream': true.", "stream_options")
        include_usage = options is not None and bool(options.include_usage)
        return cls(
            include_usage=include_usage,
            continuous_usage=include_usage and options is not None and bool(options.continuous_usage_stats),
            token_ids=bool(request.return_token_ids),
            tokens_as_ids=bool(request.return_tokens_as_token_ids),
            prompt_logprobs=request.prompt_logprobs is not None,
        )


def chat_params(request: ChatCompletionRequest, defaults: SamplingParams) -> SamplingParams:
    """Return the parameters of a chat request; without a limit, it may use the rest of the context."""
    if request.top_logprobs and not request.logprobs:
        raise bad_request("'top_logprobs' needs 'logprobs': true.", "top_logprobs")
    cap = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    return defaults.replace(**_given(request), max_tokens=None if cap == NO_LIMIT else cap, logprobs=logprobs)


def completion_params(request: CompletionRequest, defaults: SamplingParams) -> SamplingParams:
    """Return the parameters of a completion request; a limit of 0 computes one token, which the reply omits."""
    cap = DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    given = _given(request)
    if request.echo and request.logprobs is not None and request.prompt_logprobs is None:
        given["prompt_logprobs"] = request.logprobs
    limit = {0: 1, NO_LIMIT: None}.get(cap, cap)
    return defaults.replace(**given, max_tokens=limit, logprobs=request.logprobs)


def wire_names(request: GenerationRequest) -> dict[str, str]:
    """Return the wire names of `SamplingParams` fields whose names differ, for errors found later."""
    constraints = {f"structured_output.{field}": path for field, _, path in _constraints(request)}
    if not isinstance(request, ChatCompletionRequest):
        return {"prompt_token_ids": "prompt"} | constraints
    cap = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    names = {"prompt": "messages", "prompt_token_ids": "messages", "logprobs": "top_logprobs", "max_tokens": cap}
    return names | tool_wire_names(request) | constraints


def _given(request: GenerationRequest) -> dict[str, Any]:
    """Return the fields that the client gave."""
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
    """Return a request's constraint; None for free text.

    Raises:
        ApiError: 400; several constraints, an unknown one, a schema that is missing or malformed.
    """
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


def needs_grammar(request: GenerationRequest) -> bool:
    """Whether a schema, pattern or grammar may need validation, which may take a while."""
    if getattr(request, "tools", None):
        return True
    given = (request.response_format, request.structured_outputs, request.guided_json, request.guided_regex)
    return any(field is not None for field in (*given, request.guided_choice, request.guided_grammar))


def _constraints(request: GenerationRequest) -> list[Constraint]:
    values: list[Constraint] = []
    if (outputs := request.structured_outputs) is not None:
        values += _structured_outputs(outputs)
    values += [
        ("json_schema", request.guided_json, "guided_json"),
        ("regex", request.guided_regex, "guided_regex"),
        ("choice", request.guided_choice, "guided_choice"),
        ("grammar", request.guided_grammar, "guided_grammar"),
    ]
    return [*_response_format(request.response_format), *(each for each in values if each[1] is not None)]


def _structured_outputs(outputs: StructuredOutputs) -> list[Constraint]:
    names = {name: "json_schema" if name == "json" else name for name in outputs.__struct_fields__}
    if all(getattr(outputs, name) is UNSET for name in names):
        raise bad_request(f"'structured_outputs' needs one of {', '.join(names)}.", "structured_outputs")
    given = [(field, getattr(outputs, name), f"structured_outputs.{name}") for name, field in names.items()]
    return [each for each in given if each[1] not in (UNSET, False)]


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
    """Return the prompts of a request: one text, one list of ids, or a list of either.

    Raises:
        ApiError: 400; none, too many, or a list that mixes kinds.
    """
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
    """Return the last `max_tokens` tokens of a prompt; all if there is no limit.

    Raises:
        ApiError: 400; a limit below 1.
    """
    if max_tokens is not None and max_tokens < 1:
        raise bad_request(f"truncate_prompt_tokens={max_tokens}: at least 1", "truncate_prompt_tokens")
    token_ids: list[int] = prompt["prompt_token_ids"]
    return {"prompt_token_ids": token_ids if max_tokens is None else token_ids[-max_tokens:]}


def process_prompt(
    front: EngineFront,
    request: GenerationRequest,
    prompt: Prompt | MultiModalPrompt,
    params: SamplingParams,
    warn: Warn,
    adapter: AdapterRef | None = None,
) -> ProcessedRequest:
    """Validate one prompt of a request; warn if the context has no room for all tokens asked for. Raises UserError."""
    priority = RequestPriority.NORMAL if request.priority is None else request.priority
    processed = front.process(prompt, params, priority=priority, cache_salt=request.cache_salt, adapter=adapter)
    name = wire_names(request).get("max_tokens", "max_tokens")
    cap, room = getattr(request, name), processed.params.max_tokens
    if cap is not None and room is not None and cap > room:
        warn(f"{name} is lowered to {room}, which the model's context leaves after the prompt")
    return processed
