"""What an executor is, and how one is chosen."""

from concurrent.futures import Future
from typing import Protocol

from octavo.config.engine import EngineConfig
from octavo.contracts.schedule import SchedulerOutput
from octavo.contracts.step import ModelRunnerOutput
from octavo.device.threads import limit_spinning
from octavo.errors import InvalidParameterError


class Executor(Protocol):
    """Carries one `SchedulerOutput` to every rank and brings one answer back."""

    @property
    def profile(self) -> str:
        """Name what the last bits of an answer depend on: device, dtype, kernels."""
        ...

    def start(self) -> list[int]:
        """Build the ranks and load the model; return how many KV blocks of each group every rank has."""
        ...

    @property
    def most_steps_in_flight(self) -> int:
        """How many steps may be begun before the oldest is answered."""
        ...

    def execute_model(self, order: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Begin a step. Steps run, and are answered, in the order in which they were begun.

        The future carries what the forward
        raised; the ranks have brought their rows up to date all the same.
        """
        ...

    def warmup(self) -> None:
        """Run a prefill and a decode that leave no trace, timed and logged."""
        ...

    def prefault_kv(self, num_reached_blocks: list[int]) -> bool:
        """Prefault some KV memory past the first `num_reached_blocks` blocks of each group, for a few ms.

        For idle moments. Returns False when enough of it is there.

        Raises:
            EngineDeadError: a rank is gone.
        """
        ...

    def check_health(self) -> None:
        """Say whether steps can be begun; cheap, for idle moments.

        Raises:
            EngineDeadError: a rank is gone.
        """
        ...

    def exit(self) -> None:
        """Let go of every rank. May be called twice."""
        ...


def make_executor(config: EngineConfig) -> Executor:
    """Return the executor of one replica. Imported here: one rank in this process needs torch.

    Raises:
        InvalidParameterError: degrees that this executor does not run.
    """
    parallel = config.parallel
    if parallel.backend == "uniproc" and parallel.world_size > 1:
        limit = f"mp or ray for {parallel.world_size} ranks; uniproc runs one"
        raise InvalidParameterError("distributed_executor_backend", parallel.backend, limit)
    match parallel.backend:
        case "uniproc":
            limit_spinning()  # before a rank imports torch

            from octavo.executor.uniproc import UniProcExecutor

            return UniProcExecutor(config)
        case "mp":
            from octavo.executor.multiproc import MultiprocExecutor

            return MultiprocExecutor(config)
        case "ray":
            from octavo.executor.ray_executor import RayExecutor

            return RayExecutor(config)
