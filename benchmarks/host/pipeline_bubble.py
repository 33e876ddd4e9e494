"""How much of the time the stages of a pipeline stand idle, and what dealing the rows over batches is worth.

    python -m benchmarks.host.pipeline_bubble [--tokens 60] [--json FILE]

Everything is real but the model: scheduler, core, executor, one process for each stage, and the links between them. A
stage takes WEIGHTS_S and TOKEN_S for each token of the step, divided by the number of stages; it sleeps, so that cores
do not decide. Decoding only: prompts are of one token.

Arithmetic. Let w and c be those two times for the whole model, N requests, p stages. Dealt, a batch has N / p rows and
p batches are under way, so N / p tokens come every (w + c N / p) / p: N / (w + c N / p) tokens a second. Else one
batch has all rows and nothing follows it before it is answered: N / (w + c N). The bubble of a stage is what is missing
from its share of the time: 1 - 1 / p where only one batch is under way, and 0 where p are, but for what the host takes.
"""

import argparse
import json
import math
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from octavo.config.args import EngineArgs
from octavo.config.engine import EngineConfig
from octavo.config.parallel import RankPlace, Rendezvous
from octavo.contracts.schedule import Int32Array, ModelRunnerOutput, SchedulerOutput
from octavo.distributed.connect import make_groups
from octavo.engine.core import EngineCore
from octavo.executor.multiproc import MultiprocExecutor
from octavo.models.interfaces import IntermediateTensors
from octavo.scheduler.step_builder import RunningScheduler
from octavo.testing import FakeRank, make_request, model_output_for
from octavo.worker.stages import StageLinks

WEIGHTS_S, TOKEN_S = 0.012, 0.0006
HIDDEN_SIZE = 1024
ROOT = Path(__file__).parents[2]


class PacedStage(FakeRank):
    """A stage that takes its time and hands on tensors of the right size."""

    def __init__(self, config: EngineConfig, place: RankPlace, rendezvous: Rendezvous) -> None:
        super().__init__(config, place, rendezvous)
        cpu = torch.device("cpu")
        self._links = StageLinks(make_groups(place, rendezvous, cpu).stages, HIDDEN_SIZE, torch.bfloat16, cpu)

    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        num_tokens = scheduler_output.total_num_scheduled_tokens
        tensors = self._links.receive(num_tokens) if num_tokens else None
        if num_tokens:
            time.sleep(stage_s(num_tokens, self.place.pp_size))
        if num_tokens and not self.place.is_last_stage:
            blank = torch.zeros(num_tokens, HIDDEN_SIZE, dtype=torch.bfloat16)
            self._links.send(tensors or IntermediateTensors(blank, blank))
        return model_output_for(
            scheduler_output, [1] * len(scheduler_output.req_ids)
        )  # the double's own model would cost more than the host


def stage_s(num_tokens: int, num_stages: int) -> float:
    """Return how long one stage takes for a step."""
    return (WEIGHTS_S + TOKEN_S * num_tokens) / num_stages


class Unbalanced(RunningScheduler):
    """Every batch takes all rows that are ready."""

    def _balanced(self, wanted: Int32Array) -> Int32Array:
        return wanted


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One run."""

    num_stages: int
    num_requests: int
    is_balanced: bool
    tokens_per_s: float
    expected_tokens_per_s: float
    bubble: float  # part of the time that a stage stands idle


def run_cell(num_stages: int, num_requests: int, num_tokens: int, *, is_balanced: bool) -> Cell:
    """Decode `num_tokens` for every request; the first few are not timed."""
    config = EngineArgs(
        pipeline_parallel_size=num_stages,
        distributed_executor_backend="mp",
        num_kv_blocks=1024,
        max_model_len=1024,
        enable_prefix_caching=False,
    ).resolve()
    core = EngineCore(config, MultiprocExecutor(config, "benchmarks.host.pipeline_bubble:PacedStage"))
    try:
        if not is_balanced:
            scheduler = core.scheduler
            vars(scheduler)["_running_scheduler"] = Unbalanced(scheduler.running, num_stages, is_speculative=False)
        for number in range(num_requests):
            core.add_request(make_request(f"r{number}", [number + 1], max_tokens=num_tokens + 40, ignore_eos=True))
        count_tokens(core, 10 * num_requests)
        start_s = time.perf_counter()
        num_done, busy_s = count_tokens(core, num_tokens * num_requests, num_stages)
        took_s = time.perf_counter() - start_s
    finally:
        core.close()
    batch = num_requests / num_stages if is_balanced else num_requests
    in_flight = min(num_stages, num_requests) if is_balanced else 1
    expected = in_flight * math.ceil(batch) / (WEIGHTS_S + TOKEN_S * math.ceil(batch))
    return Cell(
        num_stages=num_stages,
        num_requests=num_requests,
        is_balanced=is_balanced,
        tokens_per_s=round(num_done / took_s, 1),
        expected_tokens_per_s=round(expected, 1),
        bubble=round(1 - busy_s / took_s, 3),
    )


def count_tokens(core: EngineCore, num_tokens: int, num_stages: int = 1) -> tuple[int, float]:
    """Step until so many tokens have come; return their number, and how long they kept each stage busy."""
    num_done, busy_s = 0, 0.0
    while num_done < num_tokens:
        outputs = core.step()
        num_done += len(outputs.new_token_ids)
        busy_s += stage_s(outputs.num_scheduled_tokens, num_stages)
    return num_done, busy_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0] if __doc__ else None)
    parser.add_argument("--tokens", type=int, default=60, help="tokens of each request that are timed")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    print(f"{'stages':>6} {'requests':>8} {'dealt':>6} {'tok/s':>8} {'expected':>9} {'bubble':>7}")
    cells = []
    for num_stages, num_requests, is_balanced in CELLS:
        cell = run_cell(num_stages, num_requests, options.tokens, is_balanced=is_balanced)
        cells.append(cell)
        figures = f"{cell.tokens_per_s:>8} {cell.expected_tokens_per_s:>9} {cell.bubble:>7.1%}"
        print(f"{num_stages:>6} {num_requests:>8} {'yes' if is_balanced else 'no':>6} {figures}", flush=True)
    if options.json:
        facts = {"weights_s": WEIGHTS_S, "token_s": TOKEN_S, "cells": [asdict(cell) for cell in cells]}
        options.json.write_text(json.dumps(facts, indent=1) + "\n")


CELLS = [
    (2, 1, True),
    (2, 2, True),
    (2, 8, True),
    (2, 32, True),
    (2, 32, False),
    (3, 3, True),
    (3, 32, True),
    (3, 32, False),
]

if __name__ == "__main__":
    main()
