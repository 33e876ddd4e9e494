"""How far the draft model has computed each row's context. It may lag behind, or have computed rejected drafts.

Legend: N = rows, B = most blocks of a request, R = requests in the step.
"""

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
        """Of blocks of KV group `group`; contexts are computed up to `max_len`."""
        self.num_computed = np.zeros(num_rows, dtype=np.int32)  # [N]
        self.is_followed = np.zeros(num_rows, dtype=np.bool_)  # [N] the request takes drafts
        self._num_known = np.zeros(num_rows, dtype=np.int32)  # [N] tokens before the last step's drafts
        self._tables = np.zeros((num_rows, max_blocks), dtype=np.int32)  # [N, B] of `group`
        self._is_filled = np.zeros(num_blocks + 1, dtype=np.bool_)  # by block; the last is the null block
        self._is_filled[-1] = True
        self._block_size, self._group, self._max_len = block_size, group, max_len
        self._row_of: dict[str, int] = {}

    def apply(self, scheduler_output: SchedulerOutput, num_known: Int32Array) -> NDArray[np.intp]:
        """Apply the changes of a step whose rows have `num_known` [R] tokens before drafts.

        Return which requests [.] of the step, as indices in R, have prompts that the draft model must compute.
        """
        for request_id in scheduler_output.finished_req_ids:
            self._leave(request_id)
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

    def _change_tables(self, changed: CachedRequestData) -> None:
        at = changed.groups == self._group
        rows, columns, block_ids = changed.rows[at], changed.columns[at], changed.block_ids[at]
        is_freed = block_ids == len(self._is_filled) - 1  # behind a window, by the null block in its place
        ends = (columns[is_freed] + 1) * self._block_size
        is_filled = ends <= np.minimum(self.num_computed, self._num_known)[rows[is_freed]]
        self._is_filled[self._tables[rows[is_freed], columns[is_freed]]] = is_filled
        self._is_filled[block_ids[~is_freed]] = False
        self._tables[rows, columns] = block_ids

    def _enter(self, request: NewRequestData) -> None:
        row, block_ids = request.row, request.block_ids[self._group]
        num_cached = request.num_computed_tokens
        self._row_of[request.request_id] = row
        self.is_followed[row] = request.sampling_params.speculative
        self._tables[row, : len(block_ids)] = block_ids
        self._is_filled[block_ids[-(-num_cached // self._block_size) :]] = False
        is_filled = self._is_filled[block_ids[: -(-num_cached // self._block_size)]]
        num_filled = len(is_filled) if is_filled.all() else int(is_filled.argmin())
        self.num_computed[row] = min(num_cached, num_filled * self._block_size)

    def _leave(self, request_id: str) -> None:
        row = self._row_of.pop(request_id, None)
        if row is not None:
            self._mark(row, int(min(self.num_computed[row], self._num_known[row])))
            self.num_computed[row] = self._num_known[row] = 0

    def _mark(self, row: int, end: int) -> None:
        """Record that a row's full blocks before position `end` are, or will be after this step, computed."""
        self._is_filled[self._tables[row, : end // self._block_size]] = True
