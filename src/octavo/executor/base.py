"""The executor interface, and how an executor is chosen."""

from concurrent.futures import Future
from importlib import import_module
from typing import Any, Protocol

from octavo.config.engine import EngineConfig
from octavo.contracts.schedule import ModelRunnerOutput, SchedulerOutput
from octavo.device.process import limit_spinning, without_garbage_collection
from octavo.errors import InvalidParameterError


class Executor(Protocol):
    """Sends one `SchedulerOutput` to every rank and returns one model output."""

    @property
    def profile(self) -> str:
        """What the exact bits of an output depend on: device, dtype, kernels."""

    def start(self) -> list[int]:
        """Build the ranks and load the model; return how many KV blocks of each group every rank has."""

    @property
    def max_steps_in_flight(self) -> int:
        """How many steps may be in flight at once."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Start a step. Steps run and complete in the order in which they were started.

        If the forward pass raises, so does this or the future; the ranks have updated their rows nevertheless.
        """

    def call(self, method: str, *arguments: Any) -> Future[list[Any]]:
        """Call a method of the worker on every rank, in order with the steps; return what each rank returns.

        A method that returns a future goes on beside later steps and calls. The first error of a rank is the future's.

        Raises EngineDeadError, also when waiting: a rank has died.
        """

    def check_health(self) -> None:
        """Raise EngineDeadError if a rank has died, so that no step can be started; cheap, call when idle."""

    def exit(self) -> None:
        """Stop all ranks. Idempotent."""


def import_rank() -> None:
    """Import what a rank in this process needs, torch above all, before it is known what it computes."""
    limit_spinning()
    with without_garbage_collection():
        import_module("octavo.executor.uniproc")


def make_executor(config: EngineConfig) -> Executor:
    """Return the executor of one replica. Imports happen here, because a rank in this process needs torch."""
    parallel = config.parallel
    if parallel.backend == "uniproc" and parallel.world_size > 1:
        limit = f"must be mp or ray for {parallel.world_size} ranks; uniproc runs only one"
        raise InvalidParameterError("distributed_executor_backend", parallel.backend, limit)
    match parallel.backend:
        case "uniproc":
            limit_spinning()  # must come before a rank imports torch

            from octavo.executor.uniproc import UniProcExecutor

            return UniProcExecutor(config)
        case "mp":
            from octavo.executor.multiproc import MultiprocExecutor

            return MultiprocExecutor(config)
        case "ray":
            from octavo.executor.ray_executor import RayExecutor

            return RayExecutor(config)
