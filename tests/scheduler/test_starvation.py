"""Waiting requests age: even the least urgent one gets through a flood of urgent ones, and keeps its blocks."""

from octavo.sampling_params import RequestPriority
from octavo.testing import FakeWorker, make_request, make_scheduler, run_step


def test_a_background_request_gets_through_an_endless_flood() -> None:
    """Blocks are scarce: it is preempted, and would be again if its age did not count while it runs."""
    now_s = 0.0
    scheduler = make_scheduler(
        num_blocks=10, max_num_seqs=4, max_num_batched_tokens=8, max_model_len=40, ageing_s=5.0, clock=lambda: now_s
    )
    worker = FakeWorker.of(scheduler)
    scheduler.add_request(
        make_request("patient", range(16), priority=RequestPriority.BACKGROUND, max_tokens=8, ignore_eos=True)
    )
    for step in range(400):
        now_s += 1.0
        while len(scheduler.waiting) < 4:
            prompt = [100 + step, 200 + len(scheduler.waiting)]
            request_id = f"urgent-{step}-{len(scheduler.waiting)}"
            scheduler.add_request(
                make_request(request_id, prompt, priority=RequestPriority.CRITICAL, arrival_time_s=now_s, max_tokens=20)
            )
        outputs = run_step(scheduler, worker)
        if "patient" in outputs.finished:
            assert outputs.finished["patient"].finish_reason == "length"
            assert outputs.finished["patient"].num_preemptions == 1  # while it was young
            return
    raise AssertionError("starved")
