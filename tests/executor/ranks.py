"""Ranks without a model, in real processes, that do at a word what ranks should not do."""

import os
import time
from concurrent.futures import Future, ThreadPoolExecutor

from octavo.config.args import EngineArgs
from octavo.config.engine import EngineConfig
from octavo.contracts.engine import AdapterRef
from octavo.contracts.schedule import ModelRunnerOutput, SchedulerOutput
from octavo.errors import CheckpointError
from octavo.testing import FakeRank

# First tokens of prompts that have a meaning.
STUCK = 901  # all ranks wait for something that does not come, as in a collective
ONE_FAILS = 902  # rank 1 raises, the others wait for it
ALL_FAIL = 903
LAST_FAILS_ALONE = 904  # the last rank raises, the others get through
CRASH = 905  # rank 1 leaves the interpreter, the others wait for it

FOREVER_S = 600.0
LOAD_S = 0.2  # of an adapter
THREADS = ThreadPoolExecutor(1)
LOAD_VARIABLE = "OCTAVO_TEST_LOAD"  # what load_model does: "stuck", "checkpoint" or "bug"; on rank 1 only


class WilfulRank(FakeRank):
    """Stands in for a worker."""

    def load_model(self) -> None:
        what = os.environ.get(LOAD_VARIABLE, "")
        if what == "stuck":
            time.sleep(FOREVER_S)
        if self.place.rank == 1 and what == "checkpoint":
            raise CheckpointError("model.safetensors: truncated")
        if self.place.rank == 1 and what == "bug":
            raise ZeroDivisionError("in the loader")

    def count_kv_blocks(self) -> list[int]:
        return [count - self.place.rank for count in super().count_kv_blocks()]

    def prefault_kv(self, num_reached_blocks: list[int]) -> bool:
        return self.place.rank < num_reached_blocks[0]

    def load_adapter(self, adapter: AdapterRef, evicted: list[str]) -> Future[None]:
        """Takes a while, in a thread. A broken one cannot be loaded on rank 1."""

        def load() -> None:
            time.sleep(LOAD_S)
            if adapter.name == "broken" and self.place.rank == 1:
                raise CheckpointError("lora_A: of another model")
            loaded = FakeRank.load_adapter(self, adapter, evicted)
            assert loaded.result() is None

        return THREADS.submit(load)

    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        words = {int(new.token_ids[0]) for new in scheduler_output.scheduled_new_reqs}
        is_last = self.place.rank == self.place.tp_size * self.place.pp_size - 1
        if STUCK in words or (words & {ONE_FAILS, CRASH} and self.place.rank != 1):
            time.sleep(FOREVER_S)
        if LAST_FAILS_ALONE in words and is_last:
            time.sleep(0.2)  # the answer has left
        if words & {ONE_FAILS, ALL_FAIL} or (LAST_FAILS_ALONE in words and is_last):
            raise ZeroDivisionError("in the forward")
        if CRASH in words and self.place.rank == 1:
            os._exit(7)
        return super().execute(scheduler_output)


def make_config(*, tp: int = 2, pp: int = 1, **options: object) -> EngineConfig:
    """Return a configuration for `tp * pp` ranks that need no model."""
    return EngineArgs.from_options(
        {
            "tensor_parallel_size": tp,
            "pipeline_parallel_size": pp,
            "distributed_executor_backend": "mp",
            "block_size": 4,
            "num_kv_blocks": 64,
            **options,
        }
    ).resolve()
