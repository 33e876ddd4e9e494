"""Groups of ranks, as objects that layers are given when they are built. One rank alone is a group too, at no cost.

Legend: T = tokens, N = values of a row.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


class Group(ABC):
    """Some ranks, in a fixed order. Every rank of a group makes the same calls in the same order."""

    rank: int  # of this process, within the group
    size: int
    is_recordable: bool  # `all_reduce` may be noted down on a tape of native calls

    @abstractmethod
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of every rank's x [T, N], added in the order of ranks element by element; x may be reused.

        So a row's bits do not depend on where in the buffer it lies. Sums are float32, rounded once to x's dtype.
        """

    @abstractmethod
    def all_gather(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Return the columns of all ranks side by side, [T, sum(sizes)]; this one brings x [T, sizes[rank]]."""

    @abstractmethod
    def all_to_all(self, x: torch.Tensor, counts: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
        """Deal rows [sum(counts), N] out: the first counts[0] to rank 0, and so on.

        Return what came, in the order of ranks, and how many rows each rank sent.
        """

    @abstractmethod
    def barrier(self) -> None:
        """Return when every rank has called."""

    @abstractmethod
    def send(self, x: torch.Tensor, to: int) -> None:
        """Send x to one rank, without waiting for it; x may be written to afterwards."""

    @abstractmethod
    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> torch.Tensor:
        """Return the next tensor that `source` sends to this rank, which both know the shape and dtype of."""


class SingleRank(Group):
    """A group of one: nothing to add, nothing to wait for."""

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
        raise AssertionError("there is nobody to send to")

    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> torch.Tensor:
        raise AssertionError("there is nobody to receive from")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelGroups:
    """The groups that one rank belongs to."""

    tensor: Group = field(default_factory=SingleRank)  # the ranks that share every layer with this one
    experts: Group = field(default_factory=SingleRank)  # the same ranks, where they hold whole experts
    stages: Group = field(default_factory=SingleRank)  # those with its part of the layers before and behind
