"""Steps before any request: warm-up, and profiling of the largest steps.

Legend: T = tokens of the step, R = requests in it, B = blocks of one request, D = hidden size, V = vocabulary.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from octavo.attention.metadata import ForwardBatch
from octavo.config.engine import EngineConfig
from octavo.contracts.kv_cache import KVCacheSpec
from octavo.contracts.schedule import (
    DRAWN_IN_RANKS,
    CachedRequestData,
    Int32Array,
    NewRequestData,
    SchedulerOutput,
    SpecDecodeTokens,
)
from octavo.models.interfaces import CausalLM
from octavo.sampling.draw import FLOAT_COLUMNS, INTEGER_COLUMNS, SamplingMetadata
from octavo.sampling.logits_processors import Context
from octavo.sampling.rows import Ending
from octavo.sampling.sampler import sample
from octavo.sampling_params import SamplingParams
from octavo.worker.decode_step import DecodeRecord
from octavo.worker.kv_cache import allocate_kv_caches
from octavo.worker.model_runner import RankModelRunner

logger = logging.getLogger(__name__)

_REQUEST_ID = "warm-up"


def warm_up(runner: RankModelRunner, config: EngineConfig) -> None:
    """Run one prompt and its first tokens, on row 0 and the first blocks; log how long they took, and clear the row.

    These steps pay for lazily built kernels and page faults, so that no request has to. They go to the runner directly,
    with their own scheduler outputs, so they never reach scheduler, prefix cache or metrics.
    """
    room = config.model.max_model_len - 2
    num_prompt_tokens = max(1, min(16, room, config.scheduler.max_num_batched_tokens))
    num_decode_steps = max(0, min(2, room - num_prompt_tokens)) if config.model.has_head else 0
    num_blocks = -(-(num_prompt_tokens + num_decode_steps) // config.cache.block_size)
    request = NewRequestData(
        request_id=_REQUEST_ID,
        row=0,
        token_ids=np.arange(num_prompt_tokens, dtype=np.int32) % config.model.vocab_size,
        num_prompt_tokens=num_prompt_tokens,
        sampling_params=SamplingParams(seed=0) if config.model.has_head else None,
        eos_token_ids=[],
        bad_words_token_ids=[],
        block_ids=[list(range(num_blocks))] * len(config.model.kv_groups),
        num_computed_tokens=0,
    )
    start_s = time.perf_counter()
    _step(runner, start=0, count=num_prompt_tokens, new=[request])
    prefilled_s = time.perf_counter()
    for step in range(num_decode_steps):
        _step(runner, start=num_prompt_tokens + step, count=1)
    if runner.drafter is not None and num_decode_steps > 1:
        _step(runner, start=num_prompt_tokens, count=2, num_drafts=1)
    done_s = time.perf_counter()
    _step(runner, rows=0, start=0, count=0, finished=[_REQUEST_ID])
    logger.info("warm-up: prefill %.3f s, decode %.3f s", prefilled_s - start_s, done_s - prefilled_s)


def _step(
    runner: RankModelRunner,
    *,
    rows: int = 1,
    start: int,
    count: int,
    new: Sequence[NewRequestData] = (),
    num_drafts: int = 0,
    finished: Sequence[str] = (),
) -> None:
    """Run a step of the warm-up row, or of no row. Its last tokens may be drafts of a draft model."""
    drafts = SpecDecodeTokens(counts=_ints(num_drafts, rows), token_ids=_ints(DRAWN_IN_RANKS, num_drafts))
    scheduler_output = SchedulerOutput(
        step=0,
        req_ids=(_REQUEST_ID,) * rows,
        rows=_ints(0, rows),
        num_computed_tokens=_ints(start, rows),
        num_scheduled_tokens=_ints(count, rows),
        samples=np.ones(rows, dtype=np.bool_),
        total_num_scheduled_tokens=count,
        scheduled_new_reqs=list(new),
        scheduled_cached_reqs=CachedRequestData(),
        finished_req_ids=list(finished),
        scheduled_spec_decode_tokens=drafts if num_drafts else None,
    )
    runner.begin(scheduler_output).result()


def _ints(value: int, size: int) -> Int32Array:
    return np.full(size, value, dtype=np.int32)


class ProfileRun:
    """The two largest steps, before the KV pool is allocated: their peak memory must stay free.

    They use a few blocks of scratch KV memory, shared by all requests, with meaningless contents.
    """

    def __init__(self, model: CausalLM, config: EngineConfig, spec: KVCacheSpec) -> None:
        self._model, self._config = model, config
        self._device, self._block_size = model.context.device, spec.block_size
        self._num_prompt_tokens = min(config.scheduler.max_num_batched_tokens, config.model.max_model_len)
        num_blocks = -(-self._num_prompt_tokens // spec.block_size)
        self._kv_caches = allocate_kv_caches(spec, [num_blocks] * len(spec.groups), self._device)

    @torch.inference_mode()
    def prefill(self) -> None:
        """Compute as many tokens as a step may have: prompts of maximum length, the last one cut."""
        budget, most = self._config.scheduler.max_num_batched_tokens, self._num_prompt_tokens
        self._run([most] * (budget // most) + [budget % most] * (budget % most > 0))

    @torch.inference_mode()
    def decode(self) -> None:
        """Compute one token each of the maximum number of requests, launched for contexts of maximum length."""
        is_bound = self._model.context.attention.is_capturable  # then host-side lengths are bounds, not work
        self._run([1] * self._config.scheduler.max_num_seqs, self._config.model.max_model_len if is_bound else None)

    def _run(self, lens: list[int], bound: int | None = None) -> None:
        batch = self._batch(lens, bound)
        hidden = self._model.run_stage(batch, self._kv_caches, None).hidden  # [T, D]
        if not self._config.model.has_head:
            return
        logits = self._model.compute_logits(batch.of_logits(hidden))  # [R, V]; then everything that a row may use
        (num_rows, vocab_size), device = logits.shape, self._device
        ones = torch.ones(num_rows, dtype=torch.int64, device=device)
        halves = ones.double() / 2
        metadata = SamplingMetadata(**dict.fromkeys(INTEGER_COLUMNS, ones), **dict.fromkeys(FLOAT_COLUMNS, halves))
        max_tokens = self._config.model.max_model_len
        token_ids = torch.zeros(2, max_tokens, dtype=torch.int32, device=device)
        context = Context(token_ids=token_ids, rows=ones, num_tokens=ones, max_tokens=max_tokens)
        ending = Ending("drawn", has_processors=True, is_filtered=True, is_rated=True)
        processors = DecodeRecord(2, 0, 0, vocab_size, device).processors
        processors.masks.fill_(-1)  # a token for every bit
        sample(logits, metadata, ending, context, processors)

    def _batch(self, lens: list[int], bound: int | None) -> ForwardBatch:
        """Return a step of prompts of these lengths [R], with the same blocks in every table."""
        num_blocks = -(-(bound or max(lens)) // self._block_size)  # B
        table = [column % -(-self._num_prompt_tokens // self._block_size) for column in range(num_blocks)]
        inputs, starts = [[0] * length for length in lens], [0] * len(lens)
        batch = ForwardBatch.of_sequences(inputs, starts, [table] * len(lens), self._block_size, (), self._device)
        return replace(
            batch,
            logits_indices=batch.query_start_loc[1:].to(torch.int64) - 1,
            seq_lens_list=[bound] * len(lens) if bound else lens,
            rows=torch.zeros(len(lens), dtype=torch.int64, device=self._device),
        ).shared_by(self._config.model.kv_groups)
