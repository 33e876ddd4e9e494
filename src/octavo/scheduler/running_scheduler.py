"""What the running rows compute in the next step: which rows, how many tokens each, and which blocks they need.

Legend: R = rows in the step.
"""

from dataclasses import dataclass

import numpy as np

from octavo.contracts.schedule import Int32Array
from octavo.scheduler.block_manager import BlockManager
from octavo.scheduler.budget import split_budget
from octavo.scheduler.running import RowIndices, RunningRows

# Rows whose blocks of a KV group cannot hold what they would compute: group, rows, missing blocks of each row.
ShortRows = tuple[int, list[int], list[int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningTokens:
    """The running rows' part of a step."""

    rows: RowIndices  # [R]
    counts: Int32Array  # [R] tokens, each at least 1
    short: list[ShortRows]  # no entry for a group with enough blocks


class RunningScheduler:
    """Owned by the scheduler. With several batches in flight, it spreads the rows over them, so that none is empty.

    In a pipeline only the last stage samples, so a row whose last token is in flight pauses until its value is known:
    the first stage needs it. If one batch took all ready rows, the others would be empty, so each takes at most its
    share of the decoding rows. Chunks of a prompt do not wait; they may follow one another immediately.
    """

    def __init__(
        self, running: RunningRows, blocks: BlockManager, num_batches: int, *, has_drafts: bool = False
    ) -> None:
        self._running, self._blocks, self._num_batches = running, blocks, num_batches
        self._has_drafts = has_drafts

    @property
    def sends_tokens(self) -> bool:
        """True if some ranks learn the sampled tokens only from the next scheduler output."""
        return self._num_batches > 1

    def next(self, budget: int) -> RunningTokens:
        """Return what running rows would compute in a step of at most `budget` tokens scheduled now."""
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
                size = self._blocks.block_sizes[group]
                num_missing = [-(-num_tokens // size) for num_tokens in num_over[at].tolist()]
                short.append((group, rows[at].tolist(), num_missing))
        return RunningTokens(rows=rows, counts=counts, short=short)

    def _wanted(self, rows: RowIndices) -> Int32Array:
        """Return how many tokens each of `rows` [R] would compute with an unlimited budget."""
        running = self._running
        if self._has_drafts:  # every row waits for its last token: drafts are proposed from it
            num_known = np.maximum(running.num_known[rows], running.num_computed[rows])  # drafts are not known yet
        elif self._num_batches == 1:
            # A row under a grammar waits for its last token: the next mask depends on it.
            num_ahead = np.where(running.is_constrained[rows], 0, running.num_in_flight[rows])
            num_known = running.num_known[rows] + num_ahead
        else:
            num_known = running.num_known[rows]
        # The last token of a request is never computed: nothing is sampled from it.
        wanted = np.minimum(num_known, running.limit[rows] - 1) - running.num_computed[rows]
        return wanted if self._num_batches == 1 else self._balanced(wanted)

    def _balanced(self, wanted: Int32Array) -> Int32Array:
        """Leave single-token rows beyond this batch's share to the other batches."""
        max_single = -(-len(wanted) // self._num_batches)
        is_single = wanted == 1
        wanted[is_single & (np.cumsum(is_single) > max_single)] = 0
        return wanted
