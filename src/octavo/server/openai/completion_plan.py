"""From a completion request to everything that is settled before it runs. Whatever is wrong with it is found here."""

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.engine.front import EngineFront
from octavo.engine.input_processor import ProcessedRequest
from octavo.inputs import Prompt
from octavo.sampling_params import RequestPriority
from octavo.server.errors import bad_request
from octavo.server.openai.chunks import ReplyHead
from octavo.server.openai.logprobs import TokenNames
from octavo.server.openai.params import completion_params
from octavo.server.openai.prompts import split_prompts, truncated
from octavo.server.openai.protocol import CompletionRequest
from octavo.server.openai.wishes import Wishes


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionPlan:
    """One completion request, correct and ready to run."""

    head: ReplyHead
    prompts: Sequence[ProcessedRequest]
    prompt_texts: Sequence[str]  # only filled when they are echoed
    wishes: Wishes
    names: TokenNames
    num_top: int | None  # None: no logprobs
    has_output: bool  # False: a cap of 0, only the prompt is wanted
    is_echoed: bool
    has_prompt_logprobs: bool  # as a field of their own

    @property
    def num_samples(self) -> int:
        return self.prompts[0].params.n

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.num_samples


def plan_completion(
    request: CompletionRequest, head: ReplyHead, front: EngineFront, *, max_prompts: int
) -> CompletionPlan:
    """Tokenise and validate all prompts. May take a while for long ones.

    Raises:
        ApiError, UserError: naming what is wrong.
    """
    _refuse_unsupported(request)
    params = completion_params(request, front.inputs.default_params)
    wishes = Wishes.of(request)
    add_special_tokens = request.add_special_tokens is not False
    prompts = [
        front.process(
            _with_ids(prompt, front, add_special_tokens, request.truncate_prompt_tokens),
            params,
            priority=RequestPriority.NORMAL if request.priority is None else request.priority,
            cache_salt=request.cache_salt,
        )
        for prompt in split_prompts(request.prompt, max_prompts)
    ]
    is_echoed = bool(request.echo)
    return CompletionPlan(
        head=head,
        prompts=prompts,
        prompt_texts=[_text_of(prompt, front) for prompt in prompts] if is_echoed else (),
        wishes=wishes,
        names=TokenNames(front.tokenizer, as_ids=wishes.names_tokens_by_id),
        num_top=request.logprobs,
        has_output=request.max_tokens != 0,
        is_echoed=is_echoed,
        has_prompt_logprobs=request.prompt_logprobs is not None,
    )


def _refuse_unsupported(request: CompletionRequest) -> None:
    if request.suffix:
        raise bad_request("This model does not fill in the middle.", "suffix", "unsupported_parameter")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise bad_request("'best_of' is not offered; it may only equal 'n'.", "best_of", "unsupported_parameter")


def _with_ids(prompt: Prompt, front: EngineFront, add_special_tokens: bool, most: int | None) -> Prompt:
    """Return the prompt as it is unless the request says more about its tokens."""
    if isinstance(prompt, str) and (most is not None or not add_special_tokens):
        prompt = {"prompt_token_ids": front.tokenizer.encode(prompt, add_special_tokens)}
    return prompt if isinstance(prompt, str) else truncated(prompt, most)


def _text_of(prompt: ProcessedRequest, front: EngineFront) -> str:
    if prompt.prompt is not None:
        return prompt.prompt
    return front.tokenizer.decode(prompt.prompt_token_ids, skip_special_tokens=False)
