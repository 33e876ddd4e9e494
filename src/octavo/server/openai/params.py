"""From the wire's sampling fields to `SamplingParams`; and what a field is called on the wire when it is refused."""

from typing import Any

from octavo.sampling_params import SEED_BITS, SamplingParams
from octavo.server.errors import bad_request
from octavo.server.openai.form import form_paths, requested_form
from octavo.server.openai.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest
from octavo.server.openai.tools import tool_wire_names

DEFAULT_COMPLETION_TOKENS = 16

# Fields that mean the same here and there, under the same name.
_SAME = (
    "n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "seed", "stop", "min_tokens", "ignore_eos", "stop_token_ids", "include_stop_str_in_output",
    "skip_special_tokens", "allowed_token_ids", "bad_words", "prompt_logprobs",
)  # fmt: skip


def chat_params(request: ChatCompletionRequest, defaults: SamplingParams) -> SamplingParams:
    """Return what a chat request asks for; without a cap it may run to the end of the context."""
    if request.top_logprobs is not None and not request.logprobs:
        raise bad_request("'top_logprobs' needs 'logprobs': true.", "top_logprobs")
    cap = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    logprobs = (request.top_logprobs or 0) if request.logprobs else None
    return defaults.replace(**_given(request), max_tokens=cap, logprobs=logprobs)


def completion_params(request: CompletionRequest, defaults: SamplingParams) -> SamplingParams:
    """Return what a completion request asks for; a cap of 0 computes one token, which the reply leaves out."""
    cap = DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    given = _given(request)
    if request.echo and request.logprobs is not None and request.prompt_logprobs is None:
        given["prompt_logprobs"] = request.logprobs
    return defaults.replace(**given, max_tokens=1 if cap == 0 else cap, logprobs=request.logprobs)


def wire_names(request: GenerationRequest) -> dict[str, str]:
    """Return the wire names of `SamplingParams` fields that are spelt otherwise there."""
    if not isinstance(request, ChatCompletionRequest):
        return {"prompt_token_ids": "prompt"} | form_paths(request)
    cap = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    return (
        {"prompt": "messages", "logprobs": "top_logprobs", "max_tokens": cap}
        | tool_wire_names(request)
        | form_paths(request)
    )


def _given(request: GenerationRequest) -> dict[str, Any]:
    """Return the fields that the client gave."""
    if request.use_beam_search:
        raise bad_request("Beam search is not offered.", "use_beam_search", "unsupported_parameter")
    values = {name: getattr(request, name) for name in _SAME} | {"structured_output": requested_form(request)}
    if request.seed is not None and -(2 ** (SEED_BITS - 1)) <= request.seed < 0:
        values["seed"] = request.seed + 2**SEED_BITS  # signed integers of 64 bits are seeds too
    return {name: value for name, value in values.items() if value is not None}
