"""The EAGLE-3 head of a rank: it reads the model's hidden states and samples drafts. See `models/eagle3.py`.

After each step, the states of accepted positions go to a ring buffer per row, a few positions long. The head computes
them in the next step if the row gets drafts, or else when a block is complete: so rows without drafts cost one pass per
block, and full blocks always have the head's keys and values, for prefix hits. Prompt chunks that complete a block are
computed at the end of their step, directly from its tensors.

Legend: N = rows, R = requests in the step, P = requests in a pass, T = tokens of a step or pass, F = size of the
model's states side by side, D = hidden size of the head, K = most drafts of a request, W = positions in the ring
buffer.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.attention.metadata import LayerCache, LayerKVCache
from octavo.contracts.schedule import Int32Array, ModelRunnerOutput, SchedulerOutput
from octavo.distributed.groups import Group
from octavo.models.eagle3 import Eagle3Head
from octavo.models.interfaces import IntermediateTensors
from octavo.sampling.sampler import Sampler
from octavo.worker.eagle_progress import BlockCopy, EagleProgress
from octavo.worker.graph import StepGraph
from octavo.worker.input_batch import make_forward_batch
from octavo.worker.rank_drafting import RankDrafting, chunks, counts_of, pass_of
from octavo.worker.request_rows import DraftRows, RequestRows


class EagleModel(RankDrafting):
    """A draft head, which reads the model's hidden states."""

    model: Eagle3Head

    def __init__(
        self,
        model: Eagle3Head,
        kv_caches: Sequence[LayerCache],
        graph: StepGraph | None,
        rows: RequestRows,
        progress: EagleProgress,
        sampler: Sampler,
        *,
        num_features: int,
        num_slots: int,
        num_blocks: int,
        max_tokens: int,
        ranks: Group,
    ) -> None:
        """`num_features` is F, `num_slots` W, `num_blocks` those of the model's group."""
        tables = [torch.from_numpy(progress.tables)]
        seen = DraftRows(rows, model.config.kv_groups, tables)
        super().__init__(
            model, kv_caches, graph, rows, seen, sampler, max_tokens=max_tokens, uses_processors=True, ranks=ranks
        )
        self._follows = progress
        dtype = model.context.dtype
        self._recent = torch.zeros(len(progress.base), num_slots, num_features, dtype=dtype)  # [N, W, F]
        self._last_of_block = torch.zeros(num_blocks, num_features, dtype=dtype)  # state of each block's last position
        self._num_slots, self._block_size = num_slots, rows.block_size

    @property
    def _tokens(self) -> Int32Array:
        tokens: Int32Array = self._rows.token_ids.numpy()
        return tokens

    def draw(self, step: SchedulerOutput) -> SchedulerOutput:
        """See `RankDrafting.draw`. Prompts are followed by `observe`."""
        self.passes = []
        num_known, num_drawn = counts_of(step)
        self._follows.apply(step)
        if not num_drawn.any():
            return step
        table = np.zeros((len(num_known), int(num_drawn.max())), dtype=np.int32)
        is_ready = self._follows.can_draft(step.rows, num_known)
        self._draw_columns(step, num_known, np.where(is_ready, num_drawn, 0), table)
        return self._filled_in(step, table, num_drawn)

    def _draw_columns(
        self, step: SchedulerOutput, num_known: Int32Array, num_drawn: Int32Array, table: Int32Array
    ) -> None:
        """Fill in the drafts [R, K] of requests with `num_drawn` [R] of them."""
        at = (num_drawn > 0).nonzero()[0]
        if not len(at):
            return
        rows, ends = step.rows[at], num_known[at] - 1
        starts = np.minimum(self._follows.num_computed[rows], ends - 1)  # the last one again, for its output
        states = self._remembered(rows, starts, ends)
        own = self._compute(step, at, starts, ends, self.model.reduce(states), table[:, :1])
        self._follows.num_computed[rows] = ends
        for column in range(1, table.shape[1]):
            goes_on = num_drawn[at] > column
            at, own = at[goes_on], own[torch.from_numpy(goes_on)]
            ends = num_known[at] - 1 + column
            own = self._compute(step, at, ends - 1, ends, own, table[:, : column + 1])

    def _compute(
        self,
        step: SchedulerOutput,
        at: NDArray[np.intp],  # [P] in R
        starts: Int32Array,  # [P] of the entries to compute
        ends: Int32Array,  # [P]
        hidden: torch.Tensor,  # [T, D]
        table: Int32Array | None,  # [R, .] drafts so far; the last column is filled here. None: no drafts
    ) -> torch.Tensor:
        """Compute entries in batches; return the output of each last one [P, D], the hidden state of the next."""
        outputs, first = [], 0
        for part, offsets, counts in chunks(ends - starts, self._max_tokens):
            start_s = time.perf_counter()
            at_part, rows = at[part], step.rows[at[part]]
            ends_of_part = starts[part] + offsets + counts
            samples = (ends_of_part == ends[part]) & (table is not None)
            base = self._follows.base[rows]
            tokens = pass_of(step, at_part, ends_of_part - base, counts, samples)
            num_tokens = tokens.total_num_scheduled_tokens
            ids = _slices(self._tokens, rows, ends_of_part - counts + 1, counts)
            result = self._run_entries(tokens, ids, hidden[first : first + num_tokens])
            first += num_tokens
            if table is not None and samples.any():
                outputs.append(result.residual[: int(samples.sum())].clone())
                at_next = ends_of_part[samples] + 1  # an entry ends with the token after its position
                self._sample_last(rows[samples], at_part[samples], at_next, result.hidden, table)
            self.passes.append((num_tokens, time.perf_counter() - start_s))
        return torch.cat(outputs) if outputs else hidden[:0]

    def _run_entries(self, tokens: SchedulerOutput, ids: Int32Array, hidden: torch.Tensor) -> IntermediateTensors:
        """Run the head; return the rows that get logits."""
        batch = replace(make_forward_batch(tokens, self._seen), input_ids=torch.from_numpy(ids.astype(np.int64)))
        result = self._run(batch, self.model.inputs(batch.input_ids, hidden))
        return IntermediateTensors(batch.of_logits(result.hidden), batch.of_logits(result.residual))

    def observe(self, step: SchedulerOutput, output: ModelRunnerOutput, aux: Sequence[torch.Tensor]) -> None:
        """See `RankDrafting.observe`. The states in `aux` are [T, .] each."""
        if not len(step.rows):
            return
        follows, rows, starts = self._follows, step.rows, step.num_computed_tokens
        num_known, _ = counts_of(step)
        ends = num_known + np.maximum(output.num_sampled - 1, 0)  # [R] behind the last position that is right
        ends = np.minimum(ends, self.model.config.max_model_len)
        firsts = np.cumsum(step.num_scheduled_tokens) - step.num_scheduled_tokens - starts  # [R] of position 0 in T
        follows.skip_gaps(rows, starts)
        self._remember_blocks(rows, starts, ends, firsts, aux)
        due = follows.take_complete(rows, ends, self._tokens)
        copies = follows.check_hits(self._tokens)
        self._catch_up(step, due, ends, firsts, aux)
        if copies:
            self._take_copies(step, copies)
        self._remember(rows, starts, ends, firsts, aux)
        follows.num_available[rows] = np.maximum(follows.num_available[rows], ends)

    def _catch_up(
        self,
        step: SchedulerOutput,
        at: NDArray[np.intp],  # [P] in R
        ends: Int32Array,  # [R]
        firsts: Int32Array,  # [R]
        aux: Sequence[torch.Tensor],
    ) -> None:
        """Compute all entries before `ends` of the requests `at`, with states of before this step or from `aux`."""
        if not len(at):
            return
        rows, ends = step.rows[at], ends[at]
        starts, here = self._follows.num_computed[rows], step.num_computed_tokens[at]
        positions, owners = _ranges(starts, ends)
        states = self._recent[rows[owners], positions % self._num_slots]  # [T, F]
        is_new = positions >= here[owners]
        places = torch.from_numpy((firsts[at][owners] + positions)[is_new].astype(np.int64))
        states[torch.from_numpy(is_new)] = torch.cat([each[places] for each in aux], dim=1)
        self._compute(step, at, starts, ends, self.model.reduce(states), None)
        self._follows.num_computed[rows] = ends

    def _remembered(self, rows: Int32Array, starts: Int32Array, ends: Int32Array) -> torch.Tensor:
        """Return the states [T, F] of positions [starts, ends) of rows [P]."""
        positions, owners = _ranges(starts, ends)
        return self._recent[rows[owners], positions % self._num_slots]

    def _remember(
        self, rows: Int32Array, starts: Int32Array, ends: Int32Array, firsts: Int32Array, aux: Sequence[torch.Tensor]
    ) -> None:
        """Keep the states of the last positions before `ends`."""
        positions, owners = _ranges(np.maximum(starts, ends - self._num_slots), ends)
        places = torch.from_numpy((firsts[owners] + positions).astype(np.int64))
        self._recent[rows[owners], positions % self._num_slots] = torch.cat([each[places] for each in aux], dim=1)

    def _remember_blocks(
        self, rows: Int32Array, starts: Int32Array, ends: Int32Array, firsts: Int32Array, aux: Sequence[torch.Tensor]
    ) -> None:
        """Keep the states of the last positions of blocks."""
        size, follows = self._block_size, self._follows
        columns, owners = _ranges(np.maximum(starts, follows.base[rows]) // size, ends // size)
        if not len(columns):
            return
        blocks = follows.tables[rows[owners], columns - follows.base[rows][owners] // size]
        places = torch.from_numpy((firsts[owners] + (columns + 1) * size - 1).astype(np.int64))
        self._last_of_block[blocks] = torch.cat([each[places] for each in aux], dim=1)

    def _take_copies(self, step: SchedulerOutput, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks, and compute the last entry of each with the token that follows it in its row."""
        self._copy_blocks(copies)
        at_row = {row: index for index, row in enumerate(step.rows.tolist())}
        at = np.array([at_row[copy.row] for copy in copies])
        positions = np.array([copy.position for copy in copies], dtype=np.int32)
        states = self._last_of_block[[copy.source for copy in copies]]
        self._compute(step, at, positions, positions + 1, self.model.reduce(states), None)

    def _copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        for cache in self._kv_caches:
            assert isinstance(cache, LayerKVCache)
            for pool in cache.pools:
                by_block = pool.view(-1, self._block_size, *pool.shape[1:])
                for copy in copies:
                    by_block[copy.target] = by_block[copy.source]


def _ranges(starts: Int32Array, ends: Int32Array) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return all positions of the ranges [starts, ends) [P], one after the other, and which range each is of."""
    counts = np.maximum(ends - starts, 0)
    owners = np.repeat(np.arange(len(counts)), counts)
    offsets = np.arange(len(owners)) - (np.cumsum(counts) - counts)[owners]
    return starts[owners] + offsets, owners


def _slices(table: Int32Array, rows: Int32Array, starts: Int32Array, counts: Int32Array) -> Int32Array:
    """Return `counts` [P] values of each of `rows` [P] from `starts` [P] on, one row after the other."""
    positions, owners = _ranges(starts, starts + counts)
    return table[rows[owners], positions]
