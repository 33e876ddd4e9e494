"""Requests under a grammar: they wait without blocking others, run a token at a time, and end when it is complete."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from octavo.contracts.engine import EngineCoreOutputs, EngineCoreRequest
from octavo.contracts.schedule import Int32Array
from octavo.errors import GrammarError, GrammarTooComplexError, OctavoError
from octavo.scheduler.grammar_gate import GrammarGate
from octavo.scheduler.request import RequestStatus
from octavo.structured.manager import GrammarManager
from octavo.structured_output import StructuredOutput
from octavo.testing import FakeWorker, expected_tokens, make_request, make_scheduler, model_output_for, run_step

FORM = StructuredOutput(regex="x")
MAX_LEN, VOCAB = 64, 1000


class CountedGrammars(GrammarManager):
    """Every form is complete after a number of tokens; the mask of a request says how many it has taken."""

    def __init__(self) -> None:
        super().__init__(lambda: pytest.fail("nothing is compiled"))
        self.ready: dict[str, OctavoError | None] = {}
        self.lengths: dict[str, int] = {}
        self.fails_at: dict[str, int] = {}
        self.taken: dict[str, list[int]] = {}

    def begin(self, message: EngineCoreRequest) -> None:
        self.taken[message.request_id] = []

    def take_compiled(self) -> dict[str, OctavoError | None]:
        done, self.ready = self.ready, {}
        return done

    def masks(self, request_ids: Sequence[str]) -> Int32Array:
        return np.array([[len(self.taken[request_id])] for request_id in request_ids], dtype=np.int32)

    def masks_along(self, request_id: str, token_ids: Sequence[int]) -> Int32Array:
        num_taken = len(self.taken[request_id])
        num_left = self.lengths.get(request_id, MAX_LEN) - num_taken
        return np.arange(num_taken, num_taken + min(1 + len(token_ids), num_left), dtype=np.int32)[:, None]

    def forced(self, request_id: str) -> list[int]:
        return []

    def advance(self, sampled: Mapping[str, Sequence[int]]) -> dict[str, OctavoError | None]:
        for request_id, token_ids in sampled.items():
            self.taken[request_id] += token_ids
        ends = dict[str, OctavoError | None]()
        ends |= {name: None for name in sampled if len(self.taken[name]) == self.lengths.get(name)}
        return ends | {name: GrammarError("no") for name in sampled if len(self.taken[name]) == self.fails_at.get(name)}

    def wait(self, timeout_s: float) -> None:
        """Nothing to wait for: the test says when a grammar is ready."""

    def forget(self, request_id: str) -> None:
        self.taken.pop(request_id, None)


class Bench:
    """A scheduler, a worker and grammars."""

    def __init__(self, num_blocks: int = 64) -> None:
        self.grammars = CountedGrammars()
        self.scheduler = make_scheduler(num_blocks=num_blocks, max_model_len=MAX_LEN, grammars=self.grammars)
        self.worker = FakeWorker.of(self.scheduler, vocab_size=VOCAB)
        self.tokens: dict[str, list[int]] = {}
        self.outputs: list[EngineCoreOutputs] = []

    def add(self, name: str, *, is_ready: bool = True, length: int | None = None, **options: Any) -> EngineCoreRequest:
        request = make_request(name, [ord(name[0]), 2, 3, 4, 5], structured_output=FORM, **options)
        self.scheduler.add_request(request)
        if is_ready:
            self.grammars.ready[name] = None
        if length is not None:
            self.grammars.lengths[name] = length
        return request

    def step(self) -> EngineCoreOutputs:
        output = run_step(self.scheduler, self.worker)
        self.outputs.append(output)
        for name, token_id in zip(output.req_ids, output.new_token_ids, strict=True):
            self.tokens.setdefault(name, []).append(token_id)
        self.scheduler.check_integrity()
        return output

    def is_idle(self) -> bool:
        return self.scheduler.only_waits

    def run(self) -> dict[str, Any]:
        """Step to the end; return the reports."""
        reports: dict[str, Any] = {}
        while not self.scheduler.is_finished():
            reports |= self.step().finished
        assert not self.grammars.taken, "nothing is kept of requests that have ended"
        return reports


def test_others_run_while_a_grammar_is_compiled() -> None:
    bench = Bench()
    bench.add("slow", is_ready=False, max_tokens=3)
    free = make_request("free", [9, 9], max_tokens=4)
    bench.scheduler.add_request(free)
    for _ in range(4):
        assert bench.step().req_ids == ["free"]
    assert bench.tokens["free"] == expected_tokens(free, MAX_LEN, VOCAB)[0]
    assert bench.is_idle()
    assert (bench.scheduler.stats().num_waiting, bench.scheduler.stats().deferred) == (1, {"grammar": 1})
    bench.grammars.ready["slow"] = None
    assert bench.step().req_ids == ["slow"]
    assert not bench.is_idle()
    bench.run()


def test_a_form_that_is_complete_ends_the_request_and_its_last_token_is_text() -> None:
    bench = Bench()
    request = bench.add("a", length=3, max_tokens=10)
    report = bench.run()["a"]
    assert (report.finish_reason, report.shows_last_token) == ("stop", True)
    assert bench.tokens["a"] == expected_tokens(request, MAX_LEN, VOCAB)[0][:3]


def test_complete_and_at_the_cap_is_complete() -> None:
    bench = Bench()
    bench.add("a", length=4, max_tokens=4)
    bench.add("b", length=5, max_tokens=4)
    reports = bench.run()
    assert (reports["a"].finish_reason, reports["b"].finish_reason) == ("stop", "length")


def test_an_end_token_ends_as_ever_and_is_not_shown() -> None:
    bench = Bench()
    token_ids = expected_tokens(make_request("a", [ord("a"), 2, 3, 4, 5], max_tokens=5), MAX_LEN, VOCAB)[0]
    bench.add("a", length=2, max_tokens=5, eos_token_ids=[token_ids[1]])
    report = bench.run()["a"]
    assert (report.finish_reason, report.shows_last_token, report.stop_token_id) == ("stop", False, None)


def test_a_stop_token_that_completes_the_form_is_named() -> None:
    bench = Bench()
    token_ids = expected_tokens(make_request("a", [ord("a"), 2, 3, 4, 5], max_tokens=5), MAX_LEN, VOCAB)[0]
    bench.add("a", length=2, max_tokens=5, stop_token_ids=[token_ids[1]])
    report = bench.run()["a"]
    assert (report.finish_reason, report.shows_last_token, report.stop_token_id) == ("stop", False, token_ids[1])


def test_only_rows_that_sample_under_a_grammar_carry_a_mask() -> None:
    bench = Bench()
    bench.add("a", max_tokens=6)
    bench.scheduler.add_request(make_request("free", [9, 9], max_tokens=6))
    bench.scheduler.add_request(make_request("long", range(60), max_tokens=3))  # its prompt takes two steps
    for taken in range(3):
        scheduler_output = bench.scheduler.schedule()
        masks = scheduler_output.token_masks
        assert masks is not None
        at = scheduler_output.req_ids.index("a")
        assert masks.logits_rows.tolist() == [int(scheduler_output.samples[:at].sum())]
        assert masks.words.tolist() == [[taken]]
        bench.scheduler.update_from_output(scheduler_output, bench.worker.execute(scheduler_output))
    bench.scheduler.abort(["a"])
    assert bench.scheduler.schedule().token_masks is None


def test_a_row_under_a_grammar_waits_for_its_last_token() -> None:
    """Free rows run ahead of the answer; what may follow under a grammar depends on it."""
    bench = Bench()
    bench.add("a", max_tokens=6)
    bench.scheduler.add_request(make_request("free", [9, 9], max_tokens=6))
    first = bench.scheduler.schedule()
    ahead = bench.scheduler.schedule()
    assert (set(first.req_ids), ahead.req_ids, ahead.token_masks) == ({"a", "free"}, ("free",), None)
    bench.scheduler.update_from_output(first, bench.worker.execute(first))
    bench.scheduler.update_from_output(ahead, bench.worker.execute(ahead))
    bench.scheduler.check_integrity()
    assert set(bench.scheduler.schedule().req_ids) == {"a", "free"}


def test_preemption_keeps_the_place_in_the_grammar() -> None:
    roomy, tight = Bench(), Bench(num_blocks=20)
    for bench in (roomy, tight):
        for name in "abcd":
            bench.add(name, length=25, max_tokens=40)
    assert roomy.run().keys() == tight.run().keys()
    assert tight.scheduler.stats().num_preemptions_total > 0
    assert tight.tokens == roomy.tokens
    assert [len(token_ids) for token_ids in tight.tokens.values()] == [25] * 4


@pytest.mark.parametrize("error", [GrammarTooComplexError("too much"), GrammarError("?")])
def test_a_grammar_that_cannot_be_fails_its_request_alone(error: OctavoError) -> None:
    bench = Bench()
    bench.add("bad", is_ready=False, max_tokens=4)
    bench.grammars.ready["bad"] = error
    bench.add("good", length=2, max_tokens=4)
    reports = bench.run()
    assert reports["good"].finish_reason == "stop"
    assert (reports["bad"].finish_reason, reports["bad"].error) == ("error", str(error))
    assert reports["bad"].error_type == type(error).__name__


def test_an_answer_that_cannot_go_on_fails_alone() -> None:
    bench = Bench()
    bench.add("bad", max_tokens=8)
    bench.grammars.fails_at["bad"] = 3
    bench.add("good", length=5, max_tokens=8)
    reports = bench.run()
    assert (reports["bad"].finish_reason, reports["bad"].error_type) == ("error", "GrammarError")
    assert (reports["good"].finish_reason, len(bench.tokens["good"])) == ("stop", 5)


def test_abort_while_waiting_for_a_grammar() -> None:
    bench = Bench()
    bench.add("a", is_ready=False, max_tokens=4)
    bench.scheduler.abort(["a"])
    assert not bench.grammars.taken
    assert bench.scheduler.is_finished()
    assert bench.scheduler.take_finished().finished["a"].finish_reason == RequestStatus.ABORTED.value
    bench.scheduler.check_integrity()
    assert not len(bench.scheduler.waiting)


def test_masks_of_tokens_that_are_not_tried_in_the_end_do_not_outlive_their_step() -> None:
    bench = Bench()
    bench.add("a", max_tokens=6)
    bench.step()
    gate = next(gate for gate in bench.scheduler._gates if isinstance(gate, GrammarGate))
    row = int(bench.scheduler.running.active[0])
    assert gate.usable(row, [7, 8]) == [7, 8]
    bench.step()  # without room for them
    assert not gate._masks_of_row


def test_a_step_that_fails_lets_go_of_grammars() -> None:
    bench = Bench()
    bench.add("a", max_tokens=4)
    scheduler_output = bench.scheduler.schedule()
    bench.scheduler.fail_step(scheduler_output, "boom")
    assert not bench.grammars.taken


def test_a_row_that_failed_on_the_device_is_forgotten() -> None:
    bench = Bench()
    bench.add("a", max_tokens=4)
    scheduler_output = bench.scheduler.schedule()
    model_output = model_output_for(scheduler_output, [0])
    model_output.num_sampled[0] = 0
    model_output.errors["a"] = "NaN"
    assert bench.scheduler.update_from_output(scheduler_output, model_output).finished["a"].error == "NaN"
    assert not bench.grammars.taken
