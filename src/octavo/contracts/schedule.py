"""One step: what the scheduler sends to every rank. Ids and counts in numpy columns, no tensors.

A request is sent in full once (`NewRequestData`), with its row; afterwards only changes are sent.

Legend: R = requests in the step, N = newly allocated blocks, K = tokens sent, M = rows with a grammar, W = 32-bit words
of a mask (one bit per token of the vocabulary, padded), `row` = index of a request in the worker.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from octavo.sampling_params import SamplingParams

Int32Array = NDArray[np.int32]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True)
class NewRequestData:
    """A request that enters the worker: new, or resumed after a preemption, with the tokens generated so far."""

    request_id: str
    row: int
    token_ids: Int32Array  # [prompt + outputs so far]
    num_prompt_tokens: int
    sampling_params: SamplingParams
    eos_token_ids: list[int]  # masked out until min_tokens have been generated
    bad_words_token_ids: list[list[int]]
    block_ids: list[int]  # all blocks it currently holds
    num_computed_tokens: int  # found in the prefix cache


def _none() -> Int32Array:
    return np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedRequestData:
    """Diffs for requests that the worker already has: blocks appended to their tables, and sampled tokens.

    Tokens are only sent where some ranks do not sample: pipeline stages before the last.
    """

    rows: Int32Array  # [N] blocks of the same row are appended in this order
    block_ids: Int32Array  # [N]
    token_rows: Int32Array = field(default_factory=_none)  # [K]
    token_positions: Int32Array = field(default_factory=_none)  # [K] in each row's context
    token_ids: Int32Array = field(default_factory=_none)  # [K]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenMasks:
    """The tokens that rows with a grammar may sample in this step; other rows are unconstrained."""

    rows: Int32Array  # [M]
    words: Int32Array  # [M, W]; bit b of word w allows token 32 w + b


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerOutput:
    """One step. `rows[i]` computes `num_scheduled_tokens[i]` tokens starting at position `num_computed_tokens[i]`.

    `samples[i]` is true if the row reaches its last known token, so that a new token is sampled.
    """

    step: int
    req_ids: tuple[str, ...]  # [R]
    rows: Int32Array  # [R]
    num_computed_tokens: Int32Array  # [R]
    num_scheduled_tokens: Int32Array  # [R], each at least 1
    samples: BoolArray  # [R]
    total_num_scheduled_tokens: int
    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    finished_req_ids: list[str]  # finished or preempted since the last step: free their rows first
    token_masks: TokenMasks | None = None
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)  # drafts to verify
    scheduled_encoder_inputs: dict[str, list[int]] = field(default_factory=dict)  # images to encode
