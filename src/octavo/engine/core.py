"""The engine core: scheduler plus executor. Knows tokens, never text. A step is three calls.

Several steps are in flight where ranks form a pipeline, as many as it has stages, and where a device has a queue, so
that it need not wait for the host: the core hands out new ones as long as there is something to compute, and waits for
the oldest.
"""

import logging
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass

from octavo.config.engine import EngineConfig
from octavo.contracts.drafter import Drafter
from octavo.contracts.engine import EngineCoreOutputs, EngineCoreRequest
from octavo.contracts.schedule import SchedulerOutput
from octavo.contracts.step import ModelRunnerOutput
from octavo.engine.grammars import make_grammars
from octavo.errors import EngineDeadError
from octavo.executor.base import Executor
from octavo.scheduler.block_manager import BlockManager
from octavo.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

_GRAMMAR_WAIT_S = 0.01  # at a time, when there is nothing else to do; messages are read in between


@dataclass(frozen=True, slots=True)
class Flight:
    """A step on its way through the ranks."""

    order: SchedulerOutput
    answer: Future[ModelRunnerOutput]


class EngineCore:
    """One thread owns it; everyone else sends messages (`EngineCoreClient`)."""

    def __init__(
        self, config: EngineConfig, executor: Executor, *, epoch: int = 0, drafter: Drafter | None = None
    ) -> None:
        self._executor = executor
        num_blocks = executor.start()
        self.profile = executor.profile
        self._grammars = make_grammars(config)
        self.scheduler = Scheduler(
            config.scheduler,
            BlockManager(config.cache, num_blocks, config.model.kv_groups),
            config.model.max_model_len,
            epoch=epoch,
            grammars=self._grammars,
            num_batches=config.parallel.pipeline_parallel_size,
            drafter=drafter,
        )
        self._most_flights = executor.most_steps_in_flight
        self._flights: deque[Flight] = deque()  # oldest first
        self._landed: deque[EngineCoreOutputs] = deque()  # of steps that a call waited for
        self._prepared_blocks: list[int] | None = None  # so many were reached when the ranks last had memory enough

    def add_request(self, request: EngineCoreRequest) -> None:
        self.scheduler.add_request(request)

    def abort(self, request_ids: list[str]) -> None:
        """End requests at once. Their blocks are free when this returns; their report comes with the next step."""
        self.scheduler.abort(request_ids)

    def has_work(self) -> bool:
        """True when a step would compute or report something."""
        return not self.scheduler.is_finished() or bool(self.scheduler.finished or self._landed)

    def step(self) -> EngineCoreOutputs:
        """Schedule, execute, update. A forward that raises ends the requests of its step, and only those.

        Raises:
            EngineDeadError: a rank is gone.
        """
        if self._landed:
            return self._landed.popleft()
        if self.scheduler.only_waits_for_grammars and not self._flights:
            self._grammars.wait(_GRAMMAR_WAIT_S)
        self._take_off()
        return self._land()

    def _take_off(self) -> None:
        """Hand out steps until enough are under way, or nothing is left that can be computed now."""
        order: SchedulerOutput | None = self._next_order() if self._flights else self.scheduler.schedule()
        while order is not None:
            self._flights.append(Flight(order, self._execute(order)))
            order = self._next_order()

    def _next_order(self) -> SchedulerOutput | None:
        return self.scheduler.schedule_ahead() if len(self._flights) < self._most_flights else None

    def _execute(self, order: SchedulerOutput) -> Future[ModelRunnerOutput]:
        try:
            return self._executor.execute_model(order)
        except BaseException as error:  # noqa: BLE001 - `_land` says what becomes of the step
            answer: Future[ModelRunnerOutput] = Future()
            answer.set_exception(error)
            return answer

    def _land(self) -> EngineCoreOutputs:
        """Wait for the oldest step in flight and book its answer."""
        flight = self._flights[0]
        try:
            answer = flight.answer.result()
        except EngineDeadError:
            raise
        except BaseException as error:
            if not flight.answer.done():
                raise  # Ctrl-C while we waited: the step goes on, and its answer is there for the next call
            self._fail(self._flights.popleft(), error)
            return self.scheduler.take_finished()
        self._flights.popleft()
        return self.scheduler.update_from_output(flight.order, answer)

    def _fail(self, flight: Flight, error: BaseException) -> None:
        self.scheduler.fail_step(flight.order, f"{type(error).__name__}: {error}")
        if not isinstance(error, Exception):
            raise error  # Ctrl-C: nobody knows how far the step came, so its requests have ended all the same
        order = flight.order
        logger.error(
            "step %d failed; its %d requests end with an error", order.step, len(order.req_ids), exc_info=error
        )

    def warmup_model(self) -> None:
        """Prefill warm-up and decode warm-up, timed and logged."""
        self._land_all()
        self._executor.warmup()

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix; running requests are not disturbed."""
        self._land_all()
        self.scheduler.blocks.reset_prefix_cache()

    def check_integrity(self) -> None:
        """Assert that no block is lost or owned twice. For tests and idle moments."""
        self.scheduler.check_integrity()

    def check_health(self) -> None:
        """Raise EngineDeadError when a rank is gone. For idle moments: a step finds out by itself."""
        self._executor.check_health()

    def prepare(self) -> bool:
        """Do a little of what makes later steps quicker. For idle moments; False when nothing of it is left.

        Raises:
            EngineDeadError: a rank is gone.
        """
        num_reached = self.scheduler.blocks.num_reached
        if num_reached == self._prepared_blocks:  # an idle engine leaves its ranks asleep
            return False
        has_more = self._executor.prefault_kv(num_reached)
        if not has_more:
            self._prepared_blocks = num_reached
        return has_more

    def _land_all(self) -> None:
        """Wait for every step in flight, so that nothing happens behind a caller's back."""
        while self._flights:
            self._landed.append(self._land())

    def close(self) -> None:
        self._grammars.close()
        self._executor.exit()
