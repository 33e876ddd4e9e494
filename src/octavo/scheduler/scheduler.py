"""The scheduler: which requests compute how many tokens in the next step.

There is no prefill phase and no decode phase. A request has known tokens and computed tokens; a step lets the
computed ones catch up, within one token budget. Running requests come first, then waiting ones in order of (priority,
arrival). If blocks run out, the worst running request is preempted: its blocks are freed, and it is recomputed later
from the front of its class. `schedule` may run again before the last step's output has arrived: the token that a step
will sample counts immediately, as a token in flight.

With `num_batches` in flight, one per pipeline stage, a row waits for its last token instead, and the rows are spread
over the batches (`RunningScheduler`).
"""

import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from octavo.config.engine import SchedulerConfig
from octavo.contracts.engine import EngineCoreOutputs, EngineCoreRequest, FinishedRequest, SchedulerStats
from octavo.contracts.schedule import ModelRunnerOutput, SchedulerOutput
from octavo.errors import OctavoError
from octavo.scheduler.admission import Admission, RequestQueue
from octavo.scheduler.encoder_schedule import EncoderSchedule
from octavo.scheduler.gate import Gate, GateHooks
from octavo.scheduler.pace import FEWEST_TOKENS, BusyTime, StepPace
from octavo.scheduler.request import Request, RequestStatus, StopIdTable
from octavo.scheduler.running import RunningRows
from octavo.scheduler.snapshot import snapshot
from octavo.scheduler.speculation import Speculation
from octavo.scheduler.step_builder import RunningScheduler, StepBuilder
from octavo.scheduler.step_update import StepInFlight, StepUpdate


class Scheduler:
    """Owned by the thread that first uses it. Handles tokens, never text or tensors."""

    def __init__(
        self,
        config: SchedulerConfig,
        running: RunningRows,
        *,
        gates: Sequence[Gate] = (),
        speculation: Speculation | None = None,
        num_batches: int = 1,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.running, self.blocks = running, running.blocks
        self.waiting = RequestQueue(config.ageing_s)
        self._max_chunk = config.max_num_batched_tokens
        self._encoder = EncoderSchedule(running, self._max_chunk, config.encoder_cache_tokens)
        self._gates: tuple[Gate, ...] = (self._encoder, *gates)
        self._hooks = GateHooks(self._gates)
        self.admission = Admission(self.waiting, running, self._encoder, self._max_chunk)
        self._running_scheduler = RunningScheduler(running, num_batches, is_speculative=speculation is not None)
        self._sends_tokens = num_batches > 1  # some ranks learn the sampled tokens only from the next scheduler output
        self._speculation = speculation
        fewest = max(FEWEST_TOKENS, config.largest_whole_span)
        self.pace = StepPace(self._max_chunk, config.step_target_s, fewest)
        self.finished: dict[str, FinishedRequest] = {}  # ended, but not reported in an `EngineCoreOutputs` yet
        self._requests: dict[str, Request] = {}  # all waiting and running ones
        self._num_held: Counter[str] = Counter()  # of the waiting ones, those that a gate holds, by its reason
        self._forgotten_req_ids: list[str] = []  # rows that the worker must drop before the next step
        self._in_flight: deque[StepInFlight] = deque()
        self._clock = clock
        self._busy_time = BusyTime()
        self._num_arrived = self._num_steps = self._num_preemptions = 0
        self._stop_ids = StopIdTable()
        self._owner: int | None = None

    # -- requests in and out ------------------------------------------------------------------------------------

    @property
    def request_ids(self) -> Iterable[str]:
        """All that have not finished."""
        return self._requests.keys()

    def add_request(self, message: EngineCoreRequest) -> None:
        """Queue a request that the frontend has validated, including that it can fit."""
        self._assert_owner()
        assert message.request_id not in self._requests, f"request {message.request_id!r} is here already"
        max_model_len = self.running.max_model_len
        request = Request(message, self._num_arrived, max_model_len)
        assert request.num_prompt_tokens
        assert len(request.token_ids) < request.max_num_tokens <= max_model_len
        assert self.blocks.can_ever_fit(request.max_num_tokens, self._max_chunk)
        self._num_arrived += 1
        self._requests[message.request_id] = request
        self._stop_ids.add_ids(request.stop_token_ids)
        self._pass_gates(request)

    def _pass_gates(self, request: Request, first: int = 0) -> None:
        """Queue a request, unless one of the gates from number `first` on holds it."""
        for gate in self._gates[first:]:
            if gate.hold(request):
                request.waits_for = gate.reason
                self._num_held[gate.reason] += 1
                return
        self.waiting.enqueue(request)

    def _poll_gates(self) -> None:
        """Take requests that gates let go of to the next gate; end those that can never pass."""
        now_s = self._clock()
        for number, gate in enumerate(self._gates, start=1):
            for request in gate.take_ready(now_s):
                self._count_released(request)
                request.waits_for = None
                self._pass_gates(request, number)
            for request, error in gate.take_failures():
                self._fail(request, str(error), type(error).__name__)

    def _count_released(self, request: Request) -> None:
        """Count a request that a gate no longer holds."""
        assert request.waits_for is not None
        self._num_held[request.waits_for] -= 1
        if not self._num_held[request.waits_for]:
            del self._num_held[request.waits_for]

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests now, whatever their state. Unknown ids are ignored: those have already ended."""
        self._assert_owner()
        for request_id in request_ids:
            request = self._requests.get(request_id)
            if request is not None:
                self._end(request, request.report(RequestStatus.ABORTED), RequestStatus.ABORTED)

    def is_finished(self) -> bool:
        """True if no request waits or runs and no step is in flight."""
        return not (self._requests or self._in_flight)

    def is_in_flight(self, group: int, block_id: int) -> bool:
        """True if a step that has not ended fills this block of a group, and has made it findable."""
        return any((group, block_id) in step.hashed_blocks for step in self._in_flight)

    @property
    def only_waits(self) -> bool:
        """True if a step would do nothing until a gate lets a request go."""
        return 0 < self._num_held.total() == len(self._requests)

    def wait_for_gates(self, timeout_s: float) -> None:
        """Wait briefly for what the requests that gates hold need: at most `timeout_s` for each gate."""
        for gate in self._gates:
            if gate.reason in self._num_held:
                gate.wait(timeout_s)

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
        if self._num_held:
            self._poll_gates()
        self._encoder.begin_step()
        builder = StepBuilder(self.running, self._hooks, sends_tokens=self._sends_tokens)
        budget, num_preemptions = self.pace.budget(self.running), self._num_preemptions
        self._schedule_running(builder, budget - self.admission.reserve(budget, self._clock()))
        if self._num_preemptions == num_preemptions:
            self.admission.admit(builder, budget - builder.num_tokens, self._clock())
        if self._speculation is not None:
            self._speculation.speculate(builder, budget - builder.num_tokens)
        return builder

    def _commit(self, builder: StepBuilder) -> SchedulerOutput:
        forgotten, self._forgotten_req_ids = self._forgotten_req_ids, []
        self._num_steps += 1
        step = builder.build(self._num_steps, forgotten, self._clock())
        self._in_flight.append(step)
        return step.output

    def _schedule_running(self, builder: StepBuilder, budget: int) -> None:
        """Schedule running rows and allocate their blocks, preempting the worst until the blocks suffice."""
        if self.blocks.windowed:
            builder.free_behind_windows(self._in_flight)
        rows, counts, short = self._running_scheduler.next_tokens(budget)
        while any(sum(num_missing) > self.blocks.pools[group].num_free for group, _, num_missing in short):
            worst = self.running.worst
            assert worst.row is not None
            builder.drop_row(worst.row)
            self._preempt(worst)
            rows, counts, short = self._running_scheduler.next_tokens(budget)
        for group, short_rows, num_missing in short:
            builder.add_blocks(short_rows, num_missing, group)
        builder.add_running(*self._encoder.limit_running(rows, counts))

    def _preempt(self, request: Request, *, is_sound: bool = True) -> None:
        """Free a running request's blocks and row. Its sampled tokens stay known; their KV is recomputed."""
        self._release(request, RequestStatus.PREEMPTED, is_sound=is_sound)
        request.num_preemptions += 1
        self._num_preemptions += 1
        self.waiting.enqueue(request)

    def _release(self, request: Request, status: RequestStatus, *, is_sound: bool) -> None:
        """Release a running request's row and blocks. Sound blocks stay findable; others lose their hash."""
        assert request.row is not None
        self._encoder.release(request.row)
        hashed_blocks = self.running.remove(request, status, is_sound=is_sound)
        for step in self._in_flight:
            step.hashed_blocks.extend(hashed_blocks)
        self._forgotten_req_ids.append(request.request_id)

    # -- a step: the model output -------------------------------------------------------------------------------

    def update_from_output(self, output: SchedulerOutput, model_output: ModelRunnerOutput) -> EngineCoreOutputs:
        """Append the tokens a step sampled, end finished requests, and return what is new."""
        self._assert_owner()
        step = self._in_flight.popleft()
        assert step.output is output, "outputs arrive in the order of their steps"
        now_s = self._clock()
        took_s = self.pace.record_step(output, step.scheduled_s, now_s)
        self._busy_time.record_output(model_output.compute_s, step.scheduled_s, now_s)
        update = step.match_output(model_output, self.running).cut(self._num_until_stop)
        if self._speculation is not None:
            self._speculation.record_step(output, model_output, update, took_s)
        update.commit(self.running)
        for after_step in self._hooks.after_step:
            for request_id, problem in after_step(output, update).items():
                self._end_by_gate(self._requests[request_id], problem, update)
        at_limit = update.num_known >= self.running.limit[update.rows]
        may_end = at_limit | self._stop_ids.candidates(update.last_token_ids)
        for index in may_end.nonzero()[0].tolist():
            request = self._requests.get(update.req_ids[index])
            if request is not None:  # not already ended by a gate
                report = request.check_stop(int(update.last_token_ids[index]), int(update.num_known[index]))
                if report is not None:
                    self._end(request, report, RequestStatus(report.finish_reason))
        for request_id, error in update.errors.items():
            self._fail(self._requests[request_id], error)
        for request_id in update.pooled:
            request = self._requests[request_id]
            self._end(request, request.report(RequestStatus.STOPPED), RequestStatus.STOPPED)
        if not self._requests:
            self._busy_time.pause()
        return self._outputs(update, step)

    def _num_until_stop(self, request_id: str, position: int, token_ids: list[int]) -> int:
        """Return how many of several new tokens, the first at `position`, a request keeps until one of them ends it."""
        request = self._requests[request_id]
        if self._speculation is not None:
            token_ids = token_ids[: self._speculation.num_allowed(request, token_ids)]
        for count, token_id in enumerate(token_ids, start=1):
            if request.check_stop(token_id, position + count) is not None:
                return count
        return len(token_ids)

    def _end_by_gate(self, request: Request, problem: OctavoError | None, update: StepUpdate) -> None:
        """End a request whose output is complete: it has stopped, even at the length limit. Or one with a problem."""
        if problem is not None:
            self._fail(request, str(problem), type(problem).__name__)
            return
        index = update.req_ids.index(request.request_id)
        report = request.check_stop(int(update.last_token_ids[index]), int(update.num_known[index]))
        if report is None or report.finish_reason != RequestStatus.STOPPED.value:
            report = request.report(RequestStatus.STOPPED, shows_last_token=True)
        self._end(request, report, RequestStatus.STOPPED)

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
                self.blocks.pools[group].forget_hashes([block_id])
        running_ids = set(self.running.req_ids_of(self.running.active))
        self._forgotten_req_ids += [req_id for req_id in output.finished_req_ids if req_id not in running_ids]
        unsure_requests = [request for gate in self._gates for request in gate.after_failed_step(output)]
        is_current = self.running.generation[step.rows] == step.generations
        for row in step.rows[is_current].tolist():
            self._fail(self.running.request_at(row), error)
        for request in [*self.running.holders(step.hashed_blocks), *unsure_requests]:
            if request.row is not None:
                self._preempt(request, is_sound=False)

    def take_finished(self) -> EngineCoreOutputs:
        """Report ends that no step's output carries: aborts and failed steps."""
        reports, self.finished = self.finished, {}
        return EngineCoreOutputs(finished=reports, stats=self.stats())

    def _fail(self, request: Request, error: str, error_type: str | None = None) -> None:
        """End one request as failed. Its blocks become unfindable, because their contents are not reliable."""
        report = request.report(RequestStatus.FAILED, error=error, error_type=error_type)
        self._end(request, report, RequestStatus.FAILED)

    def _end(self, request: Request, report: FinishedRequest, status: RequestStatus) -> None:
        if request.row is not None:
            self._release(request, status, is_sound=status is not RequestStatus.FAILED)
        elif request.waits_for is not None:
            request.status = status
            self._count_released(request)
        else:
            request.status = status
            self.waiting.remove(request)
        for forget in self._hooks.forget:
            forget(request)
        if self._speculation is not None:
            report = self._speculation.forget(request.request_id, report)
        del self._requests[request.request_id]
        self.finished[request.request_id] = report

    def _outputs(self, update: StepUpdate, step: StepInFlight) -> EngineCoreOutputs:
        """Build the message for the frontend."""
        reports, self.finished = self.finished, {}
        counts = update.counts
        return EngineCoreOutputs(
            req_ids=list(update.req_ids),
            num_new_tokens=[1] * len(update.req_ids) if counts is None else counts.tolist(),
            first_indices=(update.positions - self.running.num_prompt[update.rows]).tolist(),
            new_token_ids=update.new_token_ids.tolist(),
            num_scheduled_tokens=step.output.total_num_scheduled_tokens,
            admitted=step.admitted,
            prefilled=step.prefilled(self.running),
            finished=reports,
            logprobs=update.logprobs,
            prompt_logprobs=update.prompt_logprobs,
            pooled=update.pooled,
            stats=self.stats(),
            expert_load=update.expert_load,
            spec_decode=self._speculation.stats() if self._speculation is not None and counts is not None else None,
        )

    # -- introspection ------------------------------------------------------------------------------------------

    def stats(self) -> SchedulerStats:
        """Return a snapshot for logs and metrics."""
        pool = self.blocks.fullest_pool
        return SchedulerStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting) + self._num_held.total(),
            deferred=dict(self._num_held),
            num_free_blocks=pool.num_free,
            num_blocks=pool.num_blocks,
            num_preemptions_total=self._num_preemptions,
            num_prefix_queries_total=self.blocks.num_prefix_queries_total,
            num_prefix_hits_total=self.blocks.num_prefix_hits_total,
            num_prefix_disk_hits_total=self.blocks.disk.num_hit_tokens,
            num_prefix_disk_saved_total=self.blocks.disk.num_saved_blocks,
            prefix_disk_bytes=self.blocks.disk.num_bytes,
            prefix_disk_failures=dict(self.blocks.disk.failures),
            step_s_total=self._busy_time.step_s,
            compute_s_total=self._busy_time.compute_s,
        )

    @property
    def held(self) -> Iterable[Request]:
        """The requests that gates hold."""
        return (request for request in self._requests.values() if request.waits_for is not None)

    def snapshot(self, *, with_blocks: bool) -> dict[str, Any]:
        """Describe every request, and on request every block, for people who look."""
        self._assert_owner()
        return snapshot(self, self._clock(), with_blocks=with_blocks)

    def check_integrity(self) -> None:
        """Assert that reference counts match owners and every row is consistent. Slow: call it while idle."""
        self.running.check_integrity([each for gate in self._gates for each in gate.owned_blocks])
        for gate in self._gates:
            gate.check_integrity()
        waits = Counter(request.waits_for for request in self._requests.values() if request.waits_for is not None)
        assert waits == self._num_held
        assert len(self._requests) == len(self.running) + len(self.waiting) + waits.total()

    def _assert_owner(self) -> None:
        """Scheduler and blocks belong to one thread; others send it messages."""
        if self._owner is None:
            self._owner = threading.get_ident()
        assert self._owner == threading.get_ident(), "the scheduler belongs to another thread"
