"""The engine core: scheduler plus executor. Knows tokens, never text. A step is three calls."""

import logging

from octavo.config.engine import EngineConfig
from octavo.contracts.engine import EngineCoreOutputs, EngineCoreRequest
from octavo.engine.grammars import make_grammars
from octavo.errors import EngineDeadError
from octavo.executor.base import Executor
from octavo.scheduler.block_manager import BlockManager
from octavo.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

_GRAMMAR_WAIT_S = 0.01  # at a time, when there is nothing else to do; messages are read in between


class EngineCore:
    """One thread owns it; everyone else sends messages (`EngineCoreClient`)."""

    def __init__(self, config: EngineConfig, executor: Executor, *, epoch: int = 0) -> None:
        self._executor = executor
        num_blocks = executor.start()
        self.profile = executor.profile
        self._grammars = make_grammars(config)
        self.scheduler = Scheduler(
            config.scheduler,
            BlockManager(config.cache, num_blocks),
            config.model.max_model_len,
            epoch=epoch,
            grammars=self._grammars,
        )

    def add_request(self, request: EngineCoreRequest) -> None:
        self.scheduler.add_request(request)

    def abort(self, request_ids: list[str]) -> None:
        """End requests at once. Their blocks are free when this returns; their report comes with the next step."""
        self.scheduler.abort(request_ids)

    def has_work(self) -> bool:
        """True when a step would compute or report something."""
        return not self.scheduler.is_finished() or bool(self.scheduler.finished)

    def step(self) -> EngineCoreOutputs:
        """Schedule, execute, update. A forward that raises ends the requests of this step, and only those."""
        if self.scheduler.only_waits_for_grammars:
            self._grammars.wait(_GRAMMAR_WAIT_S)
        order = self.scheduler.schedule()
        try:
            answer = self._executor.execute_model(order).result()
        except BaseException as error:
            self.scheduler.fail_step(order, f"{type(error).__name__}: {error}")
            if isinstance(error, EngineDeadError) or not isinstance(error, Exception):
                raise  # Ctrl-C: nobody knows how far the step came, so its requests have ended all the same
            logger.exception("step %d failed; its %d requests end with an error", order.step, len(order.req_ids))
            return self.scheduler.take_finished()
        return self.scheduler.update_from_output(order, answer)

    def warmup_model(self) -> None:
        """Prefill warm-up and decode warm-up, timed and logged."""
        self._executor.warmup()

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix; running requests are not disturbed."""
        self.scheduler.blocks.reset_prefix_cache()

    def check_integrity(self) -> None:
        """Assert that no block is lost or owned twice. For tests and idle moments."""
        self.scheduler.check_integrity()

    def check_health(self) -> None:
        """Raise EngineDeadError when a rank is gone. For idle moments: a step finds out by itself."""
        self._executor.check_health()

    def close(self) -> None:
        self._grammars.close()
        self._executor.exit()
