"""The step being built: what running and admitted requests compute, and the resulting scheduler output.

Legend: R = rows of the step, N = changes of block tables.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from octavo.contracts.engine import AdmittedRequest
from octavo.contracts.schedule import (
    NOTHING,
    CachedRequestData,
    Int32Array,
    NewRequestData,
    SchedulerOutput,
    SpecDecodeTokens,
)
from octavo.scheduler.gate import GateHooks
from octavo.scheduler.request import Request
from octavo.scheduler.running import RowIndices, RunningRows
from octavo.scheduler.step_update import StepInFlight

_NO_DIFFS = CachedRequestData()

# Rows whose blocks of a KV group cannot hold what they would compute: group, rows, missing blocks of each row.
ShortRows = tuple[int, list[int], list[int]]


class RunningScheduler:
    """Decides what running rows compute next, and spreads them over the batches in flight, so that none is empty.

    In a pipeline only the last stage samples, so a row whose last token is in flight pauses until its value is known:
    the first stage needs it. If one batch took all ready rows, the others would be empty, so each takes at most its
    share of the decoding rows. Chunks of a prompt do not wait; they may follow one another immediately.
    """

    def __init__(self, running: RunningRows, num_batches: int, *, is_speculative: bool) -> None:
        self._running, self._num_batches, self._is_speculative = running, num_batches, is_speculative

    def next_tokens(self, budget: int) -> tuple[RowIndices, Int32Array, list[ShortRows]]:
        """Return the rows [R] of a step of at most `budget` tokens, the tokens of each [R], and who lacks blocks."""
        running = self._running
        rows = running.active
        counts = split_budget(self._wanted(rows), budget)
        if np.count_nonzero(counts) < len(counts):
            rows, counts = rows[counts > 0], counts[counts > 0]
        ends, short = running.num_computed[rows] + counts, []
        for group, num_slots in enumerate(running.slots_of_group):
            num_over = ends - num_slots[rows]
            at = (num_over > 0).nonzero()[0]
            if len(at):
                size = running.blocks.block_sizes[group]
                num_missing = [-(-num_tokens // size) for num_tokens in num_over[at].tolist()]
                short.append((group, rows[at].tolist(), num_missing))
        return rows, counts, short

    def _wanted(self, rows: RowIndices) -> Int32Array:
        """Return how many tokens each of `rows` [R] would compute with an unlimited budget."""
        running = self._running
        if self._is_speculative:  # every row waits for its last token, from which others are guessed
            num_known = np.maximum(running.num_known[rows], running.num_computed[rows])  # guesses are not known yet
        elif self._num_batches == 1:
            # A row under a constraint waits for its last token: the next mask depends on it.
            num_ahead = np.where(running.is_constrained[rows], 0, running.num_in_flight[rows])
            num_known = running.num_known[rows] + num_ahead
        else:
            num_known = running.num_known[rows]
        # The last token of a request is never computed: nothing is sampled from it.
        wanted = np.minimum(num_known, running.limit[rows] - 1) - running.num_computed[rows]
        if self._num_batches > 1:  # single-token rows beyond this batch's share are left to the others
            is_single = wanted == 1
            wanted[is_single & (np.cumsum(is_single) > -(-len(wanted) // self._num_batches))] = 0
        return wanted


def split_budget(wanted: Int32Array, budget: int) -> Int32Array:
    """Grant each row the tokens in `wanted` [R], most urgent first, as far as `budget` goes.

    Rows with a single token come first: they are decoding, and must not be held up by a long prompt ahead of them.
    The rest share what is left, in order; the last one served gets a chunk.
    """
    if int(wanted.sum()) <= budget:
        return wanted
    order = np.argsort(wanted > 1, kind="stable")
    before = np.cumsum(wanted[order]) - wanted[order]
    granted = np.empty_like(wanted)
    granted[order] = np.clip(budget - before, 0, wanted[order])
    return granted


class StepBuilder:
    """Created by the scheduler for every step; the scheduler decides, the builder does the bookkeeping.

    Blocks of a prompt are hashed as they are filled; those of an output when the request releases them.
    """

    def __init__(self, running: RunningRows, hooks: GateHooks, *, sends_tokens: bool) -> None:
        self.num_tokens = 0
        self._running, self._hooks, self._sends_tokens = running, hooks, sends_tokens
        # Changes of block tables [N]: rows, blocks, groups, columns.
        self._changes: tuple[list[int], list[int], list[int], list[int]] = [], [], [], []
        self.rows, self.counts = running.active, NOTHING  # of running rows [R]: known tokens that each computes [R]
        self._req_ids: tuple[str, ...] = ()
        self._hashed_blocks: list[tuple[int, int]] = []
        self._admitted: list[Request] = []
        self._admitted_counts: list[int] = []
        self._extra: SpecDecodeTokens | None = None

    def add_running(self, rows: RowIndices, counts: Int32Array) -> None:
        """Add running rows [R] with `counts` tokens each, for which they have blocks."""
        self.rows, self._req_ids, self.counts = rows, self._running.req_ids_of(rows), counts
        self.num_tokens += int(counts.sum())
        for index in (counts > 1).nonzero()[0].tolist():
            self._hash_prompt_blocks(int(rows[index]), int(counts[index]))

    def add_blocks(self, rows: Sequence[int], counts: Sequence[int], group: int) -> None:
        """Give running rows [R] so many more blocks [R]."""
        for row, first, block_ids in self._running.add_blocks(rows, counts, group):
            self._record_change(row, group, first, block_ids)

    def _record_change(self, row: int, group: int, first_column: int, block_ids: list[int]) -> None:
        """A row's table of a KV group has these blocks from `first_column` on."""
        rows, blocks, groups, columns = self._changes
        count = len(block_ids)
        rows += [row] * count
        blocks += block_ids
        groups += [group] * count
        columns += range(first_column, first_column + count)

    def drop_row(self, row: int) -> None:
        """Discard the changes of a row's tables: its request was preempted."""
        kept = [index for index, changed in enumerate(self._changes[0]) if changed != row]
        for numbers in self._changes:
            numbers[:] = [numbers[index] for index in kept]

    def free_behind_windows(self, in_flight: Iterable[StepInFlight]) -> None:
        """Free the blocks that no row's next token can see, before new ones are allocated.

        Steps in flight may still read them: ranks compute steps in order, so these reads precede any later write. Their
        contents stay findable, as when a request ends.
        """
        running, rows = self._running, self._running.active
        blocks = running.blocks
        # Not past what is known: a block is hashed when it is freed, and computed tokens may be rolled back.
        next_tokens = np.minimum(running.num_computed[rows], running.num_known[rows])
        for group in blocks.windowed:
            kind, null_block = blocks.groups[group], blocks.null_block(group)
            assert kind.sliding_window is not None
            first_seen = np.maximum(next_tokens - (kind.sliding_window - 1), 0)
            ends = first_seen // kind.tile * kind.tile // blocks.block_sizes[group]
            for index in (ends > running.num_freed[group, rows]).nonzero()[0].tolist():
                row, end, first = int(rows[index]), int(ends[index]), int(running.num_freed[group, rows[index]])
                hashed_blocks = running.hash_computed(row)
                for step in in_flight:
                    step.hashed_blocks.extend(hashed_blocks)
                running.free_columns(row, group, end)
                self._record_change(row, group, first, [null_block] * (end - first))

    @property
    def unwritten_states(self) -> frozenset[tuple[int, int]]:
        """Blocks of recurrent groups, as (group, block), that are unwritten until this step.

        A step writes all keys and values before it reads any, but computes states one row at a time, in any order.
        """
        recurrent = self._running.blocks.recurrent
        if not recurrent:
            return frozenset()
        return frozenset(hashed for hashed in self._hashed_blocks if hashed[0] in recurrent)

    def add_admitted(self, request: Request, budget: int) -> int:
        """Add a request that has just been given its row; return how many tokens it computes in this step.

        The blocks that it fills become findable immediately: siblings that arrive together share them, because a step
        writes all keys and values before it reads any.
        """
        assert request.row is not None
        num_computed = int(self._running.num_computed[request.row])
        count = min(len(request.token_ids) - num_computed, budget)
        self._admitted.append(request)
        self._admitted_counts.append(count)
        self.num_tokens += count
        self._hash_prompt_blocks(request.row, count)
        return count

    def add_spec_decode(self, extra: SpecDecodeTokens) -> None:
        """Add tokens to verify after the known ones of the running rows [R], which have blocks for them."""
        self._extra = extra
        self.num_tokens += len(extra.token_ids)

    def build(self, step: int, forgotten_req_ids: list[str], now_s: float) -> StepInFlight:
        """Finish the step: build the scheduler output, and count its tokens as computed."""
        running = self._running
        new_requests = [self._new_request_data(request) for request in self._admitted]
        admitted = {  # those that run for the first time, not resumed after a preemption
            request.request_id: AdmittedRequest(scheduled_time_s=now_s, num_cached_tokens=request.num_computed_tokens)
            for request, of in zip(new_requests, self._admitted, strict=True)
            if of.num_preemptions == 0
        }
        rows, req_ids, counts = self.rows, self._req_ids, self.counts
        if self._admitted:
            rows = np.concatenate([rows, np.array([request.row for request in new_requests], dtype=np.intp)])
            req_ids += tuple(request.request_id for request in new_requests)
            counts = np.concatenate([counts, np.array(self._admitted_counts, dtype=np.int32)])
        starts = running.num_computed[rows]
        ends = starts + counts
        samples = ends == running.num_known[rows] + running.num_in_flight[rows]
        extra = self._extra
        if extra is None:
            running.advance(rows, ends, samples)
        else:
            if self._admitted:
                extra = replace(extra, counts=np.pad(extra.counts, (0, len(self._admitted))))
            counts = counts + extra.counts
            running.advance(rows, starts + counts, samples + extra.counts)
        output = SchedulerOutput(
            step=step,
            req_ids=req_ids,
            rows=rows.astype(np.int32),
            num_computed_tokens=starts,
            num_scheduled_tokens=counts,
            samples=samples,
            total_num_scheduled_tokens=self.num_tokens,
            scheduled_new_reqs=new_requests,
            scheduled_cached_reqs=self._diffs(starts),
            finished_req_ids=forgotten_req_ids,
            scheduled_spec_decode_tokens=extra,
        )
        for add_to_step in self._hooks.add_to_step:
            output = add_to_step(output, rows)
        return StepInFlight(
            output=output,
            scheduled_s=now_s,
            rows=rows,
            generations=running.generation[rows],
            hashed_blocks=self._hashed_blocks,
            admitted=admitted,
        )

    def _diffs(self, starts: Int32Array) -> CachedRequestData:
        """Return the changes of tables; and the tokens that rows computed from `starts` [R] on, for ranks without."""
        diffs = _NO_DIFFS
        if self._changes[0]:
            numbers = np.array(self._changes, dtype=np.int32)
            diffs = CachedRequestData(rows=numbers[0], block_ids=numbers[1], groups=numbers[2], columns=numbers[3])
        if not self._sends_tokens:
            return diffs
        is_single = self.counts == 1  # includes all decoding rows
        rows, positions = self.rows[is_single], starts[: len(self.rows)][is_single]
        return replace(
            diffs,
            token_rows=rows.astype(np.int32),
            token_positions=positions,
            token_ids=self._running.tokens[rows, positions],
        )

    def _new_request_data(self, request: Request) -> NewRequestData:
        row = request.row
        assert row is not None
        data = NewRequestData(
            request_id=request.request_id,
            row=row,
            token_ids=request.token_ids,
            num_prompt_tokens=request.num_prompt_tokens,
            sampling_params=request.message.sampling_params,
            pooling=request.message.pooling,
            eos_token_ids=request.message.eos_token_ids,
            bad_words_token_ids=request.message.bad_words_token_ids,
            block_ids=[list(tables[row]) for tables in self._running.block_ids],
            num_computed_tokens=int(self._running.num_computed[row]),
            extra_inputs=request.extra_inputs,
        )
        for on_admit in self._hooks.on_admit:
            data = on_admit(request, data)
        return data

    def _hash_prompt_blocks(self, row: int, count: int) -> None:
        """Make the blocks that a chunk of `count` tokens fills findable."""
        num_tokens = min(int(self._running.num_computed[row]) + count, int(self._running.num_known[row]))
        self._hashed_blocks += self._running.hash_blocks(row, num_tokens)
