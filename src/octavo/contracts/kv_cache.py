"""Size and shape of the key/value cache.

Layers that cache the same part of a context form a KV group. Every group has a block pool and a block table of its own;
column c of each table holds positions c * block_size ... (c + 1) * block_size - 1, except that a recurrent group's
blocks are longer (`KVGroup.block_tokens`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, Self

KVKind = Literal["attention", "latent", "recurrent"]

ATTENTION_TILE = 64  # positions: attention reads whole tiles at absolute positions, and masks what a row must not see
_MAX_AHEAD = 8  # tokens that steps in flight compute beyond the known ones; nothing past known tokens is freed


@dataclass(frozen=True, kw_only=True, slots=True)
class KVGroup:
    """What layers of one kind cache of a context: all of it, or what a sliding window still sees.

    Attention layers cache a key and a value per token; latent ones a single vector that contains the value.

    Recurrent layers cache a state; a step reads the one after the previous token: a window of two. A block holds one
    state, that of the last token computed in its positions. So a full block is a snapshot that a prefix hit can start
    from, and a block spans the distance between snapshots: `interval` positions.
    """

    kind: KVKind = "attention"
    sliding_window: int | None = None  # position p sees p - sliding_window + 1 ... p; None: all up to p
    tile: int = ATTENTION_TILE
    interval: int | None = None  # positions of a block; None: `block_size` of them
    entry_kind: int = 0  # keys and values of layers with other numbers have other sizes

    @classmethod
    def recurrent(cls, interval: int) -> Self:
        return cls(kind="recurrent", sliding_window=2, tile=1, interval=interval)

    def block_tokens(self, block_size: int) -> int:
        """Return how many positions a block of the group spans: a multiple of `block_size`."""
        return block_size if self.interval is None else -(-self.interval // block_size) * block_size

    def first_read(self, position: int) -> int:
        """Return the first position read by a step whose first new token is at `position`."""
        if self.sliding_window is None:
            return 0
        return max(0, position - self.sliding_window + 1) // self.tile * self.tile

    def peak_blocks(self, num_tokens: int, block_size: int, max_chunk: int) -> int:
        """Return the peak number of blocks of a request of `num_tokens`, computed in steps of at most `max_chunk`."""
        size = self.block_tokens(block_size)
        whole = -(-num_tokens // size)
        if self.sliding_window is None:
            return whole
        return min(whole, -(-(self.sliding_window + self.tile + max_chunk + _MAX_AHEAD) // size) + 1)


def capacity_tokens(
    groups: Sequence[KVGroup], num_blocks: Sequence[int], *, block_size: int, max_model_len: int, max_chunk: int
) -> int:
    """Return how many tokens of full-length requests fit into `num_blocks` of each group."""
    return min(
        count * block_size
        if group.sliding_window is None
        else count * max_model_len // group.peak_blocks(max_model_len, block_size, max_chunk)
        for group, count in zip(groups, num_blocks, strict=True)
    )


@dataclass(frozen=True, slots=True)
class KVPart:
    """A tensor that a layer caches per token, or per state."""

    shape: tuple[int, ...]
    dtype: str  # torch's name for it
    dtype_bytes: int

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class KVGroupSpec:
    """Geometry of one group on one rank: what its layers cache."""

    group: KVGroup
    layers: tuple[int, ...]  # relative to the stage's first layer; empty if all layers of the group are on other stages
    parts: tuple[KVPart, ...]  # of a token: key and value, or the one vector; or of a recurrent state
    value_size: int | None = None  # of a latent group: elements at the front of the vector that are the value

    def entries_per_block(self, block_size: int) -> int:
        """Return how many tokens, or states, a block holds."""
        return 1 if self.group.kind == "recurrent" else block_size

    def bytes_per_block(self, block_size: int) -> int:
        return len(self.layers) * self.entries_per_block(block_size) * sum(part.num_bytes for part in self.parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class KVCacheSpec:
    """Geometry of one rank's KV cache. A block holds `block_size` tokens, or a state, in every layer of its group."""

    block_size: int
    groups: tuple[KVGroupSpec, ...]
    shared: tuple[tuple[int, int], ...] = ()  # a layer without a cache of its own, and the one whose cache it reads
    draft_bytes: tuple[int, ...] = ()  # of a block of each group that a draft model's layers take; (): there is none

    @property
    def bytes_per_block(self) -> tuple[int, ...]:
        """Bytes of one block of each group."""
        own = tuple(spec.bytes_per_block(self.block_size) for spec in self.groups)
        return tuple(map(sum, zip(own, self.draft_bytes, strict=True))) if self.draft_bytes else own

    def num_bytes(self, num_blocks: Sequence[int]) -> int:
        """Return the memory of `num_blocks` blocks of each group."""
        return sum(count * size for count, size in zip(num_blocks, self.bytes_per_block, strict=True))
