"""Groups of ranks, passed to layers at construction. A single rank is also a group, at no cost.

Legend: T = tokens, N = values per row.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


class Group(ABC):
    """Ranks in a fixed order. Every rank of a group must make the same calls in the same order."""

    rank: int  # of this process, within the group
    size: int
    is_recordable: bool  # `all_reduce` can be recorded on a tape of native calls

    @abstractmethod
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of every rank's x [T, N], added element-wise in rank order; x may be reused.

        So the bits of a row do not depend on its position in the buffer. Sums are float32, rounded once to x's dtype.
        """

    @abstractmethod
    def all_gather(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Concatenate the columns of all ranks to [T, sum(sizes)]; this rank passes x [T, sizes[rank]]."""

    @abstractmethod
    def all_to_all(self, x: torch.Tensor, counts: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
        """Send rows of x [sum(counts), N]: the first counts[0] to rank 0, and so on.

        Returns the received rows in rank order, and how many each rank sent.
        """

    @abstractmethod
    def barrier(self) -> None:
        """Return when every rank has called."""

    @abstractmethod
    def send(self, x: torch.Tensor, to: int) -> None:
        """Send x to one rank without waiting; x may be overwritten afterwards."""

    @abstractmethod
    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> torch.Tensor:
        """Return the next tensor from `source`; both ranks must know its shape and dtype."""


class SingleRank(Group):
    """A group of one: nothing to communicate."""

    rank, size, is_recordable = 0, 1, True

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        return x

    def all_to_all(self, x: torch.Tensor, counts: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
        return x, list(counts)

    def barrier(self) -> None:
        return

    def send(self, x: torch.Tensor, to: int) -> None:
        raise AssertionError("a single rank has no peer to send to")

    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> torch.Tensor:
        raise AssertionError("a single rank has no peer to receive from")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelGroups:
    """The groups that one rank belongs to."""

    tensor: Group = field(default_factory=SingleRank)  # the ranks among which each layer is sharded
    experts: Group = field(default_factory=SingleRank)  # the same ranks, if they are expert-parallel
    stages: Group = field(default_factory=SingleRank)  # the ranks with the same shard of other stages
