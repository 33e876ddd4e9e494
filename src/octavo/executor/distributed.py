"""An executor with several ranks, each in its own process, independent of the transport.

A step is sent to every rank at once; one rank returns the output. Steps may overlap: `execute_model` returns once the
step is sent, and outputs arrive in order. If a rank dies, the executor fails with an error that names the rank.
"""

import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import Future

from octavo.config.engine import EngineConfig
from octavo.contracts.engine import AdapterRef
from octavo.contracts.ranks import (
    AdapterLoaded,
    EvictAdapter,
    FromRank,
    LoadAdapter,
    RankCall,
    RankFailure,
    RankMethod,
    RankResult,
    decode_from_rank,
    encode_to_rank,
)
from octavo.contracts.schedule import ModelRunnerOutput, SchedulerOutput
from octavo.errors import EngineDeadError, OctavoError, named_error
from octavo.executor.adapter_loads import AdapterLoads, LoadFuture
from octavo.executor.ranks import Ranks
from octavo.executor.replies import DeathWatch, Replies
from octavo.executor.steps import StepFuture, StepsInFlight

logger = logging.getLogger(__name__)

_PROGRESS_S = 5.0  # between log lines about slow ranks
_LEAVE_S = 5.0  # for ranks to exit after their connections are closed


class DistributedExecutor:
    """Implements `Executor` over `Ranks`. `launch` starts the ranks; nothing slow is imported before."""

    def __init__(self, config: EngineConfig, launch: Callable[[], Ranks]) -> None:
        self._config = config
        self._launch = launch
        self._ranks: Ranks | None = None
        self._replies: Replies
        self._watch: DeathWatch
        self._adapter_loads: AdapterLoads
        self._steps = StepsInFlight(config.parallel)
        self._num_stages = config.parallel.pipeline_parallel_size
        self._results: dict[int, FromRank] = {}  # of the current call, by rank
        self.profile = ""

    @property
    def ranks(self) -> Ranks:
        assert self._ranks is not None, "the executor has not started, or has exited"
        return self._ranks

    def start(self) -> list[int]:
        """See `Executor.start`. All ranks do the same stage at the same time; each reports its numbers of blocks.

        Raises:
            UserError: from the first rank that raised one, with the rank's number.
            EngineDeadError: a rank died or failed.
        """
        start_s = time.perf_counter()
        self._ranks = self._launch()
        self._replies = Replies(self._ranks.replies)
        self._watch = DeathWatch(self._ranks)
        self._adapter_loads = AdapterLoads(self._num_ranks, _as_error)
        try:
            self.profile = str(self._call("init_worker")[0])
            self._call("load_model")
            counts = [count for count in self._call("count_kv_blocks") if isinstance(count, list)]
            num_blocks = [min(of_group) for of_group in zip(*counts, strict=True)]
            self._call("initialize_kv_cache", num_blocks)
        except BaseException as error:
            self._watch.give_up(EngineDeadError(f"the ranks failed to start: {error}"))
            self.exit()
            raise
        logger.info("%d ranks ready in %.2f s", self._num_ranks, time.perf_counter() - start_s)
        return num_blocks

    @property
    def max_steps_in_flight(self) -> int:
        """One per pipeline stage."""
        return self._num_stages

    def execute_model(self, scheduler_output: SchedulerOutput) -> StepFuture:
        """See `Executor.execute_model`.

        Raises:
            EngineDeadError: a rank has died.
        """
        if self._watch.death is not None:
            raise self._watch.death
        self._broadcast(encode_to_rank(scheduler_output))
        step = StepFuture(scheduler_output, self._receive_step)
        self._steps.add(step)
        return step

    def warmup(self) -> None:
        self._call("warmup")

    def prefault_kv(self, num_reached_blocks: list[int]) -> bool:
        return any(self._call("prefault_kv", num_reached_blocks))

    def load_adapter(self, adapter: AdapterRef) -> Future[None]:
        """See `AdapterVerbs.load_adapter`.

        Raises:
            EngineDeadError: a rank has died.
        """
        load = LoadFuture(adapter, self._receive)
        self._adapter_loads.add(load)
        self._broadcast(encode_to_rank(LoadAdapter(adapter=adapter)))
        return load

    def evict_adapter(self, content_hash: str) -> None:
        self._broadcast(encode_to_rank(EvictAdapter(content_hash=content_hash)))

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
        try:
            self.ranks.broadcast(message, self._receive_alongside)
        except ConnectionError:
            raise self._watch.wait_for_death() from None

    def _receive_alongside(self, fd: int) -> None:
        """Wait until `fd` is readable and receive replies meanwhile, because ranks block while theirs are not read."""
        self._receive(None, fd)

    def _call(self, method: RankMethod, *arguments: list[int]) -> list[int | str | list[int] | None]:
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
        """Receive until `step` is done.

        Raises:
            EngineDeadError: a rank has died, or failed while others did not.
            TimeoutError: after `timeout_s`.
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
            self._receive(min(timeout_at_s, stuck_s, self._steps.deadline_s()) - now_s)

    def _receive(self, timeout_s: float | None, extra_fd: int | None = None) -> bool:
        """Receive what ranks have sent, waiting for the first message; return False on timeout."""
        try:
            came = self._replies.receive(timeout_s, extra_fd)
        except EOFError:
            raise self._watch.wait_for_death() from None
        for rank, message in came:
            self._settle(rank, decode_from_rank(message))
        return bool(came)

    def _settle(self, rank: int, message: FromRank) -> None:
        try:
            if isinstance(message, ModelRunnerOutput):
                self._steps.complete(message)
            elif isinstance(message, AdapterLoaded):
                self._adapter_loads.settle(rank, message)
            elif isinstance(message, RankFailure) and message.step is not None:
                self._steps.fail(rank, message)
            else:
                self._results[rank] = message
        except EngineDeadError as death:
            raise self._watch.give_up(death) from None

    def _check_steps(self, now_s: float) -> None:
        try:
            self._steps.check(now_s)
        except EngineDeadError as death:
            raise self._watch.give_up(death) from None


def _as_error(rank: int, failure: RankFailure) -> OctavoError:
    """Return the error of a rank with its number, and with its traceback unless it is one of Octavo's own errors."""
    message = f"rank {rank}: {failure.message}"
    error = named_error(failure.error_type, message)
    if isinstance(error, EngineDeadError):
        return EngineDeadError(f"rank {rank}: {failure.error_type}: {failure.message}\n{failure.traceback}")
    return error
