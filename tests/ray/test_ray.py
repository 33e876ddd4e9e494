"""Ranks placed by a real Ray: on this machine, and on two hosts. Run by `make test-ray`, which installs it."""

import os
import signal
from collections.abc import Iterator

import pytest
import ray
from tests.executor.processes import are_gone, wait_until
from tests.executor.ranks import ALL_FAIL, STUCK, make_config
from tests.executor.test_multiproc import scheduler_output_of
from tests.ray.two_hosts import can_make_hosts, ray_cluster, run_program, two_hosts

from octavo import LLM, SamplingParams
from octavo.errors import EngineDeadError, EngineError, InvalidParameterError
from octavo.executor.ray_executor import RayExecutor, RayRanks

GREEDY = SamplingParams(temperature=0.0, max_tokens=16)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """One cluster of four cores on this machine; engines that find one do not start their own."""
    ray.init(num_cpus=4, include_dashboard=False, configure_logging=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture
def executor() -> Iterator[RayExecutor]:
    executor = RayExecutor(make_config(tp=2, threads=2), "tests.executor.ranks:WilfulRank")
    yield executor
    executor.exit()
    wait_until(lambda: num_free_cores() == 4)  # nothing stays reserved


def num_free_cores() -> float:
    free: dict[str, float] = ray.available_resources()
    return free.get("CPU", 0.0)


def ranks_of(executor: RayExecutor) -> RayRanks:
    assert isinstance(executor.ranks, RayRanks)
    return executor.ranks


def test_tokens_are_those_of_one_rank() -> None:
    options = {"dtype": "float32", "num_kv_blocks": 128, "max_num_seqs": 4}
    model_outputs = []
    for ranks in ({}, {"tensor_parallel_size": 2, "distributed_executor_backend": "ray", "threads": 2}):
        with LLM("demo", **options, **ranks) as llm:
            outputs = llm.generate(["Octavo is", "Hello"], GREEDY, use_tqdm=False)
            model_outputs.append([output.outputs[0].token_ids for output in outputs])
    assert model_outputs[0] == model_outputs[1]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_named(executor: RayExecutor, rank: int) -> None:
    assert executor.start() == [63]
    pids = ranks_of(executor).pids
    model_output = executor.execute_model(scheduler_output_of(STUCK))
    os.kill(pids[rank], signal.SIGKILL)
    with pytest.raises(EngineDeadError, match=rf"rank {rank} .*Died"):
        model_output.result()
    wait_until(lambda: are_gone(pids))


def test_a_failed_step_is_no_more_than_that(executor: RayExecutor) -> None:
    executor.start()
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        executor.execute_model(scheduler_output_of(ALL_FAIL)).result()
    assert executor.execute_model(scheduler_output_of(1)).result().num_sampled.tolist() == [1]


def test_ranks_leave_with_the_executor(executor: RayExecutor) -> None:
    executor.start()
    pids = ranks_of(executor).pids
    executor.exit()
    wait_until(lambda: are_gone(pids))


def test_a_rank_that_cannot_be_built_is_named() -> None:
    executor = RayExecutor(make_config(tp=2, threads=2), "octavo.worker.nothing:Worker")
    with pytest.raises(EngineDeadError, match=r"rank [01]: ModuleNotFoundError"):
        executor.start()


def test_a_cluster_without_room_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.executor.ray_executor._PLACING_S", 2.0)
    with pytest.raises(InvalidParameterError, match="no room for 4 ranks"):
        RayExecutor(make_config(tp=4, threads=8), "octavo.testing:FakeRank").start()


@pytest.mark.skipif(not can_make_hosts(), reason="making network namespaces needs root and iproute2")
def test_two_hosts() -> None:
    with two_hosts() as hosts, ray_cluster(hosts) as environment:
        result = run_program(hosts[0], environment, "tensor_parallel_size")
    assert result["hosts"] == [host.address for host in hosts]
    assert result["is_equal"]
