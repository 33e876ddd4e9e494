"""The model runner: the only owner of model, KV tensors and persistent rows on a rank. One step in, one output out.

With pipeline parallelism, every stage runs every step; only the last one samples, and only its output counts.

Legend: T = tokens of the step, R = requests in it, L = rows of logits, D = hidden size, V = vocabulary.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext

import msgspec
import numpy as np
import torch

from octavo.attention.metadata import ForwardBatch, LayerCache
from octavo.contracts.engine import ExtraInputs
from octavo.contracts.schedule import NO_SLOT, ModelRunnerOutput, SchedulerOutput
from octavo.errors import InvalidParameterError
from octavo.kernels.native import NativeKernels
from octavo.lora.pool import AdapterPool
from octavo.models.interfaces import CausalLM, IntermediateTensors
from octavo.sampling.native_backend import select_sampler_backend
from octavo.sampling.sampler import Sampler, SamplerOutput
from octavo.worker.encoder_runner import EncoderRunner
from octavo.worker.expert_loads import ExpertLoads
from octavo.worker.graph import StepGraph, one_torch_thread
from octavo.worker.input_batch import make_forward_batch
from octavo.worker.logits_rows import LogitsRows
from octavo.worker.prompt_logprobs import PromptLogprobs, PromptLogprobsUpdate
from octavo.worker.rank_drafting import RankDrafting
from octavo.worker.request_rows import RequestRows
from octavo.worker.stages import StageLinks

logger = logging.getLogger(__name__)


class RankModelRunner:
    """Runs steps. Handles rows and tensors only: no text, no queues, no allocation of blocks."""

    def __init__(
        self,
        model: CausalLM,
        kv_caches: Sequence[LayerCache],
        rows: RequestRows,
        graph: StepGraph | None = None,
        links: StageLinks | None = None,
        expert_loads: ExpertLoads | None = None,
        draft_model: RankDrafting | None = None,
        adapters: AdapterPool | None = None,
    ) -> None:
        self.model = model
        self.draft_model = draft_model
        self.graph = graph
        self.kv_caches = kv_caches
        self.rows = rows
        self.expert_loads = expert_loads
        self.adapters = adapters
        self._links = links
        self.encoder = EncoderRunner(model.encoder, rows)
        self._sampler = Sampler(rows.sampling, select_sampler_backend(rows.sampling.device, model.context.kernels))
        self._prompt_logprobs = PromptLogprobs(rows, model.compute_logits)
        models = (model,) if draft_model is None else (model, draft_model.model)
        self._timed_kernels: set[NativeKernels] = set()  # if layers are recorded, so that few calls are all calls
        if graph is not None:
            self._timed_kernels = {each for m in models if isinstance(each := m.context.kernels, NativeKernels)}

    @torch.inference_mode()
    def begin(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Begin one step: update the rows, run the model over T tokens, sample the S rows that are complete.

        Get the result once, in step order. On a device without a queue it is already done.

        Raises:
            StepError: an earlier stage failed.
        """
        before_s, done = self._compute_s(), Future[ModelRunnerOutput]()
        model_output = self._compute(scheduler_output)
        if self._timed_kernels:
            model_output = msgspec.structs.replace(model_output, compute_s=self._compute_s() - before_s)
        if self.expert_loads is not None:
            model_output = msgspec.structs.replace(model_output, expert_load=self.expert_loads.totals())
        if self.draft_model is not None:
            model_output = msgspec.structs.replace(model_output, draft_passes=self.draft_model.passes)
        done.set_result(model_output)
        return done

    def _compute_s(self) -> float:
        """Return how long native calls have taken since the start."""
        return sum(kernels.compute_s for kernels in self._timed_kernels)

    def _compute(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        if self._links is not None and not self.model.stage.is_last:
            return self._hand_on(scheduler_output, self._links)
        with self._torch_threads():
            scheduler_output, batch = self._prepare(scheduler_output)
            if batch is None:
                return empty_output()
            computed = self._run_stage(batch)  # hidden states [T, D], or the kept rows
            if not self._prompt_logprobs.are_due:
                return self._finish(scheduler_output, batch, computed, PromptLogprobsUpdate())
        prompts = self._prompt_logprobs.of_step(
            scheduler_output, batch, computed.hidden
        )  # covers the whole vocabulary: uses all threads
        with self._torch_threads():
            return self._finish(scheduler_output, batch, computed, prompts)

    def _torch_threads(self) -> AbstractContextManager[None]:
        return nullcontext() if self.graph is None else one_torch_thread()

    def check(self, scheduler_output: SchedulerOutput) -> None:
        """Reject requests that this worker does not support.

        Raises:
            InvalidParameterError: a request has an input that the model does not read.
        """
        for new in scheduler_output.scheduled_new_reqs:
            if new.extra_inputs is not None:
                self._check_extra(new.extra_inputs)
            if new.adapter_slot != NO_SLOT and not self.model.takes_adapters:
                raise InvalidParameterError("adapter_slot", new.adapter_slot, "this model takes no adapters")

    def _check_extra(self, extra: ExtraInputs) -> None:
        if extra.vision and self.model.config.vision is None:
            raise InvalidParameterError("vision", f"{len(extra.vision)} images", "this model takes no images")
        if extra.rotary_positions is not None and not self.model.config.rope.sections:
            limit = "this model's rotary embedding has one axis"
            raise InvalidParameterError("rotary_positions", "positions of three axes", limit)

    def _fill_slots(self, scheduler_output: SchedulerOutput) -> None:
        """Copy adapters to their slots. First of all: the scheduler takes it as done even if the step fails."""
        if scheduler_output.adapter_fills:
            assert self.adapters is not None, "fills come with enable_lora only"
            self.adapters.fill(scheduler_output.adapter_fills)

    def _hand_on(self, scheduler_output: SchedulerOutput, links: StageLinks) -> ModelRunnerOutput:
        """Run this stage of a step. The next stage waits for it, so failures are passed on, too."""
        try:
            with self._torch_threads():
                _, batch = self._prepare(scheduler_output)
                if batch is not None:
                    links.send(self._run_stage(batch))
        except Exception as error:
            logger.exception("step %d failed on this stage", scheduler_output.step)
            links.send_failure(scheduler_output.total_num_scheduled_tokens, error)
        return empty_output()

    def _prepare(self, scheduler_output: SchedulerOutput) -> tuple[SchedulerOutput, ForwardBatch | None]:
        """Update the rows and build the batch, while the previous stage may still compute. None: no tokens in it.

        The scheduler output is returned with its drafts drawn.
        """
        try:
            self._fill_slots(scheduler_output)
            self.check(scheduler_output)
            self.encoder.run(scheduler_output)
            self.rows.apply(scheduler_output)
            if self.draft_model is not None:
                scheduler_output = self.draft_model.draw(scheduler_output)
            return scheduler_output, (
                make_forward_batch(scheduler_output, self.rows) if scheduler_output.req_ids else None
            )
        except Exception:
            if self._links is not None and scheduler_output.req_ids:
                self._links.receive(
                    scheduler_output.total_num_scheduled_tokens
                )  # or the next step would receive this one's tensors
            raise

    def _run_stage(self, batch: ForwardBatch) -> IntermediateTensors:
        incoming = self._links.receive(len(batch.input_ids)) if self._links else None
        if self.graph is not None and self.graph.serves(batch):
            return self.graph.run(batch, incoming)
        return self.model.run_stage(batch, self.kv_caches, incoming)

    def _finish(
        self,
        scheduler_output: SchedulerOutput,
        batch: ForwardBatch,
        computed: IntermediateTensors,
        prompts: PromptLogprobsUpdate,
    ) -> ModelRunnerOutput:
        """Sample, and pass the step's results to the drafter."""
        model_output = self._sample(scheduler_output, batch, computed.hidden, prompts)
        if self.draft_model is not None:
            self.draft_model.observe(scheduler_output, model_output, computed.aux)
        return model_output

    def _sample(
        self,
        scheduler_output: SchedulerOutput,
        batch: ForwardBatch,
        hidden: torch.Tensor,
        prompts: PromptLogprobsUpdate,
    ) -> ModelRunnerOutput:
        """Sample from the rows of `hidden` [T, D] that get logits, and return the step's output."""
        logits_rows = LogitsRows.of(scheduler_output)
        if not len(logits_rows.rows):
            return logits_rows.model_output(scheduler_output, np.zeros(0, dtype=np.int32), {}, {}, prompts)
        result = self._choose(scheduler_output, logits_rows, batch.of_logits(hidden), batch.logits_adapter_ids)
        token_ids = result.token_ids.cpu().numpy().astype(np.int32)
        model_output = logits_rows.model_output(scheduler_output, token_ids, result.logprobs, result.errors, prompts)
        rows, ends, chosen = logits_rows.rows, logits_rows.ends, result.token_ids
        if logits_rows.columns is not None:
            is_kept = logits_rows.kept(model_output)
            rows, ends, chosen = rows[is_kept], ends[is_kept], chosen[torch.from_numpy(is_kept).to(chosen.device)]
        self.rows.append_sampled(rows, ends, chosen)
        return model_output

    def _choose(
        self,
        scheduler_output: SchedulerOutput,
        logits_rows: LogitsRows,
        hidden: torch.Tensor,
        adapter_ids: torch.Tensor | None,
    ) -> SamplerOutput:
        """Sample the next token for each of `hidden` [L, D], with the adapters [L]."""
        rows = logits_rows.rows
        if self._sampler.needs_argmax_only(rows, scheduler_output.token_masks):
            return self._sampler.take_argmax(*self.model.logits_argmax(hidden, adapter_ids))
        logits = self.model.compute_logits(hidden, adapter_ids)  # [L, V]
        output_indices = logits_rows.ends - self.rows.num_prompt_tokens[rows]
        return self._sampler.sample(
            logits, rows, output_indices, scheduler_output.token_masks, logits_rows.drafts_before
        )


def empty_output() -> ModelRunnerOutput:
    """Return the output of a step without requests, or of a stage that does not sample."""
    return ModelRunnerOutput(
        req_ids=(), sampled_token_ids=np.zeros((0, 1), dtype=np.int32), num_sampled=np.zeros(0, dtype=np.int32)
    )
