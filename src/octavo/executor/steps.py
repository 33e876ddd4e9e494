"""Steps in flight, and what happens when one raises.

If every rank of the last stage reports a failure, only the step has failed, as no rank is left waiting for another.
Earlier stages pass failures on (`worker/stages.py`). If only some ranks fail, the engine cannot continue.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

import msgspec

from octavo.config.parallel import ParallelConfig, RankPlace
from octavo.contracts.ranks import RankFailure
from octavo.contracts.schedule import ModelRunnerOutput, SchedulerOutput
from octavo.errors import EngineDeadError, EngineError

logger = logging.getLogger(__name__)

_OTHERS_S = 1.0  # for the other ranks to report the same failure
_NUM_REMEMBERED = 64  # failed steps that a rank may still report; far more than can be in flight


class StepFuture(Future[ModelRunnerOutput]):
    """The output of one step. There is no background thread: asking for the result receives it."""

    def __init__(
        self, scheduler_output: SchedulerOutput, receive: Callable[["StepFuture", float | None], None]
    ) -> None:
        super().__init__()
        self.scheduler_output = scheduler_output
        self.failures: dict[int, RankFailure] = {}  # by rank, in order of arrival
        self.failed_s = 0.0  # time of the first failure
        self._receive = receive

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        if not self.done():
            self._receive(self, timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if not self.done():
            self._receive(self, timeout)
        return super().exception(0)


class StepsInFlight:
    """All steps in flight, oldest first. Raises EngineDeadError if ranks disagree about one."""

    def __init__(self, parallel: ParallelConfig) -> None:
        self._parallel = parallel
        self._steps: deque[StepFuture] = deque()
        self._failed: deque[int] = deque(maxlen=_NUM_REMEMBERED)

    def add(self, step: StepFuture) -> None:
        """Add a step that has been sent."""
        self._steps.append(step)

    def complete(self, model_output: ModelRunnerOutput) -> None:
        """Complete the oldest step; its request ids are those of the scheduler output."""
        step = self._steps.popleft()
        if step.failures:
            raise _dead(*next(iter(step.failures.items())))
        step.set_result(msgspec.structs.replace(model_output, req_ids=step.scheduler_output.req_ids))

    def fail(self, rank: int, failure: RankFailure) -> None:
        """Record that a step raised on one rank; the step fails once all ranks of the last stage have reported it."""
        step = next((step for step in self._steps if step.scheduler_output.step == failure.step), None)
        if step is None:
            if failure.step in self._failed:
                return
            raise _dead(rank, failure)  # it completed, so other ranks succeeded
        if not step.failures:
            step.failed_s = time.monotonic()
        step.failures[rank] = failure
        if sum(map(self._is_last, step.failures)) == self._parallel.tensor_parallel_size:
            self._steps.remove(step)
            self._failed.append(step.scheduler_output.step)
            step.set_exception(EngineError(f"rank {rank}: {failure.error_type}: {failure.message}"))
            logger.error("step %d failed on every rank; on rank %d:\n%s", failure.step, rank, failure.traceback)

    def deadline_s(self) -> float:
        """Return when `check` is next due; infinity while no step has failed."""
        return min((step.failed_s + _OTHERS_S for step in self._steps if step.failures), default=float("inf"))

    def check(self, now_s: float) -> None:
        """Raise if a step failed on some rank and the others have not reported the same in time."""
        for step in self._steps:
            if step.failures and now_s >= step.failed_s + _OTHERS_S:
                raise _dead(*next(iter(step.failures.items())))

    def _is_last(self, rank: int) -> bool:
        return RankPlace.of(rank, self._parallel).is_last_stage


def _dead(rank: int, failure: RankFailure) -> EngineDeadError:
    what = f"{failure.error_type}: {failure.message}"
    return EngineDeadError(f"rank {rank} failed while others did not: {what}\n{failure.traceback}")
