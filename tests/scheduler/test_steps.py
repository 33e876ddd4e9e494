"""What a step computes: chunks, decoding before chunks, admission order, tokens in flight, length limits."""

import threading
from unittest.mock import Mock

import pytest

from octavo.contracts.engine import EngineCoreRequest
from octavo.contracts.schedule import SchedulerOutput
from octavo.sampling_params import RequestPriority
from octavo.scheduler.scheduler import Scheduler
from octavo.testing import FakeWorker, expected_tokens, make_request, make_scheduler, model_output_for, run_step

MAX_MODEL_LEN = 128


def counts(scheduler_output: SchedulerOutput) -> dict[str, int]:
    return dict(zip(scheduler_output.req_ids, scheduler_output.num_scheduled_tokens.tolist(), strict=True))


def step(scheduler: Scheduler, worker: FakeWorker) -> SchedulerOutput:
    scheduler_output = scheduler.schedule()
    scheduler.update_from_output(scheduler_output, worker.execute(scheduler_output))
    scheduler.check_integrity()
    return scheduler_output


def outputs_of(scheduler: Scheduler, *requests: EngineCoreRequest) -> dict[str, list[int]]:
    """Run `requests` to their ends; return the tokens of each."""
    worker = FakeWorker.of(scheduler)
    for request in requests:
        scheduler.add_request(request)
    token_ids: dict[str, list[int]] = {request.request_id: [] for request in requests}
    while not scheduler.is_finished():
        outputs = run_step(scheduler, worker)
        for request_id, token_id in zip(outputs.req_ids, outputs.new_token_ids, strict=True):
            token_ids[request_id].append(token_id)
    return token_ids


def test_a_long_prompt_is_computed_in_chunks_and_samples_once_complete() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10, max_num_seqs=4)
    worker = FakeWorker.of(scheduler)
    scheduler.add_request(make_request("long", range(25), max_tokens=2))
    scheduler_outputs = [step(scheduler, worker) for _ in range(4)]
    assert [counts(scheduler_output) for scheduler_output in scheduler_outputs] == [
        {"long": 10},
        {"long": 10},
        {"long": 5},
        {"long": 1},
    ]
    assert [scheduler_output.num_computed_tokens.tolist() for scheduler_output in scheduler_outputs] == [
        [0],
        [10],
        [20],
        [25],
    ]
    assert [scheduler_output.samples.tolist() for scheduler_output in scheduler_outputs] == [
        [False],
        [False],
        [True],
        [True],
    ]
    assert [scheduler_output.total_num_scheduled_tokens for scheduler_output in scheduler_outputs] == [10, 10, 5, 1]
    assert [scheduler_output.step for scheduler_output in scheduler_outputs] == [1, 2, 3, 4]
    assert scheduler.is_finished()


def test_a_chunked_prompt_gives_the_tokens_of_a_whole_one() -> None:
    request = make_request("r", range(40), max_tokens=20)
    whole = outputs_of(make_scheduler(), request)
    assert whole["r"] == expected_tokens(request, MAX_MODEL_LEN, 1000)[0]
    assert outputs_of(make_scheduler(max_num_seqs=3, max_num_batched_tokens=3), request) == whole


def test_streams_come_before_chunks_even_of_more_urgent_requests() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8, max_num_seqs=4)
    worker = FakeWorker.of(scheduler)
    for name in ("a", "b"):
        scheduler.add_request(make_request(name, [1, 2], priority=RequestPriority.BACKGROUND, max_tokens=9))
    step(scheduler, worker)
    scheduler.add_request(make_request("long", range(30), priority=RequestPriority.CRITICAL, max_tokens=9))
    assert counts(step(scheduler, worker)) == {"a": 1, "b": 1, "long": 6}
    assert counts(step(scheduler, worker)) == {"long": 6, "a": 1, "b": 1}


def test_admission_follows_class_then_arrival() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    worker = FakeWorker.of(scheduler)
    arrivals = [("n0", 2), ("low", 3), ("n1", 2), ("critical", 0)]
    for name, priority in arrivals:
        scheduler.add_request(make_request(name, [1], priority=priority, max_tokens=1))
    assert [request.request_id for request in scheduler.get_ready_requests()] == ["critical", "n0", "n1", "low"]
    assert [step(scheduler, worker).req_ids for _ in range(2)] == [("critical", "n0"), ("n1", "low")]


def test_a_prompt_that_does_not_fit_is_not_overtaken() -> None:
    """The first in line waits for its blocks; smaller ones behind it do not slip past for ever."""
    scheduler = make_scheduler(num_blocks=8, block_size=4, max_model_len=32)
    worker = FakeWorker.of(scheduler)
    scheduler.add_request(make_request("running", range(16), max_tokens=3))
    step(scheduler, worker)
    scheduler.add_request(make_request("large", range(100, 120), max_tokens=3))
    scheduler.add_request(make_request("small", [1], max_tokens=3))
    assert [step(scheduler, worker).req_ids for _ in range(3)] == [("running",), ("running",), ("large", "small")]


def test_a_refused_prompt_is_not_hashed_again_until_something_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make_scheduler(num_blocks=8, block_size=4, max_model_len=32)
    worker = FakeWorker.of(scheduler)
    find_prefix = Mock(side_effect=scheduler.blocks.find_prefix)
    monkeypatch.setattr(scheduler.blocks, "find_prefix", find_prefix)
    scheduler.add_request(make_request("running", range(16), max_tokens=12))
    scheduler.add_request(make_request("large", range(100, 120), max_tokens=3))
    for _ in range(11):
        step(scheduler, worker)
    assert find_prefix.call_count == 2
    assert step(scheduler, worker).req_ids == ("running",)
    assert step(scheduler, worker).req_ids == ("large",)
    assert find_prefix.call_count == 3


def test_rows_limit_how_many_run() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for index in range(5):
        scheduler.add_request(make_request(f"r{index}", [index], max_tokens=2))
    assert len(scheduler.schedule().req_ids) == 2
    assert (scheduler.stats().num_running, scheduler.stats().num_waiting) == (2, 3)


def test_a_new_request_travels_whole_and_then_as_diffs() -> None:
    scheduler = make_scheduler(block_size=4)
    worker = FakeWorker.of(scheduler)
    scheduler.add_request(make_request("r", [5, 6, 7], eos_token_ids=[1], max_tokens=9))
    first = step(scheduler, worker)
    (new,) = first.scheduled_new_reqs
    assert (new.request_id, new.token_ids.tolist(), new.num_prompt_tokens) == ("r", [5, 6, 7], 3)
    assert (len(new.block_ids[0]), new.num_computed_tokens, new.eos_token_ids) == (1, 0, [1])
    later = [step(scheduler, worker) for _ in range(6)]
    assert all(not scheduler_output.scheduled_new_reqs for scheduler_output in later)
    diffs = [scheduler_output.scheduled_cached_reqs for scheduler_output in later]
    assert [diff.rows.tolist() for diff in diffs] == [[], [new.row], [], [], [], [new.row]]
    first_block = new.block_ids[0][0]
    assert [diff.block_ids.tolist() for diff in diffs if len(diff.rows)] == [[first_block + 1], [first_block + 2]]


def test_an_order_does_not_change_after_it_was_given() -> None:
    """A worker in another thread may read it while the next step is made."""
    scheduler = make_scheduler(block_size=2)
    scheduler.add_request(make_request("r", [5, 6, 7], max_tokens=9))
    scheduler_output = scheduler.schedule()
    before = repr(scheduler_output)
    for _ in range(4):
        scheduler.schedule()
    assert repr(scheduler_output) == before


def test_steps_may_be_made_ahead_of_their_answers() -> None:
    """Three in flight: each counts on tokens that nobody has seen yet, and the end of the request is known."""
    scheduler = make_scheduler()
    worker = FakeWorker.of(scheduler)
    request = make_request("r", [1, 2, 3], max_tokens=3)
    scheduler.add_request(request)
    scheduler_outputs = [scheduler.schedule() for _ in range(4)]
    assert [scheduler_output.num_computed_tokens.tolist() for scheduler_output in scheduler_outputs] == [
        [0],
        [3],
        [4],
        [],
    ]
    assert [scheduler_output.num_scheduled_tokens.tolist() for scheduler_output in scheduler_outputs] == [
        [3],
        [1],
        [1],
        [],
    ]
    token_ids = []
    for scheduler_output in scheduler_outputs:
        token_ids += scheduler.update_from_output(scheduler_output, worker.execute(scheduler_output)).new_token_ids
    assert token_ids == expected_tokens(request, MAX_MODEL_LEN, 1000)[0]
    assert scheduler.is_finished()


def test_a_token_sampled_past_the_end_is_dropped() -> None:
    """The first token stops the request while the second is in flight already."""
    scheduler = make_scheduler()
    scheduler.add_request(make_request("r", [1, 2, 3], eos_token_ids=[7], max_tokens=9))
    first, second = scheduler.schedule(), scheduler.schedule()
    outputs = scheduler.update_from_output(first, model_output_for(first, [7]))
    assert (outputs.new_token_ids, outputs.finished["r"].finish_reason) == ([7], "stop")
    outputs = scheduler.update_from_output(second, model_output_for(second, [8]))
    assert (outputs.req_ids, outputs.new_token_ids, outputs.finished) == ([], [], {})
    assert scheduler.blocks.num_free == [scheduler.blocks.pools[0].num_blocks]


def test_a_token_past_the_end_enters_no_block_name() -> None:
    """8 would fill the block, but 7 has ended the request; a later prompt must not find it, under whatever tokens."""
    scheduler = make_scheduler(block_size=4)
    scheduler.add_request(make_request("r", [1, 2], eos_token_ids=[7], max_tokens=9))
    scheduler_outputs = [scheduler.schedule() for _ in range(3)]
    for scheduler_output, token_id in zip(scheduler_outputs, [7, 8, 9], strict=True):
        scheduler.update_from_output(
            scheduler_output, model_output_for(scheduler_output, [token_id] * len(scheduler_output.req_ids))
        )
    for token_id in (0, 8):  # what stood in the row at that time, and what was sampled
        scheduler.add_request(make_request(f"again-{token_id}", [1, 2, 7, token_id, 5], max_tokens=1))
    assert [new.num_computed_tokens for new in scheduler.schedule().scheduled_new_reqs] == [0, 0]


def test_the_last_token_enters_a_name_when_a_step_computes_it() -> None:
    """7 has ended the request, while a step in flight writes its keys: unless that step fails, they may be used."""
    for has_failed, num_cached in ((False, 4), (True, 0)):
        scheduler = make_scheduler(block_size=4)
        scheduler.add_request(make_request("r", [1, 2, 3], eos_token_ids=[7], max_tokens=9))
        first, second = scheduler.schedule(), scheduler.schedule()
        scheduler.update_from_output(first, model_output_for(first, [7]))
        if has_failed:
            scheduler.fail_step(second, "boom")
        scheduler.add_request(make_request("again", [1, 2, 3, 7, 5], max_tokens=1))
        assert [new.num_computed_tokens for new in scheduler.schedule().scheduled_new_reqs] == [num_cached]


def test_the_context_ends_a_request_without_max_tokens() -> None:
    request = make_request("r", range(10), max_tokens=None)
    scheduler = make_scheduler(max_model_len=16, num_blocks=4)
    assert outputs_of(scheduler, request) == {"r": expected_tokens(request, 16, 1000)[0]}
    assert len(expected_tokens(request, 16, 1000)[0]) == 6


def test_a_request_may_fill_the_whole_pool() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4, max_model_len=16)
    requests = [make_request(f"r{index}", [index], max_tokens=None) for index in range(3)]
    token_ids = outputs_of(scheduler, *requests)
    assert {name: len(tokens) for name, tokens in token_ids.items()} == {"r0": 15, "r1": 15, "r2": 15}


def test_what_is_new_is_told_in_columns() -> None:
    now_s = 7.0
    scheduler = make_scheduler(clock=lambda: now_s)
    worker = FakeWorker.of(scheduler)
    requests = [make_request(name, [index], max_tokens=2) for index, name in enumerate("ab")]
    for request in requests:
        scheduler.add_request(request)
    first, second = run_step(scheduler, worker), run_step(scheduler, worker)
    assert (first.req_ids, first.num_new_tokens, first.first_indices) == (["a", "b"], [1, 1], [0, 0])
    assert (second.req_ids, second.num_new_tokens, second.first_indices) == (["a", "b"], [1, 1], [1, 1])
    assert first.num_scheduled_tokens == 2
    assert {name: entry.scheduled_time_s for name, entry in first.admitted.items()} == {"a": 7.0, "b": 7.0}
    assert (second.admitted, set(second.finished)) == ({}, {"a", "b"})
    assert second.finished["a"].finish_reason == "length"
    assert second.stats is not None
    assert (second.stats.num_running, second.stats.kv_cache_usage) == (0, 0.0)


def test_a_step_without_work_is_empty_and_harmless() -> None:
    scheduler = make_scheduler()
    scheduler_output = scheduler.schedule()
    assert (scheduler_output.req_ids, scheduler_output.total_num_scheduled_tokens) == ((), 0)
    outputs = scheduler.update_from_output(scheduler_output, model_output_for(scheduler_output, []))
    assert (outputs.req_ids, scheduler.is_finished()) == ([], True)


def test_answers_come_in_the_order_of_their_steps() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("r", [1], max_tokens=9))
    _, second = scheduler.schedule(), scheduler.schedule()
    with pytest.raises(AssertionError, match="in the order of their steps"):
        scheduler.update_from_output(second, model_output_for(second, [1]))


def test_an_answer_must_be_complete() -> None:
    scheduler = make_scheduler()
    for name in "ab":
        scheduler.add_request(make_request(name, [1], max_tokens=9))
    scheduler_output = scheduler.schedule()
    model_output = model_output_for(scheduler_output, [1, 2])
    model_output.num_sampled[1] = 0
    with pytest.raises(AssertionError, match="one token for each row that samples"):
        scheduler.update_from_output(scheduler_output, model_output)


@pytest.mark.parametrize("prompt", [[], range(16)], ids=["empty", "no room for output"])
def test_what_the_front_door_must_refuse_is_a_bug_here(prompt: list[int]) -> None:
    with pytest.raises(AssertionError):
        make_scheduler(max_model_len=16).add_request(make_request("r", prompt))


def test_an_id_is_used_once_at_a_time() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("r", [1]))
    with pytest.raises(AssertionError, match="'r' is here already"):
        scheduler.add_request(make_request("r", [1]))


def test_one_thread_owns_the_scheduler() -> None:
    scheduler = make_scheduler()
    scheduler.add_request(make_request("r", [1]))
    errors: list[AssertionError] = []

    def trespass() -> None:
        try:
            scheduler.schedule()
        except AssertionError as error:
            errors.append(error)

    thread = threading.Thread(target=trespass)
    thread.start()
    thread.join()
    assert "belongs to another thread" in str(errors[0])
