"""Groups of ranks, as objects that layers are given when they are built. One rank alone is a group too, at no cost.

Legend: T = tokens, N = values of a row.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from octavo.config.parallel import RankPlace
from octavo.distributed.rendezvous import Rendezvous


class Group(ABC):
    """Some ranks, in a fixed order. Every rank of a group makes the same calls in the same order."""

    rank: int  # of this process, within the group
    size: int

    @abstractmethod
    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of every rank's x [T, N], added in the order of ranks element by element; x may be reused.

        So a row's bits do not depend on where in the buffer it lies.
        """

    @abstractmethod
    def all_gather(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """Return the columns of all ranks side by side, [T, sum(sizes)]; this one brings x [T, sizes[rank]]."""


class SingleRank(Group):
    """A group of one: nothing to add, nothing to wait for."""

    rank, size = 0, 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """See `Group.all_reduce`."""
        return x

    def all_gather(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor:
        """See `Group.all_gather`."""
        return x


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelGroups:
    """The groups that one rank belongs to."""

    tensor: Group = field(default_factory=SingleRank)  # shares every layer with this rank


def make_groups(place: RankPlace, rendezvous: Rendezvous, device: torch.device) -> ParallelGroups:
    """Meet the other ranks of this replica; returns when all are there."""
    if place.tp_size * place.pp_size > 1:
        raise NotImplementedError(f"{place} at {rendezvous} on {device}")
    return ParallelGroups()
