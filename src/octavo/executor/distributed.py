"""An executor with several ranks, each in its own process, independent of the transport.

A step is sent to every rank at once; one rank returns the output. Steps may overlap: `execute_model` returns once the
step is sent, and outputs arrive in order. If every rank of the last stage reports a failure, only the step has failed,
as no rank is left waiting for another; earlier stages pass failures on (`worker/stages.py`). If only some ranks fail,
or one dies, the executor fails with an error that names the rank.
"""

import itertools
import logging
import math
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec

from octavo.config.engine import EngineConfig
from octavo.config.parallel import RankPlace
from octavo.contracts.ranks import FromRank, RankCall, RankFailure, RankResult, decode_rank_message, encode_rank_message
from octavo.contracts.schedule import ModelRunnerOutput, SchedulerOutput
from octavo.errors import EngineDeadError, EngineError, OctavoError, named_error
from octavo.executor.ranks import Ranks, RankWatch

logger = logging.getLogger(__name__)

_PROGRESS_S = 5.0  # between log lines about slow ranks
_LEAVE_S = 5.0  # for ranks to exit after their connections are closed
_OTHERS_S = 1.0  # for the other ranks to report the same failure
_NUM_REMEMBERED = 64  # failed steps that a rank may still report; far more than can be in flight

ResultT = TypeVar("ResultT")


class _Receiving(Future[ResultT]):
    """A future without a background thread: asking for the result receives it."""

    def __init__(self, receive: Callable[[Any, float | None], None]) -> None:
        super().__init__()
        self._receive = receive

    def result(self, timeout: float | None = None) -> ResultT:
        if not self.done():
            self._receive(self, timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if not self.done():
            self._receive(self, timeout)
        return super().exception(0)


class StepFuture(_Receiving[ModelRunnerOutput]):
    """The output of one step."""

    def __init__(self, scheduler_output: SchedulerOutput, receive: Callable[[Any, float | None], None]) -> None:
        super().__init__(receive)
        self.scheduler_output = scheduler_output
        self.failures: dict[int, RankFailure] = {}  # by rank, in order of arrival
        self.failed_s = 0.0  # time of the first failure


class CallFuture(_Receiving[list[Any]]):
    """What each rank returned from a method."""

    def __init__(self, method: str, receive: Callable[[Any, float | None], None]) -> None:
        super().__init__(receive)
        self.method = method
        self.values: dict[int, Any] = {}  # by rank that has replied


class DistributedExecutor:
    """Implements `Executor` over `Ranks`. `launch` starts the ranks; nothing slow is imported before."""

    def __init__(self, config: EngineConfig, launch: Callable[[], Ranks]) -> None:
        self._config = config
        self._launch = launch
        self._ranks: Ranks | None = None
        self._watch: RankWatch
        self._steps: deque[StepFuture] = deque()  # in flight, oldest first
        self._failed_steps: deque[int] = deque(maxlen=_NUM_REMEMBERED)
        self._calls: dict[int, CallFuture] = {}
        self._call_ids = itertools.count()
        self.max_steps_in_flight = config.parallel.pipeline_parallel_size  # one per stage
        self.profile = ""

    @property
    def ranks(self) -> Ranks:
        assert self._ranks is not None, "the executor has not started, or has exited"
        return self._ranks

    def start(self) -> list[int]:
        """See `Executor.start`. All ranks do the same stage at the same time; an error says the rank's number."""
        start_s = time.perf_counter()
        self._ranks = self._launch()
        self._watch = RankWatch(self._ranks)
        try:
            self.profile = self.call("init_worker").result()[0]
            self.call("load_model").result()
            counts = self.call("count_kv_blocks").result()
            num_blocks = [min(of_group) for of_group in zip(*counts, strict=True)]
            self.call("initialize_kv_cache", num_blocks).result()
        except BaseException as error:
            self._watch.give_up(EngineDeadError(f"the ranks failed to start: {error}"))
            self.exit()
            raise
        logger.info("%d ranks ready in %.2f s", self._num_ranks, time.perf_counter() - start_s)
        return num_blocks

    def execute_model(self, scheduler_output: SchedulerOutput) -> StepFuture:
        if self._watch.death is not None:
            raise self._watch.death
        self._broadcast(encode_rank_message(scheduler_output))
        step = StepFuture(scheduler_output, self._receive_step)
        self._steps.append(step)
        return step

    def call(self, method: str, *arguments: Any) -> CallFuture:
        self.check_health()
        call_id, call = next(self._call_ids), CallFuture(method, self._receive_call)
        self._calls[call_id] = call
        self._broadcast(encode_rank_message(RankCall(call_id=call_id, method=method, arguments=list(arguments))))
        return call

    def check_health(self) -> None:
        """Raise EngineDeadError if a rank has died, or has failed in a completed step."""
        if self._watch.death is not None:
            raise self._watch.death
        self._receive(0.0)
        self._check_steps(time.monotonic())

    def exit(self) -> None:
        if self._ranks is None:
            return
        ranks, self._ranks = self._ranks, None
        self._watch.stop()
        ranks.join(_LEAVE_S)

    @property
    def _num_ranks(self) -> int:
        return len(self.ranks.replies)

    def _broadcast(self, message: bytearray) -> None:
        """Send to every rank, and receive replies meanwhile: ranks block while theirs are not read."""
        try:
            self.ranks.broadcast(message, lambda fd: self._receive(None, fd))
        except ConnectionError:
            raise self._watch.wait_for_death() from None

    def _receive_call(self, call: CallFuture, timeout_s: float | None) -> None:
        """Receive until `call` is done, or `timeout_s` is over. Raises EngineDeadError if a rank has died."""
        start_s = time.monotonic()
        end_s = math.inf if timeout_s is None else start_s + timeout_s
        while not call.done() and (left_s := end_s - time.monotonic()) > 0.0:
            if not self._receive(min(left_s, _PROGRESS_S)) and left_s > _PROGRESS_S:
                late = ", ".join(str(rank) for rank in range(self._num_ranks) if rank not in call.values)
                done, elapsed_s = f"{len(call.values)} of {self._num_ranks}", time.monotonic() - start_s
                logger.warning(
                    "%s: %s ranks are done after %.0f s; waiting for rank %s", call.method, done, elapsed_s, late
                )

    def _receive_step(self, step: StepFuture, timeout_s: float | None) -> None:
        """Receive until `step` is done.

        Raises EngineDeadError: a rank has died, or failed while others did not. TimeoutError: after `timeout_s`.
        """
        asked_s = time.monotonic()
        stuck_s = asked_s + self._config.parallel.step_timeout_s
        timeout_at_s = math.inf if timeout_s is None else asked_s + timeout_s
        while not step.done():
            now_s = time.monotonic()
            self._check_steps(now_s)
            if now_s >= timeout_at_s:
                raise TimeoutError
            if now_s >= stuck_s:
                waited = f"{self._config.parallel.step_timeout_s:g} s"
                stuck = f"step {step.scheduler_output.step}: no reply from the ranks in {waited}; they are stuck"
                raise self._watch.give_up(EngineDeadError(stuck))
            failed_s = min((step.failed_s for step in self._steps if step.failures), default=math.inf)
            self._receive(min(timeout_at_s, stuck_s, failed_s + _OTHERS_S) - now_s)

    def _receive(self, timeout_s: float | None, extra_fd: int | None = None) -> bool:
        """Receive what ranks have sent, waiting for the first message; return False on timeout."""
        came = self._watch.receive(timeout_s, extra_fd)
        for rank, message in came:
            self._dispatch(rank, decode_rank_message(message))
        return bool(came)

    def _dispatch(self, rank: int, message: FromRank) -> None:
        if isinstance(message, ModelRunnerOutput):
            step = self._steps.popleft()
            if step.failures:
                raise self._disagreement(*next(iter(step.failures.items())))
            step.set_result(msgspec.structs.replace(message, req_ids=step.scheduler_output.req_ids))
        elif isinstance(message, RankResult):
            if (call := self._calls.get(message.call_id)) is not None:  # else it has failed on another rank
                call.values[rank] = message.value
                if len(call.values) == self._num_ranks:
                    del self._calls[message.call_id]
                    call.set_result([value for _, value in sorted(call.values.items())])
        elif message.step is not None:
            self._fail_step(rank, message)
        elif (call := self._calls.pop(message.call_id, None)) is not None:  # else another rank's error was first
            call.set_exception(_as_error(rank, message))

    def _fail_step(self, rank: int, failure: RankFailure) -> None:
        """Record that a step raised on one rank; the step fails once all ranks of the last stage have reported it."""
        step = next((step for step in self._steps if step.scheduler_output.step == failure.step), None)
        if step is None:
            if failure.step in self._failed_steps:
                return
            raise self._disagreement(rank, failure)  # it completed, so other ranks succeeded
        if not step.failures:
            step.failed_s = time.monotonic()
        step.failures[rank] = failure
        parallel = self._config.parallel
        if sum(RankPlace.of(at, parallel).is_last_stage for at in step.failures) == parallel.tensor_parallel_size:
            self._steps.remove(step)
            self._failed_steps.append(step.scheduler_output.step)
            step.set_exception(EngineError(f"rank {rank}: {failure.error_type}: {failure.message}"))
            logger.error("step %d failed on every rank; on rank %d:\n%s", failure.step, rank, failure.traceback)

    def _check_steps(self, now_s: float) -> None:
        """Raise if a step failed on some rank and the others have not reported the same in time."""
        for step in self._steps:
            if step.failures and now_s >= step.failed_s + _OTHERS_S:
                raise self._disagreement(*next(iter(step.failures.items())))

    def _disagreement(self, rank: int, failure: RankFailure) -> EngineDeadError:
        what = f"{failure.error_type}: {failure.message}\n{failure.traceback}"
        return self._watch.give_up(EngineDeadError(f"rank {rank} failed while others did not: {what}"))


def _as_error(rank: int, failure: RankFailure) -> OctavoError:
    """Return the error of a rank with its number, and with its traceback unless it is one of Octavo's own errors."""
    error = named_error(failure.error_type, f"rank {rank}: {failure.message}")
    if isinstance(error, EngineDeadError):
        return EngineDeadError(f"rank {rank}: {failure.error_type}: {failure.message}\n{failure.traceback}")
    return error
