"""Requests with adapters: slots, fairness, loads that take long or fail, and prefixes by content."""

import random

import pytest
from tests.breadth import pick
from tests.scheduler.adapters import SlowLoads, adapter_of

from octavo.contracts.engine import AdapterRef, EngineCoreRequest, FinishedRequest
from octavo.lora.host_cache import HostAdapters
from octavo.sampling_params import RequestPriority
from octavo.scheduler.adapter_gate import AdapterSlots
from octavo.testing import FakeWorker, expected_tokens, make_request, make_scheduler, run_step

MAX_LEN = 128


class Ranks:
    """A scheduler and a worker whose loads end when told to."""

    def __init__(self, num_slots: int, num_places: int, *, broken: int | None = None, num_blocks: int = 64) -> None:
        self.loads = SlowLoads(frozenset() if broken is None else frozenset({adapter_of(broken).content_hash}))
        self.store = HostAdapters(self.loads.call, num_places)
        self.scheduler = make_scheduler(
            num_blocks=num_blocks, adapters=self.store, num_adapter_slots=num_slots, max_model_len=MAX_LEN
        )
        self.worker = FakeWorker.of(self.scheduler)
        self.worker.loaded = self.loads.loaded
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, FinishedRequest] = {}

    def add(self, name: str, adapter: AdapterRef | int | None, *, max_tokens: int = 4, priority: int = 2) -> None:
        ref = adapter_of(adapter) if isinstance(adapter, int) else adapter
        self.scheduler.add_request(
            make_request(name, [1, 2, 3], adapter=ref, max_tokens=max_tokens, ignore_eos=True, priority=priority)
        )

    def step(self, *, loads: bool = True) -> list[str]:
        """Run a step; return who was computed."""
        while loads and self.loads.under_way:
            self.loads.finish()
        output = run_step(self.scheduler, self.worker)
        self.ends |= output.finished
        for name, token_id in zip(output.req_ids, output.new_token_ids, strict=True):
            self.tokens.setdefault(name, []).append(token_id)
        self.scheduler.check_integrity()
        return sorted(output.req_ids)

    def is_idle(self) -> bool:
        return self.scheduler.only_waits

    def until_ended(self, name: str, limit: int = 100) -> None:
        for _ in range(limit):
            if name in self.ends:
                return
            self.step()
        raise AssertionError(f"{name} starved")


def test_an_adapter_loads_while_others_run() -> None:
    ranks = Ranks(num_slots=1, num_places=1)
    ranks.add("tuned", 0)
    assert ranks.step(loads=False) == []
    assert ranks.is_idle()
    ranks.add("base", None)
    assert ranks.step(loads=False) == ["base"]
    assert not ranks.is_idle()
    ranks.step()
    assert ranks.step() == ["base", "tuned"]


def test_a_full_pool_holds_up_only_who_needs_a_slot() -> None:
    ranks = Ranks(num_slots=1, num_places=2)
    ranks.add("first", 0, max_tokens=6)
    ranks.step(), ranks.step()
    ranks.add("other", 1)
    ranks.add("base", None)
    assert ranks.step() == ["base", "first"]
    ranks.until_ended("first")
    assert "other" not in ranks.tokens
    ranks.until_ended("other")


@pytest.mark.parametrize(("num_places", "num_rounds"), [(2, 1), (1, 2)])
def test_no_adapter_starves_behind_a_busy_one(num_places: int, num_rounds: int) -> None:
    """Requests for the adapter in the only slot keep coming: those that came after the other adapter's wait for it."""
    ranks = Ranks(num_slots=1, num_places=num_places)
    ranks.add("busy-0", 0, max_tokens=8)
    ranks.step(), ranks.step()
    ranks.add("patient", 1)
    ranks.step(), ranks.step()  # is loaded
    for number in range(1, 40):
        ranks.add(f"busy-{number}", 0)
        ranks.step()
        if "patient" in ranks.ends:
            assert ("busy-1" in ranks.ends) is (num_rounds == 2)  # with room for one copy, while the other loads
            ranks.until_ended(f"busy-{number}")
            return
    raise AssertionError("starved")


def test_a_slot_stops_draining_when_nobody_waits_for_it() -> None:
    ranks = Ranks(num_slots=1, num_places=2)
    ranks.add("first", 0, max_tokens=50)
    ranks.step(), ranks.step()
    ranks.add("gone", 1)
    ranks.step(), ranks.step()
    ranks.add("second", 0)
    assert ranks.step() == ["first"]
    ranks.scheduler.abort(["gone"])
    ranks.add("other", 2)  # so that something is parked still
    ranks.scheduler.abort(["other"])
    assert ranks.step() == ["first", "second"]


def test_the_urgent_come_first() -> None:
    ranks = Ranks(num_slots=1, num_places=3)
    ranks.add("first", 0)
    ranks.step(), ranks.step()
    ranks.add("usual", 1)
    ranks.add("urgent", 2, priority=RequestPriority.CRITICAL)
    ranks.until_ended("urgent")
    assert "usual" not in ranks.tokens


def test_what_cannot_be_loaded_ends_alone_with_its_error() -> None:
    ranks = Ranks(num_slots=2, num_places=2, broken=0)
    for name, adapter in (("a", 0), ("b", 0), ("c", 1), ("d", None)):
        ranks.add(name, adapter)
    for _ in range(8):
        ranks.step()
    assert [ranks.ends[name].error_type for name in "abcd"] == ["CheckpointError", "CheckpointError", None, None]
    assert "adapter 0 is broken" in str(ranks.ends["a"].error)
    ranks.add("again", 0)
    ranks.until_ended("again")
    assert ranks.ends["again"].error_type == "CheckpointError"


def test_least_recently_used_slots_are_refilled_first() -> None:
    slots = AdapterSlots(2)
    for name in "ab":
        slots.assign(name)
        slots.add_user(name)
    slots.settle(slots.take_fills(), are_filled=True)
    assert slots.remove_user("a")
    assert slots.remove_user("b")
    assert slots.add_user("a") == 0
    assert slots.remove_user("a")
    slots.assign("c")
    assert (slots.holds("a"), slots.holds("b"), slots.holds("c")) == (True, False, True)


def test_the_same_content_shares_prefixes_under_any_name() -> None:
    ranks = Ranks(num_slots=2, num_places=2)
    one, copy = (
        adapter_of(0),
        AdapterRef(name="copy", path="elsewhere", content_hash=adapter_of(0).content_hash, rank=1),
    )
    hits = []
    for name, adapter in (("base", None), ("one", one), ("copy", copy), ("other", adapter_of(1)), ("base again", None)):
        ranks.scheduler.add_request(make_request(name, range(12), adapter=adapter, max_tokens=1))
        before = ranks.scheduler.blocks.num_prefix_hits_total
        ranks.until_ended(name)
        hits.append(ranks.scheduler.blocks.num_prefix_hits_total - before)
    assert hits == [0, 0, 8, 0, 8]
    assert ranks.loads.num_loads == 2


@pytest.mark.parametrize("seed", range(pick(1, 12)))
def test_five_hundred_adapters_over_sixteen_slots(seed: int) -> None:
    """Under random load with aborts and preemptions, all get what they would get alone, and nothing is left."""
    chance, ranks = random.Random(seed), Ranks(num_slots=16, num_places=20, num_blocks=40)
    requests: dict[str, EngineCoreRequest] = {}
    popular = [chance.randrange(500) for _ in range(10)]
    aborted, num_requests = set[str](), pick(400, 1500)
    while len(requests) < num_requests or not ranks.scheduler.is_finished():
        for _ in range(chance.randrange(5) if len(requests) < num_requests else 0):
            number = chance.choice(popular) if chance.random() < 0.4 else chance.randrange(500)
            request = make_request(
                f"r{len(requests)}",
                [1] * chance.randrange(1, 20),
                adapter=None if chance.random() < 0.1 else adapter_of(number),
                max_tokens=chance.randrange(1, 24),
                seed=chance.randrange(2),
            )
            requests[request.request_id] = request
            ranks.scheduler.add_request(request)
        if chance.random() < 0.2:
            aborted.add(f"r{chance.randrange(len(requests) + 1)}")
            ranks.scheduler.abort(aborted)
        while ranks.loads.under_way and chance.random() < 0.6:
            ranks.loads.finish(chance.randrange(len(ranks.loads.under_way)))
        ranks.step(loads=False)
    stats = ranks.scheduler.stats()
    assert stats.num_free_blocks == stats.num_blocks
    assert ranks.loads.most_loaded <= 20
    assert stats.num_preemptions_total > 0
    ranks.step()
    assert ranks.worker.rows == {}
    for name, request in requests.items():
        expected, reason = expected_tokens(request, MAX_LEN, ranks.worker.vocab_size)
        if ranks.ends[name].finish_reason == "abort":
            assert name in aborted
        else:
            assert (ranks.tokens[name], ranks.ends[name].finish_reason) == (expected, reason)
