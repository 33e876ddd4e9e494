"""The order for one step: what the scheduler tells every rank. Ids and counts in numpy columns, no tensors.

A request is sent whole once (`NewRequestData`) together with the row that it will live in; afterwards only what
changed travels. Legend: R = requests in the step, N = changes of block tables, M = rows under a grammar, W = words of
a mask (a bit for each token of the vocabulary, perhaps some more), `row` = index into the worker's rows.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from octavo.sampling_params import SamplingParams

Int32Array = NDArray[np.int32]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True)
class NewRequestData:
    """A request that enters the worker: new, or resumed after a preemption, with tokens of its own after the prompt."""

    request_id: str
    row: int
    token_ids: Int32Array  # [prompt + outputs so far]
    num_prompt_tokens: int
    sampling_params: SamplingParams
    eos_token_ids: list[int]  # banned until min_tokens are out
    bad_words_token_ids: list[list[int]]
    block_ids: list[list[int]]  # of each KV group: its row of the block table, freed columns included
    num_computed_tokens: int  # found in the prefix cache


def _none() -> Int32Array:
    return np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedRequestData:
    """Diffs for requests that the worker already has: changes of their block tables, and tokens that were sampled.

    `block_ids[n]` goes to column `columns[n]` of row `rows[n]` in the table of group `groups[n]`: a block given out, or
    the block that is nobody's, in place of one that was freed behind a sliding window.

    Tokens are told only where some ranks do not sample: the stages of a pipeline before the last.
    """

    rows: Int32Array = field(default_factory=_none)  # [N]
    block_ids: Int32Array = field(default_factory=_none)  # [N]
    groups: Int32Array = field(default_factory=_none)  # [N]
    columns: Int32Array = field(default_factory=_none)  # [N]
    token_rows: Int32Array = field(default_factory=_none)  # [K]
    token_positions: Int32Array = field(default_factory=_none)  # [K] in each row's context
    token_ids: Int32Array = field(default_factory=_none)  # [K]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenMasks:
    """What rows under a grammar may sample in this step; a row that is not here is free."""

    rows: Int32Array  # [M]
    words: Int32Array  # [M, W]; bit b of word w: token 32 w + b may come


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerOutput:
    """One step. `rows[i]` computes `num_scheduled_tokens[i]` tokens from position `num_computed_tokens[i]` on.

    `samples[i]` says that the row reaches its last known token, so a new token is sampled from it.
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
    finished_req_ids: list[str]  # ended or preempted since the last step: forget their rows, before anything else
    token_masks: TokenMasks | None = None
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)  # drafts to verify
    scheduled_encoder_inputs: dict[str, list[int]] = field(default_factory=dict)  # images to encode
