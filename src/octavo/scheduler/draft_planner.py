"""How many drafts each row gets: as many as are expected to pay for themselves.

A step that verifies c drafts more takes longer by T(n + c) - T(n), as measured (`step_costs`), and yields more tokens:
a row's j-th draft is accepted with probability b * a^(j - 1). Where text is being copied, a guess behind a right one is
mostly right, too; elsewhere it is mostly wrong. So a row has two rates: a, of guesses behind right ones, and b, which
is a if its last guess was right, or else the rate of guesses behind wrong ones. Drafts enter in order of probability
while they raise the number of tokens per second of the whole step.

Legend: P = rows with proposals, K = maximum drafts of a row.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.contracts.schedule import Int32Array
from octavo.scheduler.running import RowIndices, RunningRows
from octavo.scheduler.step_costs import StepCosts

Float64Array = NDArray[np.float64]

_FORGET = 0.85  # weight of a row's past in a rate, per guess
_DOUBT = 2.0  # guesses that each rate of a new row begins with ...
_FIRST_RIGHT = (0.0, 0.6)  # ... and how many of them were right, behind wrong guesses and behind right ones
_MIN_GAIN = 1.02  # of tokens per second; less is within the noise of measured times


class DraftPlanner:
    """Owned by `Speculation`. Proposals that were not verified count, too: the next token shows if they were right.

    So a row is judged without computing its drafts, and gets some as soon as its text begins to repeat: a new row's
    first guesses are doubted, since to see whether they are right costs nothing.
    """

    def __init__(self, running: RunningRows, costs: StepCosts) -> None:
        self._running, self._costs = running, costs
        num_rows = len(running.requests)
        self._generations = np.full(num_rows, -1, dtype=np.int64)  # of the requests that the rates are of
        self._num_right, self._num_guesses = np.zeros((num_rows, 2)), np.zeros((num_rows, 2))  # behind wrong, right
        self._was_right = np.zeros(num_rows, dtype=np.intp)  # the last guess
        self._open: dict[int, tuple[int, Sequence[int]]] = {}  # by row: known tokens, proposal

    def observe(self, rows: Sequence[int], proposals: Sequence[Sequence[int]]) -> None:
        """Judge the previous proposals of these rows by the tokens that came, and store the new ones."""
        running = self._running
        for row, proposal in zip(rows, proposals, strict=True):
            num_known, before = int(running.num_known[row]), self._open.pop(row, None)
            if self._generations[row] != running.generation[row]:
                self._begin(row)
            elif before is not None:
                self._judge(row, before[1], running.tokens[row, before[0] : num_known].tolist())
            else:
                self._was_right[row] = False
            if proposal:
                self._open[row] = num_known, proposal

    def _begin(self, row: int) -> None:
        self._generations[row] = self._running.generation[row]
        self._num_right[row], self._num_guesses[row], self._was_right[row] = _FIRST_RIGHT, _DOUBT, False

    def _judge(self, row: int, proposal: Sequence[int], tokens: Sequence[int]) -> None:
        for guess, token in zip(proposal, tokens, strict=False):
            at, is_right = (row, self._was_right[row]), guess == token
            self._num_right[at] = _FORGET * self._num_right[at] + is_right
            self._num_guesses[at] = _FORGET * self._num_guesses[at] + 1.0
            self._was_right[row] = is_right
            if not is_right:
                break

    def acceptance(self, rows: RowIndices, num_drafts: int) -> Float64Array:
        """Return the expected probabilities that each of a row's next guesses is accepted, never rising [P, K]."""
        rates = self._num_right[rows] / self._num_guesses[rows]  # [P, 2]
        first, later = rates[np.arange(len(rows)), self._was_right[rows]], rates[:, 1]
        probabilities: Float64Array = first[:, None] * later[:, None] ** np.arange(num_drafts)
        return probabilities

    def plan(self, rows: RowIndices, lengths: Int32Array, num_tokens: int, num_sampling: int) -> Int32Array:
        """Return how many of its proposed `lengths` [P] drafts each row gets [P].

        Without drafts, the step computes `num_tokens` tokens and yields `num_sampling`.
        """
        return self.best_for(self.acceptance(rows, int(lengths.max())), lengths, num_tokens, num_sampling)

    def learn(self, row: int, num_drafts: int, num_accepted: int) -> None:
        """Record how many of a row's verified drafts were accepted. Ignored here: `observe` learns more."""

    def best_for(
        self, probabilities: Float64Array, lengths: Int32Array, num_tokens: int, num_sampling: int
    ) -> Int32Array:
        """Do so for drafts that are accepted with these probabilities [P, K], K = the largest length."""
        offsets = np.arange(1, probabilities.shape[1] + 1)
        probabilities = np.where(offsets > lengths[:, None], 0.0, probabilities)
        if probabilities.sum() < (_MIN_GAIN - 1.0) * num_sampling:
            return np.zeros_like(lengths)
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
