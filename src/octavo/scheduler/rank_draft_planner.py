"""How many drafts of a draft model each row gets. Unlike proposals of a host, they cost passes of that model.

Acceptance is only known of drafts that were verified. So a row begins with the mean of all rows, and an engine that has
stopped drafting tries again at times, at growing intervals.

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
_FIRST_WAIT, _LONGEST_WAIT = 16, 256  # steps without drafts before a trial


class RankDraftPlanner(DraftPlanner):
    """`passes` has the measured times of the draft model, by tokens of a pass."""

    def __init__(self, running: RunningRows, costs: StepCosts, passes: StepCosts) -> None:
        super().__init__(running, costs)
        self._passes = passes
        self._generations = np.full(len(running.requests), -1, dtype=np.int64)
        self._mean = _FIRST_MEAN
        self._num_idle, self._wait = 0, _FIRST_WAIT

    def observe(self, rows: Sequence[int], proposals: Sequence[Sequence[int]]) -> None:
        """Begin anew with requests that are new in their rows."""
        at = np.array(rows, dtype=np.intp)
        new = at[self._generations[at] != self._running.generation[at]]
        self._generations[new] = self._running.generation[new]
        self._num_right[new] = self._num_guesses[new] = 0.0

    def learn(self, row: int, num_drafts: int, num_accepted: int) -> None:
        """Count a row's verified drafts: the accepted ones, and the first that was not."""
        for index in range(min(num_drafts, num_accepted + 1)):
            is_right = float(index < num_accepted)
            self._num_right[row] = _FORGET * self._num_right[row] + is_right
            self._num_guesses[row] = _FORGET * self._num_guesses[row] + 1.0
            self._mean += (1.0 - _FORGET) * (is_right - self._mean) / _PRIOR_DRAFTS

    def acceptance(self, rows: RowIndices) -> Float64Array:
        """See `DraftPlanner.acceptance`."""
        right, guesses = self._num_right[rows], self._num_guesses[rows]
        rates: Float64Array = (right + _PRIOR_DRAFTS * self._mean) / (guesses + _PRIOR_DRAFTS)
        return rates

    def plan(self, rows: RowIndices, lengths: Int32Array, num_tokens: int, num_sampling: int) -> Int32Array:
        """See `DraftPlanner.plan`."""
        chosen = super().plan(rows, lengths, num_tokens, num_sampling)
        if chosen.any():
            self._num_idle, self._wait = 0, _FIRST_WAIT
            return chosen
        self._num_idle += 1
        if self._num_idle < self._wait:
            return chosen
        self._num_idle, self._wait = 0, min(2 * self._wait, _LONGEST_WAIT)
        hoped_for = np.full(len(rows), _HOPED_FOR)
        return np.minimum(self.best_for(hoped_for, lengths, num_tokens, num_sampling), 1)

    def _drafting_seconds(self, best_first: NDArray[np.intp], num_offsets: int) -> Float64Array | None:
        """Return what the passes cost that draw the first 0 ... C drafts [C + 1] of a list [C]; None: not known yet.

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
