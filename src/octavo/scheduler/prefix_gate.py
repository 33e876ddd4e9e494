"""Requests whose prompt begins as one that is on disk: each waits until the ranks have read its blocks into memory.

Then it goes on, and admission finds the blocks in memory as it finds others. What cannot be read is computed. While
blocks are read they belong to the gate; afterwards to nobody, so little may be read ahead of admission: half of memory.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from octavo.contracts.schedule import NewRequestData, SchedulerOutput
from octavo.errors import EngineDeadError
from octavo.scheduler.gate import Gate
from octavo.scheduler.prefix_store import PrefixStore, wait_for
from octavo.scheduler.request import Request
from octavo.scheduler.running import RowIndices, RunningRows

_ON_DISK = -1  # in place of a block
_MOST_AHEAD = 0.5  # of each group's memory


@dataclass(slots=True)
class _Read:
    """What is being read for a request, and the blocks of each group's columns: all have the gate as an owner."""

    request: Request | None  # None: it has ended
    places: Sequence[tuple[int, int, bytes]]  # group, block, hash
    columns: Sequence[Sequence[int]]  # of each group
    future: Future[list[Any]]
    num_in_memory: int  # tokens of the prefix that were there before


class PrefixGate(Gate):
    """Owned by the scheduler. Reads the prefixes that `store` has."""

    reason = "prefix on disk"

    def __init__(self, store: PrefixStore, running: RunningRows) -> None:
        self._store, self._running, self._blocks = store, running, running.blocks
        self._reads: list[_Read] = []
        self._parked: list[Request] = []  # until there is room, or others have read what they need
        self._ready: list[Request] = []  # what they need has been read
        self._ahead: dict[Request, float] = {}  # requests with blocks that wait for admission: the share of memory
        self._num_free: list[int] = []  # when parked requests were last looked at; empty: look at them again

    def hold(self, request: Request) -> bool:
        if request.message.reads_whole_prompt:
            return False
        self._store.open()
        if not self._store.is_open:
            return False
        self.poll()
        return self._begin(request)

    def poll(self) -> None:
        """Take over what has been read."""
        reads, self._reads = self._reads, []
        for read in reads:
            if not read.future.done():
                self._reads.append(read)
                continue
            self._finish(read)
            if read.request is not None:
                self._ready.append(read.request)

    def take_ready(self, now_s: float) -> list[Request]:
        self.poll()
        ready, self._ready = self._ready, []
        if self._parked and self._blocks.num_free != self._num_free:
            parked = sorted(self._parked, key=lambda request: request.order)
            self._parked = []
            while parked:
                request = parked.pop(0)
                if not self._begin(request):
                    ready.append(request)
                elif request in self._parked:  # the others after it
                    self._parked += parked
                    break
            self._num_free = self._blocks.num_free
        return ready

    def wait(self, timeout_s: float) -> None:
        if self._reads:
            wait_for(self._reads[0].future, timeout_s)

    def on_admit(self, request: Request, data: NewRequestData) -> NewRequestData:
        if self._ahead.pop(request, None) is not None:
            self._num_free = []
        return data

    def add_to_step(self, output: SchedulerOutput, rows: RowIndices) -> SchedulerOutput:
        if self._reads:  # perhaps only for requests that have ended: nobody waits, but others need the blocks
            self.poll()
        return output

    def forget(self, request: Request) -> None:
        self._ahead.pop(request, None)
        self._num_free = []
        for those in (self._parked, self._ready):
            if request in those:
                those.remove(request)
        for read in self._reads:
            if read.request is request:
                read.request = None

    def check_integrity(self) -> None:
        """Assert that slots are consistent, and that a request is in one place."""
        self._store.check_integrity()
        held = [*self._parked, *self._ready, *(read.request for read in self._reads if read.request is not None)]
        assert len(held) == len(set(held))

    @property
    def owned_blocks(self) -> list[tuple[int, int]]:
        return [(group, each) for read in self._reads for group, of in enumerate(read.columns) for each in of]

    def _begin(self, request: Request) -> bool:
        """Begin to read for a request, or park it; False: it may go on."""
        missing, columns = self._find(request)
        if not missing:
            return False
        being_read = {(group, block_hash) for read in self._reads for group, _, block_hash in read.places}
        if any((group, block_hash) in being_read for group, _, block_hash in missing):
            self._parked.append(request)
            return True
        counts = [found.count(_ON_DISK) for found in columns]
        share = max(count / pool.num_blocks for count, pool in zip(counts, self._blocks.pools, strict=True))
        if not self._has_room(counts, columns) or (self._ahead and sum(self._ahead.values()) + share > _MOST_AHEAD):
            if not (self._reads or self._ahead or len(self._running)):
                return False  # there will never be more room
            self._parked.append(request)
            return True
        self._read(request, missing, counts, columns)
        self._ahead[request] = share
        return True

    def _find(self, request: Request) -> tuple[list[tuple[int, int, bytes]], list[list[int | None]]]:
        """Return what of a request's prefix is only on disk, as (group, index in its columns, hash); and the columns.

        A column has a block in memory, or `_ON_DISK`. Counts as a use of the blocks on disk.
        """
        blocks, stored = self._blocks, self._store.stored

        def find(group: int, block_hash: bytes) -> int | None:
            block_id = blocks.pools[group].find(block_hash)
            return _ON_DISK if block_id is None and stored[group].has(block_hash) else block_id

        num_tokens, hashes, columns = blocks.longest_prefix(
            request.token_ids, request.block_root, request.block_keys, find
        )
        for of_group in stored:
            for block_hash in hashes[:0:-1]:
                of_group.touch(block_hash)
        missing = []
        for group, (size, found) in enumerate(zip(blocks.block_sizes, columns, strict=True)):
            first = num_tokens // size - len(found)
            for index, block_id in enumerate(found):
                if block_id == _ON_DISK:
                    missing.append((group, index, hashes[(first + index + 1) * size // blocks.block_size]))
        return missing, columns

    def _has_room(self, counts: Sequence[int], columns: Sequence[Sequence[int | None]]) -> bool:
        """Whether each group has so many free blocks besides those found, and one for each running request."""
        for pool, count, found in zip(self._blocks.pools, counts, columns, strict=True):
            num_found_free = sum(b is not None and b != _ON_DISK and not pool.ref_counts[b] for b in found)
            if count + num_found_free > pool.num_free - len(self._running):
                return False
        return True

    def _read(
        self,
        request: Request,
        missing: Sequence[tuple[int, int, bytes]],
        counts: Sequence[int],
        columns: Sequence[Sequence[int | None]],
    ) -> None:
        """Read into new blocks, and keep those that have been found."""
        owned, num_in_memory = list[list[int]](), self._num_in_memory(request)
        for pool, count, found in zip(self._blocks.pools, counts, columns, strict=True):
            here = [block_id for block_id in found if block_id is not None and block_id != _ON_DISK]
            for block_id in here:
                pool.acquire(block_id)
            new = iter(pool.allocate(count, here[-1] if here else None))
            owned.append(
                [next(new) if block_id == _ON_DISK else block_id for block_id in found if block_id is not None]
            )
        places = [(group, owned[group][index], block_hash) for group, index, block_hash in missing]
        future = self._store.read(places)
        self._reads.append(_Read(request, places, owned, future, num_in_memory))

    def _finish(self, read: _Read) -> None:
        """Make what has been read findable, and give up its blocks."""
        self._num_free = []
        stored, failed = self._store.stored, dict[int, str]()
        if (error := read.future.exception() or self._store.place(read.places)) is None:
            for of_rank in read.future.result():
                failed.update(of_rank)
        elif isinstance(error, EngineDeadError):
            raise error
        else:
            failed = dict.fromkeys(range(len(read.places)), f"{type(error).__name__}: {error}")
        for index, (group, block_id, block_hash) in enumerate(read.places):
            stored[group].end_read(block_hash)
            if index in failed:
                self._store.discard([(group, block_hash)])
                self._store.count_failures(failed[index], f"a block on disk is {failed[index]}")
            elif stored[group].has(block_hash):  # not dropped meanwhile
                self._blocks.pools[group].set_hash(block_id, block_hash)
        if read.request is not None:
            num_more = self._num_in_memory(read.request) - read.num_in_memory
            self._blocks.disk.num_hit_tokens += max(0, num_more)  # others may have been evicted
        for pool, block_ids in zip(self._blocks.pools, read.columns, strict=True):
            pool.release(block_ids)

    def _num_in_memory(self, request: Request) -> int:
        return self._blocks.find_prefix(request.token_ids, request.block_root, keys=request.block_keys).num_tokens
