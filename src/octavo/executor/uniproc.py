"""One rank, in this process and this thread: a step is done when `execute_model` returns."""

from concurrent.futures import Future

from octavo.config.engine import EngineConfig
from octavo.contracts.schedule import SchedulerOutput
from octavo.contracts.step import ModelRunnerOutput
from octavo.worker.worker import Worker


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

    def start(self) -> int:
        self.worker.load_model()
        num_blocks = self.worker.count_kv_blocks()
        self.worker.initialize_kv_cache(num_blocks)
        return num_blocks

    def execute_model(self, order: SchedulerOutput) -> Future[ModelRunnerOutput]:
        future: Future[ModelRunnerOutput] = Future()
        try:
            future.set_result(self.worker.execute_model(order))
        except Exception as error:  # noqa: BLE001 - whatever the forward raises belongs to the requests of this step
            future.set_exception(error)
        return future

    def warmup(self) -> None:
        self.worker.warmup()

    def check_health(self) -> None:
        """Alive as long as this process is."""

    def exit(self) -> None:
        self._worker = None
