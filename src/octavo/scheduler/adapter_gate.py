"""Requests with an adapter: each waits until the ranks have its adapter in a slot, without holding up others.

A request whose adapter has a slot goes on at once, and keeps the slot until it ends. Others are parked, by adapter.
When a slot has no users left, it goes to the best parked adapter that is loaded, together with all requests parked for
it; the slot that was used least recently first.

No adapter starves: while adapters are parked without a free slot, as many slots are *drained*. Requests that arrive for
a draining adapter are parked after the others, so its slot is free once its current requests have ended. Slots with the
fewest users are drained first. Adapters are identified by the hash of their contents.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from octavo.contracts.schedule import NewRequestData, SchedulerOutput, SlotFill
from octavo.errors import OctavoError
from octavo.lora.host_cache import HostAdapters
from octavo.scheduler.admission import RequestQueue
from octavo.scheduler.gate import Gate
from octavo.scheduler.request import Request
from octavo.scheduler.running import RowIndices
from octavo.scheduler.step_update import StepUpdate


class AdapterGate(Gate):
    """Owned by the scheduler. `store` has the adapters in host memory; the ranks have `num_slots` on the device."""

    reason = "adapter"

    def __init__(self, store: HostAdapters, num_slots: int, ageing_s: float) -> None:
        self._store = store
        self._slots = AdapterSlots(num_slots)
        self._ageing_s = ageing_s
        self._parked: dict[str, RequestQueue] = {}  # by adapter; never empty
        self._slot_of: dict[Request, int] = {}  # of each request that passed
        self._draining: dict[str, None] = {}  # adapters in slots, the first to be drained first
        self._kept: set[str] = set()  # adapters that the store keeps, or is loading, for us

    def hold(self, request: Request) -> bool:
        adapter = request.message.adapter
        if adapter is None:
            return False
        content_hash = adapter.content_hash
        is_stable = self._slots.holds(content_hash) and content_hash not in self._draining
        if is_stable and (content_hash in self._slots.num_users or not self._parked):
            self._give_slot(request, content_hash)  # an idle slot goes to the longest waiting instead
            return False
        self._parked.setdefault(content_hash, RequestQueue(self._ageing_s)).enqueue(request)
        return True

    def take_ready(self, now_s: float) -> list[Request]:
        if not self._parked:
            return []
        for content_hash, error in self._store.take_failed():
            self._kept.discard(content_hash)
            if (queue := self._parked.pop(content_hash, None)) is not None:
                self._failed = [*self._failed, *((request, error) for request in queue.in_order(now_s))]
        self._load_parked(now_s)
        return [*self._fill_slots(now_s), *self._balance(now_s)]

    def forget(self, request: Request) -> None:
        adapter = request.message.adapter
        if adapter is None:
            return
        content_hash = adapter.content_hash
        if self._slot_of.pop(request, None) is not None:
            if self._slots.remove_user(content_hash):
                self._draining.pop(content_hash, None)
        elif request.waits_for == self.reason and (queue := self._parked.get(content_hash)) is not None:
            queue.remove(request)
            if len(queue):
                return
            del self._parked[content_hash]
        else:
            return  # it has not come here, or its adapter cannot be loaded
        # Even if requests for it are parked: others may be ahead of them.
        if content_hash in self._kept and content_hash not in self._slots.num_users:
            self._kept.discard(content_hash)
            self._store.release(content_hash)

    def wait(self, timeout_s: float) -> None:
        self._store.wait(timeout_s)

    def on_admit(self, request: Request, data: NewRequestData) -> NewRequestData:
        slot = self._slot_of.get(request)
        return data if slot is None else replace(data, adapter_slot=slot)

    def add_to_step(self, output: SchedulerOutput, rows: RowIndices) -> SchedulerOutput:
        fills = self._slots.take_fills()
        return replace(output, adapter_fills=fills) if fills else output

    def after_step(self, output: SchedulerOutput, update: StepUpdate) -> dict[str, OctavoError | None]:
        if output.adapter_fills:
            self._slots.settle(output.adapter_fills, are_filled=True)
        return {}

    def after_failed_step(self, output: SchedulerOutput) -> Sequence[Request]:
        """Fill the step's slots again; return whose slot was perhaps not filled when later steps ran."""
        if not output.adapter_fills:
            return ()
        self._slots.settle(output.adapter_fills, are_filled=False)
        slots = {fill.slot for fill in output.adapter_fills}
        return [request for request, slot in self._slot_of.items() if slot in slots and request.row is not None]

    def check_integrity(self) -> None:
        """Assert that only adapters with requests are kept, and that no slot drains needlessly."""
        self._slots.check_integrity()
        assert all(map(len, self._parked.values()))
        assert len(self._slot_of) == sum(self._slots.num_users.values())
        assert self._kept <= self._parked.keys() | self._slots.num_users.keys()
        assert self._draining.keys() <= self._slots.num_users.keys()

    def _give_slot(self, request: Request, content_hash: str) -> None:
        self._slot_of[request] = self._slots.add_user(content_hash)

    @property
    def _without_slot(self) -> list[str]:
        """The parked adapters without a slot."""
        return [adapter for adapter in self._parked if not self._slots.holds(adapter)]

    def _load_parked(self, now_s: float) -> None:
        """Have the store load parked adapters, the best first, while it has places."""
        missing = [adapter for adapter in self._without_slot if adapter not in self._kept]
        if not missing or not self._store.has_room:
            return
        for content_hash in sorted(missing, key=lambda adapter: self._rank(adapter, now_s)):
            adapter = self._best(content_hash, now_s).message.adapter
            assert adapter is not None
            if not self._store.begin_load(adapter):
                break
            self._kept.add(content_hash)

    def _fill_slots(self, now_s: float) -> Iterator[Request]:
        """Give slots to the best parked adapters that are loaded; yield all of their requests."""
        while self._slots.has_room:
            loaded = [adapter for adapter in self._parked if self._slots.holds(adapter) or self._store.has(adapter)]
            if not loaded:
                return
            best = min(loaded, key=lambda adapter: self._rank(adapter, now_s))
            if not self._slots.holds(best):
                self._slots.assign(best)
            yield from self._unpark(best, now_s)

    def _balance(self, now_s: float) -> Iterator[Request]:
        """Drain as many slots as adapters wait for, no more; yield requests parked for slots that need not drain."""
        num_wanted = 0
        if not self._slots.has_room:
            num_wanted = sum(adapter not in self._kept or self._store.has(adapter) for adapter in self._without_slot)
        fewest_first = sorted(self._slots.num_users, key=self._slots.num_users.__getitem__)
        for adapter in fewest_first:
            if len(self._draining) >= num_wanted:
                break
            self._draining.setdefault(adapter)
        while len(self._draining) > num_wanted:
            adapter, _ = self._draining.popitem()
            yield from self._unpark(adapter, now_s)

    def _unpark(self, content_hash: str, now_s: float) -> list[Request]:
        """Give all requests parked for an adapter its slot."""
        queue = self._parked.pop(content_hash, None)
        requests = [] if queue is None else list(queue.in_order(now_s))
        for request in requests:
            self._give_slot(request, content_hash)
        return requests

    def _best(self, content_hash: str, now_s: float) -> Request:
        best = self._parked[content_hash].peek(now_s)
        assert best is not None
        return best

    def _rank(self, content_hash: str, now_s: float) -> tuple[int, int]:
        best = self._best(content_hash, now_s)
        return self._parked[content_hash].aged_class(best, now_s), best.arrival_index


class AdapterSlots:
    """Which adapter each slot of the ranks holds, and how many requests use it; steps fill them."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._free = list(range(num_slots))[::-1]
        self._slots: dict[str, int] = {}  # by adapter
        self.num_users: dict[str, int] = {}  # of adapters that are used, at least 1; the longest in use first
        self._idle: OrderedDict[str, None] = OrderedDict()  # adapters without users, least recently used first
        self._to_fill: dict[int, str] = {}  # slots to fill in the next step
        self._filling: dict[int, str] = {}  # slots that steps in flight fill

    @property
    def has_room(self) -> bool:
        """Whether `assign` finds a slot."""
        return bool(self._free or self._idle)

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
        self.num_users[content_hash] = self.num_users.get(content_hash, 0) + 1
        return self._slots[content_hash]

    def remove_user(self, content_hash: str) -> bool:
        """Count one user less; return whether it was the last."""
        self.num_users[content_hash] -= 1
        if self.num_users[content_hash]:
            return False
        del self.num_users[content_hash]
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

    def settle(self, fills: Iterable[SlotFill], *, are_filled: bool) -> None:
        """A step has completed, or failed, perhaps before it filled its slots: fill again those that are needed."""
        for fill in fills:
            if self._filling.get(fill.slot) == fill.content_hash:
                del self._filling[fill.slot]
                if not are_filled and self._slots.get(fill.content_hash) == fill.slot:
                    self._to_fill[fill.slot] = fill.content_hash

    def check_integrity(self) -> None:
        """Assert that every slot is free, or holds one adapter that is idle or used."""
        assert sorted([*self._free, *self._slots.values()]) == list(range(self._num_slots))
        assert self._slots.keys() == self._idle.keys() | self.num_users.keys()
        assert not self._idle.keys() & self.num_users.keys()
        assert all(self._slots.get(adapter) == slot for slot, adapter in self._to_fill.items())
