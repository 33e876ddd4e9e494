"""How many drafts rows get: by what they accept, and by what a longer step costs."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from octavo.contracts.engine import FinishedRequest, SpecDecodeStats
from octavo.contracts.schedule import Int32Array
from octavo.scheduler.draft_planner import DraftPlanner, GuessRates, StepCosts, VerifiedRates
from octavo.scheduler.request import Request
from octavo.scheduler.running import RunningRows
from octavo.testing import FakeWorker, make_request, make_scheduler

NUM_ROWS = 4
LENGTHS = np.full(NUM_ROWS, 8, dtype=np.int32)


def flat(num_tokens: int) -> float:
    return 1.0


def linear(num_tokens: int) -> float:
    return 1.0 * num_tokens


def free_up_to_16(num_tokens: int) -> float:
    return 1.0 if num_tokens <= 16 else num_tokens / 16


def running_rows() -> RunningRows:
    running = make_scheduler(max_num_seqs=NUM_ROWS, max_model_len=256).running
    for index in range(NUM_ROWS):
        request = Request(make_request(f"r{index}", [1, 2, 3], max_tokens=200), index, 256)
        running.insert(request, [[]], running.blocks.find_prefix(request.token_ids, b""))
    return running


class Rows:
    """Rows of requests whose next tokens a test chooses."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        self.running, costs = running_rows(), StepCosts()
        for num_tokens in range(1, 65):
            costs.record(num_tokens, seconds(num_tokens))
        self.planner, self.rows = DraftPlanner(GuessRates(self.running), costs), self.running.active

    def guess(self, tokens: Sequence[int], *, rights: Sequence[bool], times: int = 20) -> None:
        """Let each row propose `tokens`, and get one token that is as it guessed, or is not."""
        for _ in range(times):
            self.planner.rates.observe(self.rows.tolist(), [tokens] * NUM_ROWS)
            for row, is_right in zip(self.rows.tolist(), rights, strict=True):
                at = int(self.running.num_known[row])
                self.running.tokens[row, at] = tokens[0] if is_right else tokens[0] + 1
                self.running.num_known[row] += 1

    def plan(self) -> Int32Array:
        return self.planner.plan(self.rows, LENGTHS, NUM_ROWS, NUM_ROWS)


def test_where_longer_steps_cost_nothing_rows_get_all_drafts() -> None:
    rows = Rows(flat)
    rows.guess([7, 8], rights=[True] * NUM_ROWS)
    assert rows.plan().tolist() == [8] * NUM_ROWS


def test_where_time_is_proportional_to_tokens_rows_get_none() -> None:
    rows = Rows(linear)
    rows.guess([7, 8], rights=[True] * NUM_ROWS)
    assert not rows.plan().any()


def test_drafts_go_to_the_rows_that_accept_them() -> None:
    rows = Rows(free_up_to_16)
    rows.guess([7, 8], rights=[True, False, True, False])
    assert rows.plan().tolist() == [6, 0, 6, 0]  # as many as are free


def test_a_row_is_judged_by_what_it_guessed_without_getting_drafts() -> None:
    rows = Rows(free_up_to_16)
    rows.guess([7, 8], rights=[False] * NUM_ROWS)
    low = rows.planner.rates.acceptance(rows.rows, 1)
    rows.guess([7, 8], rights=[True, False, False, False], times=8)
    now = rows.planner.rates.acceptance(rows.rows, 1)
    assert low.max() < 0.1
    assert now[0] > 0.5
    assert now[1:].max() < 0.1


def test_a_right_guess_makes_the_next_more_likely_where_rights_come_in_runs() -> None:
    """Between the copied parts of a text, guesses are mostly wrong, and inside them right."""
    rows = Rows(free_up_to_16)
    for _ in range(8):
        rows.guess([7, 8], rights=[True] * NUM_ROWS, times=6)
        inside = rows.planner.rates.acceptance(rows.rows, 4)
        rows.guess([7, 8], rights=[False] * NUM_ROWS, times=6)
    rows.planner.rates.observe(rows.rows.tolist(), [()] * NUM_ROWS)
    between = rows.planner.rates.acceptance(rows.rows, 4)
    assert inside[0, 0] > 0.7
    assert between[0, 0] < 0.3
    assert np.all(np.diff(inside) <= 0)
    rows.running.num_known[rows.rows] += 1
    rows.planner.rates.observe(rows.rows.tolist(), [()] * NUM_ROWS)  # to have nothing to propose is no reason to forget
    assert rows.planner.rates.acceptance(rows.rows, 4).tolist() == between.tolist()


def test_a_new_request_in_a_row_begins_anew() -> None:
    rows = Rows(flat)
    rows.guess([7, 8], rights=[True] * NUM_ROWS)
    rows.running.generation[rows.rows] += 1
    rows.planner.rates.observe(rows.rows.tolist(), [[7]] * NUM_ROWS)
    assert not rows.plan().any()


def test_costs_between_and_beyond_measurements() -> None:
    costs = StepCosts()
    assert costs.seconds(np.array([1])) is None
    costs.record(0, 5.0)
    costs.record(4, 0.0)
    assert costs.seconds(np.array([1])) is None
    costs.record(4, 1.0)
    costs.record(8, 3.0)
    costs.record(10, 2.0)  # noise: a longer step is never taken to be faster; the truth is between both
    times = costs.seconds(np.array([1, 4, 6, 8, 10, 500]))
    assert times is not None
    assert times.tolist() == [1.0, 1.0, 1.75, 2.5, 2.5, 2.5]
    for _ in range(2000):
        costs.record(4, 2.0)
    times = costs.seconds(np.array([4, 10]))
    assert times is not None
    assert times.tolist() == pytest.approx([2.0, 2.0])


def test_one_disturbed_step_does_not_make_all_longer_ones_expensive() -> None:
    costs = StepCosts()
    for num_tokens, seconds in ((1, 1.0), (3, 9.0), (5, 1.1), (9, 1.2)):
        costs.record(num_tokens, seconds)
    times = costs.seconds(np.array([9]))
    assert times is not None
    assert times[0] < 6.0


def test_long_steps_are_measured_in_buckets() -> None:
    costs = StepCosts()
    costs.record(1030, 1.0)
    costs.record(1100, 2.0)
    times = costs.seconds(np.array([1152]))
    assert times is not None
    assert times[0] == 1.25


class Chatter:
    """A drafter that is always wrong, and counts how often it is asked."""

    max_num_drafts = 4

    def propose(self, request_ids: Sequence[str], contexts: Sequence[Int32Array]) -> list[list[int]]:
        return [[int(context[-1] + 1) % 50] * 4 for context in contexts]

    def forget(self, request_id: str) -> None:
        """Nothing is stored."""


def test_drafts_that_would_be_wrong_are_not_verified() -> None:
    now = [0.0]
    scheduler = make_scheduler(drafter=Chatter(), adapts_drafts=True, max_model_len=128, clock=lambda: now[0])
    worker = FakeWorker.of(scheduler)
    scheduler.add_request(make_request("a", [1, 2, 3], max_tokens=100))
    num_drafts = []
    while not scheduler.is_finished():
        output = scheduler.schedule()
        drafts = output.scheduled_spec_decode_tokens
        num_drafts.append(0 if drafts is None else len(drafts.token_ids))
        now[0] += 1.0 + 0.1 * output.total_num_scheduled_tokens
        scheduler.update_from_output(output, worker.execute(output))
    assert not any(num_drafts)


def test_a_request_may_decline_drafts() -> None:
    scheduler = make_scheduler(drafter=Chatter(), max_model_len=128)
    worker = FakeWorker.of(scheduler)
    scheduler.add_request(make_request("a", [1, 2, 3], max_tokens=20, speculative=False))
    scheduler.add_request(make_request("b", [1, 2, 4], max_tokens=20))
    reports: dict[str, FinishedRequest] = {}
    total: SpecDecodeStats | None = None
    while not scheduler.is_finished():
        output = scheduler.schedule()
        outputs = scheduler.update_from_output(output, worker.execute(output))
        reports |= outputs.finished
        total = outputs.spec_decode or total
    assert reports["a"].num_drafts == 0 < reports["b"].num_drafts
    assert total is not None
    assert sum(total.proposed) == reports["b"].num_drafts


class RankRows:
    """Rows of a model whose steps take 1 s for up to 32 tokens, and of a draft model whose passes take `pass_s`."""

    def __init__(self, pass_s: float, pass_sizes: Sequence[int] = range(65)) -> None:
        self.running = running_rows()
        costs, passes = StepCosts(), StepCosts(falls_to_zero=True)
        for num_tokens in range(1, 65):
            costs.record(num_tokens, max(1.0, num_tokens / 32))
            if num_tokens in pass_sizes:
                passes.record(num_tokens, pass_s)
        self.planner, self.rows = DraftPlanner(VerifiedRates(self.running), costs, passes), self.running.active

    def accept(self, *counts: int, of: int = 8, times: int = 12) -> None:
        for _ in range(times):
            for row, count in zip(self.rows.tolist(), counts, strict=True):
                self.planner.rates.learn(row, of, count)

    def plan(self) -> Int32Array:
        self.planner.rates.observe(self.rows.tolist(), [[-1]] * NUM_ROWS)
        return self.planner.plan(self.rows, LENGTHS, NUM_ROWS, NUM_ROWS)


def test_drafts_that_cost_nothing_are_drawn_for_rows_that_accept_them() -> None:
    rows = RankRows(pass_s=1e-6)
    rows.plan()
    rows.accept(8, 8, 8, 8)
    assert rows.plan().tolist() == [7] * NUM_ROWS  # 28 more tokens are free
    rows.accept(8, 0, 8, 0, times=60)
    assert rows.plan().tolist() == [8, 6, 8, 6]


def test_a_dear_draft_model_draws_few_and_a_very_dear_one_none() -> None:
    def planned(pass_s: float) -> int:
        rows = RankRows(pass_s)
        rows.plan()
        rows.accept(3, 3, 3, 3)  # three of four are right
        return int(rows.plan().sum())

    counts = [planned(pass_s) for pass_s in (0.01, 0.1, 0.3, 1.0)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[2] > counts[3] == 0


def test_a_new_request_begins_with_the_mean() -> None:
    rows = RankRows(pass_s=0.1)
    first = rows.plan()
    rows.accept(0, 0, 0, 0, times=200)
    rows.running.generation[rows.rows[0]] += 1
    assert not rows.plan().any()
    assert rows.planner.rates.acceptance(rows.rows, 1)[:, 0][0] < 0.2
    assert first.any()


def test_what_was_given_up_is_tried_again_row_by_row_at_growing_intervals() -> None:
    rows = RankRows(pass_s=0.1)
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
    rows = RankRows(pass_s=3.0)
    rows.plan()
    rows.accept(0, 0, 0, 0)
    assert not any(rows.plan().any() for _ in range(100))


def test_short_passes_are_tried_although_only_a_prompt_was_measured() -> None:
    assert RankRows(pass_s=3.0, pass_sizes=[64]).plan().any()
    assert not RankRows(pass_s=3.0, pass_sizes=[1, 64]).plan().any()


@pytest.mark.parametrize("num_drafts", [1, 4])
def test_only_the_first_wrong_draft_is_judged(num_drafts: int) -> None:
    """The later ones followed a wrong token."""
    rows = RankRows(pass_s=0.1)
    rows.plan()
    before = rows.planner.rates.acceptance(rows.rows, 1)[:, 0]
    rows.planner.rates.learn(int(rows.rows[0]), num_drafts, 0)
    after = rows.planner.rates.acceptance(rows.rows, 1)[:, 0]
    assert after[0] == pytest.approx(4 * before[1] / 5, rel=0.02)
