"""Admission: which waiting requests get a row and blocks in this step."""

from dataclasses import dataclass
from operator import add, gt

from octavo.scheduler.block_manager import BlockManager, CachedPrefix
from octavo.scheduler.encoder_schedule import EncoderSchedule
from octavo.scheduler.request import Request
from octavo.scheduler.request_queue import RequestQueue
from octavo.scheduler.running import RunningRows
from octavo.scheduler.step_builder import StepBuilder


@dataclass(frozen=True, slots=True)
class Rejection:
    """A request that did not fit, and the spare blocks then. Kept so that a long prompt is not rehashed every step."""

    request: Request
    num_spare_blocks: list[int]  # of each KV group


class Admission:
    """Owned by the scheduler, which decides when to admit; this class decides which requests."""

    def __init__(
        self,
        waiting: RequestQueue,
        running: RunningRows,
        blocks: BlockManager,
        encoder: EncoderSchedule,
        max_chunk: int,
    ) -> None:
        self._waiting = waiting
        self._running = running
        self._blocks = blocks
        self._encoder = encoder
        self._max_chunk = max_chunk
        self._rejection: Rejection | None = None

    def admit(self, builder: StepBuilder, budget: int, now_s: float) -> None:
        """Move waiting requests into rows while budget, rows and blocks last; stop at the first that does not fit."""
        while budget > 0 and self._running.has_room:
            request = self._waiting.peek(now_s)
            if request is None or self._is_still_rejected(request) or not self._try(request, builder, now_s, budget):
                break
            room = self._encoder.admit(request, budget) if request.limits_chunks else budget
            budget -= builder.add_admitted(request, room)

    @property
    def _num_spare_blocks(self) -> list[int]:
        """Free blocks minus one per running request, or admission would cause the next preemption."""
        return [num_free - len(self._running) for num_free in self._blocks.num_free]

    def _is_still_rejected(self, request: Request) -> bool:
        """True if there is no more room than last time. At the latest when nothing runs, all blocks are free."""
        rejection = self._rejection
        if rejection is None or rejection.request is not request:
            return False
        return all(now <= then for now, then in zip(self._num_spare_blocks, rejection.num_spare_blocks, strict=True))

    def _try(self, request: Request, builder: StepBuilder, now_s: float, budget: int) -> bool:
        """Give a request a row and blocks for all its known tokens, so that a prompt never stalls halfway.

        In a group with a sliding window, only for its first chunk: later chunks free as many blocks as they take.
        """
        if request.may_use_cached_prefix:
            root, keys = request.block_root, request.block_keys
            prefix = self._blocks.find_prefix(request.token_ids, root, builder.unwritten_states, keys)
        else:
            prefix = self._blocks.no_prefix(request.block_root)
        if request.limits_chunks and not self._encoder.can_begin(request, prefix.num_tokens, budget):
            return False
        num_needed = num_new_blocks = self._num_new_blocks(len(request.token_ids), prefix.num_tokens)
        if prefix.num_tokens:
            num_needed = list(map(add, num_new_blocks, self._blocks.num_unowned(prefix)))
        num_spare_blocks = self._num_spare_blocks
        if any(map(gt, num_needed, num_spare_blocks)):
            self._rejection = Rejection(request, num_spare_blocks)
            return False
        self._rejection = None
        self._waiting.pop(request)
        request.aged_class = self._waiting.aged_class(request, now_s)
        if prefix.num_tokens:
            self._blocks.acquire(prefix)
        if request.may_use_cached_prefix and not request.num_preemptions:  # hits on its own blocks do not count
            self._blocks.count_look_up(len(request.token_ids), prefix)
        self._running.add(
            request,
            [self._table(group, prefix, num_new) for group, num_new in enumerate(num_new_blocks)],
            num_cached_tokens=prefix.num_tokens,
            num_freed=prefix.first_columns,
            last_hash=prefix.last_hash,
        )
        return True

    def _num_new_blocks(self, num_tokens: int, num_cached_tokens: int) -> list[int]:
        """Return how many new blocks of each group a request needs in addition to its cached ones."""
        num_left = num_tokens - num_cached_tokens
        chunk = min(num_left, self._max_chunk)
        return [
            self._blocks.blocks_for(num_left if group.sliding_window is None else chunk, index)
            for index, group in enumerate(self._blocks.groups)
        ]

    def _table(self, group: int, prefix: CachedPrefix, num_new_blocks: int) -> list[int]:
        """Allocate; return a request's row of a group's block table."""
        cached = prefix.block_ids[group]
        new = self._blocks.allocate_blocks(num_new_blocks, cached[-1] if cached else None, group)
        return [self._blocks.null_block(group)] * prefix.first_columns[group] + cached + new
