"""Messages between the frontend (text) and the engine core (tokens). Encoded with msgspec between processes.

Outputs are columns rather than one object per request: with thousands of running requests, the objects would cost more
than scheduling. Legend: R = requests with new output in this step.
"""

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.contracts.lora import AdapterEvents, AdapterRef
from octavo.contracts.stats import ExpertLoad, SchedulerStats, SpecDecodeStats
from octavo.sampling_params import SamplingParams


class EmbeddingSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Embeddings that replace those of some prompt tokens: an image's, for instance."""

    start: int  # position of the first
    num_tokens: int
    embeddings: bytes  # [num_tokens, hidden size] float32


class VisionInput(msgspec.Struct, frozen=True, kw_only=True):
    """An image or a video in a prompt, as the processor prepared it for the model's vision tower."""

    start: int  # position of its first token
    num_tokens: int
    grid: tuple[int, int, int]  # (pairs of) frames, rows and columns of patches
    content_hash: str  # of patches, levels and grid, and of what else the rotary positions depend on
    patches: NDArray[Any] | None = None  # [frames * rows * columns, values of a patch]; None: sent separately
    levels: NDArray[np.float32] | None = None  # [channels, 256], of patches of uint8; None: patches are float32


class ExtraInputs(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs of a request in addition to its tokens; each is absent unless used. Part of its block hashes.

    With `vision`, rotary positions and whole spans follow from it and the tokens.
    """

    rotary_positions: bytes | None = None  # [3, prompt] int32: positions for multimodal rotary embeddings
    embedding_spans: list[EmbeddingSpan] = []
    vision: list[VisionInput] = []  # in the order of the prompt
    whole_spans: list[
        tuple[int, int]
    ] = []  # [start, end): tokens that attend to each other; a step computes them to the end


class EngineCoreRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sample to generate. Sent once, already validated; contains tokens, never text.

    With `resumed_token_ids` it goes on as if it had never stopped: noise, penalties, limits, grammar and the indices of
    outputs count them, and none of them is sent again.
    """

    request_id: str
    prompt_token_ids: list[int]
    resumed_token_ids: list[int] = []  # output it already has, from an engine that died: it goes on after these
    sampling_params: SamplingParams  # `seed` and `max_tokens` are set
    priority: int
    arrival_time_s: float
    eos_token_ids: list[int] = []
    bad_words_token_ids: list[list[int]] = []
    cache_salt: str | None = None  # requests with different salts (tenants) never share KV blocks
    extra_inputs: ExtraInputs | None = None
    adapter: AdapterRef | None = None  # None: the base model


class TokenLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities at one position: of the actual token first, then of the top tokens in descending order."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int  # of the actual token; 1 is the most likely


class FinishedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """How a request ended."""

    finish_reason: str  # `stop`, `length`, `abort` or `error`
    stop_token_id: int | None = None  # set if one of the request's own stop_token_ids ended it
    error: str | None = None
    num_preemptions: int = 0
    num_drafts: int = 0  # speculated tokens that were verified
    num_accepted_drafts: int = 0
    error_type: str | None = None  # the class of `error` in `octavo.errors`, if any
    shows_last_token: bool = False  # with `stop`: the last token is part of the text and completes the constraint


class AdmittedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Sent with a request's first scheduled step."""

    scheduled_time_s: float
    num_cached_tokens: int


class EngineCoreOutputs(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The new output of one step.

    `new_token_ids` is flat: `num_new_tokens[i]` of its tokens belong to `req_ids[i]`, and the first of these is output
    token number `first_indices[i]` of that request, so a replay can never duplicate a token.
    """

    epoch: int  # of the engine core that computed this
    req_ids: list[str]  # [R]
    num_new_tokens: list[int]  # [R]
    first_indices: list[int]  # [R]
    new_token_ids: list[int]  # [sum(num_new_tokens)]
    num_scheduled_tokens: int  # computed in this step, including prompt tokens
    admitted: dict[str, AdmittedRequest] = {}
    finished: dict[str, FinishedRequest] = {}
    logprobs: dict[str, list[TokenLogprobs]] = {}  # one entry for each new token of the request
    prompt_logprobs: dict[str, list[TokenLogprobs | None]] = {}  # whole prompt at once; [0] is None
    stats: SchedulerStats | None = None
    expert_load: ExpertLoad | None = None
    spec_decode: SpecDecodeStats | None = None  # of an engine with a drafter
    adapter_events: AdapterEvents | None = None
    replica: int = 0  # index of the engine core under data parallelism; set by the client that merges them
