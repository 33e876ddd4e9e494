"""Histograms count as Prometheus defines it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.metrics.collect import Histogram, powers_of_two


@given(st.lists(st.tuples(st.floats(-10, 10), st.integers(1, 5))))
def test_each_bound_counts_the_values_that_do_not_lie_above_it(values: list[tuple[float, int]]) -> None:
    histogram = Histogram((-1.0, 0.5, 2.0))
    for value, count in values:
        histogram.observe(value, count)
    for bound, num_values in histogram.cumulative():
        assert num_values == sum(count for value, count in values if value <= bound)
    assert histogram.count == sum(count for _, count in values)
    assert histogram.sum == pytest.approx(sum(value * count for value, count in values))


def test_bounds_for_tokens() -> None:
    assert powers_of_two(0, 3) == (1.0, 2.0, 4.0, 8.0)
    with pytest.raises(AssertionError):
        Histogram((2.0, 1.0))
