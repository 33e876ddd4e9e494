"""Ownership of the KV blocks of every group: allocation for requests, and prefix reuse by block hash.

Blocks are hashed by content: equal prefixes get equal hashes, in every process and on every machine. A block's KV
depends on all tokens before it, so its hash is H(hash of the previous block, its own tokens, its key). The chain starts
from a root that covers whatever else the KV depends on, or must not be shared across: the message's `prefix_keys`.
SHA-256, because a collision would show one tenant another's text.
"""

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from octavo.config.engine import CacheConfig
from octavo.contracts.kv_cache import KVGroup
from octavo.contracts.schedule import Int32Array
from octavo.scheduler.block_pool import BlockPool
from octavo.scheduler.stored_blocks import DiskCounts

FULL_ATTENTION = (KVGroup(),)
BlockKeys = Mapping[int, bytes]  # by a block's number in its context: what its hash covers besides tokens
NO_KEYS: BlockKeys = MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class CachedPrefix:
    """Full blocks that already hold the beginning of a prompt. Not owned until `acquire`d.

    In a group with a sliding window, only the last ones are held; earlier columns hold no block.
    """

    num_tokens: int
    block_ids: list[list[int]]  # of each group: from first_columns[group] to the end of the prefix
    first_columns: list[int]  # of each group
    last_hash: bytes  # parent of the block that follows


class BlockManager:
    """Used only by the scheduler, on one thread. Each group has a pool.

    Block `num_blocks` of a group with a window is its null block, which no request owns: it replaces freed blocks
    in block tables.
    """

    def __init__(
        self, config: CacheConfig, num_blocks: Sequence[int], groups: tuple[KVGroup, ...] = FULL_ATTENTION
    ) -> None:
        self.block_size = config.block_size
        self.enable_prefix_caching = config.enable_prefix_caching
        self.groups = groups
        self.block_sizes = [group.block_tokens(config.block_size) for group in groups]
        self.pools = [
            BlockPool(count, is_spaced=group.kind != "recurrent")
            for group, count in zip(groups, num_blocks, strict=True)
        ]
        self.windowed = [index for index, group in enumerate(groups) if group.sliding_window is not None]
        self.recurrent = [index for index, group in enumerate(groups) if group.kind == "recurrent"]
        self._full = [index for index, group in enumerate(groups) if group.sliding_window is None]
        self.num_prefix_queries_total = self.num_prefix_hits_total = 0  # prompt tokens
        self.disk = DiskCounts()
        # Told of each block that became findable: group, column of its context, block, hash.
        self.on_hashed: Callable[[int, int, int, bytes], None] | None = None
        assert len(self.pools) == len(groups), f"{len(self.pools)} pools for {len(groups)} KV groups"

    @property
    def fullest_pool(self) -> BlockPool:
        """The pool with the smallest fraction of free blocks."""
        if len(self.pools) == 1:
            return self.pools[0]
        return min(self.pools, key=lambda pool: pool.num_free / pool.num_blocks)

    @property
    def num_free(self) -> list[int]:
        """Free blocks of each group, including those that still hold a findable prefix."""
        return [pool.num_free for pool in self.pools]

    @property
    def num_reached(self) -> list[int]:
        """Blocks of each group from this one on have never been allocated."""
        return [pool.num_reached for pool in self.pools]

    def allocate_blocks(self, count: int, group: int = 0, after: int | None = None) -> list[int]:
        """Take free blocks for a request; `after` is its block before them. See `BlockPool.allocate`."""
        return self.pools[group].allocate(count, after)

    def free_blocks(self, block_ids: Sequence[int], group: int = 0) -> None:
        """Give up a request's blocks. They stay findable until they are reused."""
        self.pools[group].release(block_ids)

    def null_block(self, group: int) -> int:
        return self.pools[group].num_blocks

    def blocks_for(self, num_tokens: int, group: int = 0) -> int:
        """Return how many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_sizes[group])

    def can_ever_fit(self, num_tokens: int, max_chunk: int) -> bool:
        """Return whether a request of `num_tokens` fits when nothing else runs."""
        peaks = [group.peak_blocks(num_tokens, self.block_size, max_chunk) for group in self.groups]
        return all(peak <= pool.num_blocks for peak, pool in zip(peaks, self.pools, strict=True))

    def find_prefix(
        self, token_ids: Int32Array, root: bytes, unwritten: Collection[tuple[int, int]] = (), keys: BlockKeys = NO_KEYS
    ) -> CachedPrefix:
        """Look up the longest run of full blocks that every group can serve, at most `len(token_ids) - 1` tokens.

        At least one token is left to compute: its logits are needed for sampling. Blocks in `unwritten`, given as
        (group, block), do not count: those of recurrent groups.
        """

        def find(group: int, block_hash: bytes) -> int | None:
            block_id = self.pools[group].find(block_hash)
            return None if (group, block_id) in unwritten else block_id

        num_tokens, hashes, columns = self.longest_prefix(token_ids, root, keys, find)
        return CachedPrefix(
            num_tokens=num_tokens,
            block_ids=[[block_id for block_id in blocks if block_id is not None] for blocks in columns],
            first_columns=[self._first_column(group, num_tokens) for group in range(len(self.groups))],
            last_hash=hashes[num_tokens // self.block_size],
        )

    def longest_prefix(
        self, token_ids: Int32Array, root: bytes, keys: BlockKeys, find: Callable[[int, bytes], int | None]
    ) -> tuple[int, list[bytes], list[list[int | None]]]:
        """Return how many tokens every group can serve: `find` says where a group has the block with a hash, if it has.

        Also returns the hashes [1 + blocks], beginning with `root`; and what was found in the columns that each group
        needs: from its first one to the end of the prefix.
        """
        hashes = [root]
        found: list[list[int | None]] = [[] for _ in self.pools]
        if self.enable_prefix_caching:
            for block_hash in chain_hashes(root, token_ids[:-1], self.block_size, keys):
                blocks = [find(group, block_hash) for group in range(len(self.pools))]
                if None in blocks and (not self.windowed or any(blocks[group] is None for group in self._full)):
                    break
                end = len(hashes) * self.block_size
                hashes.append(block_hash)
                for group, block_id in enumerate(blocks):
                    if not end % self.block_sizes[group]:
                        found[group].append(block_id)
        num_blocks = self._longest_served(found, len(hashes) - 1) if self.windowed else len(hashes) - 1
        num_tokens = num_blocks * self.block_size
        columns = [
            blocks[self._first_column(group, num_tokens) : num_tokens // self.block_sizes[group]]
            for group, blocks in enumerate(found)
        ]
        return num_tokens, hashes, columns

    def _longest_served(self, found: list[list[int | None]], max_blocks: int) -> int:
        """Return the longest prefix, in blocks, for which every windowed group has all that the next token may see."""
        longest = 0
        run_starts = [0] * len(self.pools)  # of each group: start of the unbroken run of blocks that ends here
        for num_blocks in range(1, max_blocks + 1):
            num_tokens, is_served = num_blocks * self.block_size, True
            for group in self.windowed:
                num_columns, is_within_block = divmod(num_tokens, self.block_sizes[group])
                if not is_within_block and found[group][num_columns - 1] is None:
                    run_starts[group] = num_columns
                is_served &= not is_within_block and run_starts[group] <= self._first_column(group, num_tokens)
            if is_served:
                longest = num_blocks
        return longest

    def _first_column(self, group: int, num_tokens: int) -> int:
        """Return the first column read by the token after `num_tokens` others."""
        return self.groups[group].first_read(num_tokens) // self.block_sizes[group]

    def num_unowned(self, prefix: CachedPrefix) -> list[int]:
        """Return how many blocks of `prefix` are free in each group: acquiring it leaves that many fewer."""
        return [
            sum(pool.ref_counts[block_id] == 0 for block_id in block_ids)
            for pool, block_ids in zip(self.pools, prefix.block_ids, strict=True)
        ]

    def acquire(self, prefix: CachedPrefix) -> None:
        """Take ownership of the blocks of `prefix`."""
        for pool, block_ids in zip(self.pools, prefix.block_ids, strict=True):
            for block_id in block_ids:
                pool.acquire(block_id)

    def hash_blocks(
        self, tables: Sequence[list[int]], parent: bytes, token_ids: Int32Array, start: int, keys: BlockKeys = NO_KEYS
    ) -> tuple[bytes, list[tuple[int, int]]]:
        """Make the full blocks of every group that end in `token_ids` [blocks * block_size] after `parent` findable.

        The first token is at position `start`. Returns the hash of the last block, and the newly hashed blocks as
        (group, block): if an equal block already has the hash, that one keeps it.
        """
        first_block = start // self.block_size
        hashes, hashed = list(chain_hashes(parent, token_ids, self.block_size, keys, first_block)), []
        for group, pool in enumerate(self.pools):
            size = self.block_sizes[group]
            ends = hashes
            if size > self.block_size:  # a recurrent group: only some of the hashes end a block
                step = size // self.block_size
                ends = hashes[step - 1 - start // self.block_size % step :: step]
            first_column = start // size
            for column, (block_id, block_hash) in enumerate(zip(tables[group][first_column:], ends, strict=False)):
                if pool.set_hash(block_id, block_hash):
                    hashed.append((group, block_id))
                    if self.on_hashed is not None:
                        self.on_hashed(group, first_column + column, block_id, block_hash)
        return hashes[-1], hashed

    def forget_context(
        self, block_ids: Sequence[Sequence[int]], token_ids: Int32Array, root: bytes, keys: BlockKeys = NO_KEYS
    ) -> None:
        """Make a context's blocks unfindable: `block_ids` of each group, and those freed behind a window.

        `token_ids` are the tokens whose blocks were hashed.
        """
        for pool, held in zip(self.pools, block_ids, strict=True):
            pool.forget_hashes(held)
        for block_hash in chain_hashes(root, token_ids, self.block_size, keys) if self.windowed else ():
            for pool in self.pools:
                pool.forget_hashes([block_id] if (block_id := pool.find(block_hash)) is not None else ())

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix. Running requests keep their blocks."""
        for pool in self.pools:
            pool.forget_hashes(range(pool.num_blocks))


def root_hash(keys: Iterable[str] = ()) -> bytes:
    """Return the parent of a first block. `keys` are length-prefixed, so no two lists can collide."""
    digest = hashlib.sha256(b"octavo kv block 1")
    for key in keys:
        encoded = key.encode()
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.digest()


def chain_hashes(
    parent: bytes, token_ids: Int32Array, block_size: int, keys: BlockKeys = NO_KEYS, first_block: int = 0
) -> Iterator[bytes]:
    """Yield the hashes of the full blocks that `token_ids` fill after `parent`, one at a time.

    Tokens are hashed as little-endian 32-bit integers. The first block is number `first_block` of its context.
    """
    token_bytes = token_ids.astype("<i4", copy=False).tobytes()
    num_bytes = 4 * block_size
    for block, end in enumerate(range(num_bytes, len(token_bytes) + 1, num_bytes), start=first_block):
        parent = hashlib.sha256(parent + token_bytes[end - num_bytes : end] + keys.get(block, b"")).digest()
        yield parent
