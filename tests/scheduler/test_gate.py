"""A gate of a stranger: one class here, and one line where gates are put together (`gates=[...]`)."""

from octavo.errors import OctavoError, RequestError
from octavo.sampling_params import RequestPriority
from octavo.scheduler.gate import Gate
from octavo.scheduler.request import Request
from octavo.scheduler.scheduler import Scheduler
from octavo.testing import FakeWorker, expected_tokens, make_request, make_scheduler, run_step

EIGHT = 8.0


class OpeningHours(Gate):
    """Requests of low priority do not run before 8 o'clock; after `closes_s`, those that still wait are refused."""

    reason = "opening hours"

    def __init__(self, closes_s: float = 24.0) -> None:
        self._held: list[Request] = []
        self._refused: list[tuple[Request, OctavoError]] = []
        self._closes_s, self._now_s = closes_s, 0.0

    def hold(self, request: Request) -> bool:
        if request.priority < RequestPriority.LOW or self._now_s >= EIGHT:
            return False
        self._held.append(request)
        return True

    def take_ready(self, now_s: float) -> list[Request]:
        self._now_s = now_s
        if now_s < EIGHT:
            return []
        held, self._held = self._held, []
        if now_s < self._closes_s:
            return held
        self._refused = [(request, RequestError("closed")) for request in held]
        return []

    def take_failures(self) -> list[tuple[Request, OctavoError]]:
        refused, self._refused = self._refused, []
        return refused

    def forget(self, request: Request) -> None:
        self._held = [held for held in self._held if held is not request]


def opened(gate: Gate) -> tuple[Scheduler, FakeWorker, list[float]]:
    clock = [0.0]
    scheduler = make_scheduler(gates=[gate], clock=lambda: clock[0], ageing_s=1000.0)
    for name, priority in (("now", RequestPriority.NORMAL), ("later", RequestPriority.LOW)):
        scheduler.add_request(make_request(name, [1, 2, 3], priority=priority, max_tokens=3))
    return scheduler, FakeWorker.of(scheduler), clock


def test_who_is_held_waits_with_a_reason_and_then_runs_as_ever() -> None:
    scheduler, worker, clock = opened(OpeningHours())
    for _ in range(3):
        assert run_step(scheduler, worker).req_ids == ["now"]
        assert scheduler.stats().deferred == {"opening hours": 1}
        scheduler.check_integrity()
    assert scheduler.only_waits
    clock[0] = EIGHT
    token_ids = []
    while not scheduler.is_finished():
        outputs = run_step(scheduler, worker)
        assert outputs.req_ids == ["later"]
        token_ids += outputs.new_token_ids
        scheduler.check_integrity()
    assert token_ids == expected_tokens(make_request("later", [1, 2, 3], max_tokens=3), 128, 1000)[0]
    assert (scheduler.stats().deferred, scheduler.stats().num_waiting) == ({}, 0)


def test_who_can_never_pass_ends_with_the_gates_error() -> None:
    scheduler, worker, clock = opened(OpeningHours(closes_s=9.0))
    clock[0] = 9.5
    assert run_step(scheduler, worker).finished["later"].error == "closed"
    assert scheduler.stats().deferred == {}
    scheduler.check_integrity()


def test_who_is_aborted_at_a_gate_is_forgotten_there() -> None:
    gate = OpeningHours()
    scheduler, worker, clock = opened(gate)
    scheduler.abort(["later"])
    scheduler.check_integrity()
    clock[0] = EIGHT
    while not scheduler.is_finished():
        assert run_step(scheduler, worker).req_ids == ["now"]
    assert not gate.take_ready(EIGHT)
