"""The prefix cache on the ranks' disks, as the core sees it: what is there, and which blocks are written when.

Full blocks are written while the engine is idle, and what is left when it closes. Before that a busy engine writes a
few: beside steps that compute prompts, and those that are evicted from memory, for at most `_BUSY_SHARE` of the time.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from octavo.contracts.stored import BlocksWritten, StoreOpened
from octavo.errors import EngineDeadError
from octavo.scheduler.block_manager import BlockManager
from octavo.scheduler.stored_blocks import StoredBlocks

logger = logging.getLogger(__name__)

_BUSY_SHARE = 0.005  # of the time of a busy engine that may be spent on writing
_SAVED_UP_S = 0.05  # of that time, at most
_PROMPT_TOKENS = 64  # a step of at least as many delays others anyway
_BATCH = 16  # blocks of one call: a megabyte each, in a small model
_MAX_CALLS = 2  # at once
_MAX_NUMBER = 16  # engines with the same weights and options, each with files of its own
_CLOSE_S = 1.5  # for what is left; a process that is asked to exit has 5 s
_FIRST_BLOCK_S = 0.001  # assumed time to write a block

Block = tuple[int, int, bytes]  # group, block, hash


@dataclass(frozen=True, slots=True)
class _Write:
    places: Sequence[tuple[int, int, bytes]]  # group, slot, hash
    expected_s: float
    future: Future[list[Any]]


class PrefixStore:
    """Owned by the scheduler's thread. `call` is `Executor.call`; `blocks` are those in memory."""

    def __init__(self, call: Callable[..., Future[list[Any]]], blocks: BlockManager, max_bytes: int) -> None:
        self._call, self._blocks, self._max_bytes = call, blocks, max_bytes
        self.stored: Sequence[StoredBlocks] = ()  # of each group; none: not open
        self._slot_bytes: Sequence[int] = ()  # of each group, on all ranks together
        self._is_tried = self._is_full = self._is_placed = False
        self._waiting: deque[tuple[int, Block]] = deque()  # with their columns: how deep in their context they are
        self._evicted: list[Block] = []  # since the last step
        self._recent: list[dict[bytes, None]] = [{} for _ in blocks.pools]  # of each group: written since none waited
        self._writes: deque[_Write] = deque()
        self.is_unsure: Callable[[int, int], bool] = lambda group, block_id: False  # steps in flight fill it, or fail
        self._block_s = _FIRST_BLOCK_S
        self._allowed_s, self._looked_s = _SAVED_UP_S, time.monotonic()
        self._said: set[str] = set()

    @property
    def is_open(self) -> bool:
        return bool(self.stored)

    def open(self) -> None:
        """Open the ranks' files, once, and look at what they have; the reason is logged if they cannot be used."""
        if self._is_tried:
            return
        self._is_tried = True
        start_s = time.perf_counter()
        for number in range(_MAX_NUMBER):
            replies = self._call("open_block_store", number, self._max_bytes).result()
            opened = [msgspec.convert(each, StoreOpened) for each in replies]
            states = {each.state for each in opened}
            if states == {"open"}:
                self._adopt(opened, time.perf_counter() - start_s)
                return
            self._call("close_block_store").result()
            for each in opened:
                if each.state == "refused":
                    self.count_failures("refused", each.reason)
                    return
                if each.state == "unsupported":
                    logger.info("no prefix cache on disk: %s", each.reason)
                    return
        logger.warning("no prefix cache on disk: %d other engines use all files for this model", _MAX_NUMBER)

    def _adopt(self, opened: Sequence[StoreOpened], took_s: float) -> None:
        pools = self._blocks.pools
        self._slot_bytes = [sum(of_group) for of_group in zip(*(each.slot_bytes for each in opened), strict=True)]
        in_memory = sum(pool.num_blocks * size for pool, size in zip(pools, self._slot_bytes, strict=True))
        counts = [int(pool.num_blocks * (self._max_bytes / in_memory)) for pool in pools]
        for each in opened:
            for what, count in each.damaged.items():
                self.count_failures(what, f"{count} blocks on disk are {what}", count)
        if not all(counts):
            logger.warning("no prefix cache on disk: %d bytes are less than a block of each kind", self._max_bytes)
            self._call("close_block_store").result()
            return
        self._call("limit_block_store", counts).result()
        self._is_placed = opened[0].is_placed
        for group, (pool, count) in enumerate(zip(pools, counts, strict=True)):
            first, *others = (each.found[group] for each in opened)
            on_all = set(first).intersection(*others)
            self.stored = (*self.stored, StoredBlocks(count, [place for place in first if place in on_all]))
            pool.on_evicted = partial(self._on_evicted, group)
            pool.on_forgotten = partial(self._on_forgotten, group)
        self._blocks.on_hashed = self._on_hashed
        self._count_bytes()
        logger.info(
            "prefix cache on disk: %d blocks found, %.1f of %.1f GB, in %.3f s",
            sum(map(len, self.stored)), self._blocks.disk.num_bytes / 1e9, self._max_bytes / 1e9, took_s,
        )  # fmt: skip

    def _on_hashed(self, group: int, column: int, block_id: int, block_hash: bytes) -> None:
        if not self.stored[group].knows(block_hash):
            self._waiting.append((column, (group, block_id, block_hash)))

    def _on_evicted(self, group: int, block_id: int, block_hash: bytes) -> None:
        if not self.stored[group].knows(block_hash) and not self.is_unsure(group, block_id):
            self._evicted.append((group, block_id, block_hash))

    def _on_forgotten(self, group: int, block_hash: bytes) -> None:
        self.discard([(group, block_hash)])

    # -- writing ------------------------------------------------------------------------------------------------

    def save_evicted(self) -> None:
        """Have ranks copy some of the evicted blocks, before anything overwrites them."""
        evicted, self._evicted = self._evicted, []
        if evicted and not self._is_full:
            self._settle()
            self._write(evicted[: self._num_allowed()])

    def after_step(self, num_tokens: int) -> None:
        """A step of so many tokens has ended, and none is in flight: perhaps write some blocks beside the next one."""
        if not self.is_open:
            return
        if self._writes:
            self._settle()
        if len(self._waiting) > 2 * self._fewest_slots:
            self._drop_deepest()
        if num_tokens >= _PROMPT_TOKENS and self._waiting and not self._writes and not self._is_full:
            self._write(self._take_waiting(min(self._num_allowed(), _BATCH)))

    def work_idle(self) -> bool:
        """Write some blocks, as nothing else is to be done; return whether there are more."""
        if not self.is_open:
            return False
        self._settle()
        self._drop_deepest()
        taken = self._take_waiting(_BATCH) if len(self._writes) < _MAX_CALLS else []
        self._write(taken)
        if self._writes and not taken:
            wait_for(self._writes[0].future, 0.002)  # a request may come meanwhile
        return bool(self._writes)

    def close(self) -> None:
        """Write what is left, for a moment, and close the files."""
        end_s = time.monotonic() + _CLOSE_S
        while time.monotonic() < end_s and self.work_idle():
            pass
        if self.is_open:
            self._call("close_block_store").result()
            self.stored = ()

    def _num_allowed(self) -> int:
        """Return how many blocks a busy engine may write now."""
        now_s = time.monotonic()
        self._allowed_s = min(_SAVED_UP_S, self._allowed_s + _BUSY_SHARE * (now_s - self._looked_s))
        self._looked_s = now_s
        return max(0, int(self._allowed_s / self._block_s))

    def _take_waiting(self, count: int) -> list[Block]:
        """Take up to `count` blocks to write that are still in memory."""
        taken: list[Block] = []
        while self._waiting and len(taken) < count and not self._is_full:
            _, block = self._waiting.popleft()
            if self._is_wanted(*block):
                taken.append(block)
        return taken

    @property
    def _fewest_slots(self) -> int:
        return min((stored.num_slots for stored in self.stored), default=0)

    def _drop_deepest(self) -> None:
        """Keep no more blocks waiting than there are slots: the beginnings of contexts, which others may share."""
        if len(self._waiting) <= self._fewest_slots:
            return
        for group, stored in enumerate(self.stored):
            own = [each for each in self._waiting if each[1][0] == group and self._is_wanted(*each[1])]
            if len(own) > stored.num_slots:
                own = sorted(own, key=lambda each: each[0])[: stored.num_slots]
            kept = {block_hash for _, (_, _, block_hash) in own}
            self._waiting = deque(each for each in self._waiting if each[1][0] != group or each[1][2] in kept)

    def _is_wanted(self, group: int, block_id: int, block_hash: bytes) -> bool:
        return self._blocks.pools[group].is_hashed(block_id, block_hash) and not self.stored[group].knows(block_hash)

    def _write(self, blocks: Sequence[Block]) -> None:
        """Have all ranks copy blocks now, and write them beside what follows."""
        places, block_ids = [], []
        for group, block_id, block_hash in blocks:
            if self.stored[group].knows(block_hash):
                continue
            slot = self.stored[group].begin_write(block_hash, self._recent[group])
            if slot is not None:  # else there is no room for so many at once
                places.append((group, slot, block_hash))
                block_ids.append(block_id)
                self._recent[group][block_hash] = None
        if not places:
            return
        groups, slots, hashes = (list(column) for column in zip(*places, strict=True))
        expected_s = len(places) * self._block_s
        self._allowed_s -= expected_s
        future = self._call("save_blocks", groups, block_ids, slots, hashes)
        self._writes.append(_Write(places, expected_s, future))

    def _settle(self) -> None:
        """Count what ranks have written."""
        while self._writes and self._writes[0].future.done():
            write = self._writes.popleft()
            took_s, problem = 0.0, ""
            if (error := write.future.exception()) is None:
                written = [msgspec.convert(each, BlocksWritten) for each in write.future.result()]
                took_s = max(each.took_s for each in written)
                problem = next((each.error for each in written if each.error), "")
            elif isinstance(error, EngineDeadError):
                raise error
            else:
                problem = f"{type(error).__name__}: {error}"
            for group, slot, block_hash in write.places:
                self.stored[group].end_write(block_hash, slot, is_stored=not problem)
            if problem:
                self._is_full = True
                self._drop([place[:2] for place in write.places])  # some ranks may have written them
                self.count_failures("not written", f"blocks are not written any more: {problem}", len(write.places))
            else:
                self._blocks.disk.num_saved_blocks += len(write.places)
                self._block_s += 0.2 * (took_s / len(write.places) - self._block_s)
                self._allowed_s += write.expected_s - took_s
            self._count_bytes()
        is_much = any(2 * len(recent) > of.num_slots for of, recent in zip(self.stored, self._recent, strict=True))
        if is_much or not (self._waiting or self._writes):
            for stored, recent in zip(self.stored, self._recent, strict=True):
                for block_hash in reversed(recent):  # a prefix counts as used later than its tails
                    stored.touch(block_hash)
                recent.clear()

    # -- what is no longer wanted -------------------------------------------------------------------------------

    def discard(self, blocks: Sequence[tuple[int, bytes]]) -> None:
        """Forget blocks, given as (group, hash), on all ranks and for good: their contents are not reliable."""
        slots = [(group, slot) for group, each in blocks if (slot := self.stored[group].drop(each)) is not None]
        self._drop(slots)

    def discard_all(self) -> None:
        """Forget every block."""
        self._waiting.clear()
        self._drop([(group, slot) for group, stored in enumerate(self.stored) for slot in stored.drop_all()])

    def _drop(self, slots: Sequence[tuple[int, int]]) -> None:
        if slots:
            self._call("drop_blocks", [group for group, _ in slots], [slot for _, slot in slots])
            self._count_bytes()

    def count_failures(self, what: str, sentence: str, count: int = 1) -> None:
        """Count blocks or files that are not used; log the first of each kind."""
        self._blocks.disk.failures[what] += count
        if what not in self._said:
            self._said.add(what)
            logger.warning("prefix cache on disk: %s; prompts are computed instead. Said once.", sentence)

    def _count_bytes(self) -> None:
        used = (len(stored) * size for stored, size in zip(self.stored, self._slot_bytes, strict=True))
        self._blocks.disk.num_bytes = sum(used)

    # -- waiting ------------------------------------------------------------------------------------------------

    def read(self, places: Sequence[tuple[int, int, bytes]]) -> Future[list[Any]]:
        """Have all ranks read blocks, given as (group, block, hash), into memory that nobody else uses.

        Of each rank, the result is a list of those it could not read: (index, what was wrong).
        """
        groups, block_ids, hashes = (list(column) for column in zip(*places, strict=True))
        slots = [self.stored[group].begin_read(block_hash) for group, _, block_hash in places]
        self.save_evicted()  # perhaps these very blocks had other contents; the slots to read stay
        return self._call("read_blocks", groups, block_ids, slots, hashes)

    def place(self, places: Sequence[tuple[int, int, bytes]]) -> BaseException | None:
        """Have all ranks put blocks that they have read, given as (group, block, hash), where steps find them.

        Returns what went wrong.
        """
        if not self._is_placed:
            return None
        groups, block_ids, _ = (list(column) for column in zip(*places, strict=True))
        return self._call("place_blocks", groups, block_ids).exception()

    def check_integrity(self) -> None:
        for stored in self.stored:
            stored.check_integrity()


def wait_for(future: Future[Any], timeout_s: float) -> None:
    """Wait for a call, for at most `timeout_s`. On ranks in other processes, this is what receives.

    Raises EngineDeadError: a rank has died.
    """
    try:
        error = future.exception(timeout_s)
    except TimeoutError:
        return
    if isinstance(error, EngineDeadError):
        raise error
