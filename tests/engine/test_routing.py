"""Requests go where the least work lies before their first token."""

import numpy as np

from octavo.contracts.engine import AdmittedRequest, EngineCoreOutputs, EngineCoreRequest, SchedulerStats
from octavo.engine.process_client import Router
from octavo.scheduler.block_manager import chain_hashes, root_hash
from octavo.testing import make_request

BLOCK = 4


def router(num_replicas: int = 2, *, caches_prefixes: bool = True) -> Router:
    return Router(num_replicas, BLOCK, caches_prefixes=caches_prefixes)


def sample(request_id: str, prompt: list[int], salt: str | None = None) -> EngineCoreRequest:
    return make_request(request_id, prompt, cache_salt=salt)


def send(to: Router, request_id: str, prompt: list[int], salt: str | None = None) -> int:
    among = list(to._loads)
    return to.route([sample(request_id, prompt, salt)], among)


def outputs(*, admitted: str | None = None, stats: SchedulerStats | None = None) -> EngineCoreOutputs:
    return EngineCoreOutputs(
        admitted={} if admitted is None else {admitted: AdmittedRequest(scheduled_time_s=0.0, num_cached_tokens=0)},
        stats=stats,
    )


def test_equals_take_turns() -> None:
    to = router(3)
    sent = []
    for number in range(6):
        sent.append(send(to, str(number), [number] * 3))
        to.withdraw(sent[-1], [str(number)])
    assert sent == [0, 1, 2, 0, 1, 2]


def test_a_known_prefix_decides_among_idle_replicas() -> None:
    to = router()
    prefix = list(range(40))
    assert send(to, "first", prefix) == 0
    to.withdraw(0, ["first"])
    assert [send(to, "other", [7] * 40), send(to, "again", [*prefix, 1, 2])] == [1, 0]


def test_a_busy_replica_loses_even_who_it_knows() -> None:
    to = router()
    prefix = list(range(100))
    send(to, "first", prefix)
    to.record(0, outputs(admitted="first"))
    assert send(to, "second", prefix) == 0  # 64 for the first request are less than 100 tokens
    to.record(0, outputs(admitted="second"))
    assert send(to, "third", prefix) == 1  # 128 are more


def test_waiting_prompts_count_until_they_are_admitted() -> None:
    to = router(caches_prefixes=False)
    send(to, "long", [1] * 1000)
    assert [send(to, f"short {number}", [2] * 10) for number in range(3)] == [1, 1, 1]
    to.record(0, outputs(admitted="long"))
    assert send(to, "short 4", [2] * 10) == 0


def test_salts_keep_prefixes_apart() -> None:
    to = router()
    prompt = list(range(400))
    send(to, "first", prompt, salt="a")
    assert send(to, "second", prompt, salt="b") == 1
    to.withdraw(0, ["first"])
    to.withdraw(1, ["second"])
    assert [send(to, "third", prompt, salt="b"), send(to, "fourth", prompt, salt="a")] == [1, 0]


def test_samples_of_a_request_stay_together_and_share_its_prompt() -> None:
    to = router()
    home = to.route([sample(f"r-{number}", [3] * 100) for number in range(4)], [0, 1])
    assert to._loads[home].num_waiting_tokens == 100
    assert len(to._loads[home].unfinished) == 4


def test_memory_of_prefixes_is_bounded_by_the_replicas_blocks() -> None:
    to = router(1)
    to.record(0, outputs(stats=SchedulerStats(num_blocks=10)))
    for number in range(50):
        send(to, str(number), [number] * (BLOCK * 3))
        assert len(to._loads[0].prefixes) <= 10
    for last, num_known in ((49, 3), (1, 0)):
        names = list(chain_hashes(root_hash(), np.full(BLOCK * 3, last, dtype=np.int32), BLOCK))
        assert to._loads[0].count_cached(names) == num_known


def test_the_next_core_of_a_replica_has_nothing() -> None:
    to = router()
    prefix = list(range(100))
    assert send(to, "first", prefix) == 0
    to.empty(0)
    assert to._loads[0].num_waiting_tokens == len(to._loads[0].prefixes) == 0
    to.withdraw(0, ["first"])
