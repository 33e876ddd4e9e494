"""One rank in this process and thread. On a device with a queue, steps are asynchronous; otherwise they run inline."""

from collections.abc import Callable
from concurrent.futures import Future

from octavo.config.engine import EngineConfig
from octavo.contracts.schedule import SchedulerOutput
from octavo.contracts.step import ModelRunnerOutput
from octavo.worker.worker import Worker


class DeferredOutput(Future[ModelRunnerOutput]):
    """The output of an asynchronous step. Asking for the result waits for the device."""

    def __init__(self, wait: Callable[[], ModelRunnerOutput]) -> None:
        super().__init__()
        self._wait = wait

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        if not self.done():
            try:
                self.set_result(self._wait())
            except Exception as error:  # noqa: BLE001 - see `UniProcExecutor.execute_model`
                self.set_exception(error)
        return super().result(0)


class UniProcExecutor:
    """Implements `Executor`."""

    def __init__(self, config: EngineConfig) -> None:
        self._worker: Worker | None = Worker(config)

    @property
    def worker(self) -> Worker:
        assert self._worker is not None, "the executor has exited"
        return self._worker

    @property
    def profile(self) -> str:
        return self.worker.profile

    def start(self) -> list[int]:
        self.worker.load_model()
        num_blocks = self.worker.count_kv_blocks()
        self.worker.initialize_kv_cache(num_blocks)
        return num_blocks

    @property
    def max_steps_in_flight(self) -> int:
        return self.worker.max_steps_in_flight

    def execute_model(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        if self.max_steps_in_flight > 1:
            return self._begin(scheduler_output)
        future: Future[ModelRunnerOutput] = Future()
        try:
            future.set_result(self.worker.execute_model(scheduler_output))
        except Exception as error:  # noqa: BLE001 - any exception of the forward pass fails the requests of this step
            future.set_exception(error)
        return future

    def _begin(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        try:
            return DeferredOutput(self.worker.begin(scheduler_output))
        except Exception as error:  # noqa: BLE001 - any exception of a launch fails the requests of this step
            failed: Future[ModelRunnerOutput] = Future()
            failed.set_exception(error)
            return failed

    def warmup(self) -> None:
        self.worker.warmup()

    def prefault_kv(self, num_reached_blocks: list[int]) -> bool:
        return self.worker.prefault_kv(num_reached_blocks)

    def check_health(self) -> None:
        """No-op: alive as long as this process is."""

    def exit(self) -> None:
        self._worker = None
