"""Every KV block, owned or free, and the hashes under which free ones can still be found.

    free blocks:   blank <-> ... <-> blank   then   hashed <-> ... <-> hashed, least recently used first
    a block is in one of these lists  <=>  its ref_count is 0
    a hashed block keeps its hash while free, until it is allocated again

Allocation keeps one request's blocks adjacent where it can, so that torch's attention reads them in place, and all
requests' blocks close together, so that few memory pages are touched. New requests start 8 blocks apart from the front
of the pool; when all those places are taken, halfway between them, and so on. A growing request takes the block after
its last one if that is free and not hashed. When a request ends, its first block goes to the front of the blank list
and the others to the back: the next request starts where this one did, in warm memory, and no other request starts in
the path of its growth.

States do not grow into neighbors, and fill large pages: where blocks are states, they come in a row.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from octavo.errors import OutOfBlocksError


class BlockPool:
    """Constant-time allocation, release and look-up over `num_blocks` blocks, ids 0 to num_blocks - 1.

    `is_spaced`: requests start apart. `on_evicted` is called with a hashed block and its hash just before the block is
    reused for something else, and `on_forgotten` with the hash of one whose content is not reliable.
    """

    def __init__(
        self, num_blocks: int, on_evicted: Callable[[int, bytes], None] | None = None, *, is_spaced: bool = True
    ) -> None:
        self.on_evicted = on_evicted
        self.on_forgotten: Callable[[bytes], None] | None = None
        self.num_blocks = num_blocks
        self.num_free = 0
        self.num_reached = 0  # blocks from this one on have never been allocated
        self.ref_counts = [0] * num_blocks  # owners of each block
        self._hash: list[bytes | None] = [None] * num_blocks
        self._block_by_hash: dict[bytes, int] = {}
        self._blank, self._hashed = num_blocks, num_blocks + 1  # sentinels of two doubly linked lists
        self._next = list(range(num_blocks + 2))
        self._prev = list(range(num_blocks + 2))
        for block_id in spaced_order(num_blocks) if is_spaced else range(num_blocks):
            self._link_before(self._blank, block_id)

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Allocate `count` blocks, next to block `after` where possible; OutOfBlocksError if fewer are free."""
        if count > self.num_free:
            raise OutOfBlocksError(count, self.num_free)
        block_ids: list[int] = []
        for _ in range(count):
            after = self._take(after)
            block_ids.append(after)
        return block_ids

    def find(self, block_hash: bytes) -> int | None:
        """Return the block with this hash, owned or free."""
        return self._block_by_hash.get(block_hash)

    def acquire(self, block_id: int) -> None:
        """Add one owner to a block found by its hash."""
        if self.ref_counts[block_id] == 0:
            self._unlink(block_id)
        self.ref_counts[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Remove one owner from each of a request's blocks, given in the order of its context.

        Later blocks count as older free ones and are reused first, so a prefix outlives its tails.
        """
        for index in range(len(block_ids) - 1, -1, -1):
            block_id = block_ids[index]
            assert self.ref_counts[block_id] > 0, f"block {block_id} has no owner"
            self.ref_counts[block_id] -= 1
            if self.ref_counts[block_id] > 0:
                continue
            if self._hash[block_id] is not None:
                self._link_before(self._hashed, block_id)
            else:
                self._link_before(self._blank if index > 0 else self._next[self._blank], block_id)

    def set_hash(self, block_id: int, block_hash: bytes) -> bool:
        """Make a full block findable. Returns False if another block already has the hash, and keeps it."""
        if block_hash in self._block_by_hash:
            return False
        assert self._hash[block_id] is None, f"block {block_id} has a hash already"
        self._hash[block_id] = block_hash
        self._block_by_hash[block_hash] = block_id
        return True

    def is_hashed(self, block_id: int, block_hash: bytes) -> bool:
        """Return whether the block can be found by this hash."""
        return self._hash[block_id] == block_hash

    def has_prefix(self, block_id: int) -> bool:
        """Return whether the block can be found by its content."""
        return self._hash[block_id] is not None

    def forget_hashes(self, block_ids: Iterable[int]) -> None:
        """Make blocks unfindable because their contents are not reliable."""
        for block_id in block_ids:
            block_hash = self._hash[block_id]
            if block_hash is not None:
                del self._block_by_hash[block_hash]
                self._hash[block_id] = None
                if self.on_forgotten is not None:
                    self.on_forgotten(block_hash)

    def check_integrity(self) -> None:
        """Assert that every block is either owned or in one free list, and that hashes point both ways."""
        free = [*self._members(self._blank), *self._members(self._hashed)]
        assert len(free) == len(set(free)) == self.num_free
        assert set(free) == {b for b in range(self.num_blocks) if self.ref_counts[b] == 0}
        assert not any(self.ref_counts[self.num_reached :])
        assert not any(self._hash[self.num_reached :])
        assert self._block_by_hash == {
            block_hash: b for b, block_hash in enumerate(self._hash) if block_hash is not None
        }

    def _members(self, sentinel: int) -> Iterator[int]:
        block_id = self._next[sentinel]
        while block_id != sentinel:
            assert self._prev[self._next[block_id]] == block_id
            yield block_id
            block_id = self._next[block_id]

    def _take(self, after: int | None) -> int:
        neighbor = self.num_blocks if after is None else after + 1
        if neighbor < self.num_blocks and self.ref_counts[neighbor] == 0 and self._hash[neighbor] is None:
            block_id = neighbor
        else:
            block_id = self._next[self._blank]
            if block_id == self._blank:
                block_id = self._next[self._hashed]
        self._unlink(block_id)
        if (block_hash := self._hash[block_id]) is not None:
            if self.on_evicted is not None:
                self.on_evicted(block_id, block_hash)
            del self._block_by_hash[block_hash]
            self._hash[block_id] = None
        self.ref_counts[block_id] = 1
        if block_id >= self.num_reached:
            self.num_reached = block_id + 1
        return block_id

    def _link_before(self, successor: int, block_id: int) -> None:
        predecessor = self._prev[successor]
        self._next[predecessor] = self._prev[successor] = block_id
        self._prev[block_id], self._next[block_id] = predecessor, successor
        self.num_free += 1

    def _unlink(self, block_id: int) -> None:
        predecessor, successor = self._prev[block_id], self._next[block_id]
        self._next[predecessor], self._prev[successor] = successor, predecessor
        self.num_free -= 1


def spaced_order(count: int) -> list[int]:
    """Return 0 ... count - 1: first every 8th number, then those halfway between, then every 2nd, then the rest."""
    return [block_id for offset in (0, 4, 2, 6, 1, 5, 3, 7) for block_id in range(offset, count, 8)]
