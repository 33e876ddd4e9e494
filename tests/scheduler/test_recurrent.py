"""Recurrent groups: the blocks a request holds, which stay findable, and what is rejected."""

from octavo.contracts.kv_cache import KVGroup
from octavo.scheduler.scheduler import Scheduler
from octavo.testing import FakeWorker, KnownDrafter, make_request, make_scheduler, run_step

STATES = KVGroup.recurrent(interval=8)  # blocks of 4 tokens: every second one ends with a snapshot
PROMPT = list(range(30, 60))


def recurrent_scheduler() -> tuple[Scheduler, FakeWorker]:
    scheduler = make_scheduler(num_blocks=[64, 8], groups=(KVGroup(), STATES))
    return scheduler, FakeWorker.of(scheduler)


def test_a_block_is_a_whole_number_of_the_caches_blocks() -> None:
    assert [STATES.block_tokens(size) for size in (1, 4, 8, 16, 3)] == [8, 8, 8, 16, 9]
    assert STATES.first_read(17) == 16
    # A chunk of 16 tokens: its two blocks, the one before, and one for what is in flight.
    assert STATES.peak_blocks(1000, 4, max_chunk=16) == 5


def test_a_decoding_request_holds_one_state_and_leaves_snapshots() -> None:
    scheduler, worker = recurrent_scheduler()
    scheduler.add_request(make_request("r", PROMPT[:3], max_tokens=40, ignore_eos=True))
    num_held = []
    while not scheduler.is_finished():
        scheduler_output = scheduler.schedule()
        num_held.append(scheduler.blocks.pools[1].num_blocks - scheduler.blocks.num_free[1])
        scheduler.update_from_output(scheduler_output, worker.execute(scheduler_output))
        scheduler.check_integrity()
    assert set(num_held) == {1, 2}
    assert num_held.count(2) == 5  # in the steps that begin a block


def test_a_prefix_hit_begins_from_the_last_snapshot() -> None:
    scheduler, worker = recurrent_scheduler()
    for request_id in ("first", "second"):
        scheduler.add_request(make_request(request_id, PROMPT, max_tokens=1))
        run_step(scheduler, worker)
    assert scheduler.stats().num_prefix_hits_total == 24


def test_a_state_of_the_same_step_is_not_begun_from() -> None:
    scheduler, worker = recurrent_scheduler()
    for index in range(2):
        scheduler.add_request(make_request(f"r{index}", PROMPT[:20], max_tokens=2))
    new = scheduler.schedule()
    assert [data.num_computed_tokens for data in new.scheduled_new_reqs] == [0, 0]
    scheduler.update_from_output(new, worker.execute(new))
    scheduler.add_request(make_request("later", PROMPT[:20], max_tokens=2))
    assert [data.num_computed_tokens for data in scheduler.schedule().scheduled_new_reqs] == [16]


def test_drafts_end_no_block_of_states() -> None:
    """A block has the state before drafts until they are accepted, and nothing but known tokens in the end."""
    scheduler, worker = recurrent_scheduler()
    scheduler.add_request(make_request("r", PROMPT[:3], max_tokens=40, ignore_eos=True))
    while not scheduler.is_finished():
        run_step(scheduler, worker)
    [expected] = [row.token_ids for row in worker.rows.values()]
    drafter = KnownDrafter.of_sequences([expected], vocab_size=max(expected) + 1)
    scheduler = make_scheduler(num_blocks=[64, 8], groups=(KVGroup(), STATES), drafter=drafter)
    worker, num_drafts = FakeWorker.of(scheduler), list[int]()
    scheduler.add_request(make_request("r", PROMPT[:3], max_tokens=40, ignore_eos=True))
    while not scheduler.is_finished():
        step = scheduler.schedule()
        if step.scheduled_spec_decode_tokens is not None:
            start, [count] = int(step.num_computed_tokens[0]), step.scheduled_spec_decode_tokens.counts.tolist()
            assert start // 8 == (start + count + 1) // 8
            num_drafts.append(count)
        scheduler.update_from_output(step, worker.execute(step))
        scheduler.check_integrity()
    assert max(num_drafts) == drafter.max_num_drafts
    assert drafter.num_proposed > drafter.num_accepted > 5
    [found] = [row.token_ids for row in worker.rows.values()]
    assert found == expected
