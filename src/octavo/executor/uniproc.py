"""One rank in this process and thread. On a device with a queue, steps are asynchronous; otherwise they run inline."""

from concurrent.futures import Future
from typing import Any

from octavo.config.engine import EngineConfig
from octavo.contracts.schedule import ModelRunnerOutput, SchedulerOutput
from octavo.worker.worker import Worker
from octavo.worker.worker_proc import call_here


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
        return self.worker.begin(scheduler_output)

    def call(self, method: str, *arguments: Any) -> Future[list[Any]]:
        return call_here(self.worker, method, arguments)

    def check_health(self) -> None:
        """No-op: alive as long as this process is."""

    def exit(self) -> None:
        self._worker = None
