"""A histogram that takes many equal values at once: a busy frontend spends most of its time observing."""

from bisect import bisect_left
from collections.abc import Iterator


class Histogram:
    """Counts values by upper bound, as Prometheus does; bounds are inclusive.

    `views` are sets of bounds, each of which can be shown.
    """

    __slots__ = ("_counts", "_views", "bounds", "sum")

    def __init__(self, *views: tuple[float, ...]) -> None:
        assert all(list(bounds) == sorted(set(bounds)) for bounds in views)
        self._views = views
        self.bounds = tuple(sorted(set().union(*views)))
        self.sum = 0.0
        self._counts = [0] * (len(self.bounds) + 1)  # the last is above all bounds

    def observe(self, value: float, count: int = 1) -> None:
        """Add `count` equal values."""
        self._counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(self._counts)

    def cumulative(self, view: int = 0) -> Iterator[tuple[float, int]]:
        """Yield each bound of a view, infinity last, with the number of values up to it."""
        total = 0
        for bound, count in zip((*self.bounds, float("inf")), self._counts, strict=True):
            total += count
            if bound in self._views[view] or bound == float("inf"):
                yield bound, total


def powers_of_two(first: int, last: int) -> tuple[float, ...]:
    """Return 2**first to 2**last, as bounds for numbers of tokens."""
    return tuple(float(2**power) for power in range(first, last + 1))
