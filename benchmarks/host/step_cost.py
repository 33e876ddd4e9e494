"""Host cost of one engine step: `schedule()` plus `update_from_output()` with a model that costs nothing.

    python benchmarks/host/step_cost.py [--running 1 32 ...] [--steps 256] [--json FILE]

Every running request decodes one token per step. Rows reach the ends of their blocks at different steps, as they do
in service; `--aligned` lets all of them cross together. `turnover` lets each request end after 128 tokens, so that in
each step some leave and as many enter from the queue. Aim: 30 us + 0.1 us per running request, whatever waits and
however long the contexts are. What is measured is this thread's CPU time, so that a busy machine does not count.
"""

import argparse
import gc
import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from octavo.contracts.schedule import ModelRunnerOutput, SchedulerOutput
from octavo.scheduler.scheduler import Scheduler
from octavo.testing import make_request, make_scheduler

BLOCK_SIZE = 32
TURNOVER_TOKENS = 128


@dataclass(frozen=True, kw_only=True)
class Case:
    """One line of the table."""

    num_running: int
    num_waiting: int
    context: int
    turnover: bool
    aligned: bool


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Microseconds per step over all measured steps."""

    median_us: float
    mean_us: float
    max_us: float
    aim_us: float


def model_output(scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
    """Sample token 1 everywhere."""
    return ModelRunnerOutput(
        req_ids=scheduler_output.req_ids,
        sampled_token_ids=np.ones((len(scheduler_output.req_ids), 1), dtype=np.int32),
        num_sampled=scheduler_output.samples.astype(np.int32),
    )


def fill(case: Case, num_steps: int) -> Scheduler:
    """Return a scheduler whose running requests have all computed their prompts."""
    output_room = 2 * max(num_steps, TURNOVER_TOKENS)
    max_model_len = case.context + BLOCK_SIZE + output_room
    scheduler = make_scheduler(
        num_blocks=(case.num_running + 1) * (max_model_len // BLOCK_SIZE + 2),
        block_size=BLOCK_SIZE,
        max_num_seqs=case.num_running,
        max_num_batched_tokens=case.num_running * (case.context + BLOCK_SIZE),
        max_model_len=max_model_len,
        clock=time.time,
    )
    for index in range(case.num_running + case.num_waiting):
        stagger = 0 if case.aligned else index % BLOCK_SIZE
        left = 1 + index % TURNOVER_TOKENS if index < case.num_running else TURNOVER_TOKENS
        prompt = np.full(case.context + stagger, 7)
        prompt[0] = index  # nobody shares blocks
        scheduler.add_request(
            make_request(
                f"request-{index}",
                prompt.tolist(),
                arrival_time_s=time.time(),
                max_tokens=left if case.turnover else output_room,
                ignore_eos=True,
            )
        )
    scheduler_output = scheduler.schedule()
    scheduler.update_from_output(scheduler_output, model_output(scheduler_output))
    return scheduler


def measure(case: Case, num_steps: int) -> Cost:
    scheduler = fill(case, num_steps)
    gc.collect()
    gc.freeze()  # what the setup left behind is not the step's to scan
    costs_us = []
    for _ in range(num_steps):
        start_ns = time.thread_time_ns()
        scheduler_output = scheduler.schedule()
        scheduled_ns = time.thread_time_ns()
        sampled = model_output(scheduler_output)
        update_ns = time.thread_time_ns()
        scheduler.update_from_output(scheduler_output, sampled)
        costs_us.append((time.thread_time_ns() - update_ns + scheduled_ns - start_ns) / 1e3)
    gc.unfreeze()
    return Cost(
        median_us=statistics.median(costs_us),
        mean_us=statistics.fmean(costs_us),
        max_us=max(costs_us),
        aim_us=30 + 0.1 * case.num_running,
    )


def cases(running: list[int], aligned: bool) -> list[Case]:
    """Fresh, with a long queue, with long contexts, and with requests coming and going."""
    kinds = [(0, 100, False), (10_000, 100, False), (0, 8_000, False), (10_000, 100, True)]
    return [
        Case(num_running=count, num_waiting=waiting, context=context, turnover=turnover, aligned=aligned)
        for count in running
        for waiting, context, turnover in kinds
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, nargs="+", default=[1, 32, 256, 1024, 4096])
    parser.add_argument("--steps", type=int, default=256, help="measured steps per case")
    parser.add_argument("--aligned", action="store_true", help="all rows cross block boundaries together")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    columns = {"running": 8, "waiting": 9, "context": 9, "turnover": 10, "median us": 11, "mean us": 10, "max us": 10}
    print("".join(f"{name:>{width}}" for name, width in columns.items()), " aim")
    results = []
    for case in cases(options.running, options.aligned):
        cost = measure(case, options.steps)
        results.append({**asdict(case), **asdict(cost)})
        print(
            f"{case.num_running:8}{case.num_waiting:9}{case.context:9}{case.turnover!s:>10}"
            f"{cost.median_us:11.1f}{cost.mean_us:10.1f}{cost.max_us:10.1f}  {cost.aim_us:.0f}"
        )
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
