"""The block pool: adjacent blocks, LRU order, tails before prefixes, hashes; compared with a naive one."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.config.engine import CacheConfig
from octavo.contracts.kv_cache import KVGroup
from octavo.errors import OutOfBlocksError
from octavo.scheduler.block_manager import BlockManager
from octavo.scheduler.block_pool import BlockPool, spaced_order


def hash_of(number: int) -> bytes:
    return number.to_bytes(32, "little")


def drained(pool: BlockPool) -> list[int]:
    """Hand out all that is left, and return it in the order in which it came."""
    return [pool.allocate(1)[0] for _ in range(pool.num_free)]


@pytest.mark.parametrize("count", [1, 2, 3, 8, 13])
def test_every_block_is_there_once_and_first_ones_lie_far_apart(count: int) -> None:
    order = spaced_order(count)
    assert sorted(order) == list(range(count))
    assert spaced_order(20)[:8] == [0, 8, 16, 4, 12, 2, 10, 18]


def test_a_request_gets_neighbors() -> None:
    pool = BlockPool(16)
    first = pool.allocate(3)
    assert first == [0, 1, 2]
    assert pool.allocate(2, after=first[-1]) == [3, 4]
    assert pool.allocate(2) == [8, 9]  # another request starts eight blocks on


def test_a_neighbor_that_holds_a_prefix_is_spared() -> None:
    pool = BlockPool(4)
    pool.allocate(4)
    pool.set_hash(1, hash_of(1))
    pool.release([3])
    pool.release([1])
    assert pool.allocate(1, after=0) == [3]
    assert pool.find(hash_of(1)) == 1


def test_requests_of_a_second_round_lie_in_one_piece_too() -> None:
    """Each grows by a block later, as decoding does; nobody may have begun in its path."""
    pool = BlockPool(64)
    for _ in range(3):
        requests = [pool.allocate(3) for _ in range(8)]
        for request in requests:
            request.extend(pool.allocate(1, after=request[-1]))
        assert all(request == list(range(request[0], request[0] + 4)) for request in requests)
        for request in requests:
            pool.release(request)


def test_states_lie_in_a_row_and_are_reused_in_their_place() -> None:
    """Each fills half a large page: with gaps between them, twice the memory would be touched."""
    groups = (KVGroup(), KVGroup.recurrent(64))
    cache = CacheConfig(block_size=16, num_kv_blocks=64, gpu_memory_utilization=None, enable_prefix_caching=True)
    manager = BlockManager(cache, [64, 64], groups)
    for _ in range(3):
        states = [manager.allocate_blocks(1, group=1) for _ in range(8)]
        assert sorted(states) == [[block_id] for block_id in range(8)]
        for state in states:
            manager.free_blocks(state, group=1)


def test_an_evicted_block_is_told_of_while_it_can_still_be_found() -> None:
    evicted = list[tuple[int, bytes, int | None]]()

    def on_evicted(block_id: int, block_hash: bytes) -> None:
        evicted.append((block_id, block_hash, pool.find(block_hash)))

    pool = BlockPool(2, on_evicted)
    pool.allocate(2)
    pool.set_hash(0, hash_of(0))
    pool.set_hash(1, hash_of(1))
    pool.release([0])
    pool.release([1])
    pool.forget_hashes([1])  # its contents are wrong: nobody wants them
    assert not evicted
    pool.allocate(2)
    assert evicted == [(0, hash_of(0), 0)]
    assert pool.find(hash_of(0)) is None


def test_the_last_block_has_no_neighbor() -> None:
    pool = BlockPool(2)
    assert pool.allocate(1, after=1) == [0]


def test_least_recently_freed_is_reused_first_and_nameless_before_all() -> None:
    pool = BlockPool(4)
    pool.allocate(4)
    for block_id in (0, 1, 2):
        pool.set_hash(block_id, hash_of(block_id))
    for block_id in (1, 2, 0, 3):
        pool.release([block_id])
    assert drained(pool) == [3, 1, 2, 0]


def test_tails_are_reused_before_prefixes() -> None:
    pool = BlockPool(3)
    pool.allocate(3)
    for block_id in range(3):
        pool.set_hash(block_id, hash_of(block_id))
    pool.release([0, 1, 2])
    assert drained(pool) == [2, 1, 0]


def test_a_shared_block_is_free_when_its_last_owner_leaves() -> None:
    pool = BlockPool(2)
    (block_id,) = pool.allocate(1)
    pool.acquire(block_id)
    pool.release([block_id])
    assert (pool.ref_counts[block_id], pool.num_free) == (1, 1)
    pool.release([block_id])
    assert (pool.ref_counts[block_id], pool.num_free) == (0, 2)


def test_a_free_block_can_be_found_until_it_is_handed_out() -> None:
    pool = BlockPool(1)
    pool.allocate(1)
    pool.set_hash(0, hash_of(7))
    pool.release([0])
    assert pool.find(hash_of(7)) == 0
    pool.acquire(0)
    pool.release([0])
    assert pool.find(hash_of(7)) == 0
    pool.allocate(1)
    assert pool.find(hash_of(7)) is None


def test_the_first_bearer_keeps_its_name() -> None:
    pool = BlockPool(2)
    pool.allocate(2)
    assert pool.set_hash(0, hash_of(1))
    assert not pool.set_hash(1, hash_of(1))
    assert pool.find(hash_of(1)) == 0


def test_forgotten_names_are_not_found() -> None:
    pool = BlockPool(2)
    pool.allocate(2)
    pool.set_hash(0, hash_of(0))
    pool.set_hash(1, hash_of(1))
    pool.forget_hashes([0])
    assert (pool.find(hash_of(0)), pool.find(hash_of(1))) == (None, 1)
    pool.forget_hashes(range(pool.num_blocks))
    assert pool.find(hash_of(1)) is None
    pool.check_integrity()


def test_out_of_blocks_says_the_numbers_and_hands_out_nothing() -> None:
    pool = BlockPool(3)
    pool.allocate(1)
    with pytest.raises(OutOfBlocksError, match="3 KV blocks requested, 2 free") as caught:
        pool.allocate(3)
    assert (caught.value.num_wanted, caught.value.num_free) == (3, 2)
    assert pool.num_free == 2
    pool.check_integrity()
    assert len(pool.allocate(2)) == 2


def test_it_knows_how_far_it_has_been_used() -> None:
    pool = BlockPool(64)
    assert pool.num_reached == 0
    first = pool.allocate(3)  # at the front
    assert pool.num_reached == 3
    second = pool.allocate(1)  # of another request, further on
    assert pool.num_reached == second[0] + 1 > 3
    pool.release(second)
    pool.release(first)
    assert pool.num_reached == second[0] + 1
    pool.check_integrity()


def test_releasing_a_free_block_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="block 0 has no owner"):
        BlockPool(1).release([0])


def test_a_block_has_one_name() -> None:
    pool = BlockPool(1)
    pool.allocate(1)
    pool.set_hash(0, hash_of(0))
    with pytest.raises(AssertionError, match="has a hash already"):
        pool.set_hash(0, hash_of(1))


@pytest.mark.parametrize("damage", ["ref_counts", "_hash", "num_free", "num_reached"])
def test_check_integrity_sees_damage(damage: str) -> None:
    pool = BlockPool(4)
    pool.allocate(2)
    pool.check_integrity()
    if damage == "ref_counts":
        pool.ref_counts[3] = 1
    elif damage == "_hash":
        pool._hash[0] = hash_of(0)
    elif damage == "num_reached":
        pool.num_reached = 1
    else:
        pool.num_free += 1
    with pytest.raises(AssertionError):
        pool.check_integrity()


class NaivePool:
    """The same promises without regard to cost: a list of free blocks, searched each time."""

    def __init__(self, num_blocks: int) -> None:
        self.blank = spaced_order(num_blocks)
        self.hashed: list[int] = []
        self.owners = [0] * num_blocks
        self.names: dict[int, bytes] = {}

    def allocate(self, count: int, after: int | None) -> list[int]:
        block_ids = []
        for _ in range(count):
            neighbor = None if after is None else after + 1
            free = self.blank + self.hashed
            after = neighbor if neighbor in free and neighbor not in self.names else free[0]
            assert after is not None
            self.take(after)
            self.names.pop(after, None)
            self.owners[after] = 1
            block_ids.append(after)
        return block_ids

    def find(self, wanted: bytes) -> int | None:
        return next((block_id for block_id, held in self.names.items() if held == wanted), None)

    def release(self, block_ids: list[int]) -> None:
        for block_id in reversed(block_ids):
            self.owners[block_id] -= 1
            if not self.owners[block_id] and block_id in self.names:
                self.hashed.append(block_id)
            elif not self.owners[block_id]:
                self.blank.insert(0 if block_id == block_ids[0] else len(self.blank), block_id)

    def take(self, block_id: int) -> None:
        for free in (self.blank, self.hashed):
            if block_id in free:
                free.remove(block_id)


@settings(max_examples=150)
@given(st.integers(1, 12), st.lists(st.tuples(st.sampled_from("aarnf"), st.integers(0, 10**6)), max_size=60))
def test_the_pool_equals_a_naive_one(num_blocks: int, actions: list[tuple[str, int]]) -> None:
    """Allocate, release, name, find and acquire in any order: the same blocks in the same order."""
    pool, naive = BlockPool(num_blocks), NaivePool(num_blocks)
    held: list[list[int]] = []
    for action, number in actions:
        if action == "a" and pool.num_free:
            count, after = 1 + number % pool.num_free, None if number % 2 else number % num_blocks
            held.append(pool.allocate(count, after))
            assert held[-1] == naive.allocate(count, after)
        elif action == "r" and held:
            block_ids = held.pop(number % len(held))
            pool.release(block_ids)
            naive.release(block_ids)
        elif action == "n" and held:
            block_id, wanted = held[number % len(held)][0], hash_of(number % 5)
            if block_id not in naive.names and pool.set_hash(block_id, wanted):
                naive.names[block_id] = wanted
        elif action == "f":
            found = pool.find(hash_of(number % 5))
            assert found == naive.find(hash_of(number % 5))
            if found is not None:
                pool.acquire(found)
                naive.take(found)
                naive.owners[found] += 1
                held.append([found])
        pool.check_integrity()
        assert pool.ref_counts == naive.owners
    for block_ids in held:
        pool.release(block_ids)
    assert pool.num_free == num_blocks
