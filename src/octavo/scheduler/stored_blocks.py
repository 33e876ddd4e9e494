"""Which blocks of a KV group are on the ranks' disks, by hash: a fixed number of slots, equal on all ranks.

    a slot is free, or has one hash       a hash with a slot is being written, or stored and findable

A slot is reused when none is free: that of the hash which was used least recently. The ranks are told a slot's number,
so all of them drop and keep the same blocks.
"""

from collections import Counter, OrderedDict
from collections.abc import Container, Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class DiskCounts:
    """Totals since the start of the core."""

    num_hit_tokens: int = 0  # of prompts, that were read from disk and not computed
    num_saved_blocks: int = 0
    num_bytes: int = 0  # on the disks of all ranks, now
    failures: Counter[str] = field(default_factory=Counter)  # by what was wrong: files, or blocks that were not served


class StoredBlocks:
    """The slots of one KV group."""

    def __init__(self, num_slots: int, found: Iterable[tuple[int, bytes]]) -> None:
        """`found` are the slots that hold a block from before, those written first at the front."""
        self.num_slots = num_slots
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # of stored hashes, the least recently used first
        self._writing: dict[bytes, int] = {}
        self._num_readers: Counter[bytes] = Counter()
        for slot, block_hash in found:
            if slot < num_slots:
                self._slots[block_hash] = slot
        taken = set(self._slots.values())
        self._free = [slot for slot in range(num_slots - 1, -1, -1) if slot not in taken]  # the lowest is used first

    def __len__(self) -> int:
        return len(self._slots) + len(self._writing)

    def has(self, block_hash: bytes) -> bool:
        """Return whether the block can be read."""
        return block_hash in self._slots

    def knows(self, block_hash: bytes) -> bool:
        """Return whether the block can be read, or is being written."""
        return block_hash in self._slots or block_hash in self._writing

    def touch(self, block_hash: bytes) -> None:
        """A block has been used. Touch a context's last block first: so a prefix outlives its tails."""
        if block_hash in self._slots:
            self._slots.move_to_end(block_hash)

    def begin_write(self, block_hash: bytes, kept: Container[bytes] = ()) -> int | None:
        """Return the slot to write a block to, which may evict another, but none that is `kept` or being read."""
        if not self._free:
            victim = next((each for each in self._slots if each not in self._num_readers), None)
            if victim is None or victim in kept:  # those after it are kept, too
                return None
            self._free.append(self._slots.pop(victim))
        slot = self._writing[block_hash] = self._free.pop()
        return slot

    def end_write(self, block_hash: bytes, slot: int, *, is_stored: bool) -> None:
        """A block has been written, or could not be. Ignored if it was dropped meanwhile."""
        if self._writing.get(block_hash) == slot:
            del self._writing[block_hash]
            if is_stored:
                self._slots[block_hash] = slot
            else:
                self._free.append(slot)

    def begin_read(self, block_hash: bytes) -> int:
        """Return the slot of a stored block, which keeps it until `end_read`."""
        self._num_readers[block_hash] += 1
        return self._slots[block_hash]

    def end_read(self, block_hash: bytes) -> None:
        """A block has been read."""
        self._num_readers[block_hash] -= 1
        if not self._num_readers[block_hash]:
            del self._num_readers[block_hash]

    def drop(self, block_hash: bytes) -> int | None:
        """Forget a block; return its slot, which ranks must clear before it is written again. None: it is not here."""
        slot = self._slots.pop(block_hash, None)
        if slot is None:
            slot = self._writing.pop(block_hash, None)
        if slot is not None:
            self._free.append(slot)
        return slot

    def drop_all(self) -> list[int]:
        """Forget every block; return their slots."""
        return [slot for each in [*self._slots, *self._writing] if (slot := self.drop(each)) is not None]

    def check_integrity(self) -> None:
        """Assert that every slot is free or has one hash."""
        taken = [*self._slots.values(), *self._writing.values()]
        assert sorted([*self._free, *taken]) == list(range(self.num_slots))
        assert not self._slots.keys() & self._writing.keys()
