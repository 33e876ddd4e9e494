"""Abnormal ends of requests: aborts at any time, a step that raises, a request that fails individually."""

import pytest

from octavo.contracts.engine import EngineCoreOutputs
from octavo.scheduler.scheduler import Scheduler
from octavo.testing import FakeWorker, expected_tokens, make_request, make_scheduler, model_output_for, run_step


def ends(outputs: EngineCoreOutputs) -> dict[str, str]:
    return {request_id: end.finish_reason for request_id, end in outputs.finished.items()}


def assert_idle(scheduler: Scheduler) -> None:
    scheduler.check_integrity()
    assert scheduler.is_finished()
    assert scheduler.blocks.num_free == [scheduler.blocks.pools[0].num_blocks]


def two_requests() -> tuple[Scheduler, FakeWorker]:
    scheduler = make_scheduler()
    for index, name in enumerate("ab"):
        scheduler.add_request(make_request(name, [index] * 6, max_tokens=6))
    return scheduler, FakeWorker.of(scheduler)


def test_abort_while_waiting() -> None:
    scheduler, worker = two_requests()
    scheduler.abort(["a"])
    assert [request.request_id for request in scheduler.get_ready_requests()] == ["b"]
    outputs = run_step(scheduler, worker)
    assert (ends(outputs), outputs.req_ids) == ({"a": "abort"}, ["b"])


def test_abort_while_running_frees_blocks_at_once_and_tells_the_worker_once() -> None:
    scheduler, worker = two_requests()
    run_step(scheduler, worker)
    [num_free] = scheduler.blocks.num_free
    scheduler.abort(["a"])
    assert scheduler.blocks.num_free == [num_free + 2]
    scheduler_outputs = [scheduler.schedule() for _ in range(2)]
    assert [scheduler_output.finished_req_ids for scheduler_output in scheduler_outputs] == [["a"], []]
    assert scheduler_outputs[0].req_ids == ("b",)
    assert ends(scheduler.update_from_output(scheduler_outputs[0], worker.execute(scheduler_outputs[0]))) == {
        "a": "abort"
    }


def test_abort_while_its_token_is_in_flight() -> None:
    scheduler, worker = two_requests()
    scheduler_output = scheduler.schedule()
    scheduler.abort(["a"])
    outputs = scheduler.update_from_output(scheduler_output, worker.execute(scheduler_output))
    assert (outputs.req_ids, ends(outputs)) == (["b"], {"a": "abort"})
    scheduler.check_integrity()


def test_abort_while_a_later_request_has_its_row_already() -> None:
    """The answer in flight is for whom the row was, not for whom it is."""
    scheduler = make_scheduler(max_num_seqs=1)
    worker = FakeWorker.of(scheduler)
    scheduler.add_request(make_request("a", [1], max_tokens=3))
    first = scheduler.schedule()
    scheduler.abort(["a"])
    request = make_request("b", [2, 2], max_tokens=3)
    scheduler.add_request(request)
    second = scheduler.schedule()
    assert first.rows.tolist() == second.rows.tolist()
    assert scheduler.update_from_output(first, worker.execute(first)).req_ids == []
    outputs = scheduler.update_from_output(second, worker.execute(second))
    assert (outputs.req_ids, outputs.new_token_ids) == (["b"], expected_tokens(request, 128, 1000)[0][:1])


def test_abort_while_preempted() -> None:
    scheduler = make_scheduler(num_blocks=6, max_model_len=24)
    worker = FakeWorker.of(scheduler)
    for index, name in enumerate("ab"):
        scheduler.add_request(make_request(name, [index] * 7, max_tokens=14))
    while not scheduler.stats().num_preemptions_total:
        run_step(scheduler, worker)
    assert scheduler.stats().num_waiting == 1
    scheduler.abort(["b"])
    scheduler_output = scheduler.schedule()
    assert (scheduler_output.finished_req_ids, scheduler.stats().num_waiting) == (
        [],
        0,
    )  # its row was given back before
    outputs = scheduler.update_from_output(scheduler_output, worker.execute(scheduler_output))
    assert (outputs.finished["b"].finish_reason, outputs.finished["b"].num_preemptions) == ("abort", 1)
    scheduler.abort(["a"])
    assert_idle(scheduler)


def test_abort_of_the_unknown_and_of_the_ended_is_nothing() -> None:
    scheduler, worker = two_requests()
    scheduler.abort(["a", "a", "nobody"])
    assert ends(scheduler.take_finished()) == {"a": "abort"}
    scheduler.abort(["a"])
    assert ends(scheduler.take_finished()) == {}
    while not scheduler.is_finished():
        run_step(scheduler, worker)
    scheduler.abort(["b"])
    assert_idle(scheduler)


def test_an_aborted_id_may_come_again() -> None:
    scheduler, worker = two_requests()
    run_step(scheduler, worker)
    scheduler.abort(["a"])
    assert ends(scheduler.take_finished()) == {"a": "abort"}
    scheduler.add_request(make_request("a", [3], max_tokens=1))
    assert "a" in run_step(scheduler, worker).req_ids


def test_a_step_that_raises_fails_its_requests_and_no_others() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    worker = FakeWorker.of(scheduler)
    for index, name in enumerate("abc"):
        scheduler.add_request(make_request(name, [index] * 6, max_tokens=6))
    scheduler_output = scheduler.schedule()
    scheduler.fail_step(scheduler_output, "RuntimeError: out of memory")
    outputs = scheduler.take_finished()
    assert ends(outputs) == {"a": "error", "b": "error"}
    assert outputs.finished["a"].error == "RuntimeError: out of memory"
    assert run_step(scheduler, worker).req_ids == ["c"]
    scheduler.abort(["c"])
    assert_idle(scheduler)


def test_what_a_failed_step_should_have_filled_is_not_found() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", range(9), max_tokens=6))
    scheduler.fail_step(scheduler.schedule(), "boom")
    scheduler.add_request(make_request("b", range(9), max_tokens=6))
    (new,) = scheduler.schedule().scheduled_new_reqs
    assert new.num_computed_tokens == 0


def test_what_an_aborted_request_promised_in_a_failed_step_is_not_found() -> None:
    """Its blocks are free by then, with names; they were never written."""
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", range(9), max_tokens=6))
    scheduler_output = scheduler.schedule()
    scheduler.abort(["a"])
    scheduler.fail_step(scheduler_output, "boom")
    scheduler.add_request(make_request("b", range(9), max_tokens=6))
    (new,) = scheduler.schedule().scheduled_new_reqs
    assert new.num_computed_tokens == 0


def test_steps_behind_a_failed_one_go_on_without_its_requests() -> None:
    scheduler, worker = two_requests()
    scheduler_outputs = [scheduler.schedule() for _ in range(3)]
    scheduler.add_request(make_request("c", range(50, 53), max_tokens=1))
    scheduler_outputs.append(scheduler.schedule())
    worker.lose(scheduler_outputs[0])
    scheduler.fail_step(scheduler_outputs[0], "boom")
    assert ends(scheduler.take_finished()) == {"a": "error", "b": "error"}
    outputs = [
        scheduler.update_from_output(scheduler_output, worker.execute(scheduler_output))
        for scheduler_output in scheduler_outputs[1:]
    ]
    assert [output.req_ids for output in outputs] == [[], [], ["c"]]
    assert ends(outputs[-1]) == {"c": "length"}
    assert_idle(scheduler)


def test_who_shares_blocks_of_a_failed_step_is_computed_again() -> None:
    """`b` found the prompt of `a`, which was to be written by a step ahead of its own; `c` shares nothing."""
    scheduler = make_scheduler(num_batches=2)
    worker = FakeWorker.of(scheduler, has_first_stage=True)
    requests = {
        name: make_request(name, prompt, max_tokens=3)
        for name, prompt in {"a": range(9), "b": range(9), "c": range(50, 53)}.items()
    }
    scheduler.add_request(requests["a"])
    failing = scheduler.schedule()
    scheduler.add_request(requests["b"])
    scheduler.add_request(requests["c"])
    later = scheduler.schedule()
    assert later.num_computed_tokens.tolist() == [8, 0]
    worker.lose(failing)
    scheduler.fail_step(failing, "boom")
    assert ends(scheduler.take_finished()) == {"a": "error"}
    token_ids: dict[str, list[int]] = {"b": [], "c": []}
    outputs = scheduler.update_from_output(later, worker.execute(later))
    assert outputs.req_ids == ["c"]
    while True:
        for name, token_id in zip(outputs.req_ids, outputs.new_token_ids, strict=True):
            token_ids[name].append(token_id)
        if scheduler.is_finished():
            break
        outputs = run_step(scheduler, worker)
    assert token_ids == {name: expected_tokens(requests[name], 128, worker.vocab_size)[0] for name in ("b", "c")}
    assert scheduler.stats().num_preemptions_total == 1
    assert_idle(scheduler)


def test_what_followed_blocks_of_a_failed_step_is_not_found_behind_good_ones() -> None:
    """`b` wrote a block behind those that `a` should have written, and left. Later, others write the first two."""
    scheduler = make_scheduler(num_batches=2)
    worker = FakeWorker.of(scheduler, has_first_stage=True)
    scheduler.add_request(make_request("a", range(9), max_tokens=3))
    failing = scheduler.schedule()
    scheduler.add_request(make_request("b", range(14), max_tokens=3))
    later = scheduler.schedule()
    scheduler.abort(["b"])
    worker.lose(failing)
    scheduler.fail_step(failing, "boom")
    scheduler.update_from_output(later, worker.execute(later))
    for name, num_tokens, num_cached in (("c", 9, 0), ("d", 14, 8)):
        scheduler.add_request(make_request(name, range(num_tokens), max_tokens=1))
        scheduler_output = scheduler.schedule()
        assert scheduler_output.num_computed_tokens.tolist() == [num_cached]
        scheduler.update_from_output(scheduler_output, worker.execute(scheduler_output))
    assert_idle(scheduler)


def test_a_block_named_when_its_request_left_is_as_good_as_the_step_that_fills_it() -> None:
    """`a` leaves while its last step is in flight; `c` finds what that step should have written, and it fails."""
    scheduler = make_scheduler(num_batches=3)
    worker = FakeWorker.of(scheduler, has_first_stage=True)
    scheduler.add_request(make_request("a", range(7), max_tokens=9))
    [token_id] = run_step(scheduler, worker).new_token_ids
    failing = scheduler.schedule()  # fills the second block
    scheduler.add_request(make_request("b", range(50, 53), max_tokens=1))
    scheduler_outputs = [scheduler.schedule()]
    scheduler.abort(["a"])
    request = make_request("c", [*range(7), token_id, 1], max_tokens=1)
    scheduler.add_request(request)
    scheduler_outputs.append(scheduler.schedule())
    assert scheduler_outputs[-1].num_computed_tokens.tolist() == [8]
    worker.lose(failing)
    scheduler.fail_step(failing, "boom")
    outputs_of_steps = [
        scheduler.update_from_output(scheduler_output, worker.execute(scheduler_output))
        for scheduler_output in scheduler_outputs
    ]
    assert [outputs.req_ids for outputs in outputs_of_steps] == [["b"], []]
    assert run_step(scheduler, worker).new_token_ids == expected_tokens(request, 128, worker.vocab_size)[0]
    assert_idle(scheduler)


def test_a_failed_step_does_not_make_forget_who_came_back() -> None:
    """`b` is preempted by the step that fails, and in a row again by the step behind it."""
    scheduler = make_scheduler(num_blocks=5, max_model_len=20)
    worker = FakeWorker.of(scheduler)
    requests = [make_request(name, prompt, max_tokens=6) for name, prompt in (("a", range(7)), ("b", range(20, 27)))]
    for request in requests:
        scheduler.add_request(request)
    scheduler_outputs = [scheduler.schedule()]
    while not scheduler_outputs[-1].finished_req_ids:
        scheduler.update_from_output(scheduler_outputs[-1], worker.execute(scheduler_outputs[-1]))
        scheduler_outputs.append(scheduler.schedule())
    failing = scheduler_outputs[-1]
    assert failing.finished_req_ids == ["b"]
    scheduler.abort(["a"])
    later = scheduler.schedule()
    assert [new.request_id for new in later.scheduled_new_reqs] == ["b"]
    worker.lose(failing)
    scheduler.fail_step(failing, "boom")
    scheduler.update_from_output(later, worker.execute(later))
    assert "b" not in scheduler.schedule().finished_req_ids


def test_ends_that_a_failed_step_carried_are_told_again() -> None:
    """The step may have failed before the worker read it."""
    scheduler, worker = two_requests()
    run_step(scheduler, worker)
    scheduler.abort(["a"])
    scheduler_output = scheduler.schedule()
    assert scheduler_output.finished_req_ids == ["a"]
    scheduler.fail_step(scheduler_output, "boom")
    assert set(scheduler.schedule().finished_req_ids) == {"a", "b"}


def test_only_the_oldest_step_can_fail() -> None:
    scheduler, _ = two_requests()
    _, second = scheduler.schedule(), scheduler.schedule()
    with pytest.raises(AssertionError, match="in the order of their steps"):
        scheduler.fail_step(second, "boom")


def test_one_request_fails_alone() -> None:
    scheduler, worker = two_requests()
    scheduler_output = scheduler.schedule()
    model_output = worker.execute(scheduler_output)
    model_output.num_sampled[0] = 0
    model_output.errors["a"] = "logits are not a number"
    outputs = scheduler.update_from_output(scheduler_output, model_output)
    assert (outputs.req_ids, ends(outputs)) == (["b"], {"a": "error"})
    assert outputs.finished["a"].error == "logits are not a number"
    scheduler.check_integrity()
    scheduler.add_request(make_request("same-prompt", [0] * 6, max_tokens=6))
    (new,) = scheduler.schedule().scheduled_new_reqs
    assert new.num_computed_tokens == 0


def test_nothing_of_a_failed_request_is_found() -> None:
    """Neither its prompt nor its output: somewhere in it the numbers went wrong."""
    scheduler = make_scheduler(block_size=4)
    worker = FakeWorker.of(scheduler)
    request = make_request("a", [5, 6, 7], max_tokens=9)
    scheduler.add_request(request)
    for _ in range(4):
        run_step(scheduler, worker)
    scheduler_output = scheduler.schedule()
    model_output = worker.execute(scheduler_output)
    model_output.num_sampled[0] = 0
    model_output.errors["a"] = "logits are not a number"
    scheduler.update_from_output(scheduler_output, model_output)
    scheduler.add_request(make_request("b", [5, 6, 7, *expected_tokens(request, 128, 1000)[0]], max_tokens=1))
    (new,) = scheduler.schedule().scheduled_new_reqs
    assert new.num_computed_tokens == 0


def test_a_request_may_fail_in_the_middle_of_its_prompt() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    worker = FakeWorker.of(scheduler)
    scheduler.add_request(make_request("a", range(20), max_tokens=6))
    scheduler_output = scheduler.schedule()
    model_output = worker.execute(scheduler_output)
    model_output.errors["a"] = "logits are not a number"
    assert ends(scheduler.update_from_output(scheduler_output, model_output)) == {"a": "error"}
    assert_idle(scheduler)


def test_a_failure_of_one_that_has_ended_is_nothing() -> None:
    scheduler, _ = two_requests()
    scheduler_output = scheduler.schedule()
    scheduler.abort(["a"])
    model_output = model_output_for(scheduler_output, [1, 2])
    model_output.num_sampled[0] = 0
    model_output.errors["a"] = "late"
    assert ends(scheduler.update_from_output(scheduler_output, model_output)) == {"a": "abort"}


def test_every_end_is_told_once_to_the_worker() -> None:
    scheduler = make_scheduler(max_num_seqs=3)
    worker = FakeWorker.of(scheduler)
    for index in range(9):
        scheduler.add_request(make_request(f"r{index}", [index], max_tokens=1 + index % 4))
    told = []
    while not scheduler.is_finished():
        scheduler_output = scheduler.schedule()
        told += scheduler_output.finished_req_ids
        scheduler.update_from_output(scheduler_output, worker.execute(scheduler_output))
    told += scheduler.schedule().finished_req_ids
    assert sorted(told) == [f"r{index}" for index in range(9)]
