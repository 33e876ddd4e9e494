"""Measured duration of steps by their number of tokens: the cost of adding a token."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Float64Array = NDArray[np.float64]

_NEW = 0.25  # weight of a new measurement
_EXACT = 64  # token counts up to here are kept apart, larger ones in buckets ...
_PER_OCTAVE = 8  # ... of which a doubling has this many
_LIFETIME = 512  # steps after which a measurement that was not repeated is dropped


class _Measured(NamedTuple):
    seconds: float
    step: int  # of the latest measurement


class StepCosts:
    """Measured step times. Where there is no measurement, a step costs what the next smaller known one does.

    This errs towards more drafts, which then are measured. Old measurements are dropped: a first one may have been
    slow for another reason, and contexts grow.

    With `falls_to_zero`, steps with fewer tokens than any measured one are assumed to take proportionally less time,
    rather than as long: where long passes come first, short ones would otherwise never be tried.
    """

    def __init__(self, *, falls_to_zero: bool = False) -> None:
        self._falls_to_zero = falls_to_zero
        self._measured: dict[int, _Measured] = {}  # by bucket
        self._num_steps = 0
        self._curve: tuple[Float64Array, Float64Array] | None = None  # token counts, seconds; made on demand

    def record(self, num_tokens: int, seconds: float) -> None:
        """Record a step of `num_tokens` tokens; one without tokens, or in which the clock was set, is ignored."""
        if num_tokens == 0 or seconds <= 0.0:
            return
        self._num_steps += 1
        bucket = _bucket(num_tokens)
        known = self._measured.get(bucket)
        mean = seconds if known is None else known.seconds + _NEW * (seconds - known.seconds)
        self._measured[bucket] = _Measured(mean, self._num_steps)
        if self._num_steps % _LIFETIME == 0:
            oldest = self._num_steps - _LIFETIME
            self._measured = {key: each for key, each in self._measured.items() if each.step > oldest}
        self._curve = None

    def seconds(self, num_tokens: NDArray[np.int64]) -> Float64Array | None:
        """Return the expected duration of steps of `num_tokens` [N], never falling; None before any measurement."""
        if not self._measured:
            return None
        if self._curve is None:
            counts = sorted(self._measured)
            times = _without_falls(np.array([self._measured[count].seconds for count in counts]))
            if self._falls_to_zero:
                counts, times = [0, *counts], np.concatenate(([0.0], times))
            self._curve = np.array(counts, dtype=np.float64), times
        return np.interp(num_tokens, *self._curve)


def _without_falls(seconds: Float64Array) -> Float64Array:
    """Return the times of steps of more and more tokens [N] without noise that makes a longer one take less time.

    Where one does, the truth is between the longest time of all shorter steps and the shortest of all longer ones. The
    former alone would let one disturbed step make all longer ones look expensive, which then are not measured again.
    """
    longest, shortest = np.maximum.accumulate(seconds), np.minimum.accumulate(seconds[::-1])[::-1]
    middle: Float64Array = (longest + shortest) / 2
    return middle


def _bucket(num_tokens: int) -> int:
    if num_tokens <= _EXACT:
        return num_tokens
    width = (1 << (num_tokens.bit_length() - 1)) // _PER_OCTAVE
    return -(-num_tokens // width) * width
