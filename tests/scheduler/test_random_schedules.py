"""Thousands of random schedules: in each, every request gets the tokens that it would get alone.

A schedule is a byte string, each byte a choice: requests arrive or are aborted; steps are scheduled ahead, executed
late, fail, or fail for one request. `FakeWorker` sees only the scheduler outputs and checks what it reads; the
scheduler's state is checked after each action. The strings come from hypothesis, which shrinks failures, and in bulk
from seeds.
"""

import random
from collections import Counter, deque
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.breadth import pick
from tests.scheduler.adapters import SlowLoads, adapter_of

from octavo.contracts.engine import AdapterRef, EngineCoreOutputs, EngineCoreRequest, FinishedRequest
from octavo.contracts.kv_cache import KVGroup
from octavo.contracts.schedule import ModelRunnerOutput, SchedulerOutput
from octavo.lora.host_cache import HostAdapters
from octavo.scheduler.gate import Gate
from octavo.scheduler.running import RunningRows
from octavo.speculative.drafters import RankDrafter
from octavo.testing import FakeWorker, KnownDrafter, expected_tokens, make_request, make_scheduler

VOCAB_SIZE = 8
BROKEN = adapter_of(4)
MAX_STEPS_TO_THE_END = 3000


class Choices:
    """Bytes read one by one; when they run out, every choice is 0."""

    def __init__(self, data: bytes) -> None:
        self._left = deque(data)

    def __bool__(self) -> bool:
        return bool(self._left)

    def below(self, count: int) -> int:
        return self._left.popleft() % count if self._left else 0

    def one_in(self, count: int) -> bool:
        return self.below(count) == count - 1


@dataclass
class Step:
    """An order on its way; without an answer it has not been carried out yet."""

    scheduler_output: SchedulerOutput
    loaded: frozenset[str]  # the adapters in host memory when it was sent: evictions sent later come after it
    model_output: ModelRunnerOutput | None = None


class Drill:
    """A scheduler, a worker, and what a front would have heard of each request."""

    longest_share = 0.5  # of the longest context: tokens that a prompt has in common with others

    def __init__(self, choices: Choices) -> None:
        self.choices = choices
        self.depth = 1 + choices.below(3)  # steps made before the first of them is answered
        self.is_pipeline = self.depth > 1 and choices.one_in(2)
        block_size, num_blocks = 1 + choices.below(4), 3 + choices.below(20)
        max_num_seqs = 1 + choices.below(5)
        self.max_model_len = max(2, block_size * num_blocks - choices.below(3))
        self.now_s = 0.0
        self.drafter = KnownDrafter(self.rest_of, vocab_size=VOCAB_SIZE, max_num_drafts=1 + choices.below(4))
        self.has_drafts, self.drafts_in_ranks = choices.one_in(2), choices.one_in(2)
        in_ranks = RankDrafter(self.drafter.max_num_drafts, max(2, self.max_model_len - choices.below(3)))
        in_scheduler = in_ranks if self.drafts_in_ranks else self.drafter
        tile = 1 + choices.below(3)
        windows = [None, *(1 + choices.below(2 * block_size) for _ in range(2))]
        kinds = [KVGroup(sliding_window=window, tile=tile) for window in windows]
        kinds += KVGroup.recurrent(interval=block_size * (1 + choices.below(3))), KVGroup(kind="latent", tile=tile)
        mixes = ((0,), (1,), (0, 1), (1, 2), (1, 0, 2), (3,), (0, 3), (3, 1, 0), (3, 4))
        groups = tuple(kinds[index] for index in mixes[choices.below(len(mixes))])
        budget = max_num_seqs + choices.below(12)
        self.has_adapters, num_slots = choices.one_in(3), 1 + choices.below(3)
        self.loads = SlowLoads(broken=frozenset({BROKEN.content_hash}))
        self.num_places = num_slots + choices.below(2)
        self.store = HostAdapters(self.loads.call, self.num_places)
        peaks = [group.peak_blocks(self.max_model_len, block_size, budget) for group in groups]
        self.scheduler = make_scheduler(
            num_blocks=[min(num_blocks, peak + choices.below(3)) for peak in peaks],
            groups=groups,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=self.max_model_len,
            ageing_s=1.0,
            enable_prefix_caching=not choices.one_in(4),
            adapters=self.store if self.has_adapters else None,
            num_adapter_slots=num_slots,
            num_batches=self.depth if self.is_pipeline else 1,
            drafter=in_scheduler if self.has_drafts else None,
            gates=self.more_gates,
            clock=lambda: self.now_s,
        )
        self.worker = FakeWorker.of(
            self.scheduler,
            vocab_size=VOCAB_SIZE,
            has_first_stage=self.is_pipeline,
            drafter=self.drafter if self.has_drafts and self.drafts_in_ranks else None,
        )
        self.num_refilled = 0
        self.in_flight: deque[Step] = deque()
        self.requests: dict[str, EngineCoreRequest] = {}
        self.token_ids: dict[str, list[int]] = {}
        self.ends: dict[str, FinishedRequest] = {}
        self.may_abort: set[str] = set()
        self.may_fail: set[str] = set()
        self.num_admissions: Counter[str] = Counter()
        self.num_first_admissions: Counter[str] = Counter()
        self.num_forgotten: Counter[str] = Counter()
        self.num_several = 0  # times that a request got several tokens at once
        self.has_lost_steps = False  # then the worker is told some ends again

    def more_gates(self, running: RunningRows) -> list[Gate]:
        """Return gates besides those that every scheduler has."""
        return []

    def rest_of(self, request_id: str, context: list[int]) -> list[int]:
        """Return what a request will say behind `context`."""
        request = self.requests[request_id]
        token_ids, _ = expected_tokens(request, self.max_model_len, VOCAB_SIZE)
        return token_ids[len(context) - len(request.prompt_token_ids) :]

    # -- what may happen ------------------------------------------------------------------------------------------

    def act(self) -> None:
        """Do one thing, weighted so that most requests live to their end."""
        actions = [self.schedule] * 7 + [self.execute] * 2 + [self.update] * 6 + [self.add] * 5
        actions += [self.abort, self.fail_one, self.fail_step, self.wait, self.reset_prefix_cache]
        actions += [self.load] * 3 if self.has_adapters else []
        actions[self.choices.below(len(actions))]()
        self.scheduler.check_integrity()

    def add(self) -> None:
        below = self.choices.below
        num_shared, num_own = below(int(self.max_model_len * self.longest_share) + 1), below(4)
        prompt = ([below(2)] * num_shared + [2 + below(2)] * num_own)[: self.max_model_len - 1] or [0]
        request = make_request(
            f"r{len(self.requests)}",
            prompt,
            priority=below(5),
            arrival_time_s=self.now_s,
            eos_token_ids=[0] if below(4) == 3 else [],
            cache_salt="tenant" if below(4) == 3 else None,
            seed=below(2),
            max_tokens=None if below(8) == 7 else 1 + below(20),
            ignore_eos=below(4) == 3,
            stop_token_ids=[1] if below(4) == 3 else [],
            prompt_logprobs=1 if below(8) == 7 else None,
            adapter=self.adapter(),
        )
        if request.adapter == BROKEN:
            self.may_fail.add(request.request_id)
        self.requests[request.request_id] = request
        self.token_ids[request.request_id] = []
        self.scheduler.add_request(request)

    def adapter(self) -> AdapterRef | None:
        if not self.has_adapters or self.choices.one_in(3):
            return None
        return BROKEN if self.choices.one_in(8) else adapter_of(self.choices.below(4))

    def abort(self) -> None:
        request_id = f"r{self.choices.below(len(self.requests) + 1)}"
        self.may_abort.add(request_id)
        self.scheduler.abort([request_id])
        if self.choices.one_in(2):
            self.hear(self.scheduler.take_finished())

    def schedule(self) -> None:
        if len(self.in_flight) < self.depth:
            ahead = bool(self.in_flight) and self.choices.one_in(2)
            scheduler_output = self.scheduler.schedule_ahead() if ahead else self.scheduler.schedule()
            if scheduler_output is None:
                return
            assert scheduler_output.req_ids or not ahead, "nothing to do is not worth a step"
            self.num_admissions.update(new.request_id for new in scheduler_output.scheduled_new_reqs)
            self.in_flight.append(Step(scheduler_output, frozenset(self.loads.loaded)))
            self.num_refilled += sum(fill.slot in self.worker.slots for fill in scheduler_output.adapter_fills)

    def execute(self) -> None:
        """Carry out the oldest order that still waits for it."""
        step = next((step for step in self.in_flight if step.model_output is None), None)
        if step is not None:
            self.num_forgotten.update(step.scheduler_output.finished_req_ids)
            self.worker.loaded = set(step.loaded)
            step.model_output = self.worker.execute(step.scheduler_output)

    def update(self) -> None:
        if self.in_flight:
            if self.in_flight[0].model_output is None:
                self.execute()
            step = self.in_flight.popleft()
            assert step.model_output is not None
            self.hear(self.scheduler.update_from_output(step.scheduler_output, step.model_output))

    def fail_one(self) -> None:
        """Let one request of a step fail, whether it would have sampled or not."""
        if self.in_flight and self.in_flight[0].scheduler_output.req_ids:
            if self.in_flight[0].model_output is None:
                self.execute()
            step = self.in_flight[0]
            assert step.model_output is not None
            index = self.choices.below(len(step.scheduler_output.req_ids))
            step.model_output.num_sampled[index] = 0
            step.model_output.errors[step.scheduler_output.req_ids[index]] = "not a number"
            self.may_fail.add(step.scheduler_output.req_ids[index])
            self.update()

    def fail_step(self) -> None:
        """Let the oldest step raise: it has updated the worker's rows and written nothing. Those behind it go on."""
        if not self.in_flight or not self.choices.one_in(3):
            return
        step = self.in_flight.popleft()
        if step.model_output is None:
            self.worker.lose(step.scheduler_output)
            self.num_forgotten.update(step.scheduler_output.finished_req_ids)
        self.may_fail.update(step.scheduler_output.req_ids)
        self.scheduler.fail_step(step.scheduler_output, "out of luck")
        self.has_lost_steps = True
        self.hear(self.scheduler.take_finished())

    def load(self) -> None:
        """End the loading of an adapter."""
        if self.loads.under_way:
            self.loads.finish(self.choices.below(len(self.loads.under_way)))

    def wait(self) -> None:
        self.now_s += 1.0

    def reset_prefix_cache(self) -> None:
        if not self.in_flight:
            self.scheduler.blocks.reset_prefix_cache()

    # -- what is heard of it --------------------------------------------------------------------------------------

    def hear(self, outputs: EngineCoreOutputs) -> None:
        assert self.has_drafts or outputs.num_new_tokens == [1] * len(outputs.req_ids)
        assert sum(outputs.num_new_tokens) == len(outputs.new_token_ids)
        left = deque(outputs.new_token_ids)
        news = zip(outputs.req_ids, outputs.first_indices, outputs.num_new_tokens, strict=True)
        for request_id, first_index, count in news:
            assert request_id not in self.ends, "a token after the end"
            assert first_index == len(self.token_ids[request_id]), "a token lost or doubled"
            self.num_several += count > 1
            self.token_ids[request_id] += [left.popleft() for _ in range(count)]
        assert not self.ends.keys() & outputs.finished.keys(), "an end told twice"
        self.ends.update(outputs.finished)
        self.num_first_admissions.update(outputs.admitted.keys())

    def run_to_the_end(self) -> None:
        num_steps = 0
        while not self.scheduler.is_finished():
            self.load()
            stats = self.scheduler.stats()
            for _ in range(self.depth if stats.num_running + stats.num_waiting else 0):
                self.schedule()
            self.update()
            self.scheduler.check_integrity()
            num_steps += 1
            assert num_steps < MAX_STEPS_TO_THE_END, "no progress"
        self.hear(self.scheduler.take_finished())
        self.schedule()  # tells the worker of the last ends
        self.update()

    def check_the_end(self) -> None:
        scheduler = self.scheduler
        assert all(pool.num_free == pool.num_blocks for pool in scheduler.blocks.pools)
        assert (len(scheduler.running), len(scheduler.waiting), scheduler.get_ready_requests()) == (0, 0, [])
        assert self.worker.rows == {}
        while self.loads.under_way:
            self.loads.finish()
        assert all(self.store.begin_load(adapter_of(10 + place)) for place in range(self.num_places)), "kept for nobody"
        assert self.ends.keys() == self.requests.keys()
        assert all(count == 1 for count in self.num_first_admissions.values())
        for request_id in self.requests:
            self.check_request(request_id)

    def check_request(self, request_id: str) -> None:
        token_ids, end = self.token_ids[request_id], self.ends[request_id]
        expected, reason = expected_tokens(self.requests[request_id], self.max_model_len, VOCAB_SIZE)
        if end.finish_reason in {"abort", "error"}:
            assert request_id in (self.may_abort if end.finish_reason == "abort" else self.may_fail)
            assert token_ids == expected[: len(token_ids)]
        else:
            assert (token_ids, end.finish_reason) == (expected, reason)
        if not self.has_lost_steps:
            assert self.num_forgotten[request_id] == self.num_admissions[request_id]


def run_drill(data: bytes) -> Drill:
    choices = Choices(data)
    drill = Drill(choices)
    while choices:
        drill.act()
    drill.run_to_the_end()
    drill.check_the_end()
    return drill


@settings(max_examples=pick(60, 1000))
@given(st.binary(min_size=40, max_size=300))
def test_any_schedule_gives_every_request_its_own_tokens(data: bytes) -> None:
    run_drill(data)


@pytest.mark.parametrize("first_seed", range(0, pick(100, 5000), 100))
def test_seeded_schedules_in_bulk(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + pick(50, 100)):
        run_drill(random.Random(seed).randbytes(40 + seed % 120))


def test_the_schedules_are_worth_their_time() -> None:
    """Everything that may happen does happen, often; otherwise the tests above would prove little."""
    count = pick(24, 40)
    drills = [run_drill(random.Random(seed).randbytes(400)) for seed in range(count)]
    stats = [drill.scheduler.stats() for drill in drills]
    reasons = Counter(end.finish_reason for drill in drills for end in drill.ends.values())
    assert sum(stat.num_preemptions_total for stat in stats) > count
    assert sum(drill.num_refilled for drill in drills) > count // 3
    assert sum(end.error_type == "CheckpointError" for drill in drills for end in drill.ends.values()) > count // 8
    assert sum(stat.num_prefix_hits_total for stat in stats) > 6 * count
    assert {(drill.depth, drill.has_drafts) for drill in drills} == {(n, it) for n in (1, 2, 3) for it in (True, False)}
    for in_ranks in (True, False):
        assert sum(drill.num_several for drill in drills if drill.drafts_in_ranks is in_ranks) > count
    assert all(reasons[reason] > count // 4 for reason in ("stop", "length", "abort", "error")), reasons
