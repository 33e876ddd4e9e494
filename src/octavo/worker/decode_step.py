"""Pure decode steps as captured graphs: what a graph computes, which one fits a step, and the record it reads.

Everything that differs between steps is read from the `DecodeRecord` and the rows' tables, on the device: tokens, block
tables, slots, sampling metadata. Sampled ids are written to the rows' tokens, where the next step reads them.

Legend: C = capacity in rows, N = rows of a bucket, R = requests of the step, D = hidden size, B = blocks of a bucket's
longest context, W = words of a mask, M = masks in the step, E = biases of a step.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.attention.metadata import ForwardBatch, GroupSlots, LayerCache
from octavo.contracts.engine import ExpertLoad
from octavo.contracts.kv_cache import KVGroup
from octavo.contracts.schedule import SchedulerOutput
from octavo.device.base import DeviceQueue
from octavo.layers.moe import MixtureOfExperts
from octavo.models.interfaces import CausalLM
from octavo.sampling.draw import FLOAT_COLUMNS, INTEGER_COLUMNS, SamplingMetadata
from octavo.sampling.logits_processors import Arrays, Context, LogitsProcessorTensors
from octavo.sampling.logprobs import RATING_SIZE
from octavo.sampling.rows import ARGMAX, Ending, StepSampling
from octavo.sampling.sampler import Sampled, sample
from octavo.worker.decode_graphs import DecodeGraphs, GraphKey, GraphUses, context_bucket, row_bucket
from octavo.worker.request_rows import RequestRows, state_slots

_TABLE_COLUMNS = (
    "rows",  # [N] in the worker's rows
    "positions",  # [N] of each row's one token
    "grown_rows",  # [N] rows whose block table changes in this step
    "grown_groups",  # [N] KV group of the table
    "grown_columns",  # [N] column in the table
    "grown_blocks",  # [N] the new block ids
)
_COLUMNS = (*_TABLE_COLUMNS, *INTEGER_COLUMNS, *FLOAT_COLUMNS)  # [N] each
_MAX_BIASES = 4096


class DecodeRecord:
    """The host's inputs of one decode step, in columns of C words on the device, at the same addresses in every step.

    The rest of a bucket is padded with a scratch row at position 0, whose table points to a scratch block: padded rows
    compute like all others and write nowhere else. `processors` has space for a mask per row, and for biases; bad words
    of several tokens do not fit: such steps use no graph.
    """

    def __init__(
        self, capacity: int, scratch_row: int, scratch_block: int, vocab_size: int, device: torch.device
    ) -> None:
        self.capacity, self.scratch_row = capacity, scratch_row
        self._padding: dict[str, float] = {
            **dict.fromkeys(_COLUMNS, 0),
            "rows": scratch_row,
            "grown_rows": scratch_row,
            "grown_blocks": scratch_block,
            "num_logprobs": -1,
            "repetition": 1,
            "mask_indices": -1,
        }
        self._words = torch.zeros(len(_COLUMNS), capacity, dtype=torch.int64, device=device)
        nothing = self._words.new_zeros(0)
        self.processors = LogitsProcessorTensors(
            masks=torch.zeros(capacity, -(-vocab_size // 32), dtype=torch.int32, device=device),  # [C, W]
            biased=torch.zeros(_MAX_BIASES, dtype=torch.int64, device=device),  # [E]
            biases=torch.zeros(_MAX_BIASES, device=device),  # [E]
            bad_rows=nothing,
            bad_lens=nothing,
            bad_tokens=nothing.view(0, 0),
            banned=nothing,
        )

    def integers(self, name: str, size: int) -> torch.Tensor:
        """Return a view of the first `size` entries of a column, int64."""
        return self._words[_COLUMNS.index(name), :size]

    def metadata(self, size: int) -> SamplingMetadata:
        """Return the sampling metadata of the first `size` rows."""
        columns = {name: self.integers(name, size) for name in INTEGER_COLUMNS}
        floats = {name: self.integers(name, size).view(torch.float64) for name in FLOAT_COLUMNS}
        return SamplingMetadata(**columns, **floats)

    def send(self, queue: DeviceQueue, columns: Mapping[str, NDArray[Any]]) -> None:
        """Start copying a step: `columns` [R] each, padded. Missing columns are all padding."""
        host = queue.host_bytes(self._words.nbytes).view(torch.int64).view_as(self._words)
        for name, words in zip(_COLUMNS, host.numpy(), strict=True):
            column = words.view(np.float64) if name in FLOAT_COLUMNS else words
            values = columns.get(name, ())
            column[: len(values)] = values
            column[len(values) :] = self._padding[name]
        self._words.copy_(host, non_blocking=True)

    def send_padding(self, queue: DeviceQueue) -> None:
        """Make all of it harmless for a capture: biases of an earlier step may lie beyond the rows of this one."""
        self.send(queue, {})
        self.processors.biased.zero_()
        self.processors.biases.zero_()

    @staticmethod
    def fits(arrays: Arrays) -> bool:
        """Return whether a step's logits processors, if any, fit."""
        return not arrays or (len(arrays["biased"]) <= _MAX_BIASES and not len(arrays["banned"]))

    def send_processors(self, queue: DeviceQueue, arrays: Arrays) -> None:
        """Start copying a step's logits processors: masks [M, W], and biases padded with 0."""
        num_masks = len(arrays["masks"])
        if num_masks:
            _copy(queue, self.processors.masks[:num_masks], arrays["masks"])
        for target, name in ((self.processors.biased, "biased"), (self.processors.biases, "biases")):
            padded = np.zeros(_MAX_BIASES, dtype=arrays[name].dtype)
            padded[: len(arrays[name])] = arrays[name]
            _copy(queue, target, padded)


def _copy(queue: DeviceQueue, target: torch.Tensor, values: NDArray[np.generic]) -> None:
    host = queue.host_bytes(values.nbytes).view(target.dtype).view_as(target)
    host.numpy()[...] = values
    target.copy_(host, non_blocking=True)


class ExpertLoads:
    """Gives each mixture a row of one table to count in. Created before steps are recorded: they hold its address."""

    def __init__(self, mixtures: list[MixtureOfExperts]) -> None:
        self._mixtures = mixtures
        self._layers = [mixture.layer for mixture in mixtures]
        self._table = torch.stack([mixture.load for mixture in mixtures])  # [layers, experts] int64
        for mixture, row in zip(mixtures, self._table, strict=True):
            mixture.load = row

    @classmethod
    def of_model(cls, model: CausalLM) -> Self | None:
        """Return None if the model has no experts, or none on this stage."""
        mixtures = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
        return cls(mixtures) if mixtures else None

    def begin_totals(self, queue: DeviceQueue | None) -> Callable[[], ExpertLoad]:
        """Return a function for the counts since the start; with a queue, it waits for a copy enqueued now."""
        if queue is None:
            return lambda: ExpertLoad(layers=self._layers, counts=self._table.cpu().numpy().tobytes())
        host = queue.host_bytes(self._table.nbytes)
        host.copy_(self._table.view(torch.uint8).flatten(), non_blocking=True)
        wait = queue.mark()

        def totals() -> ExpertLoad:
            wait()
            return ExpertLoad(layers=self._layers, counts=host.numpy().tobytes())

        return totals

    @contextmanager
    def counting(self, is_counted: torch.Tensor) -> Iterator[None]:
        """Count only tokens where `is_counted` [T] int64 is 1, in a step launched inside this context."""
        for mixture in self._mixtures:
            mixture.is_counted = is_counted
        try:
            yield
        finally:
            for mixture in self._mixtures:
                mixture.is_counted = None

    def reset(self) -> None:
        """Reset the counts to zero."""
        self._table.zero_()


class GraphedDecoding:
    """Replays pure decode steps of one token per row. Owned by a runner."""

    def __init__(
        self,
        model: CausalLM,
        kv_caches: Sequence[LayerCache],
        rows: RequestRows,
        record: DecodeRecord,
        queue: DeviceQueue,
        uses: GraphUses,
        loads: ExpertLoads | None,
    ) -> None:
        self._model, self._kv_caches, self._rows, self._loads = model, kv_caches, rows, loads
        self._record, self._queue = record, queue
        self.captured = DecodeGraphs(queue, self._run, partial(record.send_padding, queue), uses)
        size, device = record.capacity, rows.transfers.device
        self._results = torch.zeros(size, 3, dtype=torch.int64, device=device)  # [C, 3] see `Sampled.packed`
        self._ratings = torch.zeros(size, RATING_SIZE, dtype=torch.int64, device=device)  # [C, .]
        self._places = torch.arange(size + 1, device=device)  # [C + 1]
        self._starts = self._places.to(torch.int32)  # [C + 1]

    def _run(self, key: GraphKey) -> None:
        """Launch the step of a bucket of rows. The key's ending decides which results are written."""
        record, size, token_ids = self._record, key.num_rows, self._rows.token_ids
        grown = tuple(record.integers(f"grown_{name}", size) for name in ("groups", "rows", "columns"))
        self._rows.block_table[grown] = record.integers("grown_blocks", size).to(torch.int32)
        rows, positions = record.integers("rows", size), record.integers("positions", size)  # [N]
        is_counted = (rows != record.scratch_row).to(torch.int64)  # by expert loads: no padding
        with nullcontext() if self._loads is None else self._loads.counting(is_counted):
            hidden = self._model.run_stage(self._batch(key, rows, positions), self._kv_caches, None).hidden  # [N, D]
        sampled = self._sample(key, hidden)
        token_ids[rows, positions + 1] = sampled.token_ids.to(torch.int32)
        self._results[:size] = sampled.packed()
        if sampled.ratings is not None:
            self._ratings[:size] = sampled.ratings

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
        size, record = key.num_rows, self._record
        context = Context(
            token_ids=self._rows.token_ids,
            rows=record.integers("rows", size),
            num_tokens=record.integers("positions", size) + 1,
            max_tokens=key.max_context,
        )
        logits = self._model.compute_logits(hidden)
        return sample(logits, record.metadata(size), key.ending, context, record.processors)

    def replay(
        self, scheduler_output: SchedulerOutput, sampling: StepSampling
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Replay the step, which includes its changes of tables. None without a graph or pure decoding.

        Return packed results [R, 3], and ratings [R, .] if it has logprobs; the next replay overwrites them.
        """
        sampling_columns, processors = sampling.arrays
        key = self._key_of(scheduler_output, sampling.ending) if DecodeRecord.fits(processors) else None
        launch = None if key is None else self.captured.find(key)
        if launch is None:
            return None
        rows, grown = scheduler_output.rows, scheduler_output.scheduled_cached_reqs
        columns: dict[str, NDArray[Any]] = {"rows": rows, "positions": scheduler_output.num_computed_tokens}
        if len(grown.rows) > len(rows):  # many blocks freed at once: too many for the record
            self._rows.apply_tables(scheduler_output)
        else:
            columns |= {f"grown_{name}": getattr(grown, name) for name in ("rows", "groups", "columns")}
            columns["grown_blocks"] = grown.block_ids
        self._record.send(self._queue, {**columns, **sampling_columns})
        if processors:
            self._record.send_processors(self._queue, processors)
        launch()
        return self._results[: len(rows)], self._ratings[: len(rows)] if sampling.ending.is_rated else None

    def _key_of(self, scheduler_output: SchedulerOutput, ending: Ending) -> GraphKey | None:
        is_decoding = (
            scheduler_output.samples.all()
            and (scheduler_output.num_scheduled_tokens == 1).all()
            and not self._rows.prompt_logprobs
            and not self._rows.states.are_read_by_decoding(scheduler_output.rows)
        )
        num_rows = row_bucket(len(scheduler_output.rows))
        if not is_decoding or num_rows > self._record.capacity:
            return None
        longest = int(scheduler_output.num_computed_tokens.max()) + 1
        max_context = context_bucket(longest, self._model.config.max_model_len)
        return GraphKey(num_rows=num_rows, max_context=max_context, ending=ending)
