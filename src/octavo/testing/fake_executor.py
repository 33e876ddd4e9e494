"""The fake worker in an executor, as a rank, or stepped manually."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from octavo.config.engine import EngineConfig
from octavo.config.parallel import RankPlace
from octavo.contracts.engine import AdapterRef, EngineCoreOutputs
from octavo.contracts.schedule import ModelRunnerOutput, SchedulerOutput
from octavo.distributed.rendezvous import Rendezvous
from octavo.scheduler.scheduler import Scheduler
from octavo.testing.fake_worker import FakeWorker
from octavo.worker.rank_loop import call_worker


def run_step(scheduler: Scheduler, worker: FakeWorker) -> EngineCoreOutputs:
    """Schedule one step, execute it and update the scheduler with its output."""
    scheduler_output = scheduler.schedule()
    return scheduler.update_from_output(scheduler_output, worker.execute(scheduler_output))


class FakeExecutor:
    """An `Executor` without a model. `fails` selects steps that raise instead of computing."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        vocab_size: int = 1000,
        fails: Callable[[SchedulerOutput], bool] = lambda scheduler_output: False,
        max_steps_in_flight: int = 1,
    ) -> None:
        self.max_steps_in_flight = max_steps_in_flight
        self.worker = FakeWorker(num_blocks=[num_blocks], block_size=block_size, vocab_size=vocab_size)
        self.has_exited = False
        self._num_blocks = num_blocks
        self._fails = fails

    @property
    def profile(self) -> str:
        return "fake"

    def start(self) -> list[int]:
        return [self._num_blocks]

    def execute_model(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        future: Future[ModelRunnerOutput] = Future()
        if self._fails(scheduler_output):
            self.worker.lose(scheduler_output)
            future.set_exception(RuntimeError("failed as requested"))
        else:
            future.set_result(self.worker.execute(scheduler_output))
        return future

    def call(self, method: str, *arguments: Any) -> Future[list[Any]]:
        values: Future[list[Any]] = Future()
        call_worker(self.worker, method, arguments, lambda value: values.set_result([value]), values.set_exception)
        return values

    def check_health(self) -> None:
        """Always healthy."""

    def exit(self) -> None:
        self.has_exited = True


class FakeRank:
    """A `FakeWorker` as a rank of an executor: `MultiprocExecutor(config, "octavo.testing:FakeRank")`."""

    profile = "fake"

    def __init__(self, config: EngineConfig, place: RankPlace, rendezvous: Rendezvous) -> None:
        self.place = place
        self._config = config
        self._worker: FakeWorker | None = None

    def load_model(self) -> None:
        """No-op: there is no model."""

    def count_kv_blocks(self) -> list[int]:
        return [self._config.cache.num_kv_blocks or 64]

    def initialize_kv_cache(self, num_blocks: list[int]) -> None:
        cache, vocab_size = self._config.cache, self._config.model.vocab_size
        self._worker = FakeWorker(num_blocks=num_blocks, block_size=cache.block_size, vocab_size=vocab_size)

    @property
    def worker(self) -> FakeWorker:
        assert self._worker is not None, "initialize_kv_cache must be called first"
        return self._worker

    def load_adapter(self, adapter: AdapterRef, evicted: list[str]) -> Future[None]:
        return self.worker.load_adapter(adapter, evicted)

    def begin(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        done = Future[ModelRunnerOutput]()
        done.set_result(self.execute(scheduler_output))
        return done

    def execute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute a step. Override this to do something else."""
        return self.worker.execute(scheduler_output)

    def warmup(self) -> None:
        """No-op: nothing is initialized lazily."""

    def prefault_kv(self, num_reached_blocks: list[int]) -> bool:
        """No-op: there are no keys and values."""
        return False
