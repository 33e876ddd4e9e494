"""What ranks in processes of their own add to a step, with a model that costs nothing.

    python -m benchmarks.host.executor_cost [--ranks 2 4] [--running 1 32 256] [--steps 1000] [--json FILE]

The same steps, answered at once by one rank in this process and by ranks behind `MultiprocExecutor`; each figure is the
wall time from `execute_model` to the answer. Aim at two ranks: at most 60 us over one. Then ranks are killed: how long
until the executor has said which one it was, with all others gone. Quiet machine.
"""

import argparse
import gc
import json
import os
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from octavo.config.args import EngineArgs
from octavo.config.parallel import ALONE, Rendezvous
from octavo.contracts.schedule import ModelRunnerOutput, SchedulerOutput
from octavo.errors import EngineDeadError
from octavo.executor.multiproc import LocalRanks, MultiprocExecutor
from octavo.scheduler.scheduler import Scheduler
from octavo.testing import FakeRank, make_request, make_scheduler, model_output_for

FREE_RANK = "benchmarks.host.executor_cost:FreeRank"
BLOCK_SIZE = 32
WARM_STEPS = 50
Execute = Callable[[SchedulerOutput], ModelRunnerOutput]


class FreeRank(FakeRank):
    """Samples token 1 everywhere."""

    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        return model_output_for(scheduler_output, [1] * len(scheduler_output.req_ids))


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Microseconds of a step, over all measured ones."""

    num_ranks: int
    num_running: int
    median_us: float
    p90_us: float
    over_one_rank_us: float


def args(num_ranks: int, num_running: int, num_steps: int) -> EngineArgs:
    """Options of an engine whose every running request decodes in every step."""
    blocks = num_running * (-(-(num_steps + WARM_STEPS + 8) // BLOCK_SIZE) + 1)
    return EngineArgs(
        tensor_parallel_size=num_ranks,
        distributed_executor_backend="mp",
        block_size=BLOCK_SIZE,
        num_kv_blocks=blocks,
        max_num_seqs=num_running,
    )


def make_decoding(engine: EngineArgs, num_running: int, num_steps: int) -> Scheduler:
    assert engine.num_kv_blocks is not None
    room = num_steps + WARM_STEPS + 8
    scheduler = make_scheduler(
        num_blocks=engine.num_kv_blocks,
        block_size=BLOCK_SIZE,
        max_num_seqs=num_running,
        max_num_batched_tokens=max(64, num_running * 4),
        max_model_len=room + 8,
    )
    for index in range(num_running):
        scheduler.add_request(make_request(f"request-{index}", [index, 1], max_tokens=room, ignore_eos=True))
    return scheduler


def step_times_us(scheduler: Scheduler, execute: Execute, num_steps: int) -> list[float]:
    gc.collect()
    gc.freeze()
    times_us = []
    for _ in range(WARM_STEPS + num_steps):
        scheduler_output = scheduler.schedule()
        start_ns = time.perf_counter_ns()
        model_output = execute(scheduler_output)
        times_us.append((time.perf_counter_ns() - start_ns) / 1e3)
        scheduler.update_from_output(scheduler_output, model_output)
    gc.unfreeze()
    return times_us[WARM_STEPS:]


def one_rank(num_running: int, num_steps: int) -> list[float]:
    engine = args(1, num_running, num_steps)
    rank = FreeRank(engine.resolve(), ALONE, Rendezvous())
    rank.initialize_kv_cache(rank.count_kv_blocks())
    return step_times_us(make_decoding(engine, num_running, num_steps), rank.execute, num_steps)


def several_ranks(num_ranks: int, num_running: int, num_steps: int) -> list[float]:
    engine = args(num_ranks, num_running, num_steps)
    executor = MultiprocExecutor(engine.resolve(), FREE_RANK)
    executor.start()
    try:
        scheduler = make_decoding(engine, num_running, num_steps)
        return step_times_us(
            scheduler, lambda scheduler_output: executor.execute_model(scheduler_output).result(), num_steps
        )
    finally:
        executor.exit()


def measure(num_ranks: int, num_running: int, num_steps: int) -> Cost:
    """Take turns, so that a busy moment of the host meets both."""
    alone, together = [], []
    for _ in range(4):
        alone += one_rank(num_running, num_steps // 4)
        together += several_ranks(num_ranks, num_running, num_steps // 4)
    return Cost(
        num_ranks=num_ranks,
        num_running=num_running,
        median_us=statistics.median(together),
        p90_us=statistics.quantiles(together, n=10)[-1],
        over_one_rank_us=statistics.median(together) - statistics.median(alone),
    )


def notice_ms(num_ranks: int) -> float:
    """Return the worst time, over all ranks, from the kill of an idle rank to the error, with no rank left."""
    worst = 0.0
    for rank in range(num_ranks):
        executor = MultiprocExecutor(args(num_ranks, 1, 1).resolve(), FREE_RANK)
        executor.start()
        assert isinstance(executor.ranks, LocalRanks)
        start_s = time.perf_counter()
        os.kill(executor.ranks.pids[rank], signal.SIGKILL)
        try:
            while True:
                executor.check_health()
        except EngineDeadError:
            executor.exit()
        worst = max(worst, time.perf_counter() - start_s)
    return worst * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--running", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--steps", type=int, default=1000, help="measured steps per case")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    print("  ranks  running  median us  p90 us  over one rank us")
    costs = []
    for num_ranks in options.ranks:
        for num_running in options.running:
            cost = measure(num_ranks, num_running, options.steps)
            costs.append(asdict(cost))
            print(
                f"{num_ranks:7}{num_running:9}{cost.median_us:11.1f}{cost.p90_us:8.1f}{cost.over_one_rank_us:18.1f}",
                flush=True,
            )
    notices = {num_ranks: notice_ms(num_ranks) for num_ranks in options.ranks}
    for num_ranks, worst in notices.items():
        print(
            f"kill -9 of one of {num_ranks} idle ranks, until it is named and nothing is left: {worst:.0f} ms at worst"
        )
    if options.json:
        options.json.write_text(json.dumps({"steps": costs, "notice_ms": notices}, indent=2) + "\n")


if __name__ == "__main__":
    main()
