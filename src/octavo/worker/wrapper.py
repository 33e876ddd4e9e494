"""`WorkerWrapperBase`: stands for a worker that does not exist yet, and builds it in the process where it belongs."""

from importlib import import_module
from typing import Protocol

import msgspec

from octavo.config.engine import EngineConfig
from octavo.config.parallel import RankPlace
from octavo.contracts.schedule import SchedulerOutput
from octavo.contracts.step import ModelRunnerOutput
from octavo.distributed.rendezvous import Rendezvous

DEFAULT_WORKER = "octavo.worker.worker:Worker"


class RankWorker(Protocol):
    """What an executor asks of a rank. The constructor takes `(config, place, rendezvous)`."""

    @property
    def profile(self) -> str: ...

    def load_model(self) -> None: ...

    def count_kv_blocks(self) -> list[int]: ...

    def initialize_kv_cache(self, num_blocks: list[int]) -> None: ...

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput: ...

    def warmup(self) -> object: ...

    def prefault_kv(self, num_reached_blocks: list[int]) -> bool: ...


class RankSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank must know to build its worker."""

    config: EngineConfig
    rank: int
    rendezvous: Rendezvous
    worker_class: str = DEFAULT_WORKER  # "module:class"


class WorkerWrapperBase:
    """Cheap to make: what the worker needs is imported by `init_worker`, so a process can say early that it lives."""

    def __init__(self, setup: RankSetup) -> None:
        self.place = RankPlace.of(setup.rank, setup.config.parallel)
        self._setup = setup
        self._worker: RankWorker | None = None

    @property
    def worker(self) -> RankWorker:
        assert self._worker is not None, "init_worker comes first"
        return self._worker

    def init_worker(self) -> str:
        """Import and build the worker, which meets the other ranks; return its profile."""
        module, _, name = self._setup.worker_class.partition(":")
        self._worker = getattr(import_module(module), name)(self._setup.config, self.place, self._setup.rendezvous)
        return self.worker.profile

    def load_model(self) -> None:
        self.worker.load_model()

    def count_kv_blocks(self) -> list[int]:
        return self.worker.count_kv_blocks()

    def initialize_kv_cache(self, num_blocks: list[int]) -> None:
        self.worker.initialize_kv_cache(num_blocks)

    def warmup(self) -> None:
        self.worker.warmup()

    def prefault_kv(self, num_reached_blocks: list[int]) -> bool:
        return self.worker.prefault_kv(num_reached_blocks)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        return self.worker.execute_model(scheduler_output)
