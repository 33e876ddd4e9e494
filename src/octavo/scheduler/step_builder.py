"""The step being built: what running and admitted requests compute, and the resulting scheduler output."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from octavo.contracts.engine import AdmittedRequest, VisionInput
from octavo.contracts.schedule import (
    BoolArray,
    CachedRequestData,
    Int32Array,
    NewRequestData,
    SchedulerOutput,
    SlotFill,
    SpecDecodeTokens,
    TokenMasks,
)
from octavo.scheduler.block_manager import BlockManager
from octavo.scheduler.request import Request
from octavo.scheduler.running import RowIndices, RunningRows
from octavo.scheduler.table_changes import TableChanges
from octavo.scheduler.trials import Trials

_NOTHING: Int32Array = np.zeros(0, dtype=np.int32)
_NO_DIFFS = CachedRequestData()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInFlight:
    """What is needed to process a step's output, even if rows have been reassigned since."""

    output: SchedulerOutput
    scheduled_s: float  # when it was built
    rows: RowIndices  # [R] `output.rows` as an index
    generations: NDArray[np.int64]  # [R] of each row when the step was built
    hashed_blocks: list[tuple[int, int]]  # (group, block): findable because this step, or an earlier one, fills them
    admitted: dict[str, AdmittedRequest]

    def requests(self, running: RunningRows) -> list[Request]:
        """Return the step's requests that are still in the same rows."""
        is_current = running.generation[self.rows] == self.generations
        return [running.request_at(row) for row in self.rows[is_current].tolist()]


class StepBuilder:
    """Created by the scheduler for every step; the scheduler decides, the builder does the bookkeeping.

    Blocks of a prompt are hashed as they are filled; those of an output when the request releases them.
    """

    def __init__(self, running: RunningRows, blocks: BlockManager, *, sends_tokens: bool) -> None:
        self.num_tokens = 0
        self._sends_tokens = sends_tokens
        self._running = running
        self._blocks = blocks
        self._rows = running.active
        self._req_ids: tuple[str, ...] = ()
        self._counts = _NOTHING
        self.table_changes = TableChanges()
        self._hashed_blocks: list[tuple[int, int]] = []
        self._admitted: list[Request] = []
        self._admitted_counts: list[int] = []
        self._trials: Trials | None = None

    def add_running(self, rows: RowIndices, counts: Int32Array) -> None:
        """Add running rows [R] with `counts` tokens each, for which they have blocks."""
        self._rows, self._req_ids, self._counts = rows, self._running.req_ids_of(rows), counts
        self.num_tokens += int(counts.sum())
        for index in (counts > 1).nonzero()[0].tolist():
            self._hash_prompt_blocks(int(rows[index]), int(counts[index]))

    def add_blocks(self, row: int, count: int, group: int) -> None:
        """Give a running row more blocks, next to its last one where possible."""
        table = self._running.block_ids[group][row]
        block_ids = self._blocks.pools[group].allocate(count, table[-1])
        self.table_changes.add(row, group, len(table), block_ids)
        table += block_ids
        self._running.slots_of_group[group][row] += count * self._blocks.block_sizes[group]

    def free_behind_windows(self, in_flight: Iterable[StepInFlight]) -> None:
        """Free the blocks that no row's next token can see, before new ones are allocated.

        Steps in flight may still read them: ranks compute steps in order, so these reads precede any later write. Their
        contents stay findable, as when a request ends.
        """
        running, blocks, rows = self._running, self._blocks, self._running.active
        # Not past what is known: a block is hashed when it is freed, and computed tokens may be rolled back.
        next_tokens = np.minimum(running.num_computed[rows], running.num_known[rows])
        for group in blocks.windowed:
            kind, null_block = blocks.groups[group], blocks.null_block(group)
            assert kind.sliding_window is not None
            first_seen = np.maximum(next_tokens - (kind.sliding_window - 1), 0)
            ends = first_seen // kind.tile * kind.tile // blocks.block_sizes[group]
            for index in (ends > running.num_freed[group, rows]).nonzero()[0].tolist():
                row, end, first = int(rows[index]), int(ends[index]), int(running.num_freed[group, rows[index]])
                hash_released(row, running, blocks, in_flight)
                blocks.free_blocks(running.free_columns(row, group, end, null_block), group)
                self.table_changes.add(row, group, first, [null_block] * (end - first))

    @property
    def unwritten_states(self) -> frozenset[tuple[int, int]]:
        """Blocks of recurrent groups, as (group, block), that are unwritten until this step.

        A step writes all keys and values before it reads any, but computes states one row at a time, in any order.
        """
        recurrent = self._blocks.recurrent
        return (
            frozenset(hashed for hashed in self._hashed_blocks if hashed[0] in recurrent) if recurrent else frozenset()
        )

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

    @property
    def running_part(self) -> tuple[RowIndices, Int32Array]:
        """The running rows [R] added so far, and the known tokens that each computes [R]."""
        return self._rows, self._counts

    def add_trials(self, trials: Trials) -> None:
        """Add drafts after the known tokens of running rows, which have blocks for them."""
        self._trials = trials
        self.num_tokens += len(trials.token_ids)

    def build(
        self,
        step: int,
        forgotten_req_ids: list[str],
        now_s: float,
        make_masks: Callable[[RowIndices, BoolArray, Trials | None], TokenMasks | None],
        encoder_inputs: list[VisionInput],
        freed_encoder_outputs: list[str],
        *,
        adapter_fills: tuple[SlotFill, ...],
    ) -> StepInFlight:
        """Finish the step: build the scheduler output, and count its tokens as computed.

        `make_masks` takes rows [R] and which of them sample [R], and returns their masks, also after each draft.
        """
        running = self._running
        new_requests = [self._new_request_data(request) for request in self._admitted]
        admitted = self._admissions(now_s)
        rows, req_ids, counts = self._all_rows()
        starts = running.num_computed[rows]
        ends = starts + counts
        samples = ends == running.num_known[rows] + running.num_in_flight[rows]
        running.num_computed[rows] = ends
        diffs = self._diffs()
        running.num_in_flight[rows] += samples
        drafts: SpecDecodeTokens | None = None
        if (trials := self._trials) is not None:
            drafts = trials.of_rows(len(rows))
            counts = counts + drafts.counts
            running.num_computed[rows] += drafts.counts
            running.num_in_flight[rows] += drafts.counts
        output = SchedulerOutput(
            step=step,
            req_ids=req_ids,
            rows=rows.astype(np.int32),
            num_computed_tokens=starts,
            num_scheduled_tokens=counts,
            samples=samples,
            total_num_scheduled_tokens=self.num_tokens,
            scheduled_new_reqs=new_requests,
            scheduled_cached_reqs=diffs,
            finished_req_ids=forgotten_req_ids,
            token_masks=make_masks(rows, samples, trials),
            scheduled_encoder_inputs=encoder_inputs,
            freed_encoder_outputs=freed_encoder_outputs,
            adapter_fills=adapter_fills,
            scheduled_spec_decode_tokens=drafts,
        )
        return StepInFlight(
            output=output,
            scheduled_s=now_s,
            rows=rows,
            generations=running.generation[rows],
            hashed_blocks=self._hashed_blocks,
            admitted=admitted,
        )

    def _all_rows(self) -> tuple[RowIndices, tuple[str, ...], Int32Array]:
        if not self._admitted:
            return self._rows, self._req_ids, self._counts
        rows = np.array([request.row for request in self._admitted], dtype=np.intp)
        req_ids = tuple(request.request_id for request in self._admitted)
        counts = np.array(self._admitted_counts, dtype=np.int32)
        return np.concatenate([self._rows, rows]), self._req_ids + req_ids, np.concatenate([self._counts, counts])

    def _diffs(self) -> CachedRequestData:
        diffs = self.table_changes.diffs() if self.table_changes else _NO_DIFFS
        if not self._sends_tokens:
            return diffs
        rows = self._rows[self._counts == 1]  # includes all decoding rows
        positions = self._running.num_computed[rows] - 1  # counts include this step
        return replace(
            diffs,
            token_rows=rows.astype(np.int32),
            token_positions=positions,
            token_ids=self._running.tokens[rows, positions],
        )

    def _new_request_data(self, request: Request) -> NewRequestData:
        row = request.row
        assert row is not None
        return NewRequestData(
            request_id=request.request_id,
            row=row,
            token_ids=request.token_ids,
            num_prompt_tokens=request.num_prompt_tokens,
            sampling_params=request.params,
            eos_token_ids=request.eos_token_ids,
            bad_words_token_ids=request.bad_words_token_ids,
            block_ids=[list(tables[row]) for tables in self._running.block_ids],
            num_computed_tokens=int(self._running.num_computed[row]),
            extra_inputs=request.extra_inputs,
            adapter_slot=request.adapter_slot,
        )

    def _admissions(self, now_s: float) -> dict[str, AdmittedRequest]:
        """Report requests that run for the first time, not those resumed after a preemption."""
        return {
            request.request_id: AdmittedRequest(
                scheduled_time_s=now_s, num_cached_tokens=int(self._running.num_computed[request.row])
            )
            for request in self._admitted
            if request.num_preemptions == 0
        }

    def _hash_prompt_blocks(self, row: int, count: int) -> None:
        """Make the blocks that a chunk of `count` tokens fills findable."""
        num_tokens = min(int(self._running.num_computed[row]) + count, int(self._running.num_known[row]))
        self._hashed_blocks += hash_full_blocks(row, num_tokens, self._running, self._blocks)


def hash_released(row: int, running: RunningRows, blocks: BlockManager, in_flight: Iterable[StepInFlight]) -> None:
    """Make the blocks that a row is about to free findable. Any step in flight may be the one that fills them."""
    num_tokens = min(running.num_computed[row], running.num_known[row])
    hashed_blocks = hash_full_blocks(row, int(num_tokens), running, blocks)
    for step in in_flight:
        step.hashed_blocks.extend(hashed_blocks)


def hash_full_blocks(row: int, num_tokens: int, running: RunningRows, blocks: BlockManager) -> list[tuple[int, int]]:
    """Hash the blocks that the first `num_tokens` tokens of a row fill; return those that became findable.

    All of these tokens are known: a token in flight never enters a hash.
    """
    start, end = int(running.num_hashed[row]), num_tokens - num_tokens % blocks.block_size
    if start >= end or not blocks.enable_prefix_caching:
        return []
    running.last_hash[row], hashed = blocks.hash_blocks(
        [tables[row] for tables in running.block_ids],
        running.last_hash[row],
        running.tokens[row, start:end],
        start,
        running.request_at(row).block_keys,
    )
    running.num_hashed[row] = end
    return hashed
