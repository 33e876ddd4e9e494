"""An executor whose ranks are threads of this process: real workers and groups, without startup cost."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from tests.distributed.ranks import meeting

from octavo.config.engine import EngineConfig
from octavo.config.parallel import RankPlace
from octavo.contracts.schedule import ModelRunnerOutput, SchedulerOutput
from octavo.worker.worker import Worker

ResultT = TypeVar("ResultT")


class ThreadedRanks:
    """Implements `Executor`. Every rank gets every order, and does them in turn."""

    def __init__(self, config: EngineConfig) -> None:
        places = [RankPlace.of(rank, config.parallel) for rank in range(config.parallel.world_size)]
        self._answering = next(place.rank for place in places if place.returns_output)
        self._threads = [ThreadPoolExecutor(1, f"rank-{place.rank}") for place in places]
        own = replace(config, threads=1)
        with meeting() as rendezvous:
            makers = [
                thread.submit(Worker, own, place, rendezvous)
                for thread, place in zip(self._threads, places, strict=True)
            ]
            self.workers = [maker.result() for maker in makers]
        self.max_num_in_flight = 0
        self._under_way: list[Future[ModelRunnerOutput]] = []
        self.max_steps_in_flight = config.parallel.pipeline_parallel_size

    @property
    def profile(self) -> str:
        return self.workers[0].profile

    def start(self) -> list[int]:
        self._on_every_rank(Worker.load_model)
        counts = self._on_every_rank(Worker.count_kv_blocks)
        num_blocks = [min(of_group) for of_group in zip(*counts, strict=True)]
        self._on_every_rank(lambda worker: worker.initialize_kv_cache(num_blocks))
        return num_blocks

    def execute_model(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        futures = [
            thread.submit(lambda worker: worker.begin(scheduler_output).result(), worker)
            for thread, worker in zip(self._threads, self.workers, strict=True)
        ]
        self._under_way = [future for future in (*self._under_way, futures[self._answering]) if not future.done()]
        self.max_num_in_flight = max(self.max_num_in_flight, len(self._under_way))
        return futures[self._answering]

    def call(self, method: str, *arguments: Any) -> Future[list[Any]]:
        """On all ranks at once: in a warm-up, the stages hand on what they compute."""

        def call(worker: Worker) -> Any:
            value = getattr(worker, method)(*arguments)
            return value.result() if isinstance(value, Future) else value

        values: Future[list[Any]] = Future()
        values.set_result(self._on_every_rank(call))
        return values

    def exit(self) -> None:
        for thread in self._threads:
            thread.shutdown()
        self.workers = []

    def _on_every_rank(self, body: Callable[[Worker], ResultT]) -> list[ResultT]:
        futures = [thread.submit(body, worker) for thread, worker in zip(self._threads, self.workers, strict=True)]
        return [future.result() for future in futures]
