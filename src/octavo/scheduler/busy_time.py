"""The total time of steps, and the part spent in native calls: the rest is host time that is not overlapped."""

from collections.abc import Callable


class BusyTime:
    """Owned by the scheduler. Adds up steps whose native calls are timed."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last_output_s: float | None = None  # None: nothing was left to do then
        self.step_s = self.compute_s = 0.0

    def record(self, compute_s: float | None, scheduled_s: float, *, has_more: bool) -> None:
        """Record the output of a step that was scheduled at `scheduled_s` and computed for `compute_s` seconds.

        If there was work left after the previous step, this one begins when that step's output arrived: scheduling,
        detokenizing and sending then take time in which the engine could have computed.
        """
        now_s, start_s = self._clock(), scheduled_s if self._last_output_s is None else self._last_output_s
        self._last_output_s = now_s if has_more else None
        if compute_s is not None and compute_s <= now_s - start_s:  # not if the clock was set
            self.step_s += now_s - start_s
            self.compute_s += compute_s
