"""A snapshot says of each request what it does, or why it does not run, and who has which block."""

import threading
from typing import Any

import msgspec

from octavo.errors import InvalidParameterError
from octavo.sampling_params import RequestPriority
from octavo.scheduler.gate import Gate
from octavo.scheduler.request import Request
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.snapshot import CACHED, FREE, SHARED
from octavo.structured.manager import GrammarManager
from octavo.structured_output import StructuredOutput
from octavo.testing import FakeWorker, make_request, make_scheduler, run_step


class Closed(Gate):
    reason = "closed"

    def hold(self, request: Request) -> bool:
        return request.request_id == "held"


def state_of(scheduler: Scheduler) -> dict[str, Any]:
    state = scheduler.snapshot(with_blocks=True)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(state)) == state  # it crosses a process border
    return state | {"by_id": {each["id"]: each for each in state["requests"]}}


def cells(state: dict[str, Any]) -> list[int]:
    [group] = state["blocks"]
    return [owner for owner, count in group["runs"] for _ in range(count)]


def test_who_has_no_row_waits_for_one_and_is_told_for_how_long() -> None:
    now_s = [0.0]
    scheduler = make_scheduler(max_num_seqs=1, clock=lambda: now_s[0], gates=[Closed()])
    worker = FakeWorker.of(scheduler)
    for name in ("a", "b", "c", "held"):
        scheduler.add_request(make_request(name, range(5), max_tokens=9, ignore_eos=True))
    for _ in range(3):
        output = scheduler.schedule()
        now_s[0] += 0.5
        scheduler.update_from_output(output, worker.execute(output))
    state = state_of(scheduler)
    a, b, c, held = (state["by_id"][name] for name in ("a", "b", "c", "held"))
    assert [each["id"] for each in state["requests"]] == ["a", "held", "b", "c"]
    assert (a["status"], a["num_known"], a["limit"], a["num_blocks"]) == ("decode", 8, 14, 2)
    assert (b["status"], b["reason"], b["num_ahead"], c["num_ahead"]) == ("waiting", "rows", 0, 1)
    assert b["wait_s"] == 6 * 0.5  # tokens that `a` may still get, a step each
    assert (held["status"], held["reason"]) == ("waiting", "closed")


def test_without_blocks_a_request_says_how_many_it_needs() -> None:
    scheduler = make_scheduler(num_blocks=6, max_model_len=20)
    worker = FakeWorker.of(scheduler)
    scheduler.add_request(make_request("a", range(12), max_tokens=8, ignore_eos=True))
    run_step(scheduler, worker)
    scheduler.add_request(make_request("b", range(50, 66), max_tokens=2))
    run_step(scheduler, worker)
    b = state_of(scheduler)["by_id"]["b"]
    assert (b["status"], b["reason"], b["num_blocks_needed"]) == ("waiting", "blocks", 4)
    scheduler.abort(["b"])
    scheduler.add_request(make_request("c", [1], max_tokens=2))
    assert state_of(scheduler)["by_id"]["c"]["reason"] == "next step"  # what was rejected is not why


def test_a_long_prompt_is_named_to_those_behind_it() -> None:
    scheduler = make_scheduler(num_blocks=64, max_num_batched_tokens=16)
    worker = FakeWorker.of(scheduler)
    scheduler.add_request(make_request("long", range(100), max_tokens=2))
    scheduler.add_request(make_request("short", range(200, 204), max_tokens=2))
    run_step(scheduler, worker)
    state = state_of(scheduler)
    assert (state["by_id"]["long"]["status"], state["by_id"]["long"]["num_computed"]) == ("prefill", 16)
    assert (state["by_id"]["short"]["status"], state["by_id"]["short"]["reason"]) == ("waiting", "long prompt")


def test_a_grammar_that_compiles_is_why() -> None:
    compiling, done = threading.Event(), threading.Event()

    def backend() -> Any:
        compiling.set()
        done.wait(10.0)
        raise InvalidParameterError("structured_output", "x", "no backend here")

    grammars = GrammarManager(backend)
    scheduler = make_scheduler(grammars=grammars)
    scheduler.add_request(make_request("a", [1], structured_output=StructuredOutput(regex="a+")))
    assert compiling.wait(10.0)
    assert state_of(scheduler)["by_id"]["a"]["reason"] == "grammar"
    scheduler.abort(["a"])
    done.set()
    grammars.close()


def test_blocks_have_an_owner_or_a_prefix_or_nothing() -> None:
    scheduler = make_scheduler(num_blocks=16, max_num_batched_tokens=64)
    worker = FakeWorker.of(scheduler)
    scheduler.add_request(make_request("before", range(8), max_tokens=1))
    run_step(scheduler, worker)
    assert sorted(cells(state_of(scheduler))) == [CACHED] * 2 + [FREE] * 14
    for name in ("a", "b"):
        scheduler.add_request(make_request(name, [*range(8), ord(name)], max_tokens=5, ignore_eos=True))
    run_step(scheduler, worker)
    assert sorted(cells(state_of(scheduler))) == [SHARED] * 2 + [FREE] * 12 + [0, 1]


def test_of_very_many_blocks_every_second_is_shown() -> None:
    [group] = state_of(make_scheduler(num_blocks=8001))["blocks"]
    assert (group["stride"], group["runs"]) == (2, [[FREE, 4001]])


def test_a_long_prompt_leaves_room_in_its_next_step_for_a_better_class() -> None:
    """A flood of one class delays a request of a better one by the step in flight, and no more."""
    scheduler = make_scheduler(num_blocks=64, max_num_batched_tokens=16)
    worker = FakeWorker.of(scheduler)
    scheduler.add_request(make_request("long", range(100), max_tokens=2, priority=RequestPriority.LOW))
    run_step(scheduler, worker)
    scheduler.add_request(make_request("same", range(300, 306), max_tokens=2, priority=RequestPriority.LOW))
    run_step(scheduler, worker)
    assert state_of(scheduler)["by_id"]["same"]["status"] == "waiting"
    scheduler.add_request(make_request("short", range(200, 206), max_tokens=2))
    outputs = run_step(scheduler, worker)
    assert outputs.req_ids == ["short"]  # its prompt is computed, and has its first token
    assert state_of(scheduler)["by_id"]["long"]["num_computed"] == 16 + 16 + 10
    scheduler.check_integrity()
