"""Dividing a step's token budget."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.scheduler.step_builder import split_budget


@pytest.mark.parametrize(
    ("wanted", "budget", "granted"),
    [
        ([], 4, []),
        ([1, 1, 1], 3, [1, 1, 1]),
        ([100], 7, [7]),
        ([5, 5, 5], 12, [5, 5, 2]),
        ([5, 5, 5], 5, [5, 0, 0]),
        ([9, 1, 9, 1], 6, [4, 1, 0, 1]),  # streams before chunks, whoever is more urgent
        ([0, 9, 1], 3, [0, 2, 1]),
    ],
)
def test_known_splits(wanted: list[int], budget: int, granted: list[int]) -> None:
    assert split_budget(np.array(wanted, dtype=np.int32), budget).tolist() == granted


@given(st.lists(st.integers(0, 40), max_size=12), st.integers(0, 100))
def test_all_of_the_budget_is_used_and_no_more(wanted: list[int], budget: int) -> None:
    granted = split_budget(np.array(wanted, dtype=np.int32), budget).tolist()
    assert all(0 <= got <= want for got, want in zip(granted, wanted, strict=True))
    assert sum(granted) == min(sum(wanted), budget)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(0, 100))
def test_at_most_one_row_gets_a_part_of_what_it_wants(wanted: list[int], budget: int) -> None:
    granted = split_budget(np.array(wanted, dtype=np.int32), budget).tolist()
    assert sum(0 < got < want for got, want in zip(granted, wanted, strict=True)) <= 1
    if sum(want == 1 for want in wanted) <= budget:
        assert all(got == 1 for got, want in zip(granted, wanted, strict=True) if want == 1)
