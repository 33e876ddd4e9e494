"""How many drafts each row gets: as many as are expected to pay for themselves.

A step that verifies c drafts more takes longer by T(n + c) - T(n), as measured (`step_costs`), and yields more tokens:
a row's j-th draft is accepted with probability a^j, where a is the row's own rate of acceptance so far. Drafts enter in
order of this probability while they raise the number of tokens per second of the whole step.

Legend: P = rows with proposals, K = maximum drafts of a row.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.contracts.schedule import Int32Array
from octavo.scheduler.running import RowIndices, RunningRows
from octavo.scheduler.step_costs import StepCosts

Float64Array = NDArray[np.float64]

_FORGET = 0.85  # weight of a row's past in its acceptance, per guess
_DOUBT = 2.0  # wrong guesses that a new row begins with: drafts follow right guesses, which cost nothing to see
_MIN_GAIN = 1.02  # of tokens per second; less is within the noise of measured times


class DraftPlanner:
    """Owned by `Speculation`. Proposals that were not verified count, too: the next token shows if they were right.

    So a row is judged without computing its drafts, and gets some as soon as its text begins to repeat.
    """

    def __init__(self, running: RunningRows, costs: StepCosts) -> None:
        self._running, self._costs = running, costs
        num_rows = len(running.requests)
        self._num_right, self._num_guesses = np.zeros(num_rows), np.full(num_rows, _DOUBT)
        self._open: dict[int, tuple[int, int, Sequence[int]]] = {}  # by row: generation, known tokens, proposal

    def observe(self, rows: Sequence[int], proposals: Sequence[Sequence[int]]) -> None:
        """Judge the previous proposals of these rows by the tokens that came, and store the new ones."""
        running = self._running
        for row, proposal in zip(rows, proposals, strict=True):
            generation, num_known = int(running.generation[row]), int(running.num_known[row])
            before = self._open.pop(row, None)
            if before is None or before[0] != generation:
                self._num_right[row], self._num_guesses[row] = 0.0, _DOUBT
            else:
                self._judge(row, before[2], running.tokens[row, before[1] : num_known].tolist())
            if proposal:
                self._open[row] = generation, num_known, proposal

    def _judge(self, row: int, proposal: Sequence[int], tokens: Sequence[int]) -> None:
        for guess, token in zip(proposal, tokens, strict=False):
            is_right = float(guess == token)
            self._num_right[row] = _FORGET * self._num_right[row] + is_right
            self._num_guesses[row] = _FORGET * self._num_guesses[row] + 1.0
            if not is_right:
                break

    def acceptance(self, rows: RowIndices) -> Float64Array:
        """Return the expected probability that a row's next guess is right [P]."""
        rates: Float64Array = self._num_right[rows] / self._num_guesses[rows]
        return rates

    def plan(self, rows: RowIndices, lengths: Int32Array, num_tokens: int, num_sampling: int) -> Int32Array:
        """Return how many of its proposed `lengths` [P] drafts each row gets [P].

        Without drafts, the step computes `num_tokens` tokens and yields `num_sampling`.
        """
        return self.best_for(self.acceptance(rows), lengths, num_tokens, num_sampling)

    def learn(self, row: int, num_drafts: int, num_accepted: int) -> None:
        """Record how many of a row's verified drafts were accepted. Ignored here: `observe` learns more."""

    def best_for(self, acceptance: Float64Array, lengths: Int32Array, num_tokens: int, num_sampling: int) -> Int32Array:
        """Do the same for rows with this acceptance [P]."""
        if acceptance[lengths > 0].sum() < (_MIN_GAIN - 1.0) * num_sampling:
            return np.zeros_like(lengths)
        offsets = np.arange(1, int(lengths.max()) + 1)
        probabilities = acceptance[:, None] ** offsets  # [P, K]
        probabilities[offsets > lengths[:, None]] = 0.0
        best_first = np.argsort(-probabilities, axis=None, kind="stable")[: int(lengths.sum())]
        seconds = self._costs.seconds(num_tokens + np.arange(len(best_first) + 1))
        drafting_seconds = self._drafting_seconds(best_first, len(offsets))
        if seconds is None or drafting_seconds is None:
            return lengths
        num_yielded = num_sampling + np.concatenate(([0.0], np.cumsum(probabilities.ravel()[best_first])))
        rates = num_yielded / (seconds + drafting_seconds)
        best = int(rates.argmax())
        if rates[best] < _MIN_GAIN * rates[0]:
            best = 0
        chosen: Int32Array = np.bincount(best_first[:best] // len(offsets), minlength=len(lengths)).astype(np.int32)
        return chosen

    def _drafting_seconds(self, best_first: NDArray[np.intp], num_offsets: int) -> Float64Array | None:
        """Return the cost of proposing the first 0 ... C drafts of a list [C]: [C + 1]; here zero."""
        return np.zeros(len(best_first) + 1)
