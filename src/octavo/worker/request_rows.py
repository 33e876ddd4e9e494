"""Rows: the worker's fixed-size copy of every running request, and the tensors of a step, gathered from them.

Rows are changed only by scheduler outputs and by sampled tokens.

Legend: N = rows, M = max_model_len, G = KV groups, T = tokens of the step, R = requests in it, B = most blocks of one
request, S = rows that sample, L = rows of logits: S, and one more for each token to verify, K = most tokens that one
request may get.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.attention.metadata import ForwardBatch, GroupSlots
from octavo.config.engine import EngineConfig
from octavo.contracts.engine import TokenLogprobs
from octavo.contracts.kv_cache import KVGroup
from octavo.contracts.schedule import Int32Array, ModelRunnerOutput, NewRequestData, SchedulerOutput
from octavo.device.base import DeviceQueue
from octavo.sampling.rows import SamplingRows
from octavo.sampling.sampler import SampledTokens
from octavo.worker.model_state import ModelStates
from octavo.worker.pooling import PooledRow

_WORD_BYTES = 8


class Transfers:
    """Copies arrays to a device, and looks up and writes tables there."""

    def __init__(self, device: torch.device, queue: DeviceQueue | None) -> None:
        self.device, self.queue = device, queue
        # Lookups and writes then use NumPy: it runs less code than torch, and weights have evicted all code.
        self._is_host = queue is None and device.type == "cpu"

    def send(self, *arrays: NDArray[Any]) -> list[torch.Tensor]:
        """Return the arrays as tensors on the device.

        With a queue, this is one asynchronous copy: contiguous one-dimensional arrays are packed, word-aligned.
        """
        if self._is_host:
            return list(map(torch.from_numpy, arrays))
        if self.queue is None:
            return [torch.from_numpy(array).to(self.device) for array in arrays]
        ends = np.cumsum([-(-array.nbytes // _WORD_BYTES) * _WORD_BYTES for array in arrays])
        host = self.queue.host_bytes(int(ends[-1]))
        starts = [0, *ends.tolist()]
        for start, array in zip(starts, arrays, strict=False):
            host.numpy()[start : start + array.nbytes] = array.view(np.uint8)
        on_device = host.to(self.device, non_blocking=True)
        return [
            on_device[start : start + array.nbytes].view(torch.from_numpy(array).dtype)
            for start, array in zip(starts, arrays, strict=False)
        ]

    def look_up(self, table: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor | slice) -> torch.Tensor:
        """Return table[rows, columns]."""
        if not self._is_host:
            return table[rows, columns]
        return torch.from_numpy(table.numpy()[rows.numpy(), columns if isinstance(columns, slice) else columns.numpy()])

    def write(self, table: torch.Tensor, rows: Int32Array, columns: Int32Array, values: torch.Tensor) -> None:
        """Set table[rows, columns] to `values` [.]."""
        if self._is_host:
            table.numpy()[rows, columns] = values.numpy()
            return
        at_rows, at_columns = self.send(rows.astype(np.int64), columns.astype(np.int64))
        table[at_rows, at_columns] = values.to(table.device, table.dtype)


class RowTables:
    """Tokens [N, M] and block tables, one [N, B] per KV group, from which batches are gathered.

    A second model over the same tokens has tables of its own, with its KV groups.
    """

    def __init__(
        self,
        transfers: Transfers,
        token_ids: torch.Tensor,
        block_size: int,
        groups: tuple[KVGroup, ...],
        block_tables: Sequence[torch.Tensor],
    ) -> None:
        self.transfers, self.block_size = transfers, block_size
        self.token_ids = token_ids  # [N, M] int32
        self.groups, self.block_tables = groups, block_tables

    def forward_batch(
        self, step: SchedulerOutput, states: ModelStates | None = None, *, keeps_all: bool = False
    ) -> ForwardBatch:
        """Gather the step's tokens from the rows. Vectorized: no Python per request or token.

        The weights of the previous step have evicted everything else from the caches, so the code of each NumPy or
        torch op is loaded from memory again, which takes 10 to 30 us: few ops are used, and fewer if each request has
        one token. With `keeps_all`, the hidden states of all tokens are needed.
        """
        block_size, counts = self.block_size, step.num_scheduled_tokens
        look_up = self.transfers.look_up
        ends = step.num_computed_tokens + counts  # [R]
        starts = np.zeros(len(counts) + 1, dtype=np.int32)  # [R + 1]
        np.cumsum(counts, out=starts[1:])
        num_tokens = int(starts[-1])
        # Token t of the flat batch belongs to row row_of[t] and is at positions[t] of its context.
        row_of, positions = step.rows, step.num_computed_tokens  # [T] each
        if num_tokens > len(counts):
            request_of = np.repeat(np.arange(len(counts)), counts)
            row_of, positions = row_of[request_of], np.arange(num_tokens) + (positions - starts[:-1])[request_of]
        sampling = starts[1:][step.samples] - 1  # [S]
        if step.scheduled_spec_decode_tokens is not None:
            # From each row's last known token to the last one to verify: [L].
            widths = 1 + step.scheduled_spec_decode_tokens.counts[step.samples]
            sampling = np.repeat(sampling + 1 - np.cumsum(widths), widths) + np.arange(int(widths.sum()))
        columns, offsets = np.divmod(positions, block_size)  # [T] each, in the block table and in the block
        integers = (row_of, positions, columns, offsets, step.rows, sampling)
        sent = self.transfers.send(*(array.astype(np.int64) for array in integers), starts, ends)
        at_rows, at_positions, at_columns, at_offsets, step_rows, logits_indices, query_start_loc, lens = sent
        max_blocks = -(-int(ends.max()) // block_size)
        kept_indices = None
        if not keeps_all and len(logits_indices) < num_tokens:
            kept_indices = logits_indices if len(logits_indices) else logits_indices.new_zeros(1)

        def slots_in(table: torch.Tensor) -> torch.Tensor:
            return look_up(table, at_rows, at_columns).to(torch.int64) * block_size + at_offsets

        first_table, *other_tables = self.block_tables
        batch = ForwardBatch(
            input_ids=look_up(self.token_ids, at_rows, at_positions).to(torch.int64),
            positions=at_positions,
            query_start_loc=query_start_loc,
            seq_lens=lens,
            slot_mapping=slots_in(first_table),
            block_table=look_up(first_table, step_rows, slice(max_blocks)),
            logits_indices=logits_indices,
            kept_indices=kept_indices,
            block_size=block_size,
            query_start_loc_list=starts.tolist(),
            seq_lens_list=ends.tolist(),
            rows=step_rows,
            **({} if states is None else states.inputs(step, starts, positions)),
        )
        if not (other_tables or self.groups[0].kind == "recurrent"):
            return batch
        groups: list[GroupSlots] = []
        for group, table in zip(self.groups, self.block_tables, strict=True):
            if group.kind == "recurrent":
                is_logged = batch.num_drafts is not None or step.scheduled_spec_decode_tokens is None
                assert is_logged, "states have drafts with speculative_config only"
                block_tokens, places = group.block_tokens(block_size), (at_rows, at_positions, query_start_loc)
                groups.append(state_slots(table, block_tokens, *places, batch.num_drafts))
            elif groups:
                groups.append(GroupSlots(slots_in(table), look_up(table, step_rows, slice(max_blocks))))
            else:
                groups.append(GroupSlots(batch.slot_mapping, batch.block_table))
        return batch.with_groups(groups)


class RequestRows(RowTables):
    """Tables, sampling parameters and model states by row. The scheduler assigns row numbers."""

    def __init__(self, config: EngineConfig, num_rows: int, states: ModelStates, transfers: Transfers) -> None:
        model, block_size, device = config.model, config.cache.block_size, transfers.device
        shape = len(model.kv_groups), num_rows, -(-model.max_model_len // block_size)  # [G, N, B]
        self.block_table, token_ids = _lazy_zeros(shape, device), _lazy_zeros((num_rows, model.max_model_len), device)
        super().__init__(transfers, token_ids, block_size, model.kv_groups, self.block_table.unbind())
        self.sampling, self.states = SamplingRows(num_rows, model.vocab_size), states
        self.prompt_logprobs: dict[int, tuple[int, int]] = {}  # by row: prompt tokens, and how many are wanted of each
        self.pooled: dict[int, PooledRow] = {}  # rows without sampling parameters
        self.reads_all = config.draft_model is not None and config.draft_model.mtp is not None  # a head, last states
        self._row_of: dict[str, int] = {}

    def apply_requests(self, step: SchedulerOutput) -> None:
        """Apply removed and new requests, the first half of a step's changes; `step_batch` does the second."""
        for request_id in step.finished_req_ids:
            row = self._row_of.pop(request_id, None)
            if row is not None:  # else its step failed before it was added
                self.prompt_logprobs.pop(row, None)
                self.pooled.pop(row, None)
                self.states.forget(row)
        self.states.prepare(step)
        for request in step.scheduled_new_reqs:
            self._add(request)

    def apply_tables(self, step: SchedulerOutput) -> None:
        """Apply blocks and tokens. May be repeated."""
        changes = step.scheduled_cached_reqs
        if len(changes.rows):
            places = (changes.groups, changes.rows, changes.columns)
            *at, block_ids = self.transfers.send(*(place.astype(np.int64) for place in places), changes.block_ids)
            self.block_table[tuple(at)] = block_ids
        if len(changes.token_rows):
            self._write_tokens(changes.token_rows, changes.token_positions, changes.token_ids)
        if step.scheduled_spec_decode_tokens is not None:
            self.write_unverified(step)

    def step_batch(self, step: SchedulerOutput) -> ForwardBatch:
        """Apply blocks and tokens, and return the step's batch."""
        self.apply_tables(step)
        reads_prompts = any(row.task.reads_whole_prompt for row in self.pooled.values())
        keeps_all = self.reads_all or bool(self.prompt_logprobs) or reads_prompts
        return self.forward_batch(step, self.states, keeps_all=keeps_all)

    def write_unverified(self, step: SchedulerOutput) -> None:
        """Append a step's tokens to verify to the known tokens of their rows; sampled tokens overwrite them."""
        tokens = step.scheduled_spec_decode_tokens
        assert tokens is not None, "the step has some"
        counts = tokens.counts
        # Each row's positions follow its known ones.
        ends = step.num_computed_tokens + step.num_scheduled_tokens - np.cumsum(counts)
        positions = np.repeat(ends, counts) + np.arange(len(tokens.token_ids))
        self._write_tokens(np.repeat(step.rows, counts), positions, tokens.token_ids)

    def _write_tokens(self, rows: Int32Array, positions: NDArray[Any], token_ids: Int32Array) -> None:
        *at, values = self.transfers.send(rows.astype(np.int64), positions.astype(np.int64), token_ids)
        self.token_ids[tuple(at)] = values

    def write_sampled(self, rows: Int32Array, positions: Int32Array, token_ids: torch.Tensor) -> None:
        """Write sampled `token_ids` [L] int64 on the device: no synchronization."""
        self.transfers.write(self.token_ids, rows, positions, token_ids)

    def _add(self, request: NewRequestData) -> None:
        row = request.row
        self._row_of[request.request_id] = row
        self.token_ids[row, : len(request.token_ids)] = self.transfers.send(request.token_ids)[0]
        for table, block_ids in zip(self.block_tables, request.block_ids, strict=True):
            table[row, : len(block_ids)] = self.transfers.send(np.array(block_ids, dtype=np.int32))[0]
        params, num_prompt_tokens = request.params, request.num_prompt_tokens
        bad_words = request.bad_words_token_ids
        self.sampling.set_row(row, params, request.eos_token_ids, bad_words, num_prompt_tokens)
        if request.sampling_params is None:
            self.pooled[row] = PooledRow(request.pooling, num_prompt_tokens)
        if params.prompt_logprobs is not None and len(request.token_ids) == num_prompt_tokens:
            self.prompt_logprobs[row] = num_prompt_tokens, params.prompt_logprobs


@dataclass(frozen=True, slots=True)
class PromptLogprobsUpdate:
    """By request id."""

    complete: dict[str, list[TokenLogprobs | None]] = field(default_factory=dict)  # one entry for each prompt token
    errors: dict[str, str] = field(default_factory=dict)


class LogitsRows:
    """The rows of logits of one step. Those of a request are adjacent, in order of position."""

    def __init__(self, step: SchedulerOutput) -> None:
        self._step = step
        self._requests = step.samples.nonzero()[0]  # [L] in R
        self.ends = (step.num_computed_tokens + step.num_scheduled_tokens)[self._requests]  # [L] see `StepSampling`
        self._columns = np.zeros_like(self._requests)  # [L] tokens to verify before
        if (unverified := step.scheduled_spec_decode_tokens) is not None:
            counts = unverified.counts[self._requests]  # [S]
            places = np.repeat(np.arange(len(counts)), 1 + counts)  # [L] in S
            self._columns = np.arange(len(places)) - (np.cumsum(1 + counts) - (1 + counts))[places]
            self._requests = self._requests[places]
            self.ends = (self.ends - counts)[places] + self._columns.astype(np.int32)
        self.rows = step.rows[self._requests]  # [L] of the worker

    @property
    def requests(self) -> list[int]:
        """The request of the step that each row belongs to, [L]."""
        found: list[int] = self._requests.tolist()
        return found

    def read_output(
        self, read: Callable[[], SampledTokens], prompts: PromptLogprobsUpdate, vectors: Mapping[str, torch.Tensor]
    ) -> ModelRunnerOutput:
        """Read the sampled tokens, and return the output of the step; requests in `vectors` get these instead.

        A token sampled after others to verify is kept only if all of these equal the tokens sampled in their place. A
        request fails if its first row of logits has an error; if a later row has one, the tokens before it are kept and
        the error recurs in the next step.
        """
        req_ids, sampled = self._step.req_ids, read()
        failed = {req_ids[self._requests[at]]: why for at, why in sampled.errors.items() if not self._columns[at]}
        failed |= prompts.errors
        pooled = {request_id: vector.float().cpu().numpy() for request_id, vector in vectors.items()}
        failed |= {name: "its hidden state is not finite" for name in pooled if not np.isfinite(pooled[name]).all()}
        token_ids = np.zeros((len(req_ids), int(self._columns.max(initial=0)) + 1), dtype=np.int32)  # [R, K]
        token_ids[self._requests, self._columns] = sampled.token_ids
        num_sampled = self._step.samples.astype(np.int32)  # [R]
        if self._step.scheduled_spec_decode_tokens is not None:
            num_sampled *= self._num_kept(token_ids, sampled.errors)
        if failed or pooled:
            num_sampled[[request_id in failed or request_id in pooled for request_id in req_ids]] = 0
        by_request: dict[str, list[TokenLogprobs]] = {}
        for at, entry in sampled.logprobs.items():
            if self._columns[at] < num_sampled[self._requests[at]]:
                by_request.setdefault(req_ids[self._requests[at]], []).append(entry)
        return ModelRunnerOutput(
            req_ids=req_ids,
            sampled_token_ids=token_ids,
            num_sampled=num_sampled,
            logprobs=by_request,
            prompt_logprobs=prompts.complete,
            pooled={name: vector.tobytes() for name, vector in pooled.items() if name not in failed},
            errors=failed,
        )

    def _num_kept(self, sampled: Int32Array, errors: Mapping[int, str]) -> Int32Array:
        """Return how many of `sampled` [R, K] each sampling request keeps, [R]."""
        unverified = self._step.scheduled_spec_decode_tokens
        assert unverified is not None
        table = np.full(sampled.shape, -1, dtype=np.int32)  # [R, K] tokens to verify, -1 after the last
        table[np.arange(sampled.shape[1]) < unverified.counts[:, None]] = unverified.token_ids
        num_kept: NDArray[np.int64] = np.logical_and.accumulate(table == sampled, axis=1).sum(1) + 1
        for at in errors:
            if column := int(self._columns[at]):
                num_kept[self._requests[at]] = min(num_kept[self._requests[at]], column)
        return num_kept.astype(np.int32)


def state_slots(
    table: torch.Tensor,  # [N, B] of a recurrent group
    block_tokens: int,
    at_rows: torch.Tensor,  # [T]
    at_positions: torch.Tensor,  # [T]
    query_start_loc: torch.Tensor,  # [R + 1]
    num_drafts: torch.Tensor | None = None,  # [R]
) -> GroupSlots:
    """Return the slots of the states that requests start from, and of those after full blocks and last known tokens.

    Drafts are all behind the last known token in its block, and before the block's end: see `Speculation`.
    """
    if num_drafts is None and len(at_positions) == len(query_start_loc) - 1:  # one token each takes fewer ops
        before = at_positions - 1
        begins = torch.where(before >= 0, table[at_rows, before.clamp(min=0) // block_tokens], -1)
        slots = table[at_rows, at_positions // block_tokens].to(torch.int64)
        return GroupSlots(slots, table[at_rows, :0], begins.to(torch.int64))
    firsts, lasts = query_start_loc[:-1].to(torch.int64), query_start_loc[1:].to(torch.int64) - 1  # [R] each, in T
    if num_drafts is not None:
        lasts = lasts - num_drafts
    is_kept = ((at_positions + 1) % block_tokens == 0).index_fill(0, lasts, True)  # [T]
    slots = torch.where(is_kept, table[at_rows, at_positions // block_tokens], -1).to(torch.int64)
    before = at_positions[firsts] - 1  # [R]
    begins = torch.where(before >= 0, table[at_rows[firsts], before.clamp(min=0) // block_tokens], -1)
    return GroupSlots(slots, table[at_rows[firsts], :0], begins.to(torch.int64))


def _lazy_zeros(shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return int32 zeros; on a CPU, pages are allocated lazily."""
    if device.type == "cpu":
        return torch.from_numpy(np.zeros(shape, dtype=np.int32))
    return torch.zeros(shape, dtype=torch.int32, device=device)
