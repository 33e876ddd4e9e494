"""The model runner: the only owner of model, KV tensors and persistent rows on a rank. One step in, one output out.

On a device with a queue, a step is launched and its output is read when needed: sampled ids stay on the device, where
the next step reads them, and the host reads them one step late. So nothing waits between two steps, unless prompt
logprobs are requested. Elsewhere, the output is ready at once.

With pipeline parallelism, every stage runs every step; only the last one samples, and only its output counts.

Legend: T = tokens of the step, R = requests in it, L = rows of logits, D = hidden size.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch

from octavo.attention.metadata import ForwardBatch, LayerCache
from octavo.contracts.schedule import ModelRunnerOutput, SchedulerOutput
from octavo.kernels.native import NativeKernels
from octavo.models.interfaces import CausalLM, IntermediateTensors
from octavo.sampling.rows import ARGMAX, StepSampling
from octavo.sampling.sampler import Sampled, SampledTokens, Sampler, read_now
from octavo.worker.decode_step import ExpertLoads, GraphedDecoding
from octavo.worker.graph import StepGraph, one_torch_thread
from octavo.worker.logits_rows import LogitsRows, PromptLogprobs, PromptLogprobsUpdate, read_later
from octavo.worker.rank_drafter import RankDrafter
from octavo.worker.request_rows import RequestRows
from octavo.worker.stages import StageLinks

logger = logging.getLogger(__name__)


class DeferredOutput(Future[ModelRunnerOutput]):
    """The output of a launched step. `result` waits for the device."""

    def __init__(self, wait: Callable[[], ModelRunnerOutput]) -> None:
        super().__init__()
        self._wait = wait  # call it once

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        if not self.done():
            try:
                self.set_result(self._wait())
            except Exception as error:  # noqa: BLE001 - any device error fails the requests of this step
                self.set_exception(error)
        return super().result(0)


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step on its way."""

    step: SchedulerOutput
    logits_rows: LogitsRows
    read: Callable[[], SampledTokens]
    batch: ForwardBatch | None  # None: replayed
    computed: IntermediateTensors | None
    pooled: dict[str, torch.Tensor] = field(default_factory=dict)  # [D] each

    def output(self, prompts: PromptLogprobsUpdate) -> ModelRunnerOutput:
        return self.logits_rows.model_output(self.read(), prompts, self.pooled)


class RankModelRunner:
    """Runs steps. Handles rows and tensors only: no text, no requests waiting, no allocation of blocks."""

    def __init__(
        self,
        model: CausalLM,
        kv_caches: Sequence[LayerCache],
        rows: RequestRows,
        *,
        graph: StepGraph | None = None,
        graphs: GraphedDecoding | None = None,
        links: StageLinks | None = None,
        expert_loads: ExpertLoads | None = None,
        drafter: RankDrafter | None = None,
    ) -> None:
        """`graph` is that of a CPU; `graphs` are those of decoding on a device with a queue."""
        self.model, self.kv_caches, self.rows = model, kv_caches, rows
        self.graph, self.graphs, self.expert_loads, self.drafter = graph, graphs, expert_loads, drafter
        self._links, self._queue = links, rows.transfers.queue
        is_queued = self._queue is not None
        self._sampler = Sampler(rows.token_ids, rows.transfers.send, model.context.kernels, is_queued=is_queued)
        self._prompt_logprobs = PromptLogprobs(rows, model.compute_logits)
        models = (model,) if drafter is None else (model, drafter.model)
        self._timed_kernels: set[NativeKernels] = set()  # if layers are recorded, so that few calls are all calls
        if graph is not None:
            self._timed_kernels = {each for m in models if isinstance(each := m.context.kernels, NativeKernels)}

    @torch.inference_mode()
    def begin(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Begin one step: update the rows, run the model over T tokens, sample the rows that are complete.

        Get the result once, in step order.

        Raises:
            StepError: an earlier stage failed.
            InvalidParameterError: a request has an input that the model does not read.
        """
        before_s = self._compute_s()
        wait = self._launch(scheduler_output)
        counted: dict[str, Any] = {}
        if self._timed_kernels:
            counted["compute_s"] = self._compute_s() - before_s
        if self.drafter is not None:
            counted["draft_passes"] = self.drafter.passes
        totals = None if self.expert_loads is None else self.expert_loads.begin_totals(self._queue)

        def output() -> ModelRunnerOutput:
            if totals is not None:
                counted["expert_load"] = totals()
            return msgspec.structs.replace(wait(), **counted) if counted or totals is not None else wait()

        if self._queue is not None:
            return DeferredOutput(output)
        done = Future[ModelRunnerOutput]()
        done.set_result(output())
        return done

    def _compute_s(self) -> float:
        """Return how long native calls have taken since the start."""
        return sum(kernels.compute_s for kernels in self._timed_kernels)

    def _torch_threads(self) -> AbstractContextManager[None]:
        return nullcontext() if self.graph is None else one_torch_thread()

    def _launch(self, scheduler_output: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        with self._torch_threads():
            if self._links is not None and not self.model.stage.is_last:
                self._hand_on(scheduler_output, self._links)
                return empty_output
            launched = self._compute(scheduler_output)
        if launched is None:
            return empty_output
        prompts, batch, computed = PromptLogprobsUpdate(), launched.batch, launched.computed
        if self.rows.prompt_logprobs and batch is not None and computed is not None:
            prompts = self._prompt_logprobs.of_step(launched.step, batch, computed.hidden)  # uses all threads
        if self._queue is not None:
            return partial(launched.output, prompts)
        output = launched.output(prompts)
        if self.drafter is not None and computed is not None:
            with self._torch_threads():
                self.drafter.observe(launched.step, output, computed.aux)
        return lambda: output

    def _hand_on(self, scheduler_output: SchedulerOutput, links: StageLinks) -> None:
        """Run this stage of a step. The next stage waits for it, so failures are passed on, too."""
        try:
            with links.preparing(scheduler_output.total_num_scheduled_tokens):
                scheduler_output = self._apply(scheduler_output)
                batch = self._batch(scheduler_output) if scheduler_output.req_ids else None
            if batch is not None:
                links.send(self._run_stage(batch))
        except Exception as error:
            logger.exception("step %d failed on this stage", scheduler_output.step)
            links.send_failure(scheduler_output.total_num_scheduled_tokens, error)

    def _apply(self, scheduler_output: SchedulerOutput) -> SchedulerOutput:
        """Update the rows, and return the step with its drafts drawn. A graph may change the tables, so they wait."""
        self.rows.apply_requests(scheduler_output)
        if self.graphs is None or self.drafter is not None or not scheduler_output.req_ids:
            self.rows.apply_tables(scheduler_output)
        return scheduler_output if self.drafter is None else self.drafter.draw(scheduler_output)

    def _batch(self, scheduler_output: SchedulerOutput) -> ForwardBatch:
        if self.graphs is not None:
            self.rows.apply_tables(scheduler_output)
        keeps_all = bool(self.rows.prompt_logprobs)
        return self.rows.forward_batch(scheduler_output, self.rows.states, keeps_all=keeps_all)

    def _compute(self, scheduler_output: SchedulerOutput) -> _Launched | None:
        """Run the step and sample; None: it has no tokens. The batch is built while an earlier stage may compute."""
        links, batch = self._links, None
        with nullcontext() if links is None else links.preparing(scheduler_output.total_num_scheduled_tokens):
            step = self._apply(scheduler_output)
            if not step.req_ids:
                return None
            logits_rows = LogitsRows(step)
            sampling = self.rows.sampling.step(logits_rows.rows, logits_rows.ends, step.token_masks)
            replayed = None if self.graphs is None or self.rows.pooled else self.graphs.replay(step, sampling)
            if replayed is None:
                batch = self._batch(step)
        if batch is None:
            assert replayed is not None and self._queue is not None  # noqa: PT018 - graphs come with a queue
            return _Launched(step, logits_rows, read_later(*replayed, sampling, self._queue), None, None)
        computed = self._run_stage(batch)  # hidden states [T, D], or the kept rows
        sampled = self._sample(batch, computed.hidden, sampling)
        # After a rejected draft, this writes tokens that are overwritten before they are read.
        self.rows.write_sampled(logits_rows.rows, logits_rows.ends, sampled.token_ids)
        read: Callable[[], SampledTokens] = partial(read_now, sampled, sampling)
        if self._queue is not None:
            read = read_later(sampled.packed(), sampled.ratings, sampling, self._queue)
        pooled = logits_rows.pool(self.rows.pooled, batch.of_logits(computed.hidden)) if self.rows.pooled else {}
        return _Launched(step, logits_rows, read, batch, computed, pooled)

    def _run_stage(self, batch: ForwardBatch) -> IntermediateTensors:
        incoming = self._links.receive(len(batch.input_ids)) if self._links else None
        if self.graph is not None and self.graph.serves(batch):
            return self.graph.run(batch, incoming)
        return self.model.run_stage(batch, self.kv_caches, incoming)

    def _sample(self, batch: ForwardBatch, hidden: torch.Tensor, sampling: StepSampling) -> Sampled:
        """Sample from the rows of `hidden` [T, D] that get logits."""
        if self.rows.pooled.issuperset(sampling.rows.tolist()):
            nothing = torch.zeros(len(sampling.rows), device=hidden.device)
            return Sampled.of_argmax(nothing, nothing.to(torch.int64))
        if sampling.ending == ARGMAX:
            return Sampled.of_argmax(*self.model.logits_argmax(*batch.head_inputs(hidden)))
        return self._sampler.sample(self.model.compute_logits(*batch.head_inputs(hidden)), sampling)


def empty_output() -> ModelRunnerOutput:
    """Return the output of a step without requests, or of a stage that does not sample."""
    return ModelRunnerOutput(
        req_ids=(), sampled_token_ids=np.zeros((0, 1), dtype=np.int32), num_sampled=np.zeros(0, dtype=np.int32)
    )
