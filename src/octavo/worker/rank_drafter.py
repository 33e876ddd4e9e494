"""The drafter of a rank: a small model samples the drafts of a step before the model verifies them.

A draft is sampled as the model will sample that position, with the same seed and output index, hence the same noise: so
sampled drafts match as often as the two distributions allow. Every rank runs the whole draft model, even with tensor
parallelism and pipeline stages: nothing is communicated, except where a head uses the model's embedding or logits head,
and a pass can be recorded. It has its own keys and values, under the same blocks and slots as the model's.

Entry p of a row is what the draft model reads at position p: token p, or for a head token p + 1 and the model's hidden
state of position p (`HeadStates`).

Legend: N = rows, R = requests in the step, P = requests in a pass, S = those that it samples, T = tokens of a pass,
K = most drafts of a request, B = most blocks of a request, D = hidden size, V = vocabulary.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.attention.metadata import ForwardBatch, LayerCache, LayerKVCache
from octavo.contracts.schedule import DRAWN_IN_RANKS, CachedRequestData, Int32Array, ModelRunnerOutput, SchedulerOutput
from octavo.distributed.groups import Group
from octavo.models.draft_head import DraftHead
from octavo.models.interfaces import CausalLM, IntermediateTensors
from octavo.sampling.rows import ARGMAX
from octavo.sampling.sampler import Sampler
from octavo.worker.draft_progress import BlockCopy, DraftProgress, EagleProgress
from octavo.worker.graph import StepGraph
from octavo.worker.request_rows import RequestRows, RowTables

# `RankDrafter.compute_entries`: of a step's requests `at` [P], from `starts` [P] to `ends` [P], with hidden [T, D].
ComputeEntries = Callable[
    [SchedulerOutput, NDArray[np.intp], Int32Array, Int32Array, torch.Tensor], torch.Tensor | None
]


class HeadStates:
    """What a head reads besides tokens: hidden states of the model, per row and per block.

    After each step, the states of accepted positions go to a ring buffer per row, a few positions long. The head
    computes them in the next step if the row gets drafts, or else when a block is complete: so rows without drafts cost
    one pass per block, and full blocks always have the head's keys and values, for prefix hits. Prompt chunks that
    complete a block are computed at the end of their step, directly from its tensors.

    Legend: F = size of the model's states side by side, W = positions in the ring buffer.
    """

    def __init__(
        self,
        model: DraftHead,
        kv_caches: Sequence[LayerCache],
        progress: EagleProgress,
        rows: RequestRows,
        *,
        num_slots: int,
        num_blocks: int,
    ) -> None:
        """`num_slots` is W, `num_blocks` are those of the head's group with the rows' own."""
        self._model, self._kv_caches, self._progress, self._rows = model, kv_caches, progress, rows
        dtype, num_features = model.context.dtype, model.num_features
        self._recent = torch.zeros(len(progress.base), num_slots, num_features, dtype=dtype)  # [N, W, F]
        self._last_of_block = torch.zeros(num_blocks, num_features, dtype=dtype)  # state of each block's last position
        self._num_slots, self._block_size = num_slots, rows.block_size

    @property
    def _tokens(self) -> Int32Array:
        tokens: Int32Array = self._rows.token_ids.numpy()
        return tokens

    def known_states(self, rows: Int32Array, starts: Int32Array, ends: Int32Array) -> torch.Tensor:
        """Return what the head reads [T, D] of positions [starts, ends) of rows [P]."""
        positions, owners = _ranges(starts, ends)
        return self._model.reduce(self._recent[rows[owners], positions % self._num_slots])

    def entries(
        self, batch: ForwardBatch, rows: Int32Array, starts: Int32Array, counts: Int32Array, hidden: torch.Tensor
    ) -> tuple[ForwardBatch, IntermediateTensors]:
        """Return the batch with the tokens of `counts` [P] entries from `starts` [P] on, and the head's inputs."""
        positions, owners = _ranges(starts + 1, starts + 1 + counts)
        ids = torch.from_numpy(self._tokens[rows[owners], positions].astype(np.int64))
        return replace(batch, input_ids=ids), self._model.inputs(ids, hidden)

    def observe(
        self, step: SchedulerOutput, ends: Int32Array, computed: IntermediateTensors, compute: ComputeEntries
    ) -> None:
        """Take in the states of a step up to positions `ends` [R]; compute entries that are due."""
        aux = self._model.states(computed)
        progress, rows, starts = self._progress, step.rows, step.num_computed_tokens
        firsts = np.cumsum(step.num_scheduled_tokens) - step.num_scheduled_tokens - starts  # [R] of position 0 in T
        progress.skip_gaps(rows, starts)
        size = self._block_size
        columns, owners = _ranges(np.maximum(starts, progress.base[rows]) // size, ends // size)
        if len(columns):  # keep the states of the last positions of blocks
            blocks = progress.tables[rows[owners], columns - progress.base[rows][owners] // size]
            self._last_of_block[blocks] = _states_at(aux, firsts[owners] + (columns + 1) * size - 1)
        due = progress.take_complete(rows, ends, self._tokens)
        copies = progress.check_hits(self._tokens)
        if len(due):  # compute all of their entries, with states of before this step or from `aux`
            begins = progress.num_computed[rows[due]]
            positions, owners = _ranges(begins, ends[due])
            states = self._recent[rows[due][owners], positions % self._num_slots]  # [T, F]
            is_new = positions >= starts[due][owners]
            states[torch.from_numpy(is_new)] = _states_at(aux, (firsts[due][owners] + positions)[is_new])
            compute(step, due, begins, ends[due], self._model.reduce(states))
            progress.num_computed[rows[due]] = ends[due]
        if copies:
            self._make_copies(step, copies, compute)
        positions, owners = _ranges(np.maximum(starts, ends - self._num_slots), ends)
        self._recent[rows[owners], positions % self._num_slots] = _states_at(aux, firsts[owners] + positions)
        progress.num_available[rows] = np.maximum(progress.num_available[rows], ends)

    def learn(self, output: ModelRunnerOutput) -> None:
        """Show the head the tokens that a step has sampled."""
        sampled = output.sampled_token_ids
        self._model.learn(sampled[np.arange(sampled.shape[1]) < output.num_sampled[:, None]])

    def _make_copies(self, step: SchedulerOutput, copies: Sequence[BlockCopy], compute: ComputeEntries) -> None:
        """Copy blocks, and compute the last entry of each with the token that follows it in its row."""
        for cache in self._kv_caches:
            assert isinstance(cache, LayerKVCache)
            for pool in cache.pools:
                by_block = pool.view(-1, self._block_size, *pool.shape[1:])
                for copy in copies:
                    by_block[copy.target] = by_block[copy.source]
        at_row = {row: index for index, row in enumerate(step.rows.tolist())}
        at = np.array([at_row[copy.row] for copy in copies])
        positions = np.array([copy.position for copy in copies], dtype=np.int32)
        hidden = self._model.reduce(self._last_of_block[[copy.source for copy in copies]])
        compute(step, at, positions, positions + 1, hidden)


def _states_at(aux: Sequence[torch.Tensor], places: NDArray[np.intp]) -> torch.Tensor:
    """Return the states [., F] of places in T, side by side."""
    at = torch.from_numpy(places.astype(np.int64))
    return torch.cat([each[at] for each in aux], dim=1)


def _ranges(starts: Int32Array, ends: Int32Array) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return all positions of the ranges [starts, ends) [P], one after the other, and which range each is of."""
    counts = np.maximum(ends - starts, 0)
    owners = np.repeat(np.arange(len(counts)), counts)
    offsets = np.arange(len(owners)) - (np.cumsum(counts) - counts)[owners]
    return starts[owners] + offsets, owners


class RankDrafter:
    """Owned by a runner."""

    def __init__(
        self,
        model: CausalLM,
        kv_caches: Sequence[LayerCache],
        graph: StepGraph | None,
        rows: RequestRows,
        tables: RowTables,
        progress: DraftProgress,
        states: HeadStates | None,
        *,
        max_tokens: int,
        uses_processors: bool,
        ranks: Group,
    ) -> None:
        """`tables` are `rows` as the draft model sees them; a pass computes at most `max_tokens`.

        With `uses_processors`, penalties and bans apply to drafts, too: every rank must then know every token at once.
        """
        self.model = model
        self.passes: list[tuple[int, float]] = []  # of the last step: tokens and seconds of each
        self._kv_caches, self._graph, self._states = kv_caches, graph, states
        self._rows, self._tables, self._progress = rows, tables, progress
        self._sampler = Sampler(rows.token_ids, rows.transfers.send, model.context.kernels)
        self._max_tokens, self._uses_processors, self._ranks = max_tokens, uses_processors, ranks
        self._shift = 0 if states is None else 1  # tokens known beyond the last entry

    def propose(self, step: SchedulerOutput) -> SchedulerOutput:
        """Return the step with its drafts filled in. Its requests must have been applied to the rows.

        Also computes the prompts in it, but for a head: `observe` does.
        """
        self.passes = []
        self._rows.apply_tables(step)
        num_known, num_drawn = counts_of(step)
        followed = self._progress.apply(step, num_known)
        if not (len(followed) or num_drawn.any()):
            return step
        table = np.zeros((len(num_known), int(num_drawn.max())), dtype=np.int32)
        is_ready = self._progress.can_draft(step.rows, num_known)
        self._draw_table(step, num_known, np.where(is_ready, num_drawn, 0), followed, table)
        return self._filled_in(step, table, num_drawn) if num_drawn.any() else step

    def _draw_table(
        self,
        step: SchedulerOutput,
        num_known: Int32Array,
        num_drawn: Int32Array,
        followed: NDArray[np.intp],
        table: Int32Array,
    ) -> None:
        """Run all passes; fill in the drafts [R, K] of requests with `num_drawn` [R] of them."""
        num_computed, due = self._progress.num_computed, num_drawn > 0
        due[followed] = True
        at = due.nonzero()[0]
        if not len(at):
            return
        rows, ends = step.rows[at], np.minimum(num_known[at] - self._shift, self.model.config.max_model_len)
        starts, hidden = num_computed[rows], None
        if self._states is not None:
            starts = np.minimum(starts, ends - 1)  # the last one again, for its output
            hidden = self._states.known_states(rows, starts, ends)
        samples = (num_drawn[at] > 0) & (ends == num_known[at] - self._shift)
        hidden = self.compute_entries(step, at, starts, ends, hidden, samples, table[:, :1])
        num_computed[rows] = np.maximum(starts, ends)
        for column in range(1, table.shape[1]):
            goes_on = num_drawn[at] > column
            at = at[goes_on]
            ends = num_known[at] - self._shift + column
            if hidden is None:
                num_computed[step.rows[at]] = ends
            else:
                hidden = hidden[torch.from_numpy(goes_on)]
            samples = np.ones(len(at), dtype=np.bool_)
            hidden = self.compute_entries(step, at, ends - 1, ends, hidden, samples, table[:, : column + 1])

    def compute_entries(
        self,
        step: SchedulerOutput,
        at: NDArray[np.intp],  # [P] in R
        starts: Int32Array,  # [P] of the entries to compute
        ends: Int32Array,  # [P]
        hidden: torch.Tensor | None,  # [T, D] for a head
        samples: NDArray[np.bool_] | None = None,  # [P]; None: no drafts
        table: Int32Array | None = None,  # [R, .] drafts so far; the last column is filled here
    ) -> torch.Tensor | None:
        """Compute entries in batches, and sample. Return the output of each last one [S, D], the next one's hidden."""
        outputs, first = [], 0
        for part, offsets, counts in chunks(ends - starts, self._max_tokens):
            start_s = time.perf_counter()
            at_part, rows = at[part], step.rows[at[part]]
            ends_of_part = starts[part] + offsets + counts
            is_sampled = (ends_of_part == ends[part]) & (samples is not None and samples[part])
            num_tokens = int(counts.sum())
            tokens = SchedulerOutput(
                step=step.step,
                req_ids=(),
                rows=rows,
                num_computed_tokens=ends_of_part - self._progress.base[rows] - counts,
                num_scheduled_tokens=counts,
                samples=is_sampled,
                total_num_scheduled_tokens=num_tokens,
                scheduled_new_reqs=[],
                scheduled_cached_reqs=CachedRequestData(),
                finished_req_ids=[],
            )
            batch, incoming = self._tables.forward_batch(tokens), None
            if self._states is not None and hidden is not None:
                some = hidden[first : first + num_tokens]
                batch, incoming = self._states.entries(batch, rows, ends_of_part - counts, counts, some)
            elif (vocab_size := self.model.config.vocab_size) < self._rows.sampling.vocab_size:
                batch = replace(batch, input_ids=batch.input_ids.clamp(max=vocab_size - 1))
            first += num_tokens
            if self._graph is not None:
                result = self._graph.run(batch, incoming)
            else:
                result = self.model.run_stage(batch, self._kv_caches, incoming)
            if table is not None and is_sampled.any():
                if hidden is not None:
                    outputs.append(batch.of_logits(result.residual).clone())
                at_next, chosen = ends_of_part[is_sampled] + self._shift, batch.of_logits(result.hidden)
                self._sample_last(rows[is_sampled], at_part[is_sampled], at_next, chosen, table)
            self.passes.append((num_tokens, time.perf_counter() - start_s))
        if hidden is None:
            return None
        return torch.cat(outputs) if outputs else hidden[:0]

    def observe(self, step: SchedulerOutput, output: ModelRunnerOutput, computed: IntermediateTensors) -> None:
        """Read the results of a step: its output, and what the model has computed."""
        if self._states is not None and len(step.rows):
            self._states.learn(output)
            ends = counts_of(step)[0] + np.maximum(output.num_sampled - 1, 0)  # [R] behind the last one that is right
            ends = np.minimum(ends, self.model.config.max_model_len)
            self._states.observe(step, ends, computed, self.compute_entries)

    def forget_blocks(self, groups: Sequence[int], block_ids: Sequence[int]) -> None:
        """Take blocks of KV groups as not computed: they are filled with the model's keys and values alone."""
        self._progress.forget_blocks(groups, block_ids)

    def _sample_last(
        self, rows: Int32Array, requests: NDArray[np.intp], ends: Int32Array, hidden: torch.Tensor, table: Int32Array
    ) -> None:
        """Sample from hidden [S, D] the tokens at positions `ends` [S], into the last column of the drafts [R, .]."""
        wanted = self._rows.sampling.vocab_size
        sampling = self._rows.sampling.unverified_step(rows, ends, with_processors=self._uses_processors)
        if sampling.ending == ARGMAX:
            _, token_ids = self.model.logits_argmax(hidden)
        else:
            logits = self.model.compute_logits(hidden)
            if (missing := wanted - logits.shape[1]) != 0:  # vocabularies of one tokenizer are padded in different ways
                logits = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
            token_ids = self._sampler.sample(logits, sampling).token_ids
        chosen = token_ids.clamp(0, wanted - 1)  # where logits are not finite, it may be any token
        table[requests, -1] = chosen.cpu().numpy()
        self._rows.write_sampled(rows, ends, chosen)

    def _filled_in(self, step: SchedulerOutput, table: Int32Array, num_drawn: Int32Array) -> SchedulerOutput:
        """Return the step with the drafts of `table` [R, K] in place of the placeholders."""
        drafts = step.scheduled_spec_decode_tokens
        assert drafts is not None, "there are places to fill"
        if self._ranks.size > 1:  # those of the first rank, should processors differ in their last bits
            mine = torch.from_numpy(table).to(self._rows.transfers.device, torch.float32)
            table = self._ranks.all_gather(mine, [table.shape[1]] * self._ranks.size).cpu().numpy()
        token_ids = drafts.token_ids.copy()
        columns = np.arange(table.shape[1])
        token_ids[token_ids == DRAWN_IN_RANKS] = table[columns < num_drawn[:, None]]
        filled = replace(step, scheduled_spec_decode_tokens=replace(drafts, token_ids=token_ids))
        if self._ranks.size > 1:
            self._rows.write_unverified(filled)
        return filled


def counts_of(step: SchedulerOutput) -> tuple[Int32Array, Int32Array]:
    """Return how many tokens each request has before its drafts [R], and how many drafts to draw for it [R]."""
    num_known = step.num_computed_tokens + step.num_scheduled_tokens
    drafts = step.scheduled_spec_decode_tokens
    if drafts is None:
        return num_known, np.zeros_like(num_known)
    owners = np.repeat(np.arange(len(num_known)), drafts.counts)
    is_drawn = drafts.token_ids == DRAWN_IN_RANKS
    num_drawn = np.bincount(owners[is_drawn], minlength=len(num_known)).astype(np.int32)
    return num_known - drafts.counts, num_drawn


def chunks(sizes: Int32Array, most: int) -> Iterator[tuple[NDArray[np.intp], Int32Array, Int32Array]]:
    """Divide runs of `sizes` [P] tokens into batches of at most `most`: which runs, from where, how many of each."""
    ends = np.cumsum(np.maximum(sizes, 0))
    starts = ends - np.maximum(sizes, 0)
    for first in range(0, int(ends[-1]), most):
        begin, end = (np.clip(place, starts, ends) - starts for place in (first, first + most))
        part = (end > begin).nonzero()[0]
        yield part, begin[part].astype(np.int32), (end - begin)[part].astype(np.int32)
