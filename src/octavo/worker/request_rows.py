"""Rows: the worker's fixed-size copy of every running request, changed only by scheduler outputs and sampled tokens.

Legend: N = rows, M = max_model_len, B = most blocks of one request, G = KV groups.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.contracts.engine import ExtraInputs
from octavo.contracts.kv_cache import KVGroup
from octavo.contracts.schedule import NO_SLOT, CachedRequestData, Int32Array, NewRequestData, SchedulerOutput
from octavo.device.base import DeviceQueue
from octavo.sampling.rows import SamplingRows
from octavo.worker.extra_inputs import ExtraRows

_WORD_BYTES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptLogprobsJob:
    """A row whose prompt logprobs are requested."""

    num_prompt_tokens: int
    num_logprobs: int


class RequestRows:
    """Tokens, block table and sampling state by row. The scheduler assigns row numbers."""

    def __init__(
        self,
        *,
        num_rows: int,
        max_model_len: int,
        block_size: int,
        groups: tuple[KVGroup, ...] = (KVGroup(),),
        sampling: SamplingRows,
        device: torch.device,
        queue: DeviceQueue | None = None,
    ) -> None:
        self.block_size, self.groups = block_size, groups
        self.queue = queue
        self.device = device
        # Lookups and writes then use NumPy: it runs less code than torch, and weights have evicted all code.
        self._is_host = queue is None and device.type == "cpu"
        self.sampling = sampling
        max_blocks = -(-max_model_len // block_size)
        self.token_ids = _lazy_zeros((num_rows, max_model_len), device)  # [N, M] int32
        self.block_table = _lazy_zeros((len(groups), num_rows, max_blocks), device)  # [G, N, B] int32
        self.block_tables = self.block_table.unbind()  # G views [N, B]
        self.num_prompt_tokens = np.zeros(num_rows, dtype=np.int32)  # [N]
        self.prompt_logprobs: dict[int, PromptLogprobsJob] = {}
        self.extra = ExtraRows(self.send)
        self._row_of: dict[str, int] = {}

    def apply(self, scheduler_output: SchedulerOutput) -> None:
        """Apply the changes since the last step: removed rows first, then new requests, blocks and tokens."""
        self.apply_requests(scheduler_output)
        self.apply_tables(scheduler_output)

    def apply_tables(self, scheduler_output: SchedulerOutput) -> None:
        """Apply blocks and tokens, the second half of `apply`."""
        self._change_tables(scheduler_output.scheduled_cached_reqs)
        self._take_tokens(scheduler_output.scheduled_cached_reqs)
        if scheduler_output.scheduled_spec_decode_tokens is not None:
            self.take_drafts(scheduler_output)

    def apply_requests(self, scheduler_output: SchedulerOutput) -> None:
        """Apply removed and new requests, the first half of `apply`."""
        for request_id in scheduler_output.finished_req_ids:
            self._remove(request_id)
        for request in scheduler_output.scheduled_new_reqs:
            self._add(request)

    def append_sampled(self, rows: Int32Array, positions: Int32Array, token_ids: torch.Tensor) -> None:
        """Append newly sampled `token_ids` [S] int64 to `rows` [S]."""
        self.write_sampled(rows, positions, token_ids)
        self.sampling.append(rows, token_ids)

    def write_sampled(self, rows: Int32Array, positions: Int32Array, token_ids: torch.Tensor) -> None:
        """Do so without updating the sampler's token counts (see `processors_on_device`): no device synchronization."""
        if self._is_host:
            self.token_ids.numpy()[rows, positions] = token_ids.numpy()
            return
        at_rows, at_positions = self.send(rows.astype(np.int64), positions.astype(np.int64))
        self.token_ids[at_rows, at_positions] = token_ids.to(torch.int32)

    def look_up(self, table: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor | slice) -> torch.Tensor:
        """Return table[rows, columns]."""
        if not self._is_host:
            return table[rows, columns]
        return torch.from_numpy(table.numpy()[rows.numpy(), columns if isinstance(columns, slice) else columns.numpy()])

    def send(self, *arrays: NDArray[Any]) -> list[torch.Tensor]:
        """Return the arrays as tensors on the device. With a queue, this is one asynchronous copy."""
        if self.queue is None:
            return [torch.from_numpy(array).to(self.device) for array in arrays]
        return _send_packed(arrays, self.queue, self.device)

    def _add(self, request: NewRequestData) -> None:
        row = request.row
        self._row_of[request.request_id] = row
        self.num_prompt_tokens[row] = request.num_prompt_tokens
        self._write(self.token_ids, row, 0, request.token_ids)
        for table, block_ids in zip(self.block_tables, request.block_ids, strict=True):
            self._write(table, row, 0, np.array(block_ids, dtype=np.int32))
        self.sampling.add(
            row,
            request.sampling_params,
            eos_token_ids=request.eos_token_ids,
            bad_words_token_ids=request.bad_words_token_ids,
            token_ids=request.token_ids,
            num_prompt_tokens=request.num_prompt_tokens,
        )
        if request.extra_inputs is not None or request.adapter_slot != NO_SLOT:
            self.extra.add(row, request.extra_inputs or ExtraInputs(), request.adapter_slot)
        num_logprobs = request.sampling_params.prompt_logprobs
        if num_logprobs is not None and len(request.token_ids) == request.num_prompt_tokens:
            self.prompt_logprobs[row] = PromptLogprobsJob(
                num_prompt_tokens=request.num_prompt_tokens, num_logprobs=num_logprobs
            )

    def _remove(self, request_id: str) -> None:
        row = self._row_of.pop(request_id, None)
        if row is None:  # its step failed before it was added
            return
        self.prompt_logprobs.pop(row, None)
        self.extra.remove(row)
        self.sampling.remove(row)

    def _change_tables(self, changed: CachedRequestData) -> None:
        if len(changed.rows):
            places = (changed.groups, changed.rows, changed.columns)
            *at, block_ids = self.send(*(place.astype(np.int64) for place in places), changed.block_ids)
            self.block_table[tuple(at)] = block_ids

    def _take_tokens(self, told: CachedRequestData) -> None:
        if len(told.token_rows):
            rows, positions, token_ids = self.send(
                told.token_rows.astype(np.int64), told.token_positions.astype(np.int64), told.token_ids
            )
            self.token_ids[rows, positions] = token_ids

    def take_drafts(self, scheduler_output: SchedulerOutput) -> None:
        """Append a step's drafts to the known tokens of their rows; sampled tokens overwrite them."""
        drafts = scheduler_output.scheduled_spec_decode_tokens
        assert drafts is not None, "the step has drafts"
        counts = drafts.counts
        ends = (
            scheduler_output.num_computed_tokens + scheduler_output.num_scheduled_tokens - np.cumsum(counts)
        )  # of the drafts before: none
        positions = np.repeat(ends, counts) + np.arange(len(drafts.token_ids))
        rows, at_positions, token_ids = self.send(
            np.repeat(scheduler_output.rows, counts).astype(np.int64), positions.astype(np.int64), drafts.token_ids
        )
        self.token_ids[rows, at_positions] = token_ids

    def _write(self, table: torch.Tensor, row: int, start: int, values: Int32Array) -> None:
        table[row, start : start + len(values)] = self.send(values)[0]


class DraftRows:
    """The rows as batches of a draft model see them: only tokens, and the block tables [N, B] of its own KV groups."""

    extra: ExtraRows | None = None

    def __init__(self, rows: RequestRows, groups: tuple[KVGroup, ...], block_tables: Sequence[torch.Tensor]) -> None:
        self.block_size, self.token_ids = rows.block_size, rows.token_ids
        self.send, self.look_up = rows.send, rows.look_up
        self.groups, self.block_tables = groups, block_tables
        self.prompt_logprobs: dict[int, PromptLogprobsJob] = {}


def _send_packed(arrays: Sequence[NDArray[Any]], queue: DeviceQueue, device: torch.device) -> list[torch.Tensor]:
    """Pack the arrays, contiguous and one-dimensional, word-aligned into one buffer, and copy it at once."""
    ends = np.cumsum([-(-array.nbytes // _WORD_BYTES) * _WORD_BYTES for array in arrays])
    host = queue.host_bytes(int(ends[-1]))
    starts = [0, *ends.tolist()]
    for start, array in zip(starts, arrays, strict=False):
        host.numpy()[start : start + array.nbytes] = array.view(np.uint8)
    on_device = host.to(device, non_blocking=True)
    return [
        on_device[start : start + array.nbytes].view(torch.from_numpy(array).dtype)
        for start, array in zip(starts, arrays, strict=False)
    ]


def _lazy_zeros(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return int32 zeros; on a CPU, pages are allocated lazily."""
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(shape, dtype=np.int32))
    return torch.zeros(shape, dtype=torch.int32, device=device)
