"""A step of pure decoding on tensors that stay where they are: what a graph captures.

Everything that differs between steps is read from the `DecodeRecord` and the rows' own tables, on the device: tokens,
block tables, slots, wishes of the sampler. The sampled ids go back to the rows' tokens, so the next step finds them.

Legend: C = capacity in rows, N = rows of a bucket, R = requests of the step, D = hidden size,
B = blocks of a bucket's longest context.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from octavo.attention.metadata import ForwardBatch, GroupSlots, LayerCache
from octavo.contracts.kv_cache import KVGroup
from octavo.models.interfaces import CausalLM
from octavo.sampling.device_logits_processors import Context
from octavo.sampling.device_logprobs import RATING_SIZE
from octavo.worker.decode_record import DecodeRecord
from octavo.worker.device_sampling import NUM_RESULTS, Sampled, sample
from octavo.worker.expert_loads import ExpertLoads
from octavo.worker.graph_key import ARGMAX, Ending, GraphKey
from octavo.worker.input_batch import state_slots
from octavo.worker.logits_processor_record import LogitsProcessorRecord
from octavo.worker.request_rows import RequestRows


class DecodeStep:
    """Computes a bucket of rows, one token each. Which of the results is written goes by the key's ending."""

    def __init__(
        self,
        model: CausalLM,
        kv_caches: Sequence[LayerCache],
        rows: RequestRows,
        record: DecodeRecord,
        loads: ExpertLoads | None = None,
    ) -> None:
        self._loads = loads
        self._model, self._kv_caches, self._rows = model, kv_caches, rows
        self.record = record
        size, device = record.capacity, rows.device
        self.processors = LogitsProcessorRecord(size, rows.sampling.vocab_size, device)
        self.results = torch.zeros(size, NUM_RESULTS, dtype=torch.int64, device=device)  # [C, 3] see `Sampled`
        self.ratings = torch.zeros(size, RATING_SIZE, dtype=torch.int64, device=device)  # [C, .]
        self._places = torch.arange(size + 1, device=device)  # [C + 1]
        self._starts = self._places.to(torch.int32)  # [C + 1]

    def of_key(self, key: GraphKey) -> Callable[[], None]:
        """Return what launches the step of `key`."""
        return partial(self._run, key)

    def _run(self, key: GraphKey) -> None:
        record, size, token_ids = self.record, key.num_rows, self._rows.token_ids
        grown = tuple(record.integers(f"grown_{name}", size) for name in ("groups", "rows", "columns"))
        self._rows.block_table[grown] = record.integers("grown_blocks", size).to(torch.int32)
        rows, positions = record.integers("rows", size), record.integers("positions", size)  # [N]
        with self._counting(rows):
            hidden = self._model.run_stage(self._batch(key, rows, positions), self._kv_caches, None).hidden  # [N, D]
        sampled = self._sample(key, hidden)
        token_ids[rows, positions + 1] = sampled.token_ids.to(torch.int32)
        self.results[:size] = sampled.results()
        if sampled.ratings is not None:
            self.ratings[:size] = sampled.ratings

    def outcome(self, num_rows: int, ending: Ending) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return what the last replay left: results [R, 3], and ratings [R, .] where the step was rated."""
        return self.results[:num_rows], self.ratings[:num_rows] if ending.is_rated else None

    def _counting(self, rows: torch.Tensor) -> AbstractContextManager[None]:
        """Leave padding out of the loads of experts."""
        if self._loads is None:
            return nullcontext()
        return self._loads.counting((rows != self.record.scratch_row).to(torch.int64))

    def _batch(self, key: GraphKey, rows: torch.Tensor, positions: torch.Tensor) -> ForwardBatch:
        size, block_size = key.num_rows, self._rows.block_size
        max_blocks, query_start_loc = -(-key.max_context // block_size), self._starts[: size + 1]

        def slots_of(group: KVGroup, tables: torch.Tensor) -> GroupSlots:
            if group.kind == "recurrent":
                return state_slots(tables, group.block_tokens(block_size), rows, positions, query_start_loc)
            table = tables[:, :max_blocks].index_select(0, rows)  # [N, B]
            blocks = table.gather(1, (positions // block_size)[:, None])[:, 0].to(torch.int64)  # [N]
            return GroupSlots(blocks * block_size + positions % block_size, table)

        groups = list(map(slots_of, self._rows.groups, self._rows.block_tables))
        return ForwardBatch(
            input_ids=self._rows.token_ids[rows, positions].to(torch.int64),
            positions=positions,
            query_start_loc=query_start_loc,
            seq_lens=(positions + 1).to(torch.int32),
            slot_mapping=groups[0].slot_mapping,
            block_table=groups[0].block_table,
            logits_indices=self._places[:size],
            block_size=block_size,
            query_start_loc_list=list(range(size + 1)),
            seq_lens_list=[key.max_context] * size,  # bounds, as a capturable backend takes them
        ).with_groups(groups)

    def _sample(self, key: GraphKey, hidden: torch.Tensor) -> Sampled:
        if key.ending == ARGMAX:
            return Sampled.of_argmax(*self._model.logits_argmax(hidden))
        size, record = key.num_rows, self.record
        context = Context(
            token_ids=self._rows.token_ids,
            rows=record.integers("rows", size),
            num_tokens=record.integers("positions", size) + 1,
            max_tokens=key.max_context,
        )
        logits = self._model.compute_logits(hidden)
        return sample(logits, record.metadata(size), key.ending, context, self.processors.processors)
