"""Who holds what of a layer: the arithmetic of dealing heads, features and vocabulary to ranks. Pure numbers.

Nothing has to divide: shares may differ by one unit.
"""

from dataclasses import dataclass
from typing import Self

# Features are dealt in the largest of these units that can be dealt evenly, or of which every rank gets at least so
# many that shares differ little. 128 is a group of inputs with a scale of its own in weights of 4 bits, 32 a panel of
# the C++ kernels.
_UNITS = (128, 32, 8)
_LEAST_UNITS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What one rank holds of a dimension of `total`: start ... stop - 1."""

    start: int
    stop: int
    total: int

    @classmethod
    def whole(cls, total: int) -> Self:
        """Return a share that leaves nothing to others."""
        return cls(start=0, stop=total, total=total)

    @classmethod
    def of(cls, total: int, rank: int, size: int, *, unit: int = 1) -> Self:
        """Deal `total` evenly to `size` ranks, in whole units where they last; return the share of `rank`."""
        num_units = -(-total // unit)
        start, stop = (min(total, num_units * at // size * unit) for at in (rank, rank + 1))
        return cls(start=start, stop=stop, total=total)

    @classmethod
    def of_features(cls, total: int, rank: int, size: int) -> Self:
        """The same, in units that suit kernels and formats of weights."""
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
        """Return the share in parts of which each position has `factor`: of the features of heads."""
        return Share(start=self.start * factor, stop=self.stop * factor, total=self.total * factor)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadShare:
    """The heads of one rank. Its query heads read its kv heads, each of those serving as many."""

    query: Share
    kv: Share

    @classmethod
    def of(cls, num_heads: int, num_kv_heads: int, rank: int, size: int) -> Self:
        """Deal kv heads with the query heads that read them.

        With fewer kv heads than ranks, several ranks hold the same kv head and deal its query heads among themselves.
        """
        assert size <= num_heads, "every rank has a query head"
        group_size = num_heads // num_kv_heads
        if size <= num_kv_heads:
            kv = Share.of(num_kv_heads, rank, size)
            return cls(query=kv.times(group_size), kv=kv)
        holders = [Share.of(size, head, num_kv_heads) for head in range(num_kv_heads)]  # ranks that hold each kv head
        head = next(head for head, ranks in enumerate(holders) if ranks.start <= rank < ranks.stop)
        within = Share.of(group_size, rank - holders[head].start, holders[head].size)
        first = head * group_size
        return cls(
            query=Share(start=first + within.start, stop=first + within.stop, total=num_heads),
            kv=Share(start=head, stop=head + 1, total=num_kv_heads),
        )

    @property
    def group_size(self) -> int:
        """Query heads of this rank that read one of its kv heads."""
        return self.query.size // self.kv.size
