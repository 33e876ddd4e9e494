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

    def start(self) -> int:
        """Build the ranks and load the model; return the number of KV blocks that each rank has."""
        ...

    def execute_model(self, order: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Begin a step. Steps run in the order in which they were begun. The future carries what the forward raised."""
        ...

    def warmup(self) -> None:
        """Run a prefill and a decode that leave no trace, timed and logged."""
        ...

    def exit(self) -> None:
        """Let go of every rank. May be called twice."""
        ...


def make_executor(config: EngineConfig) -> Executor:
    """Return the executor for this configuration. Imported here, because a rank needs torch.

    Raises:
        InvalidParameterError: several ranks, which no executor of this version runs.
    """
    parallel = config.parallel
    if parallel.backend != "uniproc" or parallel.world_size * parallel.data_parallel_size > 1:
        raise InvalidParameterError(
            "distributed_executor_backend", parallel.backend, "one rank, run by uniproc, so far"
        )
    limit_spinning()  # before a rank imports torch

    from octavo.executor.uniproc import UniProcExecutor

    return UniProcExecutor(config)
