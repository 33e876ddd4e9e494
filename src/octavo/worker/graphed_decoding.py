"""Pure decode steps as captured graphs: what a graph computes, which one fits a step, and the record it reads.

Everything that differs between steps is read from the `DecodeRecord` and the rows' tables, on the device: tokens, block
tables, slots, sampling metadata. Sampled ids are written to the rows' tokens, where the next step reads them.

Legend: C = capacity in rows, N = rows of a bucket, R = requests of the step, D = hidden size,
B = blocks of a bucket's longest context.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from numpy.typing import NDArray

from octavo.attention.metadata import ForwardBatch, GroupSlots, LayerCache
from octavo.contracts.kv_cache import KVGroup
from octavo.contracts.schedule import SchedulerOutput
from octavo.device.base import DeviceQueue
from octavo.models.interfaces import CausalLM
from octavo.sampling.device_logits_processors import Context
from octavo.sampling.device_logprobs import RATING_SIZE
from octavo.worker.decode_graphs import ARGMAX, DecodeGraphs, Ending, GraphKey, context_bucket, row_bucket
from octavo.worker.decode_record import DecodeRecord, LogitsProcessorRecord
from octavo.worker.device_sampling import NUM_RESULTS, Sampled, StepSamplingMetadata, sample
from octavo.worker.expert_loads import ExpertLoads
from octavo.worker.input_batch import state_slots
from octavo.worker.request_rows import RequestRows


class DecodeStep:
    """Computes a bucket of rows, one token each. The key's ending decides which results are written."""

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
        """Return a function that launches the step of `key`."""
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
        """Return the last replay's results [R, 3], and ratings [R, .] if it had logprobs."""
        return self.results[:num_rows], self.ratings[:num_rows] if ending.is_rated else None

    def _counting(self, rows: torch.Tensor) -> AbstractContextManager[None]:
        """Exclude padding from the expert load counters."""
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
            seq_lens_list=[key.max_context] * size,  # bounds, which a capturable backend accepts
            rows=rows,
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


class GraphedDecoding:
    """Owned by a runner. `step` holds the results of the last replay."""

    def __init__(
        self, step: DecodeStep, rows: RequestRows, queue: DeviceQueue, graphs: DecodeGraphs, max_model_len: int
    ) -> None:
        self.step, self.captured = step, graphs
        self._rows, self._queue, self._max_model_len = rows, queue, max_model_len

    def find(self, scheduler_output: SchedulerOutput, metadata: StepSamplingMetadata) -> Callable[[], None] | None:
        """Return a function that replays the step once its record is sent; None without a graph or pure decoding."""
        key = (
            self._key_of(scheduler_output, metadata.ending) if LogitsProcessorRecord.fits(metadata.processors) else None
        )
        return None if key is None else self.captured.find(key, self._send_padding)

    def send(self, scheduler_output: SchedulerOutput, metadata: StepSamplingMetadata) -> None:
        """Start copying the host's inputs of the step."""
        tables = table_columns(scheduler_output)
        if len(tables["grown_rows"]) > len(tables["rows"]):  # many blocks freed at once: too many for the record
            self._rows.apply_tables(scheduler_output)
            tables = {name: tables[name] for name in ("rows", "positions")}
        self.step.record.send(self._queue, {**tables, **metadata.columns})
        if metadata.processors:
            self.step.processors.send(self._queue, metadata.processors)

    def capture_known(self) -> None:
        """Capture the graphs that engines like this one used before."""
        with torch.inference_mode():
            self.captured.capture_known(self._send_padding)

    def _key_of(self, scheduler_output: SchedulerOutput, ending: Ending) -> GraphKey | None:
        is_decoding = (
            scheduler_output.samples.all()
            and (scheduler_output.num_scheduled_tokens == 1).all()
            and not self._rows.prompt_logprobs
            and not (self._rows.extra and self._rows.extra.concern_decoding(scheduler_output.rows))
        )
        num_rows = row_bucket(len(scheduler_output.rows))
        if not is_decoding or num_rows > self.step.record.capacity:
            return None
        longest = int(scheduler_output.num_computed_tokens.max()) + 1
        return GraphKey(num_rows=num_rows, max_context=context_bucket(longest, self._max_model_len), ending=ending)

    def _send_padding(self) -> None:
        self.step.record.send_padding(self._queue)


def table_columns(scheduler_output: SchedulerOutput) -> dict[str, NDArray[Any]]:
    """Return the record's columns about a decode step's rows and their blocks."""
    grown = scheduler_output.scheduled_cached_reqs
    return {
        "rows": scheduler_output.rows,
        "positions": scheduler_output.num_computed_tokens,
        "grown_rows": grown.rows,
        "grown_groups": grown.groups,
        "grown_columns": grown.columns,
        "grown_blocks": grown.block_ids,
    }
