"""How far the draft model has computed each row's context, and which blocks have its keys and values.

It may lag behind, or have computed rejected drafts.

Legend: N = rows, B = most blocks of a request, R = requests in the step.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from octavo.contracts.schedule import CachedRequestData, Int32Array, NewRequestData, SchedulerOutput


class DraftProgress:
    """By row, positions [0, num_computed) have the draft model's keys and values.

    Blocks keep them after their request has ended, for prefix hits. Where a hit finds blocks that the draft model has
    not computed, it starts there.
    """

    def __init__(
        self, num_rows: int, max_blocks: int, num_blocks: int, *, block_size: int, group: int, max_len: int
    ) -> None:
        """Of blocks of KV group `group`; contexts are computed up to `max_len`. The last block is the null block."""
        self.tables = np.zeros((num_rows, max_blocks), dtype=np.int32)  # [N, B] of `group`
        self.base = np.zeros(num_rows, dtype=np.int32)  # [N] where `tables` begin, the start of a block
        self.num_computed = np.zeros(num_rows, dtype=np.int32)  # [N]
        self.is_followed = np.zeros(num_rows, dtype=np.bool_)  # [N] prompts are computed with the step's
        self._num_known = np.zeros(num_rows, dtype=np.int32)  # [N] tokens before the last step's drafts
        self._is_filled = np.zeros(num_blocks + 1, dtype=np.bool_)  # by block; the last is the null block
        self._is_filled[-1] = True
        self._block_size, self._group, self._max_len = block_size, group, max_len
        self._row_of: dict[str, int] = {}

    def apply(self, scheduler_output: SchedulerOutput, num_known: Int32Array) -> NDArray[np.intp]:
        """Apply the changes of a step whose rows have `num_known` [R] tokens before drafts.

        Return which requests [.] of the step, as indices in R, have prompts that the draft model must compute.
        """
        for request_id in scheduler_output.finished_req_ids:
            row = self._row_of.pop(request_id, None)
            if row is not None:
                self._leave(row)
        changed = scheduler_output.scheduled_cached_reqs
        if len(changed.rows):
            self._change_tables(changed)
        rows, starts = scheduler_output.rows, scheduler_output.num_computed_tokens
        self._num_known[rows] = num_known
        self.num_computed[rows] = np.minimum(self.num_computed[rows], starts)
        new = {request.request_id: request for request in scheduler_output.scheduled_new_reqs}
        chunks = (num_known - starts > 1).nonzero()[0]
        for index in chunks.tolist():  # in order: a request may share blocks that one before it computes in this step
            row = int(rows[index])
            if request := new.pop(scheduler_output.req_ids[index], None):
                self._enter(request)
            if self.is_followed[row]:
                self._mark(row, min(int(num_known[index]), self._max_len))
        for request in new.values():
            self._enter(request)
        followed: NDArray[np.intp] = chunks[self.is_followed[rows[chunks]]]
        return followed

    def forget_blocks(self, groups: Sequence[int], block_ids: Sequence[int]) -> None:
        """Take these blocks, each of a KV group, as not computed."""
        self._forget([block for group, block in zip(groups, block_ids, strict=True) if group == self._group])

    def _forget(self, block_ids: list[int]) -> None:
        self._is_filled[block_ids] = False

    def can_draft(self, rows: Int32Array, num_known: Int32Array) -> NDArray[np.bool_]:
        """Return in which rows [R] of `num_known` [R] tokens the draft model has all it needs for the first draft."""
        return np.ones(len(rows), dtype=np.bool_)

    def _change_tables(self, changed: CachedRequestData) -> None:
        at = changed.groups == self._group
        rows, columns, block_ids = changed.rows[at], changed.columns[at], changed.block_ids[at]
        is_freed = block_ids == len(self._is_filled) - 1  # behind a window, by the null block in its place
        ends = (columns[is_freed] + 1) * self._block_size
        is_filled = ends <= np.minimum(self.num_computed, self._num_known)[rows[is_freed]]
        self._is_filled[self.tables[rows[is_freed], columns[is_freed]]] = is_filled
        self._is_filled[block_ids[~is_freed]] = False
        self.tables[rows, columns] = block_ids

    def _enter(self, request: NewRequestData) -> None:
        row, block_ids = request.row, request.block_ids[self._group]
        num_cached = request.num_computed_tokens
        self._row_of[request.request_id] = row
        self.is_followed[row] = request.params.speculative
        self.tables[row, : len(block_ids)] = block_ids
        self._is_filled[block_ids[-(-num_cached // self._block_size) :]] = False
        is_filled = self._is_filled[block_ids[: -(-num_cached // self._block_size)]]
        num_filled = len(is_filled) if is_filled.all() else int(is_filled.argmin())
        self.num_computed[row] = min(num_cached, num_filled * self._block_size)

    def _leave(self, row: int) -> None:
        self._mark(row, int(min(self.num_computed[row], self._num_known[row])))
        self.num_computed[row] = self._num_known[row] = 0

    def _mark(self, row: int, end: int) -> None:
        """Record that a row's full blocks before position `end` are, or will be after this step, computed."""
        self._is_filled[self.tables[row, : end // self._block_size]] = True


OWN_BLOCKS = 2  # of a row, for copies: of the last block of a hit, and of one where requests before it parted
_NOTHING = -1


class BlockCopy(NamedTuple):
    """A row's own copy of a cached block, and the position whose entry must be recomputed."""

    row: int
    source: int
    target: int
    position: int


class EagleProgress(DraftProgress):
    """That of a head: positions [base, num_computed) have its keys and values, [base, num_available) states.

    Entry p of a row is token p + 1 and the model's hidden state of position p; its key and value are in the slot of
    position p and depend on nothing else. So the last entry of a block depends on a token that the block's hash does
    not cover: a prefix hit may continue with a different token. Then the row gets its own copy of that block, and the
    entry is recomputed from the state that is stored for the last position of every block. A hit on blocks without
    entries, or on many that continue differently, is a miss: the head's context begins after them.
    """

    def __init__(self, num_rows: int, max_blocks: int, num_blocks: int, **limits: int) -> None:
        """`num_blocks` include the null block. Blocks of the rows' own come after them."""
        super().__init__(num_rows, max_blocks, num_blocks, **limits)
        self.num_available = np.zeros(num_rows, dtype=np.int32)  # [N]
        num_ids = num_blocks + OWN_BLOCKS * num_rows
        self._next_token = np.full(num_ids, _NOTHING, dtype=np.int32)  # after each block that is computed
        self._num_blocks = num_blocks
        self._hits: dict[int, int] = {}  # by row, cached tokens, until the step ends that adds the row

    def apply(self, scheduler_output: SchedulerOutput, num_known: Int32Array) -> NDArray[np.intp]:
        """Also take back states of rejected drafts. No prompts are followed: their states come with the step's end."""
        rows = scheduler_output.rows
        self.num_available[rows] = np.minimum(self.num_available[rows], scheduler_output.num_computed_tokens)
        return super().apply(scheduler_output, num_known)

    def _leave(self, row: int) -> None:
        self._hits.pop(row, None)

    def _change_tables(self, changed: CachedRequestData) -> None:
        at = (changed.groups == self._group) & (changed.columns * self._block_size >= self.base[changed.rows])
        rows, block_ids = changed.rows[at], changed.block_ids[at]
        self._next_token[block_ids] = _NOTHING
        self.tables[rows, changed.columns[at] - self.base[rows] // self._block_size] = block_ids

    def _enter(self, request: NewRequestData) -> None:
        row, block_ids, num_cached = request.row, request.block_ids[self._group], request.num_computed_tokens
        self._row_of[request.request_id] = row
        self.tables[row, : len(block_ids)] = block_ids
        self._next_token[block_ids[num_cached // self._block_size :]] = _NOTHING
        self.base[row] = 0
        self.num_computed[row] = self.num_available[row] = num_cached
        self._hits.pop(row, None)
        if num_cached:
            self._hits[row] = num_cached

    def _forget(self, block_ids: list[int]) -> None:
        self._next_token[block_ids] = _NOTHING

    def skip_gaps(self, rows: Int32Array, starts: Int32Array) -> None:
        """Restart at the next block in rows whose states before `starts` [R] are unknown, as after a failed step."""
        is_behind = (starts > self.num_available[rows]) & (starts < self._max_len)
        for at in is_behind.nonzero()[0].tolist():
            self._begin_at(int(rows[at]), -(-int(starts[at]) // self._block_size))

    def take_complete(self, rows: Int32Array, ends: Int32Array, token_ids: Int32Array) -> NDArray[np.intp]:
        """Return which rows [R] have new complete blocks before positions `ends` [R], which are to be computed now.

        Blocks are recorded as computed.
        """
        size = self._block_size
        firsts, lasts = self.num_computed[rows] // size, ends // size
        due: NDArray[np.intp] = (lasts > firsts).nonzero()[0]
        for row, first, last in zip(rows[due].tolist(), firsts[due].tolist(), lasts[due].tolist(), strict=True):
            blocks = self._blocks(row, first, last)
            self._next_token[blocks] = token_ids[row, (first + 1) * size : last * size + 1 : size]
        return due

    def check_hits(self, token_ids: Int32Array) -> list[BlockCopy]:
        """Check the cached blocks of rows that this step has added; return the copies to make."""
        copies: list[BlockCopy] = []
        for row, num_cached in self._hits.items():
            size, num_blocks = self._block_size, num_cached // self._block_size
            blocks = self._blocks(row, 0, num_blocks)
            found, is_next = self._next_token[blocks], token_ids[row, size : num_cached + 1 : size]
            others = (found != is_next).nonzero()[0]
            empty = (found == _NOTHING).nonzero()[0]
            begin = max([0, *(empty[-1:] + 1).tolist(), *(others[:-OWN_BLOCKS][-1:] + 1).tolist()])
            for number, column in enumerate(others[others >= begin].tolist()):
                target = self._num_blocks + OWN_BLOCKS * row + number
                copies.append(BlockCopy(row, int(blocks[column]), target, (column + 1) * size - 1))
                self.tables[row, column] = target
            self._begin_at(row, begin)
        self._hits.clear()
        return copies

    def _blocks(self, row: int, first: int, last: int) -> Int32Array:
        """Return a row's blocks in columns [first, last) of its context."""
        skipped = int(self.base[row]) // self._block_size
        return self.tables[row, first - skipped : last - skipped]

    def _begin_at(self, row: int, column: int) -> None:
        """Leave out what is before a column of a row's context."""
        skipped = column - int(self.base[row]) // self._block_size
        if skipped > 0:
            self.tables[row, :-skipped] = self.tables[row, skipped:].copy()
        position = column * self._block_size
        self.base[row] = position
        self.num_computed[row] = max(int(self.num_computed[row]), position)
        self.num_available[row] = max(int(self.num_available[row]), position)

    def can_draft(self, rows: Int32Array, num_known: Int32Array) -> NDArray[np.bool_]:
        """Return in which rows [R] of `num_known` [R] tokens the head has all it needs for the first draft."""
        is_known: NDArray[np.bool_] = (self.num_available[rows] >= num_known - 1) & (self.base[rows] < num_known - 1)
        return is_known
