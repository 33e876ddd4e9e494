"""The KV blocks of one group as bytes, in the caches of its layers: copied out of them, and read into them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.attention.metadata import LayerCache

Bytes = NDArray[np.uint8]


class BlockMemory(ABC):
    """A block consists of a piece of each pool: of keys, of values, of states, of each layer."""

    block_bytes: int

    @abstractmethod
    def copy(self, block_ids: Sequence[int], out: Bytes) -> None:
        """Copy blocks into `out` [blocks, block bytes], in order with the steps."""

    @abstractmethod
    def target(self, block_id: int) -> list[memoryview]:
        """Return memory to read a block into, piece by piece; in any thread."""

    @abstractmethod
    def zero(self, block_id: int) -> None:
        """Overwrite what was read: attention reads whole tiles, and masks what is not NaN. In any thread."""

    @abstractmethod
    def place(self, block_ids: Sequence[int]) -> None:
        """Put what has been read where steps find it, in order with them."""


class HostBlocks(BlockMemory):
    """Steps compute on this memory, and none is in flight when a block is read into it, or reads it."""

    def __init__(self, pools: Sequence[torch.Tensor]) -> None:
        self._pools: list[Bytes] = [pool.numpy() for pool in pools]  # [blocks, bytes] each
        self.block_bytes = sum(pool.shape[1] for pool in self._pools)

    def copy(self, block_ids: Sequence[int], out: Bytes) -> None:
        start = 0
        for pool in self._pools:
            end = start + pool.shape[1]
            np.take(pool, block_ids, axis=0, out=out[:, start:end])
            start = end

    def target(self, block_id: int) -> list[memoryview]:
        return [pool[block_id].data for pool in self._pools]

    def zero(self, block_id: int) -> None:
        for pool in self._pools:
            pool[block_id] = 0

    def place(self, block_ids: Sequence[int]) -> None:
        """No-op: it is there."""


class DeviceBlocks(BlockMemory):
    """Blocks on a device, and those on the host that have been read for it. Threads do not touch the device."""

    def __init__(self, pools: Sequence[torch.Tensor]) -> None:
        self._pools = pools  # [blocks, bytes] each
        self._read: dict[int, Bytes] = {}
        self.block_bytes = sum(pool.shape[1] for pool in pools)

    def copy(self, block_ids: Sequence[int], out: Bytes) -> None:
        start = 0
        for pool in self._pools:
            end = start + pool.shape[1]
            ids = torch.tensor(block_ids, dtype=torch.int64, device=pool.device)
            out[:, start:end] = pool.index_select(0, ids).cpu().numpy()
            start = end

    def target(self, block_id: int) -> list[memoryview]:
        self._read[block_id] = read = np.empty(self.block_bytes, dtype=np.uint8)
        return [read.data]

    def zero(self, block_id: int) -> None:
        self._read[block_id][:] = 0

    def place(self, block_ids: Sequence[int]) -> None:
        blocks = torch.from_numpy(np.stack([self._read.pop(block_id) for block_id in block_ids]))
        start = 0
        for pool in self._pools:
            end = start + pool.shape[1]
            ids = torch.tensor(block_ids, dtype=torch.int64, device=pool.device)
            pool.index_copy_(0, ids, blocks[:, start:end].to(pool.device))
            start = end


def block_memory(caches: Sequence[LayerCache], entries_per_block: int, *, is_host: bool) -> BlockMemory:
    """Return the blocks of a group whose layers have these caches; `is_host`: steps compute there, one at a time."""
    pools = [pool for cache in caches for pool in cache.pools]
    flat = [pool.view(len(pool) // entries_per_block, -1).view(torch.uint8) for pool in pools]
    return HostBlocks(flat) if is_host else DeviceBlocks(flat)
