"""Prompt chunks are sized by measured time, so that streams do not stall."""

import statistics

import pytest
from tests.breadth import pick

from octavo.contracts.schedule import ModelRunnerOutput, SchedulerOutput
from octavo.scheduler.pace import FEWEST_TOKENS, FIRST_TOKENS, BusyTime, StepPace
from octavo.scheduler.request import Request
from octavo.scheduler.scheduler import Scheduler
from octavo.testing import make_request, make_scheduler, model_output_for

MOST = 2048


class Machine:
    """A clock that moves on with each step: some seconds for the step, for each row, and for each further token."""

    def __init__(self, step_s: float, token_s: float, row_s: float = 0.0) -> None:
        self.now_s, self.step_s, self.token_s, self.row_s = 1000.0, step_s, token_s, row_s

    def clock(self) -> float:
        return self.now_s

    def compute(self, output: SchedulerOutput) -> float:
        """Let the step pass; return how long it took."""
        num_rows = len(output.req_ids)
        took_s = self.step_s + self.row_s * num_rows + self.token_s * (output.total_num_scheduled_tokens - num_rows)
        self.now_s += took_s
        return took_s


def scheduler_of(machine: Machine, target_s: float, max_num_seqs: int = 8) -> Scheduler:
    return make_scheduler(
        num_blocks=4096,
        block_size=32,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=MOST,
        max_model_len=16_384,
        step_target_s=target_s,
        clock=machine.clock,
    )


def answer_to(output: SchedulerOutput) -> ModelRunnerOutput:
    """Any token will do, and a worker that checks its cache would take most of the time."""
    return model_output_for(output, [1] * len(output.req_ids))


def run(
    machine: Machine, *, target_s: float, prompts: list[int], steps: int, streams: int = 0
) -> list[tuple[int, float]]:
    """Answer requests with prompts of such lengths beside streams; return tokens and seconds of each step."""
    scheduler = scheduler_of(machine, target_s)

    def step() -> tuple[int, float]:
        output = scheduler.schedule()
        took_s = machine.compute(output)
        scheduler.update_from_output(output, answer_to(output))
        return output.total_num_scheduled_tokens, took_s

    for index in range(streams):
        scheduler.add_request(make_request(f"stream {index}", [index + 1] * 8, max_tokens=200, ignore_eos=True))
    for _ in range(4 if streams else 0):
        step()
    for index, size in enumerate(prompts):
        scheduler.add_request(make_request(f"{index}", [index + 1] * size, max_tokens=200, ignore_eos=True))
    return [step() for _ in range(steps)]


def test_a_slow_machine_gets_chunks_that_fit() -> None:
    steps = run(Machine(0.02, 0.001), target_s=0.25, prompts=[8192], steps=20, streams=1)
    assert steps[0][0] == FIRST_TOKENS
    assert all(0.15 < took_s <= 0.25 for _, took_s in steps[2:])
    assert all(num_tokens % FEWEST_TOKENS == 0 for num_tokens, _ in steps)


def test_where_nobody_waits_chunks_are_longer() -> None:
    steps = run(Machine(0.02, 0.001), target_s=0.25, prompts=[8192], steps=8)
    assert all(0.6 < took_s <= 1.0 for _, took_s in steps[2:])


def test_a_fast_machine_gets_all_at_once_after_its_first_step() -> None:
    steps = run(Machine(0.005, 0.00002), target_s=0.25, prompts=[8192], steps=4)
    assert [num_tokens for num_tokens, _ in steps] == [FIRST_TOKENS, MOST, MOST, MOST]


def test_streams_go_on_beside_a_prompt() -> None:
    steps = run(Machine(0.02, 0.001), target_s=0.25, prompts=[6000], steps=25, streams=3)
    assert all(took_s <= 0.3 for _, took_s in steps[1:])


def test_large_weights_are_not_read_for_a_few_tokens() -> None:
    """A decode step of a second: chunks may take two, not a quarter."""
    steps = run(Machine(1.0, 0.002), target_s=0.25, prompts=[9000], steps=12, streams=1)
    assert all(num_tokens > 300 and took_s <= 2.1 for num_tokens, took_s in steps[3:])


def test_a_chunk_is_never_smaller_than_a_tile() -> None:
    steps = run(Machine(0.02, 1.0), target_s=0.25, prompts=[512], steps=5)
    assert [num_tokens for num_tokens, _ in steps[1:]] == [1 + FEWEST_TOKENS] * 4  # its own request counts as one


def test_without_a_target_chunks_are_as_long_as_may_be() -> None:
    steps = run(Machine(0.02, 1.0), target_s=0.0, prompts=[5000], steps=3)
    assert [num_tokens for num_tokens, _ in steps] == [MOST, MOST, 5000 - 2 * MOST]


@pytest.mark.parametrize("num_running", [1, 300, 2048])
def test_every_running_request_advances(num_running: int) -> None:
    running = make_scheduler(max_num_seqs=num_running, max_model_len=64).running
    for index in range(num_running):
        request = Request(make_request(f"{index}", [1] * 8), index, 64)
        running.insert(request, [[index]], running.blocks.find_prefix(request.token_ids, b""))
    assert StepPace(MOST, 0.25).budget(running) >= num_running


def test_a_clock_that_is_set_back_teaches_nothing() -> None:
    machine = Machine(0.02, 0.001)
    scheduler = scheduler_of(machine, 0.25)
    scheduler.add_request(make_request("a", [1] * 4000, max_tokens=1))
    output = scheduler.schedule()
    machine.now_s -= 3600.0
    scheduler.update_from_output(output, answer_to(output))
    assert scheduler.schedule().total_num_scheduled_tokens == FIRST_TOKENS


def keep_busy(
    machine: Machine, *, target_s: float, streams: int, num_requests: int, size: int, max_tokens: int
) -> tuple[list[float], list[float]]:
    """Keep `streams` requests there at any time; return how long each waited for a token, and each step took."""
    scheduler = scheduler_of(machine, target_s, max_num_seqs=streams)
    came_s: dict[str, float] = {}
    waited_s: dict[str, float] = {}
    took_s = []

    def come() -> None:
        request_id = f"{len(came_s)}"
        came_s[request_id] = machine.now_s
        prompt = [len(came_s)] * size
        scheduler.add_request(make_request(request_id, prompt, max_tokens=max_tokens, ignore_eos=True))

    for _ in range(streams):
        come()
    while not scheduler.is_finished():
        output = scheduler.schedule()
        took_s.append(machine.compute(output))
        outputs_of_steps = scheduler.update_from_output(output, answer_to(output))
        for request_id in outputs_of_steps.req_ids:
            waited_s.setdefault(request_id, machine.now_s - came_s[request_id])
        for _ in range(min(len(outputs_of_steps.finished), num_requests - len(came_s))):
            come()
    return list(waited_s.values()), took_s


def test_a_crowd_does_not_wait_behind_a_queue_that_never_ends() -> None:
    """32 streams decode in 0.11 s: what is left of the target is less than the prompts of those who come."""
    machine = Machine(0.025, 0.0025, row_s=0.0027)
    num_requests = pick(64, 128)
    waited_s, took_s = keep_busy(machine, target_s=0.25, streams=32, num_requests=num_requests, size=128, max_tokens=64)
    assert statistics.median(waited_s) < 1.0  # 6 s where the target alone decides
    assert statistics.median(waited_s[num_requests // 2 :]) < 0.5
    assert max(took_s[5:]) <= 2 * 0.25


def test_a_crowd_leaves_the_target_alone_where_prompts_are_quick() -> None:
    machine = Machine(0.02, 0.0004, row_s=0.0015)
    waited_s, took_s = keep_busy(
        machine, target_s=0.25, streams=32, num_requests=pick(40, 128), size=128, max_tokens=64
    )
    assert max(took_s[5:]) <= 0.26
    assert statistics.median(waited_s) < 1.0


def test_time_between_steps_is_the_hosts_while_there_is_work() -> None:
    busy = BusyTime()
    for output_s, scheduled_s, compute_s, has_more in (
        (1.0, 0.1, 0.8, True),
        (2.0, 1.2, 0.7, False),  # from 1.0 on
        (9.0, 8.5, 0.4, True),  # idle until 8.5
        (9.5, 9.1, None, True),  # not timed
        (9.1, 9.6, 0.2, True),  # the clock was set
    ):
        busy.record_output(compute_s, scheduled_s, output_s)
        if not has_more:
            busy.pause()
    assert round(busy.step_s, 6) == 0.9 + 1.0 + 0.5
    assert round(busy.compute_s, 6) == 0.8 + 0.7 + 0.4
