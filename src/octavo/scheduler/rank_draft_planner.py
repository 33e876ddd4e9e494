"""How many drafts of a draft model each row gets. Unlike drafts proposed on the host, they cost passes of that model.

Acceptance is only known for verified drafts. So a row starts with the mean of all rows, and a row that no longer gets
drafts is tried again from time to time, at growing intervals. Only one row is tried per step, as the draft model has to
catch up with it first.

Legend: P = rows that may have drafts, K = maximum drafts of a row, C = drafts that are considered.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.contracts.schedule import Int32Array
from octavo.scheduler.draft_planner import DraftPlanner, Float64Array
from octavo.scheduler.running import RowIndices, RunningRows
from octavo.scheduler.step_costs import StepCosts

_FORGET = 0.95  # weight of the past in acceptance, per draft
_PRIOR_DRAFTS = 4.0  # that the mean of all rows counts for in a row's acceptance
_FIRST_MEAN = 0.7  # acceptance before any draft was verified
_HOPED_FOR = 0.9  # acceptance for which a trial is made
_FIRST_WAIT, _LONGEST_WAIT = 16, 256  # steps of a row without drafts before a trial ...
_TRIAL_DRAFTS = 2  # ... of so many


class RankDraftPlanner(DraftPlanner):
    """`passes` has the measured times of the draft model, by tokens of a pass."""

    def __init__(self, running: RunningRows, costs: StepCosts, passes: StepCosts) -> None:
        super().__init__(running, costs)
        self._passes = passes
        self._num_accepted = np.zeros(len(running.requests))  # by row, of those that could tell: `_num_told`
        self._num_told = np.zeros(len(running.requests))
        self._mean = _FIRST_MEAN
        self._num_idle = np.zeros(len(running.requests), dtype=np.int64)  # steps of a row since its last drafts
        self._waits = np.full(len(running.requests), _FIRST_WAIT)  # how many of them before a trial

    def observe(self, rows: Sequence[int], proposals: Sequence[Sequence[int]]) -> None:
        """Reset rows that have a new request."""
        at = np.array(rows, dtype=np.intp)
        new = at[self._generations[at] != self._running.generation[at]]
        self._generations[new] = self._running.generation[new]
        self._num_accepted[new] = self._num_told[new] = 0.0
        self._num_idle[new], self._waits[new] = 0, _FIRST_WAIT

    def learn(self, row: int, num_drafts: int, num_accepted: int) -> None:
        """Count a row's verified drafts: the accepted ones, and the first that was not."""
        for index in range(min(num_drafts, num_accepted + 1)):
            is_right = float(index < num_accepted)
            self._num_accepted[row] = _FORGET * self._num_accepted[row] + is_right
            self._num_told[row] = _FORGET * self._num_told[row] + 1.0
            self._mean += (1.0 - _FORGET) * (is_right - self._mean) / _PRIOR_DRAFTS
        if num_accepted == num_drafts:
            self._waits[row] = _FIRST_WAIT

    def acceptance(self, rows: RowIndices, num_drafts: int) -> Float64Array:
        """See `DraftPlanner.acceptance`. Every draft of a row is as likely as the one before it."""
        accepted, told = self._num_accepted[rows], self._num_told[rows]
        return _powers((accepted + _PRIOR_DRAFTS * self._mean) / (told + _PRIOR_DRAFTS), num_drafts)

    def plan(self, rows: RowIndices, lengths: Int32Array, num_tokens: int, num_sampling: int) -> Int32Array:
        """See `DraftPlanner.plan`."""
        chosen = super().plan(rows, lengths, num_tokens, num_sampling)
        self._num_idle[rows] = np.where(chosen > 0, 0, self._num_idle[rows] + 1)
        overdue = self._num_idle[rows] - self._waits[rows]  # [P]
        if overdue.max() >= 0:
            self._try_again(rows, int(overdue.argmax()), chosen, lengths, num_tokens, num_sampling)
        return chosen

    def _try_again(
        self, rows: RowIndices, at: int, chosen: Int32Array, lengths: Int32Array, num_tokens: int, num_sampling: int
    ) -> None:
        """Give the row `rows[at]` a few drafts, unless they could not pay off even if most were accepted."""
        row = rows[at]
        self._num_idle[row], self._waits[row] = 0, min(2 * self._waits[row], _LONGEST_WAIT)
        hopes = _powers(np.full(len(rows), _HOPED_FOR), int(lengths.max()))
        hoped_for = self.best_for(hopes, lengths, num_tokens, num_sampling)
        chosen[at] = min(int(hoped_for[at]), _TRIAL_DRAFTS)

    def _drafting_seconds(self, best_first: NDArray[np.intp], num_offsets: int) -> Float64Array | None:
        """Return the cost [C + 1] of the passes that draw the first 0 ... C drafts of a list [C]; None: not known yet.

        Draft number j of each row is drawn in pass j.
        """
        columns = best_first % num_offsets  # [C]
        size_of_pass = np.zeros(num_offsets, dtype=np.int64)
        before = np.empty(len(columns), dtype=np.int64)  # [C] tokens of its pass before each draft
        for index, column in enumerate(columns.tolist()):
            before[index] = size_of_pass[column]
            size_of_pass[column] += 1
        costs = self._passes.seconds(np.arange(1, int(size_of_pass.max()) + 1))
        if costs is None:
            return None
        by_size = np.concatenate(([0.0], costs))
        return np.concatenate(([0.0], np.cumsum(by_size[before + 1] - by_size[before])))


def _powers(rates: Float64Array, count: int) -> Float64Array:
    """Return a, a^2, ... for each of some rates a [P, K]."""
    powers: Float64Array = rates[:, None] ** np.arange(1, count + 1)
    return powers
