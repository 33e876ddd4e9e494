"""How an engine is distributed over ranks. Plain numbers, used by the control side and by each rank."""

import logging
from dataclasses import dataclass
from typing import Literal

from octavo.config.model import ModelConfig
from octavo.errors import InvalidParameterError

logger = logging.getLogger(__name__)

ExecutorBackend = Literal["uniproc", "mp", "ray"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """Degrees of parallelism. A replica has `tensor_parallel_size * pipeline_parallel_size` ranks and one scheduler."""

    tensor_parallel_size: int = 1  # ranks that each layer is sharded over
    pipeline_parallel_size: int = 1  # stages of consecutive layers
    data_parallel_size: int = 1  # replicas, each with its own scheduler and KV memory
    enable_expert_parallel: bool = False  # distribute whole experts over tensor-parallel ranks instead of sharding each
    distributed_executor_backend: ExecutorBackend | None = None  # None: uniproc for one rank, mp for several
    step_timeout_s: float = 300.0  # silence after which ranks in other processes are considered stuck

    @property
    def world_size(self) -> int:
        """Ranks of one replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def backend(self) -> ExecutorBackend:
        return self.distributed_executor_backend or ("uniproc" if self.world_size == 1 else "mp")

    def check_fits(self, model: ModelConfig) -> None:
        """Check that every rank gets a part of the model: a head, a layer, experts. Raises InvalidParameterError."""
        if self.tensor_parallel_size > model.max_tensor_parallel_size:
            limit = f"at most {model.max_tensor_parallel_size}: every rank needs an attention head"
            raise InvalidParameterError("tensor_parallel_size", self.tensor_parallel_size, limit)
        if self.pipeline_parallel_size > model.num_layers:
            limit = f"at most {model.num_layers}: every stage needs a layer"
            raise InvalidParameterError("pipeline_parallel_size", self.pipeline_parallel_size, limit)
        if self.enable_expert_parallel and model.experts is None:
            limit = f"requires a MoE model; {model.model} ({model.architecture}) has no experts"
            raise InvalidParameterError("enable_expert_parallel", True, limit)
        if self.enable_expert_parallel and self.tensor_parallel_size == 1:
            logger.warning("enable_expert_parallel has no effect with tensor_parallel_size=1: one rank has all experts")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlace:
    """The position of one rank in its replica. The ranks of a stage are consecutive, as they communicate most."""

    rank: int
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int

    @classmethod
    def of(cls, rank: int, config: ParallelConfig) -> "RankPlace":
        """Return the position of rank number `rank` in [0, world_size)."""
        assert 0 <= rank < config.world_size, f"rank {rank} of {config.world_size}"
        pp_rank, tp_rank = divmod(rank, config.tensor_parallel_size)
        sizes = {"tp_size": config.tensor_parallel_size, "pp_size": config.pipeline_parallel_size}
        return cls(rank=rank, tp_rank=tp_rank, pp_rank=pp_rank, **sizes)

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    @property
    def returns_output(self) -> bool:
        """True for the one rank of a replica whose output the scheduler reads: the first of the last stage."""
        return self.is_last_stage and self.tp_rank == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendezvous:
    """What one rank needs to find the others; a single rank needs nothing. Created by the executor.

    On one host: inherited in-memory files. They have no name, so two engines cannot meet by mistake and nothing is left
    behind, however the ranks end. On several hosts: an address.
    """

    store_fd: int | None = None  # one host: empty file for a store, reopened as /proc/self/fd/N
    memory_fd: int | None = None  # one host: empty file that collectives resize and map
    store_address: str | None = None  # several hosts: "host:port" of the store on rank 0
    listen_fd: int | None = None  # several hosts, rank 0 only: the socket already listening there
    host: str = "127.0.0.1"  # address of this rank for the others
    local_rank: int = 0  # index among the ranks of its host that see the same devices


ALONE = RankPlace.of(0, ParallelConfig())


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """The consecutive layers [first_layer, end_layer) of a rank, and whether it has the ends of the model."""

    first_layer: int
    end_layer: int
    is_first: bool  # has the embedding
    is_last: bool  # has the final norm and the LM head

    @classmethod
    def whole(cls, num_layers: int) -> "Stage":
        """Return the single stage of an undivided model."""
        return cls(first_layer=0, end_layer=num_layers, is_first=True, is_last=True)

    @property
    def layers(self) -> range:
        """Indices of its layers in the whole model."""
        return range(self.first_layer, self.end_layer)

    @property
    def is_whole(self) -> bool:
        return self.is_first and self.is_last
