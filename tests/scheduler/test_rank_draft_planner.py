"""How many drafts of a draft model rows get: by what they accept, what verifying costs, and what drawing costs."""

from collections.abc import Sequence

import numpy as np
import pytest

from octavo.contracts.schedule import Int32Array
from octavo.scheduler.rank_draft_planner import RankDraftPlanner
from octavo.scheduler.request import Request
from octavo.scheduler.running import RunningRows
from octavo.scheduler.step_costs import StepCosts
from octavo.testing import make_request

NUM_ROWS = 4
LENGTHS = np.full(NUM_ROWS, 8, dtype=np.int32)
NOBODY: Int32Array = np.zeros(NUM_ROWS, dtype=np.int32)


class Rows:
    """Rows of a model whose steps take 1 s for up to 32 tokens, and of a draft model whose passes take `pass_s`."""

    def __init__(self, pass_s: float, pass_sizes: Sequence[int] = range(65)) -> None:
        self.running = RunningRows(NUM_ROWS, 256, 4)
        for index in range(NUM_ROWS):
            request = Request(make_request(f"r{index}", [1, 2, 3], max_tokens=200), index, 256)
            self.running.add(request, [[]], num_cached_tokens=0, num_freed=[0], last_hash=b"")
        costs, passes = StepCosts(), StepCosts(falls_to_zero=True)
        for num_tokens in range(1, 65):
            costs.record(num_tokens, max(1.0, num_tokens / 32))
            if num_tokens in pass_sizes:
                passes.record(num_tokens, pass_s)
        self.planner, self.rows = RankDraftPlanner(self.running, costs, passes), self.running.active

    def accept(self, *counts: int, of: int = 8, times: int = 12) -> None:
        for _ in range(times):
            for row, count in zip(self.rows.tolist(), counts, strict=True):
                self.planner.learn(row, of, count)

    def plan(self) -> Int32Array:
        self.planner.observe(self.rows.tolist(), [[-1]] * NUM_ROWS)
        return self.planner.plan(self.rows, LENGTHS, NUM_ROWS, NUM_ROWS)


def test_drafts_that_cost_nothing_are_drawn_for_rows_that_accept_them() -> None:
    rows = Rows(pass_s=1e-6)
    rows.plan()
    rows.accept(8, 8, 8, 8)
    assert rows.plan().tolist() == [7] * NUM_ROWS  # 28 more tokens are free
    rows.accept(8, 0, 8, 0, times=60)
    assert rows.plan().tolist() == [8, 6, 8, 6]


def test_a_dear_draft_model_draws_few_and_a_very_dear_one_none() -> None:
    def planned(pass_s: float) -> int:
        rows = Rows(pass_s)
        rows.plan()
        rows.accept(3, 3, 3, 3)  # three of four are right
        return int(rows.plan().sum())

    counts = [planned(pass_s) for pass_s in (0.01, 0.1, 0.3, 1.0)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[2] > counts[3] == 0


def test_a_new_request_begins_with_the_mean() -> None:
    rows = Rows(pass_s=0.1)
    first = rows.plan()
    rows.accept(0, 0, 0, 0, times=200)
    rows.running.generation[rows.rows[0]] += 1
    assert not rows.plan().any()
    assert rows.planner.acceptance(rows.rows, 1)[:, 0][0] < 0.2
    assert first.any()


def test_what_was_given_up_is_tried_again_row_by_row_at_growing_intervals() -> None:
    rows = Rows(pass_s=0.1)
    rows.plan()
    rows.accept(0, 0, 0, 0, times=200)
    plans = [rows.plan().tolist() for _ in range(130)]
    assert max(sum(count > 0 for count in plan) for plan in plans) == 1
    for row in range(NUM_ROWS):
        trials = [at for at, plan in enumerate(plans) if plan[row]]
        assert len(trials) == 3
        assert trials[2] - trials[1] == 2 * (trials[1] - trials[0])
    rows.accept(8, 0, 0, 0, times=30)
    assert rows.plan()[0] > 2


def test_nothing_is_tried_where_it_could_not_pay() -> None:
    rows = Rows(pass_s=3.0)
    rows.plan()
    rows.accept(0, 0, 0, 0)
    assert not any(rows.plan().any() for _ in range(100))


def test_short_passes_are_tried_although_only_a_prompt_was_measured() -> None:
    assert Rows(pass_s=3.0, pass_sizes=[64]).plan().any()
    assert not Rows(pass_s=3.0, pass_sizes=[1, 64]).plan().any()


@pytest.mark.parametrize("num_drafts", [1, 4])
def test_only_the_first_wrong_draft_is_judged(num_drafts: int) -> None:
    """The later ones followed a wrong token."""
    rows = Rows(pass_s=0.1)
    rows.plan()
    before = rows.planner.acceptance(rows.rows, 1)[:, 0]
    rows.planner.learn(int(rows.rows[0]), num_drafts, 0)
    after = rows.planner.acceptance(rows.rows, 1)[:, 0]
    assert after[0] == pytest.approx(4 * before[1] / 5, rel=0.02)
