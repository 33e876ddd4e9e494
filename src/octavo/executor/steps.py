"""Steps that ranks are computing, and what becomes of one that raises.

A step fails, and no more than the step, where every rank of the last stage says so: then none waits for another. Stages
before hand a failure on (`worker/stage_links.py`). Where some ranks fail and others do not, the engine cannot go on.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

import msgspec

from octavo.config.parallel import ParallelConfig, RankPlace
from octavo.contracts.ranks import RankFailure
from octavo.contracts.schedule import SchedulerOutput
from octavo.contracts.step import ModelRunnerOutput
from octavo.errors import EngineDeadError, EngineError

logger = logging.getLogger(__name__)

_OTHERS_S = 1.0  # a rank's step has failed; when the others' has too, they say so within this time
_NUM_REMEMBERED = 64  # failed steps, of which some rank may speak late; far more than are ever under way


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


class StepsUnderWay:
    """All steps that are begun and not answered, oldest first. Raises EngineDeadError where ranks disagree on one."""

    def __init__(self, parallel: ParallelConfig) -> None:
        self._parallel = parallel
        self._steps: deque[StepFuture] = deque()
        self._failed: deque[int] = deque(maxlen=_NUM_REMEMBERED)

    def add(self, step: StepFuture) -> None:
        """Take in a step whose order is on its way."""
        self._steps.append(step)

    def answer(self, answer: ModelRunnerOutput) -> None:
        """Give the oldest step its answer; its ids are those of the order."""
        step = self._steps.popleft()
        if step.failures:
            raise _dead(*next(iter(step.failures.items())))
        step.set_result(msgspec.structs.replace(answer, req_ids=step.order.req_ids))

    def fail(self, rank: int, failure: RankFailure) -> None:
        """Note that a step raised on one rank; the step has failed when it did on enough of them."""
        step = next((step for step in self._steps if step.order.step == failure.step), None)
        if step is None:
            if failure.step in self._failed:
                return
            raise _dead(rank, failure)  # answered, so other ranks got through
        if not step.failures:
            step.failed_s = time.monotonic()
        step.failures[rank] = failure
        if sum(map(self._is_last, step.failures)) == self._parallel.tensor_parallel_size:
            self._steps.remove(step)
            self._failed.append(step.order.step)
            step.set_exception(EngineError(f"rank {rank}: {failure.error_type}: {failure.message}"))
            logger.error("step %d failed on every rank; on rank %d:\n%s", failure.step, rank, failure.traceback)

    def deadline_s(self) -> float:
        """Return when `check` may have something to say; infinity while no step has failed."""
        return min((step.failed_s + _OTHERS_S for step in self._steps if step.failures), default=float("inf"))

    def check(self, now_s: float) -> None:
        """Raise when some rank's step has failed and time is up for the others to say the same."""
        for step in self._steps:
            if step.failures and now_s >= step.failed_s + _OTHERS_S:
                raise _dead(*next(iter(step.failures.items())))

    def _is_last(self, rank: int) -> bool:
        return RankPlace.of(rank, self._parallel).is_last_stage


def _dead(rank: int, failure: RankFailure) -> EngineDeadError:
    what = f"{failure.error_type}: {failure.message}"
    return EngineDeadError(f"rank {rank} failed where others did not: {what}\n{failure.traceback}")
