"""Several ranks in real processes: steps, failures, and kill -9 at every moment."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from tests.breadth import pick
from tests.executor.conftest import MakeExecutor
from tests.executor.processes import are_gone, descendants, wait_until
from tests.executor.ranks import ALL_FAIL, CRASH, LAST_FAILS_ALONE, LOAD_VARIABLE, ONE_FAILS, STUCK

from octavo.contracts.schedule import SchedulerOutput
from octavo.errors import CheckpointError, EngineDeadError, EngineError, InvalidParameterError
from octavo.executor.base import make_executor as choose_executor
from octavo.executor.multiproc import LocalRanks, MultiprocExecutor
from octavo.scheduler.scheduler import Scheduler
from octavo.testing import expected_tokens, make_request, make_scheduler

VOCAB_SIZE = 4096  # of the demo model
LONG = 1_000_000  # numbers, which take more bytes than a ring has


def pids_of(executor: MultiprocExecutor) -> list[int]:
    assert isinstance(executor.ranks, LocalRanks)
    return executor.ranks.pids


def answer_then_look(executor: MultiprocExecutor, scheduler_output: SchedulerOutput) -> None:
    assert executor.execute_model(scheduler_output).result().req_ids == scheduler_output.req_ids
    deadline_s = time.monotonic() + 10.0
    while time.monotonic() < deadline_s:
        executor.check_health()


def scheduler_output_of(word: int, *, num_tokens: int = 3) -> SchedulerOutput:
    """Return the first step of a request whose prompt starts with `word`."""
    scheduler = make_scheduler()
    scheduler.add_request(make_request("wilful", [word] * num_tokens, max_tokens=8, ignore_eos=True))
    return scheduler.schedule()


def decode(executor: MultiprocExecutor, scheduler: Scheduler) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    while not scheduler.is_finished():
        scheduler_output = scheduler.schedule()
        outputs = scheduler.update_from_output(scheduler_output, executor.execute_model(scheduler_output).result())
        new = iter(outputs.new_token_ids)
        for request_id, count in zip(outputs.req_ids, outputs.num_new_tokens, strict=True):
            tokens.setdefault(request_id, []).extend(next(new) for _ in range(count))
    return tokens


@pytest.mark.parametrize(("tp", "pp"), pick([(2, 2)], [(1, 1), (3, 1), (2, 2)]))
def test_every_rank_sees_every_step_and_one_returns_outputs(make_executor: MakeExecutor, tp: int, pp: int) -> None:
    executor = make_executor(tp=tp, pp=pp)
    num_blocks = executor.start()
    assert num_blocks == [64 - (tp * pp - 1)]  # the least of all
    executor.call("warmup").result()
    vocab_size = executor._config.model.vocab_size
    scheduler = make_scheduler(num_blocks=16, max_num_seqs=4)  # some are preempted
    requests = [make_request(f"r{i}", range(i + 1), seed=i, max_tokens=30, ignore_eos=True) for i in range(7)]
    for request in requests:
        scheduler.add_request(request)
    tokens = decode(executor, scheduler)
    assert tokens == {request.request_id: expected_tokens(request, 128, vocab_size)[0] for request in requests}


def test_one_executor_for_what_leaves_it_well(make_executor: MakeExecutor) -> None:
    """Ranks take a second to start, so these share theirs, and the scheduler that knows which rows are taken."""
    executor = make_executor(max_num_batched_tokens=8_000_000)
    executor.start()
    scheduler = make_scheduler()
    prefaults_memory(executor)
    overlaps_steps(executor, scheduler)
    passes_long_outputs(executor, scheduler)
    fails_a_step_everywhere(executor)


def prefaults_memory(executor: MultiprocExecutor) -> None:
    """Until all ranks have enough."""
    assert executor.call("prefault_kv", [2]).result() == [True, True]
    assert executor.call("prefault_kv", [1]).result() == [True, False]
    assert executor.call("prefault_kv", [0]).result() == [False, False]


def fails_a_step_everywhere(executor: MultiprocExecutor) -> None:
    """Which is no more than that."""
    with pytest.raises(EngineError, match="ZeroDivisionError: in the forward") as failure:
        executor.execute_model(scheduler_output_of(ALL_FAIL)).result()
    assert not isinstance(failure.value, EngineDeadError)
    assert executor.execute_model(scheduler_output_of(1)).result().num_sampled.tolist() == [1]


def overlaps_steps(executor: MultiprocExecutor, scheduler: Scheduler) -> None:
    scheduler_outputs = []
    for index in range(40):  # more than the ring has slots
        scheduler.add_request(make_request(f"r{index}", [index], max_tokens=1))
    while not scheduler.is_finished():
        scheduler_outputs.append(scheduler.schedule())
        model_outputs = [executor.execute_model(scheduler_output) for scheduler_output in scheduler_outputs]
        for scheduler_output, model_output in reversed(list(zip(scheduler_outputs, model_outputs, strict=True))):
            assert model_output.result().req_ids == scheduler_output.req_ids
        scheduler.update_from_output(scheduler_outputs.pop(), model_outputs[-1].result())


def passes_long_outputs(executor: MultiprocExecutor, scheduler: Scheduler) -> None:
    for turn in range(2):
        request = make_request(f"long{turn}", [turn, 1], max_tokens=1, bad_words=("x",))
        scheduler.add_request(request)
        scheduler_output = scheduler.schedule()
        scheduler_output.scheduled_new_reqs[0].bad_words_token_ids.append(list(range(LONG)))
        scheduler.update_from_output(scheduler_output, executor.execute_model(scheduler_output).result())


@pytest.mark.parametrize("rank", pick([1], [0, 1, 2]))
def test_a_rank_killed_while_idle(make_executor: MakeExecutor, rank: int) -> None:
    executor = make_executor(tp=pick(2, 3))
    executor.start()
    pids = pids_of(executor)
    os.kill(pids[rank], signal.SIGKILL)
    wait_until(lambda: are_gone(pids))
    with pytest.raises(EngineDeadError, match=rf"rank {rank} .*SIGKILL"):
        executor.check_health()
    with pytest.raises(EngineDeadError, match=rf"rank {rank} .*SIGKILL"):
        executor.execute_model(scheduler_output_of(1))


@pytest.mark.full  # by default one of two engines, below
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_killed_while_all_wait_for_one_another(make_executor: MakeExecutor, rank: int) -> None:
    executor = make_executor()
    executor.start()
    pids = pids_of(executor)
    model_output = executor.execute_model(scheduler_output_of(STUCK))
    killer = threading.Timer(0.2, os.kill, (pids[rank], signal.SIGKILL))
    killer.start()
    with pytest.raises(EngineDeadError, match=rf"rank {rank} .*SIGKILL"):
        model_output.result()
    wait_until(lambda: are_gone(pids))
    killer.join()


@pytest.mark.parametrize("rank", pick([1], [0, 1]))
def test_a_rank_killed_while_loading(make_executor: MakeExecutor, monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    monkeypatch.setenv(LOAD_VARIABLE, "stuck")
    executor = make_executor()

    def kill() -> None:
        wait_until(lambda: executor._ranks is not None)
        time.sleep(0.2 * rank)  # one as it starts, one as it loads
        os.kill(pids_of(executor)[rank], signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(EngineDeadError, match=rf"rank {rank} .*SIGKILL"):
        executor.start()
    killer.join()


def test_a_rank_that_ends_itself(make_executor: MakeExecutor) -> None:
    executor = make_executor()
    executor.start()
    with pytest.raises(EngineDeadError, match=r"rank 1 .*exit code 7"):
        executor.execute_model(scheduler_output_of(CRASH)).result()


def test_a_long_scheduler_output_to_ranks_that_die(make_executor: MakeExecutor) -> None:
    executor = make_executor()
    executor.start()
    executor.execute_model(scheduler_output_of(STUCK))
    long = scheduler_output_of(1)
    long.scheduled_new_reqs[0].bad_words_token_ids.append(list(range(LONG)))
    killer = threading.Timer(0.2, os.kill, (pids_of(executor)[0], signal.SIGKILL))
    killer.start()
    with pytest.raises(EngineDeadError, match="rank 0"):
        executor.execute_model(long)
    killer.join()


def test_a_step_that_fails_on_one_rank_ends_the_engine(make_executor: MakeExecutor) -> None:
    executor = make_executor()
    executor.start()
    pids = pids_of(executor)
    with pytest.raises(EngineDeadError, match=r"rank 1 failed while others did not: ZeroDivisionError(.|\n)*Traceback"):
        executor.execute_model(scheduler_output_of(ONE_FAILS)).result()
    wait_until(lambda: are_gone(pids))


def test_a_failure_after_the_output_is_found_when_idle(make_executor: MakeExecutor) -> None:
    executor = make_executor()
    executor.start()
    pids = pids_of(executor)
    with pytest.raises(EngineDeadError, match=r"rank 1 failed while others did not: ZeroDivisionError(.|\n)*Traceback"):
        answer_then_look(executor, scheduler_output_of(LAST_FAILS_ALONE))
    wait_until(lambda: are_gone(pids))


def test_a_step_that_takes_for_ever(make_executor: MakeExecutor) -> None:
    executor = make_executor(step_timeout_s=0.2)
    executor.start()
    pids = pids_of(executor)
    with pytest.raises(EngineDeadError, match="step 1: no reply"):
        executor.execute_model(scheduler_output_of(STUCK)).result()
    wait_until(lambda: are_gone(pids))


@pytest.mark.parametrize(
    ("what", "error", "message"),
    [
        ("checkpoint", CheckpointError, r"rank 1: model\.safetensors: truncated"),
        pytest.param(
            *("bug", EngineDeadError, r"rank 1: ZeroDivisionError: in the loader(.|\n)*Traceback"),
            marks=pytest.mark.full,
        ),
    ],
)
def test_errors_of_loading_keep_type_and_rank(
    what: str, error: type[EngineError], message: str, make_executor: MakeExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LOAD_VARIABLE, what)
    with pytest.raises(error, match=message):
        make_executor().start()


def test_ranks_leave_with_their_parent() -> None:
    code = (
        "import os, time\n"
        "from tests.executor.ranks import make_config\n"
        "from octavo.executor.multiproc import MultiprocExecutor\n"
        "executor = MultiprocExecutor(make_config(), 'octavo.testing:FakeRank')\n"
        "executor.start()\n"
        "print(*executor.ranks.pids, flush=True)\n"
        "if os.fork() == 0: os.setsid()\n"  # a child that holds all pipes open
        "time.sleep(20)\n"
    )
    with subprocess.Popen([sys.executable, "-W", "ignore", "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2
        time.sleep(0.1)
        children = [child for child in descendants(parent.pid) if child not in pids]
        parent.kill()
        wait_until(lambda: are_gone(pids))
        for pid in children:
            os.kill(pid, signal.SIGKILL)


def test_two_engines_do_not_meet(make_executor: MakeExecutor) -> None:
    executors = [make_executor(), make_executor()]
    for executor in executors:
        executor.start()
    pids = pids_of(executors[0])
    model_output = executors[0].execute_model(scheduler_output_of(STUCK))
    killer = threading.Timer(0.2, os.kill, (pids[1], signal.SIGKILL))
    killer.start()
    with pytest.raises(EngineDeadError, match=r"rank 1 .*SIGKILL"):
        model_output.result()
    wait_until(lambda: are_gone(pids))
    killer.join()
    assert executors[1].execute_model(scheduler_output_of(1)).result().num_sampled.tolist() == [1]


def test_what_no_executor_runs_is_refused() -> None:
    from tests.executor.ranks import make_config

    with pytest.raises(InvalidParameterError, match="uniproc runs only one"):
        choose_executor(make_config(distributed_executor_backend="uniproc"))
