"""Builds the tensors of one step from rows and a `SchedulerOutput`.

Legend: T = tokens of the step, R = requests in it, N = rows, B = most blocks any of the R holds, S = rows that sample,
L = rows of logits: S, and one more for each draft.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.attention.metadata import ForwardBatch, GroupSlots
from octavo.contracts.schedule import SchedulerOutput
from octavo.worker.request_rows import DraftRows, RequestRows


def make_forward_batch(scheduler_output: SchedulerOutput, rows: RequestRows | DraftRows) -> ForwardBatch:
    """Gather the step's tokens from the rows. Vectorized: no Python per request or token.

    The weights of the previous step have evicted everything else from the caches, so the code of each NumPy or torch op
    is loaded from memory again, which takes 10 to 30 us: few ops are used, and fewer if each request has one token.
    """
    block_size, counts = rows.block_size, scheduler_output.num_scheduled_tokens
    ends = scheduler_output.num_computed_tokens + counts  # [R]
    starts = np.zeros(len(counts) + 1, dtype=np.int32)  # [R + 1]
    np.cumsum(counts, out=starts[1:])
    num_tokens = int(starts[-1])
    # Token t of the flat batch belongs to row row_of[t] and is at positions[t] of its context.
    row_of, positions = scheduler_output.rows, scheduler_output.num_computed_tokens  # [T] each
    if num_tokens > len(counts):
        request_of = np.repeat(np.arange(len(counts)), counts)
        row_of, positions = row_of[request_of], np.arange(num_tokens) + (positions - starts[:-1])[request_of]
    sampling = starts[1:][scheduler_output.samples] - 1  # [S]
    if scheduler_output.scheduled_spec_decode_tokens is not None:
        sampling = _with_drafts(
            sampling, scheduler_output.scheduled_spec_decode_tokens.counts[scheduler_output.samples]
        )  # [L]
    columns, offsets = np.divmod(positions, block_size)  # [T] each, in the block table and in the block
    integers = (row_of, positions, columns, offsets, scheduler_output.rows, sampling)
    sent = rows.send(*(array.astype(np.int64) for array in integers), starts, ends)
    at_rows, at_positions, at_columns, at_offsets, step_rows, logits_indices, query_start_loc, lens = sent
    max_blocks = -(-int(ends.max()) // block_size)

    def slots_in(table: torch.Tensor) -> torch.Tensor:
        return rows.look_up(table, at_rows, at_columns).to(torch.int64) * block_size + at_offsets

    first_table, *other_tables = rows.block_tables
    batch = ForwardBatch(
        input_ids=rows.look_up(rows.token_ids, at_rows, at_positions).to(torch.int64),
        positions=at_positions,
        query_start_loc=query_start_loc,
        seq_lens=lens,
        slot_mapping=slots_in(first_table),
        block_table=rows.look_up(first_table, step_rows, slice(max_blocks)),
        logits_indices=logits_indices,
        kept_indices=_kept(logits_indices, num_tokens, rows),
        block_size=block_size,
        query_start_loc_list=starts.tolist(),
        seq_lens_list=ends.tolist(),
        rows=step_rows,
        **(rows.extra.of_step(scheduler_output, starts, positions) if rows.extra else {}),
    )
    if not (other_tables or rows.groups[0].kind == "recurrent"):
        return batch
    groups = [GroupSlots(batch.slot_mapping, batch.block_table)]
    groups += [GroupSlots(slots_in(table), rows.look_up(table, step_rows, slice(max_blocks))) for table in other_tables]
    for index, group in enumerate(rows.groups):
        if group.kind == "recurrent":
            block_tokens = group.block_tokens(block_size)
            groups[index] = state_slots(rows.block_tables[index], block_tokens, at_rows, at_positions, query_start_loc)
    return batch.with_groups(groups)


def state_slots(
    table: torch.Tensor,  # [N, B] of a recurrent group
    block_tokens: int,
    at_rows: torch.Tensor,  # [T]
    at_positions: torch.Tensor,  # [T]
    query_start_loc: torch.Tensor,  # [R + 1]
) -> GroupSlots:
    """Return the slots of the states that requests start from, and of those after full blocks and last tokens."""
    firsts, lasts = query_start_loc[:-1].to(torch.int64), query_start_loc[1:].to(torch.int64) - 1  # [R] each, in T
    is_kept = ((at_positions + 1) % block_tokens == 0).index_fill(0, lasts, True)  # [T]
    slots = torch.where(is_kept, table[at_rows, at_positions // block_tokens], -1).to(torch.int64)
    before = at_positions[firsts] - 1  # [R]
    begins = torch.where(before >= 0, table[at_rows[firsts], before.clamp(min=0) // block_tokens], -1)
    return GroupSlots(slots, table[at_rows[firsts], :0], begins.to(torch.int64))


def _with_drafts(last: NDArray[np.int32], counts: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the tokens [L] from each row's last known one to its last draft, which is at `last` [S]."""
    widths = 1 + counts
    indices: NDArray[np.int32] = np.repeat(last + 1 - np.cumsum(widths), widths) + np.arange(int(widths.sum()))
    return indices


def _kept(logits_indices: torch.Tensor, num_tokens: int, rows: RequestRows | DraftRows) -> torch.Tensor | None:
    """Return `ForwardBatch.kept_indices`. Prompt logprobs need all hidden states."""
    if rows.prompt_logprobs or len(logits_indices) == num_tokens:
        return None
    return logits_indices if len(logits_indices) else logits_indices.new_zeros(1)
