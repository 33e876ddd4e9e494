"""When blocks run out: which request is preempted, when it resumes, and that its tokens do not change."""

from octavo.contracts.schedule import SchedulerOutput
from octavo.sampling_params import RequestPriority
from octavo.scheduler.scheduler import Scheduler
from octavo.testing import FakeWorker, expected_tokens, make_request, make_scheduler

MAX_MODEL_LEN = 24


def crowded() -> Scheduler:
    """Six blocks of four tokens: enough for one request of full length, short for two."""
    return make_scheduler(num_blocks=6, block_size=4, max_model_len=MAX_MODEL_LEN)


class Log:
    """Runs steps and keeps what was ordered and told."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.worker = FakeWorker.of(scheduler)
        self.scheduler_outputs: list[SchedulerOutput] = []
        self.token_ids: dict[str, list[int]] = {}
        self.num_preemptions: dict[str, int] = {}

    def step(self) -> SchedulerOutput:
        scheduler_output = self.scheduler.schedule()
        outputs = self.scheduler.update_from_output(scheduler_output, self.worker.execute(scheduler_output))
        self.scheduler.check_integrity()
        for request_id, token_id in zip(outputs.req_ids, outputs.new_token_ids, strict=True):
            self.token_ids.setdefault(request_id, []).append(token_id)
        self.num_preemptions.update({name: end.num_preemptions for name, end in outputs.finished.items()})
        self.scheduler_outputs.append(scheduler_output)
        return scheduler_output

    def run(self) -> None:
        while not self.scheduler.is_finished():
            self.step()


def test_the_worst_goes_and_comes_back_with_the_same_tokens() -> None:
    log = Log(crowded())
    requests = [make_request(name, [index] * 7, max_tokens=14) for index, name in enumerate("ab")]
    for request in requests:
        log.scheduler.add_request(request)
    log.run()
    assert log.num_preemptions == {"a": 0, "b": 1}
    for request in requests:
        assert log.token_ids[request.request_id] == expected_tokens(request, MAX_MODEL_LEN, 1000)[0]


def test_a_less_urgent_one_goes_before_a_later_one() -> None:
    log = Log(crowded())
    for index, (name, priority) in enumerate([("low", RequestPriority.LOW), ("normal", RequestPriority.NORMAL)]):
        log.scheduler.add_request(make_request(name, [index] * 7, priority=priority, max_tokens=14))
    log.run()
    assert log.num_preemptions == {"low": 1, "normal": 0}


def test_the_worker_is_told_to_forget_it_and_gets_it_back_whole() -> None:
    log = Log(crowded())
    for index, name in enumerate("ab"):
        log.scheduler.add_request(make_request(name, [index] * 7, max_tokens=14))
    log.run()
    forgotten = [
        scheduler_output.finished_req_ids
        for scheduler_output in log.scheduler_outputs
        if scheduler_output.finished_req_ids
    ]
    assert forgotten == [["b"], ["a"]]  # b when it is preempted, a when it has ended
    first, again = [
        new
        for scheduler_output in log.scheduler_outputs
        for new in scheduler_output.scheduled_new_reqs
        if new.request_id == "b"
    ]
    assert first.token_ids.tolist() == [1] * 7
    num_sampled = len(again.token_ids) - 7
    assert num_sampled > 0
    assert again.token_ids[7:].tolist() == log.token_ids["b"][:num_sampled]
    assert again.num_prompt_tokens == 7


def test_it_is_let_in_before_later_ones_of_its_class() -> None:
    log = Log(crowded())
    for index, name in enumerate("ab"):
        log.scheduler.add_request(make_request(name, [index] * 7, max_tokens=14))
    while not log.scheduler.stats().num_preemptions_total:
        log.step()
    log.scheduler.add_request(make_request("late", [5], max_tokens=2))
    assert [request.request_id for request in log.scheduler.get_ready_requests()] == ["b", "late"]
    log.run()
    new = [new.request_id for scheduler_output in log.scheduler_outputs for new in scheduler_output.scheduled_new_reqs]
    assert new == ["a", "b", "b", "late"]


def test_nobody_is_let_in_by_the_step_that_preempts() -> None:
    """There is a free row, budget, and after the preemption there are blocks; still, the next step is early enough."""

    def two_running() -> Log:
        log = Log(crowded())
        for index, name in enumerate("ab"):
            log.scheduler.add_request(make_request(name, [index] * 7, max_tokens=14))
        return log

    rehearsal, log = two_running(), two_running()
    while not rehearsal.scheduler.stats().num_preemptions_total:
        rehearsal.step()
    for _ in rehearsal.scheduler_outputs[:-1]:
        log.step()
    log.scheduler.add_request(make_request("tiny", [9], priority=RequestPriority.CRITICAL, max_tokens=1))
    scheduler_output = log.step()
    assert (scheduler_output.finished_req_ids, scheduler_output.scheduled_new_reqs) == (["b"], [])
    assert [new.request_id for new in log.step().scheduled_new_reqs] == ["tiny"]


def test_it_is_reported_as_admitted_once() -> None:
    scheduler = crowded()
    worker = FakeWorker.of(scheduler)
    for index, name in enumerate("ab"):
        scheduler.add_request(make_request(name, [index] * 7, max_tokens=14))
    admitted: list[str] = []
    while not scheduler.is_finished():
        scheduler_output = scheduler.schedule()
        admitted += scheduler.update_from_output(scheduler_output, worker.execute(scheduler_output)).admitted
    assert admitted == ["a", "b"]


def test_its_token_in_flight_is_dropped_and_sampled_again() -> None:
    """Preempted by a step made ahead of the answer that it waited for."""
    scheduler = crowded()
    worker = FakeWorker.of(scheduler)
    requests = [make_request(name, [index] * 7, max_tokens=14) for index, name in enumerate("ab")]
    for request in requests:
        scheduler.add_request(request)
    token_ids: dict[str, list[int]] = {"a": [], "b": []}
    was_cut_short = False
    num_ended = 0
    pending = scheduler.schedule()
    while num_ended < 2:
        ahead = scheduler.schedule()
        outputs = scheduler.update_from_output(pending, worker.execute(pending))
        was_cut_short |= "b" in pending.req_ids and "b" in ahead.finished_req_ids and "b" not in outputs.req_ids
        for request_id, token_id in zip(outputs.req_ids, outputs.new_token_ids, strict=True):
            token_ids[request_id].append(token_id)
        num_ended += len(outputs.finished)
        pending = ahead
    assert was_cut_short
    for request in requests:
        assert token_ids[request.request_id] == expected_tokens(request, MAX_MODEL_LEN, 1000)[0]
