"""Waiting order: class, arrival, age; and entries that ended while waiting."""

import pytest

from octavo.sampling_params import RequestPriority
from octavo.scheduler.admission import RequestQueue
from octavo.scheduler.request import Request, RequestStatus
from octavo.testing import make_request

AGEING_S = 10.0


def make(request_id: str, arrival_index: int, priority: int = RequestPriority.NORMAL, came_s: float = 0.0) -> Request:
    return Request(make_request(request_id, [1], priority=priority, arrival_time_s=came_s), arrival_index, 100)


def queue_of(*requests: Request) -> RequestQueue:
    queue = RequestQueue(AGEING_S)
    for request in requests:
        queue.enqueue(request)
    return queue


def popped(queue: RequestQueue, now_s: float = 0.0) -> list[str]:
    order = []
    while (request := queue.peek(now_s)) is not None:
        queue.pop(request)
        order.append(request.request_id)
    return order


def end(queue: RequestQueue, request: Request) -> None:
    request.status = RequestStatus.ABORTED
    queue.remove(request)


def test_an_empty_queue_has_no_head() -> None:
    queue = queue_of()
    assert (len(queue), queue.peek(0.0), list(queue.in_order(0.0))) == (0, None, [])


def test_urgent_first_then_arrival() -> None:
    requests = [
        make("n0", 0),
        make("low", 1, RequestPriority.LOW),
        make("n1", 2),
        make("c", 3, RequestPriority.CRITICAL),
    ]
    queue = queue_of(*requests)
    in_order = [request.request_id for request in queue.in_order(0.0)]
    assert popped(queue) == in_order == ["c", "n0", "n1", "low"]
    assert len(queue) == 0


def test_a_preempted_request_stands_at_the_front_of_its_class() -> None:
    first, second = make("first", 0), make("second", 1)
    queue = queue_of(second)
    first.status = RequestStatus.PREEMPTED
    queue.enqueue(first)
    assert popped(queue) == ["first", "second"]


@pytest.mark.parametrize(("now_s", "head"), [(9.9, "new"), (10.0, "old")])
def test_waiting_lifts_by_one_class_at_a_time(now_s: float, head: str) -> None:
    """After ten seconds LOW counts as NORMAL, and came first."""
    queue = queue_of(make("old", 0, RequestPriority.LOW), make("new", 1, came_s=9.0))
    request = queue.peek(now_s)
    assert request is not None
    assert request.request_id == head


def test_whoever_waits_long_enough_beats_any_newcomer() -> None:
    background = make("background", 0, RequestPriority.BACKGROUND)
    queue = queue_of(background)
    for number in range(1, 100):
        now_s = float(number)
        queue.enqueue(make(f"critical-{number}", number, RequestPriority.CRITICAL, came_s=now_s))
        request = queue.peek(now_s)
        assert request is not None
        queue.pop(request)
        if request is background:
            break
    assert now_s == 4 * AGEING_S


def test_a_clock_that_runs_behind_lifts_nobody_down() -> None:
    queue = queue_of(make("future", 0, came_s=1000.0), make("low", 1, RequestPriority.LOW))
    assert popped(queue, now_s=0.0) == ["future", "low"]


def test_the_ended_are_neither_counted_nor_seen() -> None:
    requests = [make(f"r{index}", index) for index in range(4)]
    queue = queue_of(*requests)
    end(queue, requests[0])
    end(queue, requests[2])
    assert len(queue) == 2
    assert [request.request_id for request in queue.in_order(0.0)] == ["r1", "r3"]
    assert popped(queue) == ["r1", "r3"]
    assert len(queue) == 0


def test_those_who_gave_up_do_not_pile_up() -> None:
    """A stuck head, and thousands of callers that come and go behind it."""
    queue = queue_of(make("stuck", 0))
    for index in range(1, 5000):
        request = make(f"r{index}", index)
        queue.enqueue(request)
        end(queue, request)
    assert len(queue) == 1
    assert sum(map(len, queue._classes)) < 100
    assert popped(queue) == ["stuck"]


def test_only_the_head_is_popped() -> None:
    requests = [make("r0", 0), make("r1", 1)]
    queue = queue_of(*requests)
    with pytest.raises(AssertionError):
        queue.pop(requests[1])


def test_removing_a_request_that_has_not_ended_is_a_bug() -> None:
    request = make("r0", 0)
    with pytest.raises(AssertionError):
        queue_of(request).remove(request)
