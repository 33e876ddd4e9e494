"""Messages between the front (text) and the engine core (tokens). Encoded with msgspec when they cross a process.

Columns rather than one object per request: at thousands of running requests the objects would cost more than the
scheduling. Legend: R = requests with news in this step.
"""

import msgspec

from octavo.contracts.stats import ExpertLoad, SchedulerStats
from octavo.sampling_params import SamplingParams


class EngineCoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sample to generate. Sent once; correct and known to fit; holds tokens, never text."""

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams  # `seed` and `max_tokens` are set
    priority: int
    arrival_time_s: float
    eos_token_ids: list[int] = []
    bad_words_token_ids: list[list[int]] = []
    cache_salt: str | None = None  # tenants with different salts never share KV blocks


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities at one position: the token that stands there first, then the most likely, best first."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int  # of the token that stands there; 1 is the most likely


class FinishedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """How a request ended."""

    finish_reason: str  # `stop`, `length`, `abort` or `error`
    stop_token_id: int | None = None  # set when one of the request's own stop_token_ids ended it
    error: str | None = None
    num_preemptions: int = 0
    error_type: str | None = None  # a class of `octavo.errors`, where `error` has one
    shows_last_token: bool = False  # with `stop`: the last token is text, and the form of the answer is complete


class AdmittedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Sent with a request's first scheduled step."""

    scheduled_time_s: float
    num_cached_tokens: int


class EngineCoreOutputs(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What one step brought that is new.

    `new_token_ids` is flat: `num_new_tokens[i]` of them belong to `req_ids[i]`, and the first of those is output
    token number `first_indices[i]` of its request, so that a replay can never double one.
    """

    epoch: int  # of the engine core that computed this
    req_ids: list[str]  # [R]
    num_new_tokens: list[int]  # [R]
    first_indices: list[int]  # [R]
    new_token_ids: list[int]  # [sum(num_new_tokens)]
    num_scheduled_tokens: int  # work done in this step, prompt tokens included
    admitted: dict[str, AdmittedRequest] = {}
    finished: dict[str, FinishedRequest] = {}
    logprobs: dict[str, list[TokenLogprobs]] = {}  # one entry for each new token of the request
    prompt_logprobs: dict[str, list[TokenLogprobs | None]] = {}  # whole prompt at once; [0] is None
    stats: SchedulerStats | None = None
    expert_load: ExpertLoad | None = None
    replica: int = 0  # of the engine, where it has several cores; the client that joins them sets it
