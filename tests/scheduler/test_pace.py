"""Chunks of prompts follow the clock, so that streams go on."""

import pytest

from octavo.contracts.schedule import SchedulerOutput
from octavo.scheduler.pace import FEWEST_TOKENS, FIRST_TOKENS, StepPace
from octavo.scheduler.request import Request
from octavo.scheduler.running import RunningRows
from octavo.testing import FakeWorker, make_request, make_scheduler

MOST = 2048


class Machine:
    """A clock that moves on with each step: some seconds for the step, and some for each token of a prompt."""

    def __init__(self, step_s: float, token_s: float) -> None:
        self.now_s, self.step_s, self.token_s = 1000.0, step_s, token_s

    def clock(self) -> float:
        return self.now_s

    def compute(self, output: SchedulerOutput) -> float:
        """Let the step pass; return how long it took."""
        took_s = self.step_s + self.token_s * (output.total_num_scheduled_tokens - len(output.req_ids))
        self.now_s += took_s
        return took_s


def run(
    machine: Machine, *, target_s: float, prompts: list[int], steps: int, streams: int = 0
) -> list[tuple[int, float]]:
    """Answer requests with prompts of such lengths beside streams; return tokens and seconds of each step."""
    scheduler = make_scheduler(
        num_blocks=4096,
        block_size=32,
        max_num_batched_tokens=MOST,
        max_model_len=16_384,
        step_target_s=target_s,
        clock=machine.clock,
    )
    worker = FakeWorker.of(scheduler)

    def step() -> tuple[int, float]:
        output = scheduler.schedule()
        took_s = machine.compute(output)
        scheduler.update_from_output(output, worker.execute(output))
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
    running = RunningRows(num_running, 64, 32)
    for index in range(num_running):
        running.add(Request(make_request(f"{index}", [1] * 8), index, 64), [index], num_cached_blocks=0, last_hash=b"")
    assert StepPace(MOST, 0.25, lambda: 0.0).budget(running) >= num_running


def test_a_clock_that_is_set_back_teaches_nothing() -> None:
    machine = Machine(0.02, 0.001)
    scheduler = make_scheduler(
        num_blocks=512,
        block_size=32,
        max_num_batched_tokens=MOST,
        max_model_len=8192,
        step_target_s=0.25,
        clock=machine.clock,
    )
    worker = FakeWorker.of(scheduler)
    scheduler.add_request(make_request("a", [1] * 4000, max_tokens=1))
    output = scheduler.schedule()
    machine.now_s -= 3600.0
    scheduler.update_from_output(output, worker.execute(output))
    assert scheduler.schedule().total_num_scheduled_tokens == FIRST_TOKENS
