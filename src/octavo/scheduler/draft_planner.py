"""How many drafts each row gets: as many as are expected to pay for themselves.

A step that verifies c drafts more takes longer by T(n + c) - T(n), as measured (`StepCosts`), and yields more tokens.
How likely each of a row's drafts is accepted, `GuessRates` estimates for drafts from the host, which cost nothing to
propose, and `VerifiedRates` for those of a draft model, which cost passes of that model. Drafts enter in order of
probability while they raise the number of tokens per second of the whole step.

Legend: P = rows with proposals, K = maximum drafts of a row, C = drafts that are considered, N = numbers of tokens.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from octavo.contracts.schedule import Int32Array
from octavo.scheduler.running import RowIndices, RunningRows

Float64Array = NDArray[np.float64]

_MIN_GAIN = 1.02  # of tokens per second; less is within the noise of measured times


class DraftPlanner:
    """Owned by `Speculation`. `passes` has the times of a draft model, by tokens of a pass; None: drafts are free."""

    def __init__(
        self, rates: "GuessRates | VerifiedRates", steps: "StepCosts", passes: "StepCosts | None" = None
    ) -> None:
        self.rates, self._steps, self._passes = rates, steps, passes

    def plan(self, rows: RowIndices, lengths: Int32Array, num_tokens: int, num_sampling: int) -> Int32Array:
        """Return how many of its proposed `lengths` [P] drafts each row gets [P].

        Without drafts, the step computes `num_tokens` tokens and yields `num_sampling`.
        """
        acceptance = self.rates.acceptance(rows, int(lengths.max()))
        chosen = self._best_counts(acceptance, lengths, num_tokens, num_sampling)
        if isinstance(self.rates, VerifiedRates) and (at := self.rates.overdue(rows, chosen)) is not None:
            # A few drafts on trial, unless they could not pay off even if most were accepted.
            hopes = _powers(np.full(len(rows), _HOPED_FOR), acceptance.shape[1])
            hoped_for = self._best_counts(hopes, lengths, num_tokens, num_sampling)
            chosen[at] = min(int(hoped_for[at]), _TRIAL_DRAFTS)
        return chosen

    def _best_counts(
        self, probabilities: Float64Array, lengths: Int32Array, num_tokens: int, num_sampling: int
    ) -> Int32Array:
        """Plan for drafts that are accepted with these probabilities [P, K], K = the largest length."""
        offsets = np.arange(1, probabilities.shape[1] + 1)
        probabilities = np.where(offsets > lengths[:, None], 0.0, probabilities)
        if probabilities.sum() < (_MIN_GAIN - 1.0) * num_sampling:
            return np.zeros_like(lengths)
        best_first = np.argsort(-probabilities, axis=None, kind="stable")[: int(lengths.sum())]
        seconds = self._steps.seconds(num_tokens + np.arange(len(best_first) + 1))
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
        """Return the cost [C + 1] of drawing the first 0 ... C drafts of a list [C]; None: not known yet.

        Draft number j of each row is drawn in pass j.
        """
        if self._passes is None:
            return np.zeros(len(best_first) + 1)
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


_FORGET_GUESS = 0.85  # weight of a row's past in a rate, per guess
_DOUBT = 2.0  # guesses that each rate of a new row begins with ...
_FIRST_RIGHT = (0.0, 0.6)  # ... and how many of them were right, behind wrong guesses and behind right ones


class GuessRates:
    """Acceptance of drafts that cost nothing to propose: proposals that were not verified count, too.

    The next token shows if they were right. A row's j-th draft is accepted with probability b * a^(j - 1). Where text
    is being copied, a guess behind a right one is mostly right, too; elsewhere it is mostly wrong. So a row has two
    rates: a, of guesses behind right ones, and b, which is a if its last guess was right, or else the rate of guesses
    behind wrong ones. So it gets drafts as soon as its text begins to repeat: a new row's first guesses are doubted,
    since to see whether they are right costs nothing.
    """

    def __init__(self, running: RunningRows) -> None:
        self._running = running
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
                self._generations[row] = running.generation[row]
                self._num_right[row], self._num_guesses[row], self._was_right[row] = _FIRST_RIGHT, _DOUBT, False
            elif before is not None:
                for guess, token in zip(before[1], running.tokens[row, before[0] : num_known].tolist(), strict=False):
                    at, is_right = (row, self._was_right[row]), guess == token
                    self._num_right[at] = _FORGET_GUESS * self._num_right[at] + is_right
                    self._num_guesses[at] = _FORGET_GUESS * self._num_guesses[at] + 1.0
                    self._was_right[row] = is_right
                    if not is_right:
                        break
            else:
                self._was_right[row] = False
            if proposal:
                self._open[row] = num_known, proposal

    def learn(self, row: int, num_drafts: int, num_accepted: int) -> None:
        """No-op: `observe` learns more than how many of a row's verified drafts were accepted."""

    def acceptance(self, rows: RowIndices, num_drafts: int) -> Float64Array:
        """Return the expected probabilities that each of a row's next guesses is accepted, never rising [P, K]."""
        rates = self._num_right[rows] / self._num_guesses[rows]  # [P, 2]
        first, later = rates[np.arange(len(rows)), self._was_right[rows]], rates[:, 1]
        probabilities: Float64Array = first[:, None] * later[:, None] ** np.arange(num_drafts)
        return probabilities


_FORGET_DRAFT = 0.95  # weight of the past in acceptance, per draft
_PRIOR_DRAFTS = 4.0  # that the mean of all rows counts for in a row's acceptance
_FIRST_MEAN = 0.7  # acceptance before any draft was verified
_HOPED_FOR = 0.9  # acceptance for which a trial is made
_FIRST_WAIT, _LONGEST_WAIT = 16, 256  # steps of a row without drafts before a trial ...
_TRIAL_DRAFTS = 2  # ... of so many


class VerifiedRates:
    """Acceptance of drafts that cost passes, known only for verified ones: a row starts with the mean of all rows.

    A row that no longer gets drafts is tried again from time to time, at growing intervals. Only one row is tried per
    step, as the draft model has to catch up with it first.
    """

    def __init__(self, running: RunningRows) -> None:
        self._running = running
        num_rows = len(running.requests)
        self._generations = np.full(num_rows, -1, dtype=np.int64)  # of the requests that the rates are of
        self._num_accepted = np.zeros(num_rows)  # by row, of those that could tell: `_num_told`
        self._num_told = np.zeros(num_rows)
        self._mean = _FIRST_MEAN
        self._num_idle = np.zeros(num_rows, dtype=np.int64)  # steps of a row since its last drafts
        self._waits = np.full(num_rows, _FIRST_WAIT)  # how many of them before a trial

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
            self._num_accepted[row] = _FORGET_DRAFT * self._num_accepted[row] + is_right
            self._num_told[row] = _FORGET_DRAFT * self._num_told[row] + 1.0
            self._mean += (1.0 - _FORGET_DRAFT) * (is_right - self._mean) / _PRIOR_DRAFTS
        if num_accepted == num_drafts:
            self._waits[row] = _FIRST_WAIT

    def acceptance(self, rows: RowIndices, num_drafts: int) -> Float64Array:
        """Return the probabilities [P, K]. Every draft of a row is as likely as the one before it."""
        accepted, told = self._num_accepted[rows], self._num_told[rows]
        return _powers((accepted + _PRIOR_DRAFTS * self._mean) / (told + _PRIOR_DRAFTS), num_drafts)

    def overdue(self, rows: RowIndices, chosen: Int32Array) -> int | None:
        """Count the rows [P] that get `chosen` [P] drafts; return the index of one that is to be tried again."""
        self._num_idle[rows] = np.where(chosen > 0, 0, self._num_idle[rows] + 1)
        overdue = self._num_idle[rows] - self._waits[rows]  # [P]
        at = int(overdue.argmax())
        if overdue[at] < 0:
            return None
        self._num_idle[rows[at]], self._waits[rows[at]] = 0, min(2 * self._waits[rows[at]], _LONGEST_WAIT)
        return at


def _powers(rates: Float64Array, count: int) -> Float64Array:
    """Return a, a^2, ... for each of some rates a [P, K]."""
    powers: Float64Array = rates[:, None] ** np.arange(1, count + 1)
    return powers


_NEW = 0.25  # weight of a new measurement
_EXACT = 64  # token counts up to here are kept apart, larger ones in buckets ...
_PER_OCTAVE = 8  # ... of which a doubling has this many
_LIFETIME = 512  # steps after which a measurement that was not repeated is dropped


class StepCosts:
    """Measured step times. Where there is no measurement, a step costs what the next smaller known one does.

    This errs towards more drafts, which then are measured. Old measurements are dropped: a first one may have been
    slow for another reason, and contexts grow.

    With `falls_to_zero`, steps with fewer tokens than any measured one are assumed to take proportionally less time,
    rather than as long: where long passes come first, short ones would otherwise never be tried.
    """

    def __init__(self, *, falls_to_zero: bool = False) -> None:
        self._falls_to_zero = falls_to_zero
        self._measured: dict[int, tuple[float, int]] = {}  # by bucket: seconds, and the step of the latest measurement
        self._num_steps = 0
        self._curve: tuple[Float64Array, Float64Array] | None = None  # token counts, seconds; made on demand

    def record(self, num_tokens: int, seconds: float) -> None:
        """Record a step of `num_tokens` tokens; one without tokens, or in which the clock was set, is ignored."""
        if num_tokens == 0 or seconds <= 0.0:
            return
        self._num_steps += 1
        bucket = _bucket(num_tokens)
        known, _ = self._measured.get(bucket, (seconds, 0))
        self._measured[bucket] = known + _NEW * (seconds - known), self._num_steps
        if self._num_steps % _LIFETIME == 0:
            oldest = self._num_steps - _LIFETIME
            self._measured = {key: each for key, each in self._measured.items() if each[1] > oldest}
        self._curve = None

    def seconds(self, num_tokens: NDArray[np.int64]) -> Float64Array | None:
        """Return the expected duration of steps of `num_tokens` [N], never falling; None before any measurement."""
        if not self._measured:
            return None
        if self._curve is None:
            counts = sorted(self._measured)
            times = np.array([self._measured[count][0] for count in counts])
            # Without the noise that makes a longer step take less time: there the truth is between the longest time of
            # all shorter steps and the shortest of all longer ones. The former alone would let one disturbed step make
            # all longer ones look expensive, which then are not measured again.
            longest, shortest = np.maximum.accumulate(times), np.minimum.accumulate(times[::-1])[::-1]
            times = (longest + shortest) / 2
            if self._falls_to_zero:
                counts, times = [0, *counts], np.concatenate(([0.0], times))
            self._curve = np.array(counts, dtype=np.float64), times
        return np.interp(num_tokens, *self._curve)


def _bucket(num_tokens: int) -> int:
    if num_tokens <= _EXACT:
        return num_tokens
    width = (1 << (num_tokens.bit_length() - 1)) // _PER_OCTAVE
    return -(-num_tokens // width) * width
