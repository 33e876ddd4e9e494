"""Who owns which KV block: allocation for requests, and prefix reuse by block hash."""

from dataclasses import dataclass

from octavo.config.engine import CacheConfig
from octavo.contracts.schedule import Int32Array
from octavo.scheduler.block_hash import chain_hashes
from octavo.scheduler.block_pool import BlockPool


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedPrefix:
    """Full blocks that already hold the beginning of a prompt. Not owned until `acquire`d."""

    block_ids: list[int]
    last_hash: bytes  # parent of the block that follows

    @property
    def num_blocks(self) -> int:
        return len(self.block_ids)


class BlockManager:
    """Allocated and freed only by the scheduler, one thread."""

    def __init__(self, config: CacheConfig, num_blocks: int) -> None:
        self.block_size = config.block_size
        self.enable_prefix_caching = config.enable_prefix_caching
        self.pool = BlockPool(num_blocks)
        self.num_prefix_queries_total = 0
        self.num_prefix_hits_total = 0

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Free blocks, those that still hold a findable prefix included."""
        return self.pool.num_free

    @property
    def num_reached(self) -> int:
        """Blocks from this one on have never been handed out."""
        return self.pool.num_reached

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def allocate_blocks(self, num_blocks: int, after: int | None = None) -> list[int]:
        """Hand out blocks, next to block `after` where possible.

        Raises:
            OutOfBlocksError: with the numbers; nothing was handed out.
        """
        return self.pool.allocate(num_blocks, after)

    def free_blocks(self, block_ids: list[int]) -> None:
        """Give back a request's blocks, in the order of its context. Hashed ones stay findable until reused."""
        self.pool.release(block_ids)

    def find_prefix(self, token_ids: Int32Array, root: bytes) -> CachedPrefix:
        """Look up the longest cached run of full blocks, at most `len(token_ids) - 1` tokens.

        One token is always left to compute: its logits are what the request came for.
        """
        block_ids: list[int] = []
        last_hash = root
        if self.enable_prefix_caching:
            for block_hash in chain_hashes(root, token_ids[:-1], self.block_size):
                block_id = self.pool.find(block_hash)
                if block_id is None:
                    break
                block_ids.append(block_id)
                last_hash = block_hash
        return CachedPrefix(block_ids=block_ids, last_hash=last_hash)

    def num_unowned(self, prefix: CachedPrefix) -> int:
        """Return how many blocks of `prefix` are free, so that acquiring it leaves that many fewer."""
        return sum(self.pool.ref_count(block_id) == 0 for block_id in prefix.block_ids)

    def acquire(self, prefix: CachedPrefix) -> None:
        """Own the blocks of `prefix`."""
        for block_id in prefix.block_ids:
            self.pool.acquire(block_id)

    def count_look_up(self, num_tokens: int, prefix: CachedPrefix) -> None:
        """Count for the statistics that a prompt of `num_tokens` found `prefix`."""
        self.num_prefix_queries_total += num_tokens
        self.num_prefix_hits_total += prefix.num_blocks * self.block_size

    def hash_blocks(self, block_ids: list[int], parent: bytes, token_ids: Int32Array) -> tuple[bytes, list[int]]:
        """Make full blocks findable that hold `token_ids` [len(block_ids) * block_size] after `parent`.

        Returns the hash of the last, and the blocks now found by theirs: where an equal block was first, that one is.
        """
        block_hash, hashed = parent, []
        for block_id, block_hash in zip(block_ids, chain_hashes(parent, token_ids, self.block_size), strict=True):
            if self.pool.set_hash(block_id, block_hash):
                hashed.append(block_id)
        return block_hash, hashed

    def forget_blocks(self, block_ids: list[int]) -> None:
        """Make blocks unfindable: the step that was to fill them failed."""
        self.pool.forget_hashes(block_ids)

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix. Running requests keep their blocks."""
        self.pool.forget_all_hashes()

    def check_integrity(self) -> None:
        self.pool.check_integrity()
