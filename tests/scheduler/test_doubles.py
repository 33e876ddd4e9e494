"""The doubles of `octavo.testing` must detect errors, or the tests that rely on them prove nothing."""

from dataclasses import replace

import numpy as np
import pytest

from octavo.contracts.schedule import SchedulerOutput
from octavo.scheduler.scheduler import Scheduler
from octavo.testing import FakeWorker, expected_tokens, make_request, make_scheduler


def first_step() -> tuple[Scheduler, FakeWorker, SchedulerOutput]:
    scheduler = make_scheduler()
    for index, name in enumerate("ab"):
        scheduler.add_request(make_request(name, [index] * 6, max_tokens=6))
    return scheduler, FakeWorker.of(scheduler), scheduler.schedule()


def test_a_right_order_is_carried_out() -> None:
    _, worker, scheduler_output = first_step()
    model_output = worker.execute(scheduler_output)
    expected = [expected_tokens(make_request(name, [i] * 6), 128, 1000)[0][0] for i, name in enumerate("ab")]
    assert model_output.sampled_token_ids[:, 0].tolist() == expected
    assert (model_output.num_sampled.tolist(), worker.num_tokens_computed) == ([1, 1], 12)


def test_a_block_given_to_two_is_seen() -> None:
    _, worker, scheduler_output = first_step()
    first, second = scheduler_output.scheduled_new_reqs
    wrong = replace(scheduler_output, scheduled_new_reqs=[first, replace(second, block_ids=first.block_ids)])
    with pytest.raises(AssertionError, match=r"a: wrong keys at positions \[0, 1, 2, 3, 4, 5\]"):
        worker.execute(wrong)


def test_a_prefix_that_nobody_computed_is_seen() -> None:
    _, worker, scheduler_output = first_step()
    wrong = replace(scheduler_output, num_computed_tokens=np.array([4, 0]), num_scheduled_tokens=np.array([2, 6]))
    with pytest.raises(AssertionError, match=r"a: wrong keys at positions \[0, 1, 2, 3\]"):
        worker.execute(wrong)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"num_scheduled_tokens": np.array([7, 6])}, "a: nothing to compute"),
        ({"num_scheduled_tokens": np.array([0, 6])}, "a: nothing to compute"),
        ({"rows": np.array([1, 0])}, "rows hold"),
        ({"samples": np.array([True, False])}, "rows at their last token"),
    ],
    ids=["too many", "none", "rows", "samples"],
)
def test_wrong_counts_rows_and_samples_are_seen(change: dict[str, object], complaint: str) -> None:
    _, worker, scheduler_output = first_step()
    with pytest.raises(AssertionError, match=complaint):
        worker.execute(replace(scheduler_output, **change))  # type: ignore[arg-type]  # any field


def test_a_missing_diff_is_seen() -> None:
    scheduler, worker, scheduler_output = first_step()
    for _ in range(2):
        scheduler.update_from_output(scheduler_output, worker.execute(scheduler_output))
        scheduler_output = scheduler.schedule()
    scheduler.update_from_output(scheduler_output, worker.execute(scheduler_output))
    grown = scheduler.schedule()
    assert len(grown.scheduled_cached_reqs.rows) == 2
    with pytest.raises(AssertionError, match="a: no block for position 8"):
        worker.execute(replace(grown, scheduled_cached_reqs=scheduler_output.scheduled_cached_reqs))


def test_a_row_that_was_not_forgotten_is_seen() -> None:
    scheduler, worker, scheduler_output = first_step()
    scheduler.update_from_output(scheduler_output, worker.execute(scheduler_output))
    scheduler.abort(["b"])
    scheduler.add_request(make_request("c", [7], max_tokens=2))
    scheduler_output = scheduler.schedule()
    with pytest.raises(AssertionError, match="row 1 is taken by b"):
        worker.execute(replace(scheduler_output, finished_req_ids=[]))
