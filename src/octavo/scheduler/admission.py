"""From waiting to running: who gets a row and blocks in this step."""

from dataclasses import dataclass

from octavo.scheduler.block_manager import BlockManager, CachedPrefix
from octavo.scheduler.request import Request
from octavo.scheduler.request_queue import RequestQueue
from octavo.scheduler.running import RunningRows
from octavo.scheduler.step_builder import StepBuilder


@dataclass(frozen=True, slots=True)
class Rejection:
    """Who did not fit, and how much room there was. Kept, so that a long prompt is not hashed again in every step."""

    request: Request
    num_spare_blocks: int


class Admission:
    """Owned by the scheduler, which says when; this one decides who."""

    def __init__(self, waiting: RequestQueue, running: RunningRows, blocks: BlockManager) -> None:
        self._waiting = waiting
        self._running = running
        self._blocks = blocks
        self._rejection: Rejection | None = None

    def admit(self, builder: StepBuilder, budget: int, now_s: float) -> None:
        """Move waiting requests into rows while budget, rows and blocks last; the first that does not fit ends it."""
        while budget > 0 and self._running.has_room:
            request = self._waiting.peek(now_s)
            if request is None or self._is_still_rejected(request) or not self._try(request, now_s):
                break
            budget -= builder.add_admitted(request, budget)

    @property
    def _num_spare_blocks(self) -> int:
        """Free blocks but one for each running request, or admission would cause the next preemption."""
        return self._blocks.num_free_blocks - len(self._running)

    def _is_still_rejected(self, request: Request) -> bool:
        """True when there is no more room than the last time. All room is there, at the latest, when nothing runs."""
        rejection = self._rejection
        return (
            rejection is not None
            and rejection.request is request
            and self._num_spare_blocks <= rejection.num_spare_blocks
        )

    def _try(self, request: Request, now_s: float) -> bool:
        """Give a request a row and the blocks of all its known tokens, so that a prompt never stops halfway."""
        prefix = CachedPrefix(block_ids=[], last_hash=request.block_root)
        if request.may_use_cached_prefix:
            prefix = self._blocks.find_prefix(request.token_ids, request.block_root)
        num_new_blocks = self._blocks.blocks_for(len(request.token_ids)) - prefix.num_blocks
        num_spare_blocks = self._num_spare_blocks
        if num_new_blocks + self._blocks.num_unowned(prefix) > num_spare_blocks:
            self._rejection = Rejection(request, num_spare_blocks)
            return False
        self._rejection = None
        self._waiting.pop(request)
        request.aged_class = self._waiting.aged_class(request, now_s)
        self._blocks.acquire(prefix)
        if request.may_use_cached_prefix and not request.num_preemptions:  # to find one's own blocks again is no merit
            self._blocks.count_look_up(len(request.token_ids), prefix)
        last_block = prefix.block_ids[-1] if prefix.block_ids else None
        block_ids = prefix.block_ids + self._blocks.allocate_blocks(num_new_blocks, after=last_block)
        self._running.add(request, block_ids, num_cached_blocks=prefix.num_blocks, last_hash=prefix.last_hash)
        return True
