"""How one engine is spread over ranks. Pure numbers: the control side plans with them, a rank finds its place."""

from dataclasses import dataclass
from typing import Literal

ExecutorBackend = Literal["uniproc", "mp", "ray"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """Degrees. A replica is `tensor_parallel_size * pipeline_parallel_size` ranks under one scheduler."""

    tensor_parallel_size: int = 1  # ranks that share every layer
    pipeline_parallel_size: int = 1  # stages that hold consecutive layers
    data_parallel_size: int = 1  # replicas, each with a scheduler and KV memory of its own
    enable_expert_parallel: bool = False  # whole experts to each tensor-parallel rank, instead of a slice of each
    distributed_executor_backend: ExecutorBackend | None = None  # None: uniproc for one rank, mp for several
    step_timeout_s: float = 300.0  # without a word from ranks in other processes, after which they count as stuck

    @property
    def world_size(self) -> int:
        """Ranks of one replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def backend(self) -> ExecutorBackend:
        """Who runs the ranks."""
        return self.distributed_executor_backend or ("uniproc" if self.world_size == 1 else "mp")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlace:
    """Where one rank of a replica stands: consecutive ranks share a stage, so that the busiest talk is between them."""

    rank: int
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int

    @classmethod
    def of(cls, rank: int, config: ParallelConfig) -> "RankPlace":
        """Return the place of rank number `rank` in [0, world_size)."""
        assert 0 <= rank < config.world_size, f"rank {rank} of {config.world_size}"
        pp_rank, tp_rank = divmod(rank, config.tensor_parallel_size)
        return cls(
            rank=rank,
            tp_rank=tp_rank,
            tp_size=config.tensor_parallel_size,
            pp_rank=pp_rank,
            pp_size=config.pipeline_parallel_size,
        )

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1

    @property
    def answers(self) -> bool:
        """True for the one rank of a replica whose answer the scheduler reads: the first of the last stage."""
        return self.is_last_stage and self.tp_rank == 0


ALONE = RankPlace.of(0, ParallelConfig())


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """The consecutive layers [first_layer, end_layer) that a rank holds, and which ends of the model come with them."""

    first_layer: int
    end_layer: int
    is_first: bool  # with the embedding
    is_last: bool  # with the last norm and the logits head

    @classmethod
    def whole(cls, num_layers: int) -> "Stage":
        """Return the one stage of a model that is not divided."""
        return cls(first_layer=0, end_layer=num_layers, is_first=True, is_last=True)

    @property
    def layers(self) -> range:
        """Numbers of its layers, counted over the whole model."""
        return range(self.first_layer, self.end_layer)

    @property
    def is_whole(self) -> bool:
        return self.is_first and self.is_last
