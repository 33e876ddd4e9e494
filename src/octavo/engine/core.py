"""The engine core: scheduler plus executor. It handles tokens, never text. A step is three calls.

Several steps are in flight with pipeline parallelism, one per stage, and on devices with a queue, which then need not
wait for the host: the core submits steps while there is something to compute, and waits for the oldest.
"""

import contextlib
import logging
import re
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.config.engine import EngineConfig
from octavo.contracts.engine import CoreReady, EngineCoreOutputs, EngineCoreRequest
from octavo.contracts.kv_cache import capacity_tokens
from octavo.contracts.schedule import ModelRunnerOutput, SchedulerOutput
from octavo.errors import EngineDeadError
from octavo.executor.base import Executor
from octavo.lora.host_cache import HostAdapters
from octavo.scheduler.adapter_gate import AdapterGate
from octavo.scheduler.block_manager import BlockManager
from octavo.scheduler.gate import Gate
from octavo.scheduler.grammar_gate import GrammarGate
from octavo.scheduler.prefix_gate import PrefixGate
from octavo.scheduler.prefix_store import PrefixStore
from octavo.scheduler.running import RunningRows
from octavo.scheduler.scheduler import Scheduler
from octavo.scheduler.speculation import Speculation
from octavo.speculative.drafters import Drafter, make_drafter
from octavo.structured.manager import GrammarManager

if TYPE_CHECKING:  # the library loads with the first request
    from octavo.structured.llguidance_backend import LLGuidanceBackend

logger = logging.getLogger(__name__)

# Errors, here or of a rank, after which later steps fail, too: a new process goes on with the requests, if one can.
_BROKEN = re.compile(r"\b(MemoryError|OutOfMemoryError|AcceleratorError)\b|CUDA error|out of memory")
_READY_WAIT_S = 0.01  # per wait for what a gate needs, when idle; messages are read in between


class EngineCore:
    """Owned by one thread, in which no signal handler runs; others send it messages (`EngineCoreClient`)."""

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        *,
        drafter: Drafter | None = None,
        on_begin: Callable[[list[str], Iterable[str]], None] | None = None,
    ) -> None:
        """`on_begin` is told which requests are prepared or computed next, for the first time, and which there are."""
        self._executor = executor
        self._on_begin = on_begin
        num_blocks = executor.start()
        kv_tokens = capacity_tokens(
            config.model.kv_groups, num_blocks, block_size=config.cache.block_size,
            max_model_len=config.model.max_model_len, max_chunk=config.scheduler.max_num_batched_tokens,
        )  # fmt: skip
        self._grammars = GrammarManager(partial(_make_grammar_backend, config))
        self._adapters = None if config.lora is None else HostAdapters(executor.call, config.lora.max_cpu_loras)
        blocks = BlockManager(config.cache, num_blocks, config.model.kv_groups)
        running = RunningRows(config.scheduler.max_num_seqs, config.model.max_model_len, blocks)
        gates: list[Gate] = [grammar_gate := GrammarGate(self._grammars, running)]
        if self._adapters is not None and config.lora is not None:
            gates.append(AdapterGate(self._adapters, config.lora.max_loras, config.scheduler.ageing_s))
        self._prefixes = None
        if config.cache.enable_prefix_caching and config.cache.prefix_disk_bytes:
            self._prefixes = PrefixStore(executor.call, blocks, config.cache.prefix_disk_bytes)
            self._prefix_gate = PrefixGate(self._prefixes, running)
            gates.append(self._prefix_gate)
        speculation = None
        is_unsure = config.draft_model is not None and config.draft_model.is_optional
        has_drafts = not is_unsure or all(executor.call("draws_drafts").result())
        if (drafter := drafter or (make_drafter(config) if has_drafts else None)) is not None:
            is_adaptive = config.speculative is not None and config.speculative.adaptive
            speculation = Speculation(drafter, running, grammar_gate, is_adaptive=is_adaptive)
        self.scheduler = Scheduler(
            config.scheduler,
            running,
            gates=gates,
            speculation=speculation,
            num_batches=config.parallel.pipeline_parallel_size,
        )
        if self._prefixes is not None:
            self._prefixes.is_unsure = self.scheduler.is_in_flight
            if not config.supervision.hot_standby:  # else when the first request comes: the other one has the files
                self._prefixes.open()
        self.ready = CoreReady(profile=executor.profile, kv_tokens=kv_tokens, stats=self.scheduler.stats())
        self._max_steps_in_flight = executor.max_steps_in_flight
        self._pending_steps: deque[tuple[SchedulerOutput, Future[ModelRunnerOutput]]] = deque()  # oldest first
        self._finished_outputs: deque[EngineCoreOutputs] = deque()  # of steps that a call waited for
        self._prepared_blocks: list[int] | None = None  # blocks in use when the ranks last had enough memory prefaulted

    def add_request(self, request: EngineCoreRequest) -> None:
        if request.is_prepared and self._on_begin is not None:
            self._on_begin([request.request_id], self.scheduler.request_ids)
        self.scheduler.add_request(request)

    def abort(self, request_ids: list[str]) -> None:
        """End requests immediately. Their blocks are free on return; their outputs come with the next step."""
        self.scheduler.abort(request_ids)

    def has_work(self) -> bool:
        """True when a step would compute or report something."""
        return not self.scheduler.is_finished() or bool(self.scheduler.finished or self._finished_outputs)

    def step(self) -> EngineCoreOutputs:
        """Schedule, execute, update. If the forward pass raises, only the requests of its step end."""
        if self._finished_outputs:
            return self._finished_outputs.popleft()
        if self.scheduler.only_waits and not self._pending_steps:
            self.scheduler.wait_for_gates(_READY_WAIT_S)
        while len(self._pending_steps) < self._max_steps_in_flight:
            output = self.scheduler.schedule_ahead() if self._pending_steps else self.scheduler.schedule()
            if output is None:  # nothing is left that can be computed now
                break
            if self._prefixes is not None:
                self._prefixes.save_evicted()
            if self._on_begin is not None and (new := output.scheduled_new_reqs):
                self._on_begin([each.request_id for each in new], self.scheduler.request_ids)
            try:
                future = self._executor.execute_model(output)
            except Exception as error:  # noqa: BLE001 - handled by `_finish_oldest`
                future = Future()
                future.set_exception(error)
            self._pending_steps.append((output, future))
        return self._finish_oldest()

    def _finish_oldest(self) -> EngineCoreOutputs:
        """Wait for the oldest step in flight and update the scheduler from its output."""
        scheduler_output, future = self._pending_steps[0]
        try:
            model_output = future.result()
        except EngineDeadError:
            raise
        except Exception as error:  # reported to the step's requests
            if self._on_begin is not None and _BROKEN.search(f"{type(error).__name__}: {error}"):
                raise EngineDeadError(f"the device is out of order: {type(error).__name__}: {error}") from error
            self._pending_steps.popleft()
            self.scheduler.fail_step(scheduler_output, f"{type(error).__name__}: {error}")
            num_requests = len(scheduler_output.req_ids)
            logger.exception("step %d failed; its %d requests end with an error", scheduler_output.step, num_requests)
            return self.scheduler.take_finished()
        self._pending_steps.popleft()
        outputs = self.scheduler.update_from_output(scheduler_output, model_output)
        if self._prefixes is not None and not self._pending_steps:
            self._prefixes.after_step(scheduler_output.total_num_scheduled_tokens)
        events = None if self._adapters is None else self._adapters.take_events()
        return outputs if events is None else msgspec.structs.replace(outputs, adapter_events=events)

    def warmup_model(self) -> None:
        """Run a prefill and a decode step without side effects, timed and logged."""
        self._finish_all()
        self._executor.call("warmup").result()

    def reset_prefix_cache(self) -> None:
        """Drop all cached prefixes; running requests are not affected."""
        self._finish_all()
        if self._prefixes is not None:
            self._prefixes.discard_all()
        self.scheduler.blocks.reset_prefix_cache()

    def check_integrity(self) -> None:
        """Assert that no block is lost or owned twice. For tests and when idle."""
        self.scheduler.check_integrity()

    def state(self, with_blocks: bool) -> dict[str, Any]:
        """Describe the requests, and on request the KV blocks, of this moment; `took_s` is what that has cost."""
        start_s = time.perf_counter()
        state = self.scheduler.snapshot(with_blocks=with_blocks)
        return state | {"took_s": time.perf_counter() - start_s}

    def prepare(self) -> bool:
        """When idle, check the ranks, and do some work that makes later steps faster; False when there is none left."""
        self._executor.check_health()
        if self._prefixes is not None:
            self._prefix_gate.poll()
            if self._prefixes.work_idle():
                return True
        num_reached = self.scheduler.blocks.num_reached
        if num_reached == self._prepared_blocks:  # let the ranks of an idle engine sleep
            return False
        has_more = any(self._executor.call("prefault_kv", num_reached).result())
        if not has_more:
            self._prepared_blocks = num_reached
        return has_more

    def _finish_all(self) -> None:
        """Wait for all steps in flight, so that none runs concurrently with the caller."""
        while self._pending_steps:
            self._finished_outputs.append(self._finish_oldest())

    def close(self) -> None:
        self._grammars.close()
        if self._prefixes is not None:
            with contextlib.suppress(EngineDeadError):  # then nothing can be written any more
                self._finish_all()
                self._prefixes.close()
        self._executor.exit()


def _make_grammar_backend(config: EngineConfig) -> "LLGuidanceBackend":
    """Connect the tokenizer to the grammar library: on the first request with a grammar, so that others pay nothing."""
    from octavo.structured.llguidance_backend import LLGuidanceBackend
    from octavo.tokenizer.files import read_tokenizer_files

    files = read_tokenizer_files(Path(config.tokenizer_path))
    token_ids = files.backend.get_vocab(with_added_tokens=True).values()
    added = files.backend.get_added_tokens_decoder()
    return LLGuidanceBackend(
        files.backend.to_str(),
        num_tokens=max(token_ids) + 1,
        vocab_size=config.model.vocab_size,
        added_tokens={token.content: token_id for token_id, token in added.items()},
        end_token_ids=files.end_token_ids(config.model.eos_token_ids, config.model.vocab_size),
    )
