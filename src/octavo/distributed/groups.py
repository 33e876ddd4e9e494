"""Groups of ranks, passed to layers at construction, and how heads, features and vocabulary are sharded over them.

A single rank is also a group, at no cost. Nothing has to be divisible: shards may differ by one unit.

Legend: T = tokens, N = values per row.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import torch

# Features are sharded in the largest of these units that divides evenly, or of which every rank gets at least
# _LEAST_UNITS so that shards differ little. 128 is the group size of int4 weights, 32 a panel of the C++ kernels.
_UNITS = (128, 32, 8)
_LEAST_UNITS = 8


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """One rank's shard of a dimension of size `total`: [start, stop)."""

    start: int
    stop: int
    total: int

    @classmethod
    def whole(cls, total: int) -> Self:
        """Return the shard of a dimension that is not sharded."""
        return cls(start=0, stop=total, total=total)

    @classmethod
    def of(cls, total: int, rank: int, size: int, *, unit: int = 1) -> Self:
        """Divide `total` evenly among `size` ranks in multiples of `unit`; return the shard of `rank`."""
        num_units = -(-total // unit)
        start, stop = (min(total, num_units * at // size * unit) for at in (rank, rank + 1))
        return cls(start=start, stop=stop, total=total)

    @classmethod
    def of_features(cls, total: int, rank: int, size: int) -> Self:
        """Do the same with a unit that suits kernels and weight formats."""
        fits = (unit for unit in _UNITS if total % (unit * size) == 0 or total >= _LEAST_UNITS * unit * size)
        unit = next(fits, 1)
        return cls.of(total, rank, size, unit=unit)

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        return self.size == self.total

    def times(self, factor: int) -> "Share":
        """Return the shard of a dimension with `factor` elements per position, e.g. the features of heads."""
        return Share(start=self.start * factor, stop=self.stop * factor, total=self.total * factor)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadShare:
    """The heads of one rank. Its query heads read its KV heads, each of which serves the same number of query heads."""

    query: Share
    kv: Share

    @classmethod
    def of(cls, num_heads: int, num_kv_heads: int, rank: int, size: int) -> Self:
        """Shard KV heads together with the query heads that read them.

        With fewer KV heads than ranks, several ranks hold the same KV head and divide its query heads.
        """
        assert size <= num_heads, "every rank needs a query head"
        group_size = num_heads // num_kv_heads
        if size <= num_kv_heads:
            kv = Share.of(num_kv_heads, rank, size)
            return cls(query=kv.times(group_size), kv=kv)
        holders = [Share.of(size, head, num_kv_heads) for head in range(num_kv_heads)]  # ranks that hold each KV head
        head = next(head for head, ranks in enumerate(holders) if ranks.start <= rank < ranks.stop)
        within = Share.of(group_size, rank - holders[head].start, holders[head].size)
        first = head * group_size
        return cls(
            query=Share(start=first + within.start, stop=first + within.stop, total=num_heads),
            kv=Share(start=head, stop=head + 1, total=num_kv_heads),
        )

    @property
    def group_size(self) -> int:
        """Number of this rank's query heads per KV head."""
        return self.query.size // self.kv.size
