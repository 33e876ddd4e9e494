"""One step: what the scheduler sends to every rank, and what comes back. Numpy columns, no tensors.

A request is sent whole once (`NewRequestData`) together with its row; afterwards only changes are sent. Legend:
R = requests in the step, L = rows of logits that it samples, N = changes of block tables, M = masks, W = words of a
mask (a bit for each token of the vocabulary, perhaps some more), K = drafts of the step, `row` = index into the
worker's rows.
"""

from dataclasses import dataclass, field
from functools import cached_property

import msgspec
import numpy as np
from numpy.typing import NDArray

from octavo.contracts.engine import ExpertLoad, ExtraInputs, PoolingTask, TokenLogprobs, VisionInput
from octavo.sampling_params import NO_SAMPLING, SamplingParams

Int32Array = NDArray[np.int32]
BoolArray = NDArray[np.bool_]

NO_SLOT = -1  # the slot of a request without an adapter


@dataclass(frozen=True, kw_only=True, slots=True)
class NewRequestData:
    """A request that enters the worker: new, or resumed after a preemption, with the tokens generated so far."""

    request_id: str
    row: int
    token_ids: Int32Array  # [prompt + outputs so far]
    num_prompt_tokens: int
    sampling_params: SamplingParams | None  # None: a pooled vector is wanted
    pooling: PoolingTask = field(default_factory=PoolingTask)
    eos_token_ids: list[int]  # masked out until min_tokens have been generated
    bad_words_token_ids: list[list[int]]
    block_ids: list[list[int]]  # of each KV group: its row of the block table, freed columns included
    num_computed_tokens: int  # found in the prefix cache
    extra_inputs: ExtraInputs | None = None  # without patches: those come with the step that encodes them
    adapter_slot: int = NO_SLOT  # where the ranks have its adapter, until the row is freed

    @property
    def params(self) -> SamplingParams:
        """Those that count tokens; `NO_SAMPLING` of a request that is pooled."""
        return self.sampling_params or NO_SAMPLING


NOTHING: Int32Array = np.zeros(0, dtype=np.int32)


def _none() -> Int32Array:
    return NOTHING


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedRequestData:
    """Diffs for requests that the worker already has: changes of their block tables, and tokens that were sampled.

    `block_ids[n]` goes to column `columns[n]` of row `rows[n]` in the table of group `groups[n]`: an allocated block,
    or the group's null block in place of one freed after a sliding window moved past it.

    Tokens are only sent where some ranks do not sample: pipeline stages before the last.
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
    """Tokens that grammars allow in this step; rows of logits not listed are unconstrained."""

    logits_rows: Int32Array  # [M] ascending, in L: those of `rows` that sample, in order, 1 + drafts of each
    words: Int32Array  # [M, W]; bit b of word w: token 32 w + b is allowed


DRAWN_IN_RANKS = -1  # placeholder of a draft that the draft model of every rank samples first


@dataclass(frozen=True, kw_only=True, slots=True)
class SpecDecodeTokens:
    """Drafts: tokens to verify after the last known one of a row, each below the size of the vocabulary.

    They are the last `counts[i]` of the tokens that `rows[i]` computes. The row also samples after each of them, and
    keeps its samples up to the first draft that differs from the token sampled in its place. A row's drafts are given,
    or all of them are `DRAWN_IN_RANKS`.
    """

    counts: Int32Array  # [R]
    token_ids: Int32Array  # [K] row after row


class SlotFill(msgspec.Struct, frozen=True, kw_only=True):
    """Copy an adapter from the rank's host cache to this slot before the step; the slot's old content is unused."""

    slot: int
    content_hash: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerOutput:
    """One step. `rows[i]` computes `num_scheduled_tokens[i]` tokens starting at position `num_computed_tokens[i]`.

    `samples[i]` says that the row reaches its last known token, so a new token is sampled from it, or several.
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
    scheduled_spec_decode_tokens: SpecDecodeTokens | None = None  # None: no row has drafts
    scheduled_encoder_inputs: list[VisionInput] = field(default_factory=list)  # to encode before the step, and keep
    freed_encoder_outputs: list[str] = field(default_factory=list)  # content hashes to drop first
    adapter_fills: tuple[SlotFill, ...] = ()  # to do before the step


class ModelRunnerOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, dict=True):
    """Sampled tokens, in the order of the `SchedulerOutput` that scheduled them.

    Legend: R = requests in the step, K = maximum of tokens for one of them (1 without drafts).
    """

    req_ids: tuple[str, ...]  # [R]
    sampled_token_ids: Int32Array  # [R, K]; row i has num_sampled[i] valid entries
    num_sampled: Int32Array  # [R]; 0 if the prompt is not complete yet, or the request is in `errors` or `pooled`
    logprobs: dict[str, list[TokenLogprobs]] = {}
    prompt_logprobs: dict[str, list[TokenLogprobs | None]] = {}  # sent when the prompt is complete
    pooled: dict[str, bytes] = {}  # float32 each, of requests whose context is complete
    errors: dict[str, str] = {}  # requests that failed individually (NaN logits, ...), with the reason
    draft_passes: list[tuple[int, float]] = []  # of a draft model, in this step: tokens and seconds of each
    expert_load: ExpertLoad | None = None  # only for MoE models
    compute_s: float | None = None  # of this step, in native calls; None: not measured

    @cached_property  # cached in the instance's __dict__
    def req_id_to_index(self) -> dict[str, int]:
        return {req_id: index for index, req_id in enumerate(self.req_ids)}
