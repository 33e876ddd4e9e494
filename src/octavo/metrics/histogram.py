"""Histograms that take many equal values at once, as a busy frontend spends most of its time observing; their bounds.

Bounds come in pairs: ours, and vLLM's, which its dashboards expect under its names. Values are counted once, by both.
"""

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


Views = tuple[tuple[float, ...], tuple[float, ...]]


def _one_two_five(last: int) -> tuple[float, ...]:
    return tuple(float(factor * 10**power) for power in range(last) for factor in (1, 2, 5))


# Seconds. Ours: from the demo model on one core to long reasoning of a large model.
_REQUEST = (
    0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0, 1800.0,
)  # fmt: skip
_VLLM_REQUEST = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
REQUEST: Views = (_REQUEST, _VLLM_REQUEST)
FIRST_TOKEN: Views = (
    _REQUEST,
    (
        0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
        160.0, 640.0, 2560.0,
    ),
)  # fmt: skip
TOKEN: Views = (
    (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.2, 0.4, 0.8, 1.6, 5.0, 20.0),
    (
        0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    ),
)  # fmt: skip
# Tokens.
SIZES: Views = (powers_of_two(0, 20), _one_two_five(6))
STEP: Views = (powers_of_two(0, 16), (1.0, *powers_of_two(3, 14)))
# Samples of a request.
SAMPLES: Views = ((1.0, 2.0, 5.0, 10.0, 20.0), (1.0, 2.0, 5.0, 10.0, 20.0))
