"""An executor of several ranks, each in a process of its own: what does not depend on how they are reached.

An order goes to every rank at once; the answer of a step comes from one. Steps may overlap: `execute_model` returns
when the order is on its way, and answers come in the order of steps. A rank that dies ends all, with its name.
"""

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from octavo.config.engine import EngineConfig
from octavo.config.parallel import RankPlace
from octavo.contracts.ranks import (
    FromRank,
    RankCall,
    RankFailure,
    RankMethod,
    RankResult,
    decode_from_rank,
    encode_to_rank,
)
from octavo.contracts.schedule import SchedulerOutput
from octavo.contracts.step import ModelRunnerOutput
from octavo.errors import EngineDeadError, EngineError, OctavoError, named_error
from octavo.executor.ranks import Ranks
from octavo.executor.replies import DeathWatch, Replies

logger = logging.getLogger(__name__)

_PROGRESS_S = 5.0  # between lines about ranks that take their time
_LEAVE_S = 5.0  # how long ranks may take to leave once nobody talks to them
_OTHERS_S = 1.0  # a rank's step has failed; when the others' has too, they say so within this time


class StepFuture(Future[ModelRunnerOutput]):
    """The answer of one step. Nobody listens in the background: who asks for the result receives it."""

    def __init__(self, order: SchedulerOutput, receive: Callable[["StepFuture", float | None], None]) -> None:
        super().__init__()
        self.order = order
        self.failures: dict[int, RankFailure] = {}  # by rank, the first to fail first
        self.failed_s = 0.0  # when it was
        self._receive = receive

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        if not self.done():
            self._receive(self, timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if not self.done():
            self._receive(self, timeout)
        return super().exception(0)


class DistributedExecutor:
    """Implements `Executor` over `Ranks`. `launch` starts them; no rank has begun to import anything slow before."""

    def __init__(self, config: EngineConfig, launch: Callable[[], Ranks]) -> None:
        self._config = config
        self._launch = launch
        self._ranks: Ranks | None = None
        self._replies: Replies
        self._watch: DeathWatch
        self._steps: deque[StepFuture] = deque()  # not answered yet, oldest first
        self._results: dict[int, FromRank] = {}  # of the call under way, by rank
        self.profile = ""

    @property
    def ranks(self) -> Ranks:
        assert self._ranks is not None, "the executor has not started, or has exited"
        return self._ranks

    def start(self) -> int:
        """See `Executor.start`. All ranks do the same stage at the same time; each is asked for its number of blocks.

        Raises:
            UserError: of whichever rank was first to raise one, with its number.
            EngineDeadError: a rank died or failed.
        """
        start_s = time.perf_counter()
        self._ranks = self._launch()
        self._replies = Replies(self._ranks.replies)
        self._watch = DeathWatch(self._ranks)
        try:
            self.profile = str(self._call("init_worker")[0])
            self._call("load_model")
            num_blocks = min(int(count or 0) for count in self._call("count_kv_blocks"))
            self._call("initialize_kv_cache", num_blocks)
        except BaseException as error:
            self._watch.give_up(EngineDeadError(f"the ranks did not start: {error}"))
            self.exit()
            raise
        logger.info("%d ranks ready in %.2f s", self._num_ranks, time.perf_counter() - start_s)
        return num_blocks

    def execute_model(self, order: SchedulerOutput) -> StepFuture:
        """See `Executor.execute_model`.

        Raises:
            EngineDeadError: a rank is gone.
        """
        if self._watch.death is not None:
            raise self._watch.death
        self._broadcast(encode_to_rank(order))
        self._steps.append(StepFuture(order, self._receive_step))
        return self._steps[-1]

    def warmup(self) -> None:
        self._call("warmup")

    def check_health(self) -> None:
        """Raise EngineDeadError when a rank is gone, or has failed in a step that is answered."""
        if self._watch.death is not None:
            raise self._watch.death
        self._receive(0.0)

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
        try:
            self.ranks.broadcast(message, self._wait_beside)
        except ConnectionError:
            raise self._watch.wait_for_death() from None

    def _wait_beside(self, fd: int) -> None:
        """Wait until `fd` can be read, while ranks reply: one that nobody listens to would not go on."""
        self._receive(None, fd)

    def _call(self, method: RankMethod, *arguments: int) -> list[int | str | None]:
        """Have all ranks run a method of the worker at the same time; return what each of them returned."""
        self.check_health()
        self._results = {}
        self._broadcast(encode_to_rank(RankCall(method=method, arguments=list(arguments))))
        start_s = time.monotonic()
        while len(self._results) < self._num_ranks:
            if not self._receive(_PROGRESS_S):
                self._report_progress(method, time.monotonic() - start_s)
            self._raise_failed_call()
        return [result.value for _, result in sorted(self._results.items()) if isinstance(result, RankResult)]

    def _report_progress(self, method: str, elapsed_s: float) -> None:
        late = [str(rank) for rank in range(self._num_ranks) if rank not in self._results]
        logger.warning(
            "%s: %d of %d ranks are done after %.0f s; waiting for rank %s",
            method,
            len(self._results),
            self._num_ranks,
            elapsed_s,
            ", ".join(late),
        )

    def _raise_failed_call(self) -> None:
        for rank, result in self._results.items():
            if isinstance(result, RankFailure):
                raise _as_error(rank, result)

    def _receive_step(self, step: StepFuture, timeout_s: float | None) -> None:
        """Listen until `step` is answered.

        Raises:
            EngineDeadError: a rank is gone, or failed where others did not.
            TimeoutError: `timeout_s` is over.
        """
        limit_s = self._config.parallel.step_timeout_s
        asked_s = time.monotonic()
        while not step.done():
            now_s = time.monotonic()
            self._raise_lone_failure(now_s)
            if timeout_s is not None and now_s >= asked_s + timeout_s:
                raise TimeoutError
            if now_s >= asked_s + limit_s:
                stuck = f"step {step.order.step}: no answer from the ranks in {limit_s:g} s; they are stuck"
                raise self._watch.give_up(EngineDeadError(stuck))
            ends_s = [asked_s + limit_s, *(step.failed_s + _OTHERS_S for step in self._steps if step.failures)]
            if timeout_s is not None:
                ends_s.append(asked_s + timeout_s)
            self._receive(min(ends_s) - now_s)

    def _receive(self, timeout_s: float | None, beside: int | None = None) -> bool:
        """Take in what ranks say, waiting for the first to speak; False when time is up and nobody has."""
        try:
            came = self._replies.receive(timeout_s, beside)
        except EOFError:
            raise self._watch.wait_for_death() from None
        for rank, message in came:
            self._settle(rank, decode_from_rank(message))
        return bool(came)

    def _settle(self, rank: int, message: FromRank) -> None:
        if isinstance(message, ModelRunnerOutput):
            step = self._steps.popleft()
            for failed, failure in step.failures.items():
                raise self._give_up(failed, failure)
            step.set_result(dataclasses.replace(message, req_ids=step.order.req_ids))
        elif isinstance(message, RankFailure) and message.step is not None:
            self._settle_failure(rank, message)
        else:
            self._results[rank] = message

    def _settle_failure(self, rank: int, failure: RankFailure) -> None:
        """A step fails, and no more than the step, where it fails on every rank: then none waits for another.

        Of a pipeline that is every rank of the last stage; those before hand a failure on (`worker/stage_links.py`).
        """
        step = next((step for step in self._steps if step.order.step == failure.step), None)
        if step is None:  # answered, so other ranks got through
            raise self._give_up(rank, failure)
        if not step.failures:
            step.failed_s = time.monotonic()
        step.failures[rank] = failure
        if sum(map(self._is_last, step.failures)) == self._config.parallel.tensor_parallel_size:
            self._steps.remove(step)
            step.set_exception(EngineError(f"rank {rank}: {failure.error_type}: {failure.message}"))
            logger.error("step %d failed on every rank; on rank %d:\n%s", failure.step, rank, failure.traceback)

    def _is_last(self, rank: int) -> bool:
        return RankPlace.of(rank, self._config.parallel).is_last_stage

    def _raise_lone_failure(self, now_s: float) -> None:
        """Raise EngineDeadError when some rank's step failed and time is up for the others to say the same."""
        for step in self._steps:
            if step.failures and now_s >= step.failed_s + _OTHERS_S:
                raise self._give_up(*next(iter(step.failures.items())))

    def _give_up(self, rank: int, failure: RankFailure) -> EngineDeadError:
        what = f"{failure.error_type}: {failure.message}"
        return self._watch.give_up(
            EngineDeadError(f"rank {rank} failed where others did not: {what}\n{failure.traceback}")
        )


def _as_error(rank: int, failure: RankFailure) -> OctavoError:
    """Return what a rank raised, with its number; with its traceback where it is not one of our own errors."""
    message = f"rank {rank}: {failure.message}"
    error = named_error(failure.error_type, message)
    if isinstance(error, EngineDeadError):
        return EngineDeadError(f"rank {rank}: {failure.error_type}: {failure.message}\n{failure.traceback}")
    return error
