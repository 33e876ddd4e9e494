"""A step of pure decoding on tensors that stay where they are: what a graph captures.

Everything that differs between steps is read from the `DecodeRecord` and the rows' own tables, on the device: tokens,
block tables, slots, wishes of the sampler. The sampled ids go back to the rows' tokens, so the next step finds them.

Legend: C = capacity in rows, N = rows of a bucket, D = hidden size, B = blocks of a bucket's longest context.
"""

from collections.abc import Callable
from functools import partial

import torch

from octavo.attention.metadata import ForwardBatch, LayerKVCache
from octavo.models.interfaces import CausalLM
from octavo.sampling.noise import NoiseKeys
from octavo.sampling.plain_draw import draw_plain
from octavo.worker.decode_record import DecodeRecord
from octavo.worker.graph_key import GraphKey
from octavo.worker.request_rows import RequestRows


class DecodeStep:
    """Computes a bucket of rows, one token each. Which of the results is written goes by the key's ending."""

    def __init__(self, model: CausalLM, kv_caches: list[LayerKVCache], rows: RequestRows, record: DecodeRecord) -> None:
        self._model, self._kv_caches, self._rows = model, kv_caches, rows
        self.record = record
        size, device = record.capacity, rows.device
        self.hidden = torch.zeros(size, model.config.hidden_size, dtype=model.context.dtype, device=device)  # [C, D]
        self.results = torch.zeros(size, 2, dtype=torch.int64, device=device)  # [C, 2] see `write_results`
        self._places = torch.arange(size + 1, device=device)  # [C + 1]
        self._starts = self._places.to(torch.int32)  # [C + 1]

    def of_key(self, key: GraphKey) -> Callable[[], None]:
        """Return what launches the step of `key`."""
        return partial(self._run, key)

    def _run(self, key: GraphKey) -> None:
        record, size, token_ids = self.record, key.num_rows, self._rows.token_ids
        grown = record.integers("grown_rows", size), record.integers("grown_columns", size)
        self._rows.block_table[grown] = record.integers("grown_blocks", size).to(torch.int32)
        rows, positions = record.integers("rows", size), record.integers("positions", size)  # [N]
        hidden = self._model.run_stage(self._batch(key, rows, positions), self._kv_caches, None).hidden  # [N, D]
        if key.ending == "hidden":
            self.hidden[:size] = hidden
            return
        largest, sampled = self._sample(key, hidden)
        token_ids[rows, positions + 1] = sampled.to(torch.int32)
        write_results(self.results[:size], largest, sampled)

    def _batch(self, key: GraphKey, rows: torch.Tensor, positions: torch.Tensor) -> ForwardBatch:
        size, block_size = key.num_rows, self._rows.block_size
        max_blocks = -(-key.max_context // block_size)
        table = self._rows.block_table[:, :max_blocks].index_select(0, rows)  # [N, B]
        blocks = table.gather(1, (positions // block_size)[:, None])[:, 0].to(torch.int64)  # [N]
        return ForwardBatch(
            input_ids=self._rows.token_ids[rows, positions].to(torch.int64),
            positions=positions,
            query_start_loc=self._starts[: size + 1],
            seq_lens=(positions + 1).to(torch.int32),
            slot_mapping=blocks * block_size + positions % block_size,
            block_table=table,
            logits_indices=self._places[:size],
            block_size=block_size,
            query_start_loc_list=list(range(size + 1)),
            seq_lens_list=[key.max_context] * size,  # bounds, as a capturable backend takes them
        )

    def _sample(self, key: GraphKey, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each row's largest logit [N] and its token [N]."""
        if key.ending == "largest":
            return self._model.largest_logits(hidden)
        record, size = self.record, key.num_rows
        keys = NoiseKeys(
            seed_low=record.integers("seed_low", size),
            seed_high=record.integers("seed_high", size),
            output_indices=record.integers("output_indices", size),
        )
        return draw_plain(self._model.compute_logits(hidden), record.floats("temperatures", size), keys)


def write_results(results: torch.Tensor, largest: torch.Tensor, token_ids: torch.Tensor) -> None:
    """Write what the host wants of N rows to `results` [N, 2]: tokens, and the bits of largest logits as float64."""
    results[:, 0] = token_ids
    results[:, 1] = largest.to(torch.float64).view(torch.int64)
