"""Prompts with a common prefix share KV blocks: how many, which requests, and which never do."""

import pytest

from octavo.contracts.schedule import NewRequestData
from octavo.scheduler.scheduler import Scheduler
from octavo.testing import FakeWorker, expected_tokens, make_request, make_scheduler, run_step

PROMPT = list(range(100, 112))  # three blocks of four


def run_to_end(scheduler: Scheduler, worker: FakeWorker) -> None:
    while not scheduler.is_finished():
        run_step(scheduler, worker)
        scheduler.check_integrity()


def admit(scheduler: Scheduler, worker: FakeWorker) -> dict[str, NewRequestData]:
    """Run one step; return the requests that it let in."""
    scheduler_output = scheduler.schedule()
    scheduler.update_from_output(scheduler_output, worker.execute(scheduler_output))
    return {new.request_id: new for new in scheduler_output.scheduled_new_reqs}


@pytest.fixture
def scheduler() -> Scheduler:
    """One that has served `PROMPT` already, and ten tokens after it."""
    scheduler = make_scheduler()
    scheduler.add_request(make_request("before", PROMPT, max_tokens=10))
    run_to_end(scheduler, FakeWorker.of(scheduler))
    return scheduler


@pytest.mark.parametrize(
    ("length", "num_cached"),
    [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (11, 8), (12, 8)],
    ids=str,
)
def test_at_most_all_but_the_last_token_is_a_hit(scheduler: Scheduler, length: int, num_cached: int) -> None:
    """A prompt of exactly k blocks, all cached, computes its last block again: the logits of its last token."""
    scheduler.add_request(make_request("r", PROMPT[:length], max_tokens=3))
    new = admit_only(scheduler)
    assert new.num_computed_tokens == num_cached


def admit_only(scheduler: Scheduler) -> NewRequestData:
    (new,) = scheduler.schedule().scheduled_new_reqs
    return new


def test_a_full_hit_computes_one_token() -> None:
    scheduler = make_scheduler(block_size=1)
    worker = FakeWorker.of(scheduler)
    for name in ("before", "after"):
        request = make_request(name, PROMPT, max_tokens=1)
        scheduler.add_request(request)
        outputs = run_step(scheduler, worker)
        assert outputs.new_token_ids == expected_tokens(request, 128, 1000)[0]
    assert worker.num_tokens_computed == len(PROMPT) + 1
    assert outputs.admitted["after"].num_cached_tokens == len(PROMPT) - 1


def test_output_is_a_prefix_too() -> None:
    """The second turn of a chat finds what the first turn said, up to its last full block."""
    scheduler = make_scheduler()
    worker = FakeWorker.of(scheduler)
    first = make_request("first", PROMPT, max_tokens=6)
    scheduler.add_request(first)
    run_to_end(scheduler, worker)
    scheduler.add_request(make_request("second", PROMPT + expected_tokens(first, 128, 1000)[0] + [1, 2], max_tokens=1))
    assert admit(scheduler, worker)["second"].num_computed_tokens == 16


def test_siblings_that_arrive_together_share_in_the_same_step() -> None:
    scheduler = make_scheduler()
    worker = FakeWorker.of(scheduler)
    requests = [make_request(f"sample-{index}", [*PROMPT, 1], seed=index, max_tokens=5) for index in range(4)]
    for request in requests:
        scheduler.add_request(request)
    new = admit(scheduler, worker)
    assert [data.num_computed_tokens for data in new.values()] == [0, 12, 12, 12]
    assert len({tuple(data.block_ids[0][:3]) for data in new.values()}) == 1
    assert len({data.block_ids[0][3] for data in new.values()}) == 4
    assert worker.num_tokens_computed == 13 + 3
    run_to_end(scheduler, worker)


def test_a_chunked_sibling_shares_what_is_computed_by_then() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10)
    worker = FakeWorker.of(scheduler)
    scheduler.add_request(make_request("first", PROMPT, max_tokens=5))
    admit(scheduler, worker)
    scheduler.add_request(make_request("sibling", [*PROMPT, 1], max_tokens=5))
    assert admit(scheduler, worker)["sibling"].num_computed_tokens == 12
    run_to_end(scheduler, worker)


def test_prompt_logprobs_need_every_position(scheduler: Scheduler) -> None:
    scheduler.add_request(make_request("r", PROMPT, prompt_logprobs=0, max_tokens=1))
    assert admit_only(scheduler).num_computed_tokens == 0


def test_its_blocks_are_there_for_others(scheduler: Scheduler) -> None:
    scheduler.blocks.reset_prefix_cache()
    scheduler.add_request(make_request("asks", PROMPT, prompt_logprobs=0, max_tokens=1))
    scheduler.add_request(make_request("shares", [*PROMPT, 1], max_tokens=1))
    asks, shares = scheduler.schedule().scheduled_new_reqs
    assert (asks.num_computed_tokens, shares.num_computed_tokens) == (0, 12)


def test_tenants_with_different_salts_share_nothing() -> None:
    scheduler = make_scheduler()
    worker = FakeWorker.of(scheduler)
    for index, salt in enumerate([None, "a", "b", "a"]):
        scheduler.add_request(make_request(f"r{index}", [*PROMPT, 1], cache_salt=salt, max_tokens=1))
    assert [new.num_computed_tokens for new in admit(scheduler, worker).values()] == [0, 0, 0, 12]


def test_without_prefix_caching_nothing_is_found_or_named() -> None:
    scheduler = make_scheduler(enable_prefix_caching=False)
    worker = FakeWorker.of(scheduler)
    for index in range(2):
        scheduler.add_request(make_request(f"r{index}", [*PROMPT, 1], max_tokens=1))
    assert [new.num_computed_tokens for new in admit(scheduler, worker).values()] == [0, 0]
    assert scheduler.blocks.pools[0]._block_by_hash == {}


def test_reset_forgets_every_prefix(scheduler: Scheduler) -> None:
    scheduler.blocks.reset_prefix_cache()
    scheduler.check_integrity()
    scheduler.add_request(make_request("r", PROMPT, max_tokens=1))
    assert admit_only(scheduler).num_computed_tokens == 0


def test_hits_are_counted_in_tokens(scheduler: Scheduler) -> None:
    scheduler.add_request(make_request("asks", PROMPT, max_tokens=1))
    scheduler.add_request(make_request("must not ask", PROMPT, prompt_logprobs=0, max_tokens=1))
    scheduler.schedule()
    stats = scheduler.stats()
    assert (stats.num_prefix_queries_total, stats.num_prefix_hits_total) == (24, 8)


def test_to_find_ones_own_blocks_after_a_preemption_is_no_hit() -> None:
    scheduler = make_scheduler(num_blocks=6, max_model_len=24)
    worker = FakeWorker.of(scheduler)
    for index, name in enumerate("ab"):
        scheduler.add_request(make_request(name, [index] * 7, max_tokens=14))
    run_to_end(scheduler, worker)
    stats = scheduler.stats()
    assert stats.num_preemptions_total == 1
    assert (stats.num_prefix_queries_total, stats.num_prefix_hits_total) == (14, 0)


def test_an_evicted_prefix_is_computed_again() -> None:
    """A pool so small that another request takes the blocks; the simulated memory checks every read."""
    scheduler = make_scheduler(num_blocks=6, max_model_len=24)
    worker = FakeWorker.of(scheduler)
    for index, prompt in enumerate([PROMPT, range(20), PROMPT]):
        request = make_request(f"r{index}", prompt, max_tokens=4)
        scheduler.add_request(request)
        run_to_end(scheduler, worker)
    assert worker.num_tokens_computed == (12 + 3) + (20 + 3) + (12 + 3)
