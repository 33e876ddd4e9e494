"""The adapter slots of the ranks: which adapter each holds, and how many requests use it.

A slot is refilled only when no request needs what it holds, the least recently used first. Adapters are identified by
the hash of their contents.
"""

from collections import OrderedDict
from collections.abc import Iterable

from octavo.contracts.schedule import SlotFill


class AdapterSlots:
    """A fixed number of slots; steps fill them."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._free = list(range(num_slots))[::-1]
        self._slots: dict[str, int] = {}  # by adapter
        self._num_users: dict[str, int] = {}  # of adapters that are used, at least 1
        self._idle: OrderedDict[str, None] = OrderedDict()  # adapters without users, least recently used first
        self._to_fill: dict[int, str] = {}  # slots to fill in the next step
        self._filling: dict[int, str] = {}  # slots that steps in flight fill

    @property
    def has_room(self) -> bool:
        """Whether `assign` finds a slot."""
        return bool(self._free or self._idle)

    @property
    def used(self) -> dict[str, int]:
        """The number of users of each adapter that has any, the longest in use first."""
        return self._num_users

    def holds(self, content_hash: str) -> bool:
        return content_hash in self._slots

    def assign(self, content_hash: str) -> None:
        """Give an adapter a slot, to be filled before the next step. It needs a user before the step is scheduled."""
        if not self._free:
            last_used, _ = self._idle.popitem(last=False)
            self._free.append(self._slots.pop(last_used))
        slot = self._slots[content_hash] = self._free.pop()
        self._to_fill[slot] = content_hash
        self._idle[content_hash] = None

    def add_user(self, content_hash: str) -> int:
        """Count a request that needs an adapter in its slot; return the slot."""
        self._idle.pop(content_hash, None)
        self._num_users[content_hash] = self._num_users.get(content_hash, 0) + 1
        return self._slots[content_hash]

    def remove_user(self, content_hash: str) -> bool:
        """Count one user less; return whether it was the last."""
        self._num_users[content_hash] -= 1
        if self._num_users[content_hash]:
            return False
        del self._num_users[content_hash]
        slot = self._slots[content_hash]
        if slot in self._to_fill or slot in self._filling:  # its copy on the host may go before it is in the slot
            self._to_fill.pop(slot, None)
            self._free.append(self._slots.pop(content_hash))
        else:
            self._idle[content_hash] = None
        return True

    def take_fills(self) -> tuple[SlotFill, ...]:
        """Return the slots that the step being scheduled fills."""
        if not self._to_fill:
            return ()
        fills = tuple(SlotFill(slot=slot, content_hash=adapter) for slot, adapter in self._to_fill.items())
        self._filling |= self._to_fill
        self._to_fill.clear()
        return fills

    def confirm(self, fills: Iterable[SlotFill]) -> None:
        """A step has completed, so these slots are filled."""
        for fill in fills:
            if self._filling.get(fill.slot) == fill.content_hash:
                del self._filling[fill.slot]

    def repeat(self, fills: Iterable[SlotFill]) -> None:
        """A step failed, perhaps before it filled these slots: fill them again if they are still needed."""
        for fill in fills:
            if self._filling.get(fill.slot) == fill.content_hash:
                del self._filling[fill.slot]
                if self._slots.get(fill.content_hash) == fill.slot:
                    self._to_fill[fill.slot] = fill.content_hash

    def check_integrity(self) -> None:
        """Assert that every slot is free, or holds one adapter that is idle or used."""
        assert sorted([*self._free, *self._slots.values()]) == list(range(self._num_slots))
        assert self._slots.keys() == self._idle.keys() | self._num_users.keys()
        assert not self._idle.keys() & self._num_users.keys()
        assert all(self._slots.get(adapter) == slot for slot, adapter in self._to_fill.items())
