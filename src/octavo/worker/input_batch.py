"""From rows and a `SchedulerOutput` to the tensors of one step.

Legend: T = tokens of the step, R = requests in it, N = rows, B = most blocks any of the R holds, S = rows that sample.
"""

import numpy as np
import torch

from octavo.attention.metadata import ForwardBatch
from octavo.contracts.schedule import SchedulerOutput
from octavo.worker.request_rows import RequestRows


def make_forward_batch(order: SchedulerOutput, rows: RequestRows) -> ForwardBatch:
    """Gather the step's tokens from the rows. Vectorised: no Python per request or token."""
    block_size = rows.block_size
    ends = order.num_computed_tokens + order.num_scheduled_tokens  # [R]
    query_start_loc = np.concatenate([[0], np.cumsum(order.num_scheduled_tokens)]).astype(np.int32)  # [R + 1]
    # Token t of the flat batch belongs to request_of[t] and stands at positions[t] of its context.
    request_of = np.repeat(np.arange(len(order.rows)), order.num_scheduled_tokens)  # [T]
    positions = np.arange(len(request_of)) + (order.num_computed_tokens - query_start_loc[:-1])[request_of]  # [T]
    logits_indices = query_start_loc[1:][order.samples] - 1  # [S]

    row_of, device_positions, step_rows, starts, lens, sampling = rows.send(
        order.rows[request_of].astype(np.int64),  # [T]
        positions,
        order.rows.astype(np.int64),
        query_start_loc,
        ends,
        logits_indices.astype(np.int64),
    )
    blocks = rows.block_table[row_of, device_positions // block_size].to(torch.int64)  # [T]
    max_blocks = -(-int(ends.max()) // block_size)
    return ForwardBatch(
        input_ids=rows.token_ids[row_of, device_positions].to(torch.int64),
        positions=device_positions,
        query_start_loc=starts,
        seq_lens=lens,
        slot_mapping=blocks * block_size + device_positions % block_size,
        block_table=rows.block_table[step_rows, :max_blocks],
        logits_indices=sampling,
        kept_indices=_kept(sampling, len(positions), rows),
        block_size=block_size,
        query_start_loc_list=query_start_loc.tolist(),
        seq_lens_list=ends.tolist(),
    )


def _kept(logits_indices: torch.Tensor, num_tokens: int, rows: RequestRows) -> torch.Tensor | None:
    """Return `ForwardBatch.kept_indices`. Log-probabilities of prompts want all hidden states."""
    if rows.prompt_logprobs or len(logits_indices) == num_tokens:
        return None
    return logits_indices if len(logits_indices) else logits_indices.new_zeros(1)
