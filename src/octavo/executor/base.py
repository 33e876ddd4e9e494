"""The executor interface, and how an executor is chosen."""

from concurrent.futures import Future
from typing import Protocol

from octavo.config.engine import EngineConfig
from octavo.contracts.engine import AdapterRef
from octavo.contracts.schedule import ModelRunnerOutput, SchedulerOutput
from octavo.device.threads import limit_spinning
from octavo.errors import InvalidParameterError


class AdapterVerbs(Protocol):
    """What every rank can do with adapters besides steps, through its executor."""

    def load_adapter(self, adapter: AdapterRef) -> Future[None]:
        """Read, check and shard an adapter into the host cache, in a thread, while steps go on.

        The future raises CheckpointError or UnsupportedModelError where the files do not fit the model, naming the
        tensor. Ranks that did not fail may have it then, until `evict_adapter`.
        """
        ...

    def evict_adapter(self, content_hash: str) -> None:
        """Drop an adapter from the host cache; no-op on ranks that do not have it. Slots keep their copies.

        Ranks carry out steps and evictions in the order they were sent: steps in flight still find the adapter.
        """
        ...


class Executor(AdapterVerbs, Protocol):
    """Sends one `SchedulerOutput` to every rank and returns one model output."""

    @property
    def profile(self) -> str:
        """What the exact bits of an output depend on: device, dtype, kernels."""
        ...

    def start(self) -> list[int]:
        """Build the ranks and load the model; return how many KV blocks of each group every rank has."""
        ...

    @property
    def max_steps_in_flight(self) -> int:
        """How many steps may be in flight at once."""
        ...

    def execute_model(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Start a step. Steps run and complete in the order in which they were started.

        If the forward pass raises, so does this or the future; the ranks have updated their rows nevertheless.
        """
        ...

    def warmup(self) -> None:
        """Run a prefill and a decode step without side effects, timed and logged."""
        ...

    def prefault_kv(self, num_reached_blocks: list[int]) -> bool:
        """Prefault some KV memory past the first `num_reached_blocks` blocks of each group, for a few ms.

        For idle moments. Returns False when enough of it is there.

        Raises:
            EngineDeadError: a rank has died.
        """
        ...

    def check_health(self) -> None:
        """Check that steps can be started; cheap, call when idle.

        Raises:
            EngineDeadError: a rank has died.
        """
        ...

    def exit(self) -> None:
        """Stop all ranks. Idempotent."""
        ...


def make_executor(config: EngineConfig) -> Executor:
    """Return the executor of one replica. Imports happen here, because a rank in this process needs torch.

    Raises:
        InvalidParameterError: the executor does not support this degree of parallelism.
    """
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
