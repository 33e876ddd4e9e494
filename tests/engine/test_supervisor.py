"""Who goes on, who is suspected and who fails when cores die: the policy alone, with cores that are sets of ids."""

import random
from collections.abc import Callable

import pytest

from octavo.contracts.engine import EngineCoreOutputs, FinishedRequest
from octavo.engine.supervisor import Supervisor
from octavo.testing import make_request

NUM_TOKENS = 6  # of each request


class Fleet:
    """Replicas that give each request they have a token per step. `kills(ids)` decides whether a step ends the core."""

    def __init__(self, num_replicas: int, rows: int, kills: Callable[[set[str]], bool]) -> None:
        self.supervisor = Supervisor()
        self.rows, self.kills = rows, kills
        self.cores: list[dict[str, int]] = [{} for _ in range(num_replicas)]  # tokens known, by request
        self.begun: list[set[str]] = [set() for _ in range(num_replicas)]
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, FinishedRequest] = {}
        self.num_deaths = 0

    def add(self, *names: str) -> None:
        self.supervisor.add([make_request(name, [1, 2]) for name in names])
        self.tokens.update({name: [] for name in names})

    def place(self) -> None:
        for entries, among in self.supervisor.take_placeable(range(len(self.cores))):
            replica = min(among, key=lambda at: len(self.cores[at]))
            for entry in entries:
                entry.replica = replica
                self.cores[replica][entry.request.request_id] = len(entry.message.resumed_token_ids)

    def step(self, replica: int, *, dies: bool = False) -> None:
        core = self.cores[replica]
        now = list(core)[: self.rows]
        self.begun[replica].update(now)
        if dies or self.kills(set(now)):
            self.num_deaths += 1
            self.ended |= self.supervisor.lose(replica, self.begun[replica], "killed")
            self.cores[replica], self.begun[replica] = {}, set()
        elif now:
            for name in now:
                assert core[name] == len(self.tokens[name])  # nothing lost, nothing twice
                self.tokens[name].append(core[name])
                core[name] += 1
            done = [name for name in now if core[name] == NUM_TOKENS]
            finished = {name: FinishedRequest(finish_reason="length") for name in done}
            self.supervisor.record(
                EngineCoreOutputs(
                    req_ids=now,
                    num_new_tokens=[1] * len(now),
                    first_indices=[core[name] - 1 for name in now],
                    new_token_ids=[core[name] - 1 for name in now],
                    finished=finished,
                )
            )
            self.ended |= finished
            for name in done:
                del core[name]
        self.place()

    def run(self, *, death_rate: float = 0.0, seed: int = 0) -> None:
        rng = random.Random(seed)
        self.place()
        for number in range(5000):
            if len(self.ended) == len(self.tokens):
                return
            self.step(number % len(self.cores), dies=rng.random() < death_rate)
        pytest.fail(f"{len(self.tokens) - len(self.ended)} requests never end")


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
@pytest.mark.parametrize("position", [0, 3])
@pytest.mark.parametrize("num_requests", [1, 2, 40])
def test_what_kills_fails_alone(num_replicas: int, position: int, num_requests: int) -> None:
    """At its first token or at a later one; more requests than there are rows."""
    poison = f"r{num_requests // 3}"
    fleet = Fleet(num_replicas, 8, lambda now: poison in now and len(fleet.tokens[poison]) == position)
    for number in range(num_requests):
        fleet.add(f"r{number}")
    fleet.run()
    reasons = {name: end.finish_reason for name, end in fleet.ended.items()}
    assert reasons == {name: "error" if name == poison else "length" for name in fleet.tokens}
    assert "in a row while it ran this request, at last alone: killed" in (fleet.ended[poison].error or "")
    assert fleet.num_deaths <= 2 + 3 + 3  # both free ones, halves of eight rows, alone
    assert not fleet.supervisor._by_id


def test_two_that_kill() -> None:
    fleet = Fleet(1, 16, lambda now: bool(now & {"r1", "r9"}))
    for number in range(12):
        fleet.add(f"r{number}")
    fleet.run()
    assert {name for name, end in fleet.ended.items() if end.finish_reason == "error"} == {"r1", "r9"}


@pytest.mark.parametrize("seed", range(8))
def test_deaths_from_outside_end_nobody(seed: int) -> None:
    fleet = Fleet(1 + seed % 3, 8, lambda _: False)
    for number in range(200):
        fleet.add(f"r{number}")
    fleet.run(death_rate=0.1, seed=seed)
    assert fleet.num_deaths > 3
    assert {end.finish_reason for end in fleet.ended.values()} == {"length"}


def test_who_waits_behind_a_killer_is_no_suspect() -> None:
    fleet = Fleet(1, 1, lambda now: "poison" in now)
    fleet.add("poison")
    for number in range(20):
        fleet.add(f"r{number}")
    fleet.run()
    assert fleet.ended["poison"].finish_reason == "error"
    assert fleet.num_deaths == 5  # two free ones, three alone


def test_new_requests_wait_until_a_trial_is_over() -> None:
    fleet = Fleet(1, 8, lambda now: "poison" in now and "other" in fleet.tokens and not fleet.tokens["other"])
    fleet.add("poison")
    fleet.place()
    fleet.add("other")  # from now on it kills
    fleet.step(0)
    fleet.step(0)
    assert list(fleet.cores[0]) == ["poison"]
    fleet.tokens["other"].append(0)  # and no longer
    fleet.step(0)
    assert list(fleet.cores[0]) == ["poison", "other"]


def test_aborts_of_who_waits_who_runs_and_who_is_lost() -> None:
    fleet = Fleet(1, 8, lambda _: False)
    fleet.add("a", "b")
    supervisor = fleet.supervisor
    assert supervisor.abort(["a", "unknown"]) == ({}, ["a"])
    fleet.place()
    assert list(fleet.cores[0]) == ["b"]
    assert supervisor.abort(["b"]) == ({0: ["b"]}, [])
    assert supervisor.lose(0, {"b"}, "killed") == {"b": FinishedRequest(finish_reason="abort")}
    assert not supervisor._by_id


def test_a_trial_that_is_aborted_before_it_began_lets_the_others_go_on() -> None:
    fleet = Fleet(1, 8, lambda now: "poison" in now)
    fleet.add("poison")
    fleet.place()
    fleet.step(0)
    assert list(fleet.cores[0]) == ["poison"]
    fleet.add("other")
    fleet.begun[0].add("poison")
    fleet.supervisor.lose(0, fleet.begun[0], "killed")  # the second: it is to be tried, and "other" waits
    fleet.cores[0] = {}
    assert fleet.supervisor.abort(["poison"]) == ({}, ["poison"])
    fleet.place()
    assert list(fleet.cores[0]) == ["other"]


def test_what_could_not_be_sent_is_kept_in_order() -> None:
    supervisor = Supervisor()
    for name in "abc":
        supervisor.add([make_request(name, [1])])
    for entries, _ in supervisor.take_placeable([0]):
        supervisor.put_back(entries)
        break
    assert [entries[0].request.request_id for entries, _ in supervisor.take_placeable([0])] == ["a", "b", "c"]
