"""Warm-up: the first steps pay for lazily built kernels and page faults, so that no request has to.

It calls the runner directly, with its own scheduler outputs, so it never reaches scheduler, prefix cache or metrics.
"""

import logging
import time

import numpy as np

from octavo.config.engine import EngineConfig
from octavo.contracts.schedule import (
    DRAWN_IN_RANKS,
    CachedRequestData,
    Int32Array,
    NewRequestData,
    SchedulerOutput,
    SpecDecodeTokens,
)
from octavo.sampling_params import SamplingParams
from octavo.worker.model_runner import RankModelRunner

logger = logging.getLogger(__name__)

_NUM_PREFILL_TOKENS = 16
_NUM_DECODE_STEPS = 2
_REQUEST_ID = "warm-up"


class Warmup:
    """One prompt and its first tokens, on row 0 and the first blocks, before any request arrives."""

    def __init__(self, runner: RankModelRunner, config: EngineConfig) -> None:
        self._runner = runner
        self._block_size, self._num_groups = config.cache.block_size, len(config.model.kv_groups)
        self._vocab_size = config.model.vocab_size
        room = config.model.max_model_len - _NUM_DECODE_STEPS
        self._num_prompt_tokens = max(1, min(_NUM_PREFILL_TOKENS, room, config.scheduler.max_num_batched_tokens))
        self._num_decode_steps = max(0, min(_NUM_DECODE_STEPS, room - self._num_prompt_tokens))

    def run(self) -> None:
        """Run both kinds of step, log how long each took, then clear the row."""
        start_s = time.perf_counter()
        self._prefill_warmup()
        prefilled_s = time.perf_counter()
        self._decode_warmup()
        done_s = time.perf_counter()
        self._step(_scheduler_output(rows=0, start=0, count=0, forget=True))
        logger.info("warm-up: prefill %.3f s, decode %.3f s", prefilled_s - start_s, done_s - prefilled_s)

    def _prefill_warmup(self) -> None:
        self._step(_scheduler_output(rows=1, start=0, count=self._num_prompt_tokens, new=self._request()))

    def _decode_warmup(self) -> None:
        for step in range(self._num_decode_steps):
            self._step(_scheduler_output(rows=1, start=self._num_prompt_tokens + step, count=1))
        if self._runner.draft_model is not None and self._num_decode_steps > 1:
            self._step(_scheduler_output(rows=1, start=self._num_prompt_tokens, count=2, num_drafts=1))

    def _step(self, scheduler_output: SchedulerOutput) -> None:
        self._runner.begin(scheduler_output).result()

    def _request(self) -> NewRequestData:
        num_tokens = self._num_prompt_tokens + self._num_decode_steps
        return NewRequestData(
            request_id=_REQUEST_ID,
            row=0,
            token_ids=np.arange(self._num_prompt_tokens, dtype=np.int32) % self._vocab_size,
            num_prompt_tokens=self._num_prompt_tokens,
            sampling_params=SamplingParams(seed=0),
            eos_token_ids=[],
            bad_words_token_ids=[],
            block_ids=[list(range(-(-num_tokens // self._block_size)))] * self._num_groups,
            num_computed_tokens=0,
        )


def _scheduler_output(
    *,
    rows: int,
    start: int,
    count: int,
    new: NewRequestData | None = None,
    num_drafts: int = 0,
    forget: bool = False,
) -> SchedulerOutput:
    """Return a scheduler output for the warm-up row, or for no row. Its last tokens may be drafts of a draft model."""
    drafts = SpecDecodeTokens(counts=_ints(num_drafts, rows), token_ids=_ints(DRAWN_IN_RANKS, num_drafts))
    return SchedulerOutput(
        step=0,
        req_ids=(_REQUEST_ID,) * rows,
        rows=_ints(0, rows),
        num_computed_tokens=_ints(start, rows),
        num_scheduled_tokens=_ints(count, rows),
        samples=np.ones(rows, dtype=np.bool_),
        total_num_scheduled_tokens=count,
        scheduled_new_reqs=[new] if new else [],
        scheduled_cached_reqs=CachedRequestData(),
        finished_req_ids=[_REQUEST_ID] if forget else [],
        scheduled_spec_decode_tokens=drafts if num_drafts else None,
    )


def _ints(value: int, size: int) -> Int32Array:
    return np.full(size, value, dtype=np.int32)
