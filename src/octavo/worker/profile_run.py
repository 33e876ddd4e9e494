"""Profiles the largest possible steps before the KV pool is allocated: their peak memory must stay free.

Legend: T = tokens of the step, R = requests in it, B = blocks of one request, D = hidden size, V = vocabulary.
"""

from collections.abc import Callable

import torch

from octavo.attention.metadata import ForwardBatch
from octavo.config.engine import EngineConfig
from octavo.contracts.kv_cache import KVCacheSpec
from octavo.models.interfaces import CausalLM
from octavo.sampling.device_draw import FLOAT_COLUMNS, INTEGER_COLUMNS, SamplingMetadata
from octavo.sampling.device_logits_processors import Context
from octavo.worker.decode_graphs import Ending
from octavo.worker.decode_record import LogitsProcessorRecord
from octavo.worker.device_sampling import sample
from octavo.worker.kv_cache import allocate_kv_caches


class ProfileRun:
    """Two steps over a few blocks of scratch KV memory, shared by all requests, with meaningless contents."""

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
        logits = self._model.compute_logits(batch.of_logits(hidden))  # [R, V]
        self._sample(logits)

    def _sample(self, logits: torch.Tensor) -> None:
        """Apply to logits [R, V] everything that a row may use."""
        (num_rows, vocab_size), device = logits.shape, self._device
        ones = torch.ones(num_rows, dtype=torch.int64, device=device)
        halves = ones.double() / 2
        metadata = SamplingMetadata(**dict.fromkeys(INTEGER_COLUMNS, ones), **dict.fromkeys(FLOAT_COLUMNS, halves))
        max_tokens = self._config.model.max_model_len
        token_ids = torch.zeros(2, max_tokens, dtype=torch.int32, device=device)
        context = Context(token_ids=token_ids, rows=ones, num_tokens=ones, max_tokens=max_tokens)
        ending = Ending("drawn", has_processors=True, is_filtered=True, is_rated=True)
        processors = LogitsProcessorRecord(2, vocab_size, device).processors
        processors.masks.fill_(-1)  # a token for every bit
        sample(logits, metadata, ending, context, processors)

    def _batch(self, lens: list[int], bound: int | None) -> ForwardBatch:
        """Return a step of prompts of these lengths [R], with the same blocks in every table."""
        positions = torch.cat([torch.arange(length) for length in lens])  # [T]
        starts = torch.tensor([0, *lens]).cumsum(0)  # [R + 1]
        num_blocks = -(-(bound or max(lens)) // self._block_size)  # B
        table = torch.arange(num_blocks) % -(-self._num_prompt_tokens // self._block_size)
        return ForwardBatch(
            input_ids=torch.zeros_like(positions).to(self._device),
            positions=positions.to(self._device),
            query_start_loc=starts.to(torch.int32).to(self._device),
            seq_lens=torch.tensor(lens, dtype=torch.int32).to(self._device),
            slot_mapping=positions.to(self._device),
            block_table=table.to(torch.int32).expand(len(lens), -1).contiguous().to(self._device),
            logits_indices=(starts[1:] - 1).to(self._device),
            block_size=self._block_size,
            query_start_loc_list=starts.tolist(),
            seq_lens_list=[bound] * len(lens) if bound else lens,
            rows=torch.zeros(len(lens), dtype=torch.int64, device=self._device),
        ).shared_by(self._config.model.kv_groups)


def measured_peaks(steps: ProfileRun, peak_bytes: Callable[[Callable[[], None]], int | None]) -> tuple[int, int] | None:
    """Return the peak extra memory of prefill and decode; None if the device does not track memory."""
    prefill, decode = peak_bytes(steps.prefill), peak_bytes(steps.decode)
    return None if prefill is None or decode is None else (prefill, decode)
