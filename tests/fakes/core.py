"""An engine core in a process of its own, whose model is a fake. Run as `python tests/fakes/core.py PREFIX`.

It is `octavo.engine.core_proc` but for its executor. A core with a model takes two CPU seconds more to start.
"""

import os
import signal
import sys
import time
from concurrent.futures import Future

from octavo.config.engine import EngineConfig
from octavo.contracts.schedule import ModelRunnerOutput, SchedulerOutput
from octavo.engine import core_proc
from octavo.errors import InsufficientMemoryError
from octavo.executor.base import Executor
from octavo.executor.multiproc import MultiprocExecutor
from octavo.testing import FakeExecutor

STEP_S = 0.005  # long answers take seconds, so that tests can interrupt them
POISON, HUGE = 77, 78  # a prompt that begins with one of these kills whoever computes it, or finds no memory


class UnhurriedExecutor(FakeExecutor):
    """Takes as long as a model would, and needs more than one block."""

    def start(self) -> list[int]:
        num_blocks = super().start()
        if num_blocks == [1]:
            raise InsufficientMemoryError("one block is not enough: max_model_len")
        return num_blocks

    def execute_model(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        time.sleep(STEP_S)
        if any(new.token_ids[0] == POISON for new in scheduler_output.scheduled_new_reqs):
            os.kill(os.getpid(), signal.SIGKILL)
        if any(new.token_ids[0] == HUGE for new in scheduler_output.scheduled_new_reqs):
            raise MemoryError("78 of 77 GiB")
        return super().execute_model(scheduler_output)


def make_executor(config: EngineConfig) -> Executor:
    """Return a fake worker, or ranks of them in processes."""
    if config.parallel.world_size > 1:
        return MultiprocExecutor(config, "octavo.testing:FakeRank")
    return UnhurriedExecutor(
        num_blocks=config.cache.num_kv_blocks or 1024,
        block_size=config.cache.block_size,
        vocab_size=config.model.vocab_size,
    )


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # as `child_command` does; the parent decides
        signal.signal(number, signal.SIG_IGN)
    core_proc.make_executor = make_executor  # type: ignore[attr-defined]  # a name that it imports
    core_proc.import_rank = lambda: None  # type: ignore[attr-defined]  # ranks that are no fakes need torch
    sys.exit(core_proc.main())
