"""Which images a step encodes, what it computes until then, and what ranks keep."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.contracts.engine import EngineCoreRequest, ExtraInputs, VisionInput
from octavo.contracts.schedule import SchedulerOutput
from octavo.scheduler.scheduler import Scheduler
from octavo.testing import FakeExecutor, make_request, make_scheduler

PATCHES: NDArray[np.float32] = np.zeros((4, 8), dtype=np.float32)


def image(name: str, start: int, num_tokens: int) -> VisionInput:
    return VisionInput(
        start=start,
        num_tokens=num_tokens,
        grid=(1, 2, 2 * num_tokens),
        content_hash=name.encode().hex().rjust(64, "0"),
        patches=PATCHES,
    )


def request(request_id: str, length: int, *images: VisionInput, **options: Any) -> EngineCoreRequest:
    extra = ExtraInputs(vision=list(images))
    return make_request(request_id, range(length), extra_inputs=extra, **{"max_tokens": 2, **options})


def scheduler_of(capacity: int, **options: Any) -> Scheduler:
    return make_scheduler(**{"encoder_cache_tokens": capacity, "enable_prefix_caching": False, **options})


def run(scheduler: Scheduler) -> list[SchedulerOutput]:
    """Run until all requests are finished; return the steps."""
    executor, steps = FakeExecutor(num_blocks=64, block_size=4), []
    executor.start()
    while not scheduler.is_finished():
        steps.append(scheduler.schedule())
        scheduler.update_from_output(steps[-1], executor.execute_model(steps[-1]).result())
        scheduler.check_integrity()
        assert len(steps) < 100
    return steps


def encoded(steps: list[SchedulerOutput]) -> list[list[str]]:
    return [
        [bytes.fromhex(each.content_hash).lstrip(b"\0").decode() for each in step.scheduled_encoder_inputs]
        for step in steps
    ]


def counts(steps: list[SchedulerOutput], request_id: str) -> list[int]:
    return [
        int(step.num_scheduled_tokens[step.req_ids.index(request_id)]) for step in steps if request_id in step.req_ids
    ]


def test_an_image_is_encoded_in_the_step_that_reaches_it_and_once_for_all() -> None:
    scheduler = scheduler_of(64, max_num_batched_tokens=16)
    scheduler.add_request(request("a", 30, image("x", 20, 6)))
    scheduler.add_request(request("b", 12, image("x", 2, 6)))
    steps = run(scheduler)
    assert encoded(steps)[:3] == [[], ["x"], []]
    assert not any(encoded(steps)[2:])
    assert steps[0].scheduled_new_reqs[0].extra_inputs is not None
    assert steps[0].scheduled_new_reqs[0].extra_inputs.vision[0].patches is None


def test_a_step_encodes_no_more_than_its_budget_unless_an_image_alone_is_larger() -> None:
    scheduler = scheduler_of(64, max_num_batched_tokens=16)
    scheduler.add_request(request("a", 60, image("x", 0, 20), image("y", 22, 10), image("z", 33, 10)))
    steps = run(scheduler)
    assert encoded(steps)[:4] == [["x"], ["y"], ["z"], []]
    assert counts(steps, "a")[:4] == [16, 16, 16, 12]


def test_a_prompt_stops_before_an_image_for_which_there_is_no_room() -> None:
    scheduler = scheduler_of(10, max_num_batched_tokens=32)
    scheduler.add_request(request("a", 30, image("x", 2, 8), image("y", 14, 8)))
    steps = run(scheduler)
    assert encoded(steps)[:2] == [["x"], ["y"]]
    assert counts(steps, "a")[:2] == [14, 16]
    assert [len(step.freed_encoder_outputs) for step in steps[:2]] == [0, 1]


def test_requests_wait_for_room_and_text_is_not_held_up() -> None:
    scheduler = scheduler_of(8, max_num_batched_tokens=64)
    for name in "abc":
        scheduler.add_request(request(name, 10, image(name, 0, 8)))
    steps = run(scheduler)
    assert [each for each in encoded(steps) if each] == [["a"], ["b"], ["c"]]
    assert len(steps) == 4  # the second token of one is computed beside the next one's prompt


def test_an_ended_request_lets_go_and_a_failed_step_keeps_nothing() -> None:
    scheduler = scheduler_of(8, max_num_batched_tokens=4)
    scheduler.add_request(request("a", 10, image("x", 0, 8)))
    scheduler.schedule()
    assert len(scheduler._encoder.held_contents) == 1
    scheduler.abort(["a"])
    assert not scheduler._encoder.held_contents
    other = scheduler_of(8)
    other.add_request(request("a", 10, image("x", 0, 8)))
    failed = other.schedule()
    other.fail_step(failed, "why")
    other.add_request(request("b", 10, image("x", 0, 8)))
    assert encoded(run(other))[0] == ["x"]


def test_blocks_hold_the_image_and_the_place_in_it() -> None:
    scheduler, executor = scheduler_of(64, enable_prefix_caching=True), FakeExecutor(num_blocks=64, block_size=4)
    executor.start()
    cached = []
    for number, images in enumerate(
        [
            [image("x", 6, 8)],
            [image("x", 6, 8)],
            [image("y", 6, 8)],
            [image("x", 5, 8)],
            [image("x", 6, 4), image("x", 10, 4)],
            [],
        ]
    ):
        scheduler.add_request(request(str(number), 24, *images))
        while not scheduler.is_finished():
            step = scheduler.schedule()
            outputs = scheduler.update_from_output(step, executor.execute_model(step).result())
            cached += [admitted.num_cached_tokens for admitted in outputs.admitted.values()]
    assert cached == [0, 20, 4, 4, 8, 4]
