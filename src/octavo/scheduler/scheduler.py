"""The scheduler: which requests compute how many tokens in the next step.

There is no prefill phase and no decode phase. A request has known tokens and computed tokens; a step lets the
computed ones catch up, within one token budget. Running requests come first, then waiting ones in order of (priority,
arrival). If blocks run out, the worst running request is preempted: its blocks are freed, and it is recomputed later
from the front of its class. `schedule` may run again before the last step's output has arrived: the token that a step
will sample counts immediately, as a token in flight.

With `num_batches` in flight, one per pipeline stage, a row waits for its last token instead, and the rows are spread
over the batches (`running_scheduler`).

What lives elsewhere: progress of running requests in `running`, what they compute next in `running_scheduler`, the
waiting order in `request_queue`, admission in `admission`, images to encode in `encoder_schedule`, blocks in
`block_manager`, the step being built in `step_builder`, its output in `step_update`, finish conditions in `stop`,
requests that wait for a grammar or run under one in `constrained`, those with an adapter in `adapted`, the two messages
in `contracts`.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

from octavo.config.engine import SchedulerConfig
from octavo.contracts.engine import EngineCoreOutputs, EngineCoreRequest, FinishedRequest, SchedulerStats
from octavo.contracts.grammar import Grammars
from octavo.contracts.schedule import ModelRunnerOutput, SchedulerOutput
from octavo.errors import UnsupportedModelError
from octavo.scheduler.adapted import AdaptedRequests, AdapterStore
from octavo.scheduler.admission import Admission
from octavo.scheduler.block_hash import vision_keys
from octavo.scheduler.block_manager import BlockManager
from octavo.scheduler.busy_time import BusyTime
from octavo.scheduler.constrained import ConstrainedRequests
from octavo.scheduler.encoder_schedule import EncoderSchedule
from octavo.scheduler.pace import FEWEST_TOKENS, StepPace
from octavo.scheduler.request import Request, RequestStatus
from octavo.scheduler.request_queue import RequestQueue
from octavo.scheduler.running import RunningRows
from octavo.scheduler.running_scheduler import RunningScheduler
from octavo.scheduler.speculation import Speculation
from octavo.scheduler.step_builder import StepBuilder, StepInFlight, hash_released
from octavo.scheduler.step_update import StepUpdate
from octavo.scheduler.stop import check_stop, finished, grammar_complete
from octavo.scheduler.stop_ids import StopIdTable
from octavo.speculative.drafters import Drafter


class Scheduler:
    """Owned by the thread that first uses it. Handles tokens, never text or tensors."""

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockManager,
        max_model_len: int,
        *,
        epoch: int = 0,
        grammars: Grammars | None = None,
        num_batches: int = 1,
        adapters: AdapterStore | None = None,
        num_adapter_slots: int = 0,
        drafter: Drafter | None = None,
        adapts_drafts: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if drafter is not None and blocks.recurrent:
            raise UnsupportedModelError(
                f"speculative decoding with {type(drafter).__name__}: a recurrent state cannot roll back rejected "
                f"drafts, and {len(blocks.recurrent)} of this model's {blocks.num_groups} KV groups are recurrent"
            )
        self.blocks = blocks
        self.waiting = RequestQueue(config.ageing_s)
        self.running = RunningRows(config.max_num_seqs, max_model_len, blocks.block_size, blocks.block_sizes)
        self._constrained = ConstrainedRequests(grammars, self.running)
        self._adapted = AdaptedRequests(adapters, num_adapter_slots, config.ageing_s) if adapters is not None else None
        self._encoder = EncoderSchedule(self.running, config.max_num_batched_tokens, config.encoder_cache_tokens)
        self._admission = Admission(self.waiting, self.running, blocks, self._encoder, config.max_num_batched_tokens)
        self._running_scheduler = RunningScheduler(self.running, blocks, num_batches, has_drafts=drafter is not None)
        self._speculation: Speculation | None = None
        if drafter is not None:
            self._speculation = Speculation(drafter, self.running, blocks, self._constrained, is_adaptive=adapts_drafts)
        fewest = max(FEWEST_TOKENS, config.largest_whole_span)
        self._pace = StepPace(config.max_num_batched_tokens, config.step_target_s, clock, fewest)
        self.finished: dict[str, FinishedRequest] = {}  # ended, but not reported in an `EngineCoreOutputs` yet
        self._requests: dict[str, Request] = {}  # all waiting and running ones
        self._forgotten_req_ids: list[str] = []  # rows that the worker must drop before the next step
        self._in_flight: deque[StepInFlight] = deque()
        self._max_model_len = max_model_len
        self._max_chunk = config.max_num_batched_tokens
        self._epoch = epoch
        self._clock = clock
        self._busy_time = BusyTime(clock)
        self._num_arrived = self._num_steps = self._num_preemptions = 0
        self._stop_ids = StopIdTable()
        self._owner: int | None = None

    # -- requests in and out ------------------------------------------------------------------------------------

    def add_request(self, message: EngineCoreRequest) -> None:
        """Queue a request that the frontend has validated, including that it can fit."""
        self._assert_owner()
        assert message.request_id not in self._requests, f"request {message.request_id!r} is here already"
        request = Request(message, self._num_arrived, self._max_model_len)
        assert request.num_prompt_tokens
        assert len(request.token_ids) < request.max_num_tokens <= self._max_model_len
        assert self.blocks.can_ever_fit(request.max_num_tokens, self._max_chunk)
        if request.vision:
            self._encoder.check(request)
            request.block_keys = vision_keys(request.vision, self.blocks.block_size)
        self._num_arrived += 1
        self._requests[message.request_id] = request
        self._stop_ids.add(request.stop_token_ids)
        if request.is_constrained:
            self._constrained.hold_back(request)
        else:
            self._queue(request)

    def _queue(self, request: Request) -> None:
        """Queue a request, unless it must wait for its adapter."""
        if request.adapter is None or self._known_adapters.admit(request):
            request.status = RequestStatus.WAITING
            self.waiting.add(request)

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests now, whatever their state. Unknown ids are ignored: those have already ended."""
        self._assert_owner()
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._end(request, finished(request, RequestStatus.ABORTED), RequestStatus.ABORTED)

    def is_finished(self) -> bool:
        """True if no request waits or runs and no step is in flight."""
        return not (self._requests or self._in_flight)

    @property
    def only_waits(self) -> bool:
        """True if a step would do nothing until a grammar is compiled or an adapter loaded."""
        return 0 < self._num_held_back == len(self._requests)

    @property
    def _num_held_back(self) -> int:
        num_parked = 0 if self._adapted is None else self._adapted.num_parked
        return self._constrained.num_pending + num_parked

    def get_ready_requests(self) -> list[Request]:
        """Return the waiting requests in the order in which they would be admitted now."""
        return list(self.waiting.in_order(self._clock()))

    # -- a step: the scheduler output ---------------------------------------------------------------------------

    def schedule(self) -> SchedulerOutput:
        """Schedule the next step. Blocks, rows and progress are updated as if it had completed."""
        return self._commit(self._plan_step())

    def schedule_ahead(self) -> SchedulerOutput | None:
        """Schedule a step after those in flight; None if nothing can be computed before the output of one arrives."""
        builder = self._plan_step()
        return self._commit(builder) if builder.num_tokens else None

    def _plan_step(self) -> StepBuilder:
        self._assert_owner()
        self._queue_compiled()
        if self._adapted is not None:
            self._queue_adapted(self._adapted)
        self._encoder.begin_step()
        builder = StepBuilder(self.running, self.blocks, sends_tokens=self._running_scheduler.sends_tokens)
        budget, num_preemptions = self._pace.budget(self.running), self._num_preemptions
        self._schedule_running(builder, budget)
        if self._num_preemptions == num_preemptions:
            self._admission.admit(builder, budget - builder.num_tokens, self._clock())
        if self._speculation is not None:
            self._speculation.add_drafts(builder, budget - builder.num_tokens)
        return builder

    def _commit(self, builder: StepBuilder) -> SchedulerOutput:
        forgotten, self._forgotten_req_ids = self._forgotten_req_ids, []
        self._num_steps += 1
        step = builder.build(
            self._num_steps,
            forgotten,
            self._clock(),
            self._constrained.token_masks,
            *self._encoder.take(),
            adapter_fills=() if self._adapted is None else self._adapted.take_fills(),
        )
        self._in_flight.append(step)
        return step.output

    def _queue_compiled(self) -> None:
        """Queue requests whose grammar has compiled; end those whose grammar failed to."""
        for request, error in self._constrained.take_compiled():
            if error is None:
                self._queue(request)
            else:
                self._fail(request, str(error), type(error).__name__)

    def _queue_adapted(self, adapted: AdaptedRequests) -> None:
        """Queue requests whose adapter has got a slot; end those whose adapter cannot be loaded."""
        ready, failures = adapted.take_ready(self._clock())
        for request in ready:
            self.waiting.add(request)
        for request, error in failures:
            self._fail(request, str(error), type(error).__name__)

    def _schedule_running(self, builder: StepBuilder, budget: int) -> None:
        """Schedule running rows and allocate their blocks, preempting the worst until the blocks suffice."""
        if self.blocks.windowed:
            builder.free_behind_windows(self._in_flight)
        running_tokens = self._running_scheduler.next(budget)
        while not self.blocks.have_room(running_tokens.short):
            worst = self.running.worst
            assert worst.row is not None
            builder.table_changes.drop(worst.row)
            self._preempt(worst)
            running_tokens = self._running_scheduler.next(budget)
        for group, rows, num_missing in running_tokens.short:
            for row, num_blocks in zip(rows, num_missing, strict=True):
                builder.add_blocks(row, num_blocks, group)
        builder.add_running(*self._encoder.limit_running(running_tokens.rows, running_tokens.counts))

    def _preempt(self, request: Request, *, is_sound: bool = True) -> None:
        """Free a running request's blocks and row. Its sampled tokens stay known; their KV is recomputed."""
        self._release(request, RequestStatus.PREEMPTED, is_sound=is_sound)
        request.num_preemptions += 1
        self._num_preemptions += 1
        self.waiting.add(request)

    def _release(self, request: Request, status: RequestStatus, *, is_sound: bool) -> None:
        """Release a running request's row and blocks. Sound blocks stay findable; others lose their hash."""
        row = request.row
        assert row is not None
        if is_sound:
            hash_released(row, self.running, self.blocks, self._in_flight)
        else:
            self._forget_blocks(request, row)
        self._encoder.release(row)
        for group, block_ids in enumerate(self.running.remove(request, status)):
            self.blocks.free_blocks(block_ids, group)
        self._forgotten_req_ids.append(request.request_id)

    def _forget_blocks(self, request: Request, row: int) -> None:
        """Make a row's blocks unfindable, including those freed when a sliding window moved past them."""
        for group, block_ids in enumerate(self.running.held_blocks(row)):
            self.blocks.forget_blocks(block_ids, group)
        if self.blocks.windowed:
            hashed = self.running.tokens[row, : self.running.num_hashed[row]]
            self.blocks.forget_prefix(hashed, request.block_root, request.block_keys)

    # -- a step: the model output -------------------------------------------------------------------------------

    def update_from_output(self, output: SchedulerOutput, model_output: ModelRunnerOutput) -> EngineCoreOutputs:
        """Append the tokens a step sampled, end finished requests, and return what is new."""
        self._assert_owner()
        step = self._in_flight.popleft()
        assert step.output is output, "outputs arrive in the order of their steps"
        if output.adapter_fills:
            self._known_adapters.confirm(output.adapter_fills)
        took_s = self._pace.record(step.output, step.scheduled_s)
        update = StepUpdate.of(step, model_output, self.running)
        update = update.cut(self._num_until_stop)
        if self._speculation is not None:
            self._speculation.record(update, output.total_num_scheduled_tokens, took_s, model_output.draft_passes)
        update.append_tokens(self.running)
        self._advance_grammars(update)
        at_limit = update.num_known >= self.running.limit[update.rows]
        may_end = at_limit | self._stop_ids.candidates(update.last_token_ids)
        for index in may_end.nonzero()[0].tolist():
            if update.req_ids[index] in self._requests:  # not already ended by its grammar
                self._end_if_stopped(int(update.rows[index]), int(update.last_token_ids[index]))
        for request_id, error in update.errors.items():
            self._fail(self._requests[request_id], error)
        self._busy_time.record(model_output.compute_s, step.scheduled_s, has_more=bool(self._requests))
        return self._outputs(update, step)

    def _num_until_stop(self, request_id: str, position: int, token_ids: list[int]) -> int:
        """Return how many of several new tokens, the first at `position`, a request keeps until one of them ends it."""
        request = self._requests[request_id]
        if self._speculation is not None:
            token_ids = token_ids[: self._speculation.num_allowed(request, token_ids)]
        for count, token_id in enumerate(token_ids, start=1):
            if check_stop(request, token_id, position + count) is not None:
                return count
        return len(token_ids)

    def _advance_grammars(self, update: StepUpdate) -> None:
        """End requests whose constraint is complete. They count as stopped, even at the length limit."""
        grammars = self._constrained.advance(update)
        for request_id in grammars.complete:
            request, index = self._requests[request_id], update.req_ids.index(request_id)
            report = check_stop(request, int(update.last_token_ids[index]), int(update.num_known[index]))
            if report is None or report.finish_reason != RequestStatus.STOPPED.value:
                report = grammar_complete(request)
            self._end(request, report, RequestStatus.STOPPED)
        for request_id, error in grammars.failed.items():
            self._fail(self._requests[request_id], str(error), type(error).__name__)

    def _end_if_stopped(self, row: int, token_id: int) -> None:
        request = self.running.request_at(row)
        report = check_stop(request, token_id, int(self.running.num_known[row]))
        if report is not None:
            self._end(request, report, RequestStatus(report.finish_reason))

    def fail_step(self, output: SchedulerOutput, error: str) -> None:
        """End the requests of the oldest step in flight, whose forward raised. Later steps continue.

        Requests that share blocks which the step should have filled are recomputed. The worker may or may not have
        dropped the step's finished requests, so their ids are sent again: dropping an unknown request must be a no-op.
        """
        self._assert_owner()
        step = self._in_flight.popleft()
        assert step.output is output, "outputs arrive in the order of their steps"
        for unsure in (step, *self._in_flight):  # hashes of later steps may depend on unfilled blocks
            for group, block_id in unsure.hashed_blocks:
                self.blocks.forget_blocks([block_id], group)
        self._encoder.forget(output.scheduled_encoder_inputs)
        self._forgotten_req_ids += [req_id for req_id in output.finished_req_ids if not self._is_running(req_id)]
        if output.adapter_fills:
            self._known_adapters.repeat(output.adapter_fills)
        for request in step.requests(self.running):
            self._fail(request, error)
        for request in self.running.holders(step.hashed_blocks):
            self._preempt(request, is_sound=False)
        slots = {fill.slot for fill in output.adapter_fills}  # perhaps not filled when later steps ran
        for request in [self.running.request_at(row) for row in self.running.active.tolist()] if slots else ():
            if request.adapter_slot in slots:
                self._preempt(request, is_sound=False)

    def _is_running(self, request_id: str) -> bool:
        request = self._requests.get(request_id)
        return request is not None and request.row is not None

    def take_finished(self) -> EngineCoreOutputs:
        """Report ends that no step's output carries: aborts and failed steps."""
        return self._outputs(StepUpdate.nothing(), None)

    def _fail(self, request: Request, error: str, error_type: str | None = None) -> None:
        """End one request as failed. Its blocks become unfindable, because their contents are not reliable."""
        report = finished(request, RequestStatus.FAILED, error=error, error_type=error_type)
        self._end(request, report, RequestStatus.FAILED)

    def _end(self, request: Request, report: FinishedRequest, status: RequestStatus) -> None:
        before = request.status
        if request.row is not None:
            self._release(request, status, is_sound=status is not RequestStatus.FAILED)
        else:
            request.status = status
            if not before.is_held_back:
                self.waiting.remove(request)
        self._constrained.forget(request)
        if request.adapter is not None:
            self._known_adapters.forget(request, before)
        if self._speculation is not None:
            self._speculation.forget(request.request_id)
        del self._requests[request.request_id]
        self.finished[request.request_id] = report

    def _outputs(self, update: StepUpdate, step: StepInFlight | None) -> EngineCoreOutputs:
        reports, self.finished = self.finished, {}
        spec_decode = (
            self._speculation.stats() if self._speculation is not None and update.several is not None else None
        )
        return update.outputs(self._epoch, step, reports, self.running, self.stats(), spec_decode)

    # -- introspection ------------------------------------------------------------------------------------------

    def stats(self) -> SchedulerStats:
        """Return a snapshot for logs and metrics."""
        pool = self.blocks.fullest_pool
        return SchedulerStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting) + self._num_held_back,
            num_deferred=self._num_held_back,
            num_free_blocks=pool.num_free,
            num_blocks=pool.num_blocks,
            num_preemptions_total=self._num_preemptions,
            num_prefix_queries_total=self.blocks.num_prefix_queries_total,
            num_prefix_hits_total=self.blocks.num_prefix_hits_total,
            step_s_total=self._busy_time.step_s,
            compute_s_total=self._busy_time.compute_s,
        )

    def check_integrity(self) -> None:
        """Assert that reference counts match owners and every row is consistent. Slow: call it while idle."""
        self.blocks.check_integrity()
        self.running.check_integrity()
        self._encoder.check_integrity()
        for group, pool in enumerate(self.blocks.pools):
            owners = np.zeros(pool.num_blocks, dtype=np.int64)
            for row in self.running.active.tolist():
                np.add.at(owners, self.running.held_blocks(row)[group], 1)
            assert owners.tolist() == [pool.ref_count(block_id) for block_id in range(pool.num_blocks)]
        if self._adapted is not None:
            self._adapted.check_integrity()
        assert len(self._requests) == len(self.running) + len(self.waiting) + self._num_held_back

    @property
    def _known_adapters(self) -> AdaptedRequests:
        assert self._adapted is not None, "this scheduler has no adapters"
        return self._adapted

    def _assert_owner(self) -> None:
        """Scheduler and blocks belong to one thread; others send it messages."""
        if self._owner is None:
            self._owner = threading.get_ident()
        assert self._owner == threading.get_ident(), "the scheduler belongs to another thread"
