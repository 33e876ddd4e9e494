"""Waiting requests: their order, and which of them get a row and blocks."""

import heapq
from collections.abc import Iterator
from operator import add, gt

from octavo.sampling_params import RequestPriority
from octavo.scheduler.encoder_schedule import EncoderSchedule
from octavo.scheduler.request import Request
from octavo.scheduler.running import RunningRows
from octavo.scheduler.step_builder import StepBuilder

_MAX_DEAD_ENTRIES = 64  # in addition to one per live entry


class RequestQueue:
    """One heap per priority class, ordered by arrival; heads are compared, and waiting promotes a head class by class.

    Only heads are inspected, so a long queue costs a step nothing. A preempted request returns with its old arrival
    index, at the front of its class. Removal is lazy: finished entries are skipped at the top.
    """

    def __init__(self, ageing_s: float) -> None:
        self._ageing_s = ageing_s
        self._classes: list[list[tuple[int, Request]]] = [[] for _ in RequestPriority]
        self._num_removed = 0

    def __len__(self) -> int:
        return sum(map(len, self._classes)) - self._num_removed

    def enqueue(self, request: Request) -> None:
        heapq.heappush(self._classes[request.priority], (request.arrival_index, request))

    def remove(self, request: Request) -> None:
        """Remove a waiting request, whose status must be final already."""
        assert request.status.is_final
        self._num_removed += 1
        if self._num_removed > len(self) + _MAX_DEAD_ENTRIES:  # aborted while nothing is admitted
            for entries in self._classes:
                entries[:] = [entry for entry in entries if not entry[1].status.is_final]
                heapq.heapify(entries)
            self._num_removed = 0

    def peek(self, now_s: float) -> Request | None:
        """Return the request to admit next: the best (aged class, arrival) among the heads."""
        heads = [head for head in map(self._head, self._classes) if head is not None]
        return min(heads, key=lambda request: self._aged_order(request, now_s), default=None)

    def pop(self, request: Request) -> None:
        """Remove the request that `peek` returned."""
        _, popped = heapq.heappop(self._classes[request.priority])
        assert popped is request

    def aged_class(self, request: Request, now_s: float) -> int:
        """Return a request's current class: one better for each `ageing_s` since its arrival."""
        waited_s = max(0.0, now_s - request.message.arrival_time_s)
        return request.priority - int(waited_s / self._ageing_s)

    def in_order(self, now_s: float) -> Iterator[Request]:
        """Yield all waiting requests, in order. For debugging and tests; sorts."""
        waiting = [request for entries in self._classes for _, request in entries if not request.status.is_final]
        yield from sorted(waiting, key=lambda request: self._aged_order(request, now_s))

    def _head(self, entries: list[tuple[int, Request]]) -> Request | None:
        while entries and entries[0][1].status.is_final:
            heapq.heappop(entries)
            self._num_removed -= 1
        return entries[0][1] if entries else None

    def _aged_order(self, request: Request, now_s: float) -> tuple[int, int]:
        return self.aged_class(request, now_s), request.arrival_index


class Admission:
    """Decides which waiting requests get a row and blocks in a step; the scheduler decides when to admit."""

    def __init__(self, waiting: RequestQueue, running: RunningRows, encoder: EncoderSchedule, max_chunk: int) -> None:
        self._waiting, self._running, self._blocks = waiting, running, running.blocks
        self._encoder, self._max_chunk = encoder, max_chunk
        # The last request that did not fit, and the spare blocks of each KV group then: a long prompt is not hashed
        # again every step.
        self.rejected: Request | None = None
        self._num_spare_then: list[int] = []

    def admit(self, builder: StepBuilder, budget: int, now_s: float) -> None:
        """Move waiting requests into rows while budget, rows and blocks last; stop at the first that does not fit."""
        while budget > 0 and self._running.has_room:
            request = self._waiting.peek(now_s)
            if request is None:
                break
            # Not again without more room than last time. At the latest when nothing runs, all blocks are free.
            if request is self.rejected and not any(map(gt, self._num_spare_blocks, self._num_spare_then)):
                break
            if not self._try(request, builder, now_s, budget):
                break
            room = self._encoder.admit(request, budget) if request.limits_chunks else budget
            budget -= builder.add_admitted(request, room)

    def reserve(self, budget: int, now_s: float) -> int:
        """Return how many tokens of a step running prompts leave to the next waiting request.

        None, unless it is of a better class than a prompt that is being computed, which could take all steps until its
        end: then as many as it needs, and at most half of the budget.
        """
        running = self._running
        request = self._waiting.peek(now_s) if running.has_room else None
        if request is None or request is self.rejected:
            return 0
        rows = running.active
        prompts = rows[running.num_known[rows] - running.num_computed[rows] > 1]
        if not len(prompts):
            return 0
        worst = running.request_at(int(prompts[-1]))
        if worst.aged_class <= self._waiting.aged_class(request, now_s):
            return 0
        return max(0, min(len(request.token_ids), budget // 2, budget - len(running) - 1))

    @property
    def _num_spare_blocks(self) -> list[int]:
        """Free blocks minus one per running request, or admission would cause the next preemption."""
        return [num_free - len(self._running) for num_free in self._blocks.num_free]

    def _try(self, request: Request, builder: StepBuilder, now_s: float, budget: int) -> bool:
        """Give a request a row and blocks for all its known tokens, so that a prompt never stalls halfway.

        In a group with a sliding window, only for its first chunk: later chunks free as many blocks as they take.
        """
        blocks, num_tokens = self._blocks, len(request.token_ids)
        may_use_prefix = not request.message.reads_whole_prompt
        prefix = blocks.find_prefix(
            request.token_ids[: None if may_use_prefix else 0],
            request.block_root,
            builder.unwritten_states,
            request.block_keys,
        )
        if request.limits_chunks and not self._encoder.can_begin(request, prefix.num_tokens, budget):
            return False
        num_left = num_tokens - prefix.num_tokens
        chunk = min(num_left, self._max_chunk)
        num_needed = num_new_blocks = [
            blocks.blocks_for(num_left if group.sliding_window is None else chunk, index)
            for index, group in enumerate(blocks.groups)
        ]
        if prefix.num_tokens:
            num_needed = list(map(add, num_new_blocks, blocks.num_unowned(prefix)))
        num_spare_blocks = self._num_spare_blocks
        if any(map(gt, num_needed, num_spare_blocks)):
            self.rejected, self._num_spare_then = request, num_spare_blocks
            return False
        self.rejected = None
        self._waiting.pop(request)
        request.aged_class = self._waiting.aged_class(request, now_s)
        if prefix.num_tokens:
            blocks.acquire(prefix)
        if may_use_prefix and not request.num_preemptions:  # hits on its own blocks do not count
            blocks.num_prefix_queries_total += num_tokens
            blocks.num_prefix_hits_total += prefix.num_tokens
        tables = []
        for group, (cached, num_new) in enumerate(zip(prefix.block_ids, num_new_blocks, strict=True)):
            new = blocks.allocate_blocks(num_new, group, cached[-1] if cached else None)
            tables.append([blocks.null_block(group)] * prefix.first_columns[group] + cached + new)
        self._running.insert(request, tables, prefix)
        return True
