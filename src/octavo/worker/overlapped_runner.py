"""The runner for asynchronous devices: a step is launched, and its output is read when needed.

Sampled ids stay on the device, where the next step reads them; the host reads them one step late. So nothing waits
between two steps, unless prompt logprobs are requested.

Legend: T = tokens of the step, R = requests in it, L = rows of logits, D = hidden size.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

import msgspec
import numpy as np
import torch

from octavo.attention.metadata import LayerCache
from octavo.contracts.schedule import ModelRunnerOutput, SchedulerOutput
from octavo.device.base import DeviceQueue
from octavo.lora.pool import AdapterPool
from octavo.models.interfaces import CausalLM
from octavo.worker.decode_graphs import ARGMAX
from octavo.worker.device_sampling import Sampled, SampledOnHost, StepSamplingMetadata, context_on_device, sample
from octavo.worker.expert_loads import ExpertLoads
from octavo.worker.graphed_decoding import GraphedDecoding
from octavo.worker.input_batch import make_forward_batch
from octavo.worker.logits_rows import LogitsRows
from octavo.worker.model_runner import RankModelRunner, empty_output
from octavo.worker.prompt_logprobs import PromptLogprobsUpdate
from octavo.worker.rank_drafting import RankDrafting
from octavo.worker.request_rows import RequestRows

_Wait = Callable[[], ModelRunnerOutput]  # for the device; call it once


class DeferredOutput(Future[ModelRunnerOutput]):
    """The output of a launched step. `result` waits for the device."""

    def __init__(self, wait: _Wait) -> None:
        super().__init__()
        self._wait = wait

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        if not self.done():
            try:
                self.set_result(self._wait())
            except Exception as error:  # noqa: BLE001 - any device error fails the requests of this step
                self.set_exception(error)
        return super().result(0)


def _with_passes(wait: _Wait, passes: list[tuple[int, float]]) -> ModelRunnerOutput:
    return msgspec.structs.replace(wait(), draft_passes=passes)


class OverlappedRunner(RankModelRunner):
    """See `RankModelRunner`. Same steps, same outputs; a whole model on one rank."""

    def __init__(
        self,
        model: CausalLM,
        kv_caches: Sequence[LayerCache],
        rows: RequestRows,
        queue: DeviceQueue,
        graphs: GraphedDecoding | None = None,
        expert_loads: ExpertLoads | None = None,
        draft_model: RankDrafting | None = None,
        adapters: AdapterPool | None = None,
    ) -> None:
        super().__init__(model, kv_caches, rows, expert_loads=expert_loads, draft_model=draft_model, adapters=adapters)
        self.graphs = graphs  # of pure decoding
        self._queue = queue

    @torch.inference_mode()
    def begin(self, scheduler_output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        """Launch one step."""
        wait = self._launch(scheduler_output)
        if self.draft_model is not None:
            wait = partial(_with_passes, wait, self.draft_model.passes)
        if self.expert_loads is None:
            return DeferredOutput(wait)
        totals = self.expert_loads.begin_totals(self._queue)
        return DeferredOutput(lambda: msgspec.structs.replace(wait(), expert_load=totals()))

    def _launch(self, scheduler_output: SchedulerOutput) -> _Wait:
        self._fill_slots(scheduler_output)
        self.check(scheduler_output)
        self.encoder.run(scheduler_output)
        self.rows.apply_requests(scheduler_output)
        if self.draft_model is not None:  # waits for its drafts; blocks and tokens are applied twice
            self.rows.apply_tables(scheduler_output)
            scheduler_output = self.draft_model.draw(scheduler_output)
        if not scheduler_output.req_ids:
            self.rows.apply_tables(scheduler_output)
            return empty_output
        logits_rows = LogitsRows.of(scheduler_output)
        metadata = StepSamplingMetadata.of(scheduler_output, logits_rows, self.rows)
        replay = None if self.graphs is None else self.graphs.find(scheduler_output, metadata)
        if replay is None:
            return self._op_by_op(scheduler_output, logits_rows, metadata)
        assert self.graphs is not None
        self.graphs.send(scheduler_output, metadata)
        replay()
        return self._read_later(
            scheduler_output,
            logits_rows,
            metadata,
            *self.graphs.step.outcome(len(scheduler_output.rows), metadata.ending),
        )

    def _op_by_op(
        self, scheduler_output: SchedulerOutput, logits_rows: LogitsRows, metadata: StepSamplingMetadata
    ) -> _Wait:
        self.rows.apply_tables(scheduler_output)
        batch = make_forward_batch(scheduler_output, self.rows)
        hidden = self._run_stage(batch).hidden  # [T, D], or the kept rows
        sampled = self._sample_on_device(logits_rows, metadata, batch.of_logits(hidden), batch.logits_adapter_ids)
        # After a rejected draft, this writes tokens that are overwritten before they are read.
        self.rows.write_sampled(logits_rows.rows, logits_rows.ends, sampled.token_ids)
        prompts = self._prompt_logprobs.of_step(scheduler_output, batch, hidden)
        return self._read_later(scheduler_output, logits_rows, metadata, sampled.results(), sampled.ratings, prompts)

    def _sample_on_device(
        self,
        logits_rows: LogitsRows,
        metadata: StepSamplingMetadata,
        hidden: torch.Tensor,
        adapter_ids: torch.Tensor | None,
    ) -> Sampled:
        """Sample from hidden [L, D], with the adapters [L]."""
        if not len(hidden):
            return Sampled.of_argmax(hidden.new_zeros(0), torch.zeros(0, dtype=torch.int64, device=hidden.device))
        if metadata.ending == ARGMAX:
            return Sampled.of_argmax(*self.model.logits_argmax(hidden, adapter_ids))
        context, processors = context_on_device(logits_rows, self.rows), metadata.processors_on_device(self.rows)
        logits = self.model.compute_logits(hidden, adapter_ids)
        return sample(logits, metadata.metadata_on_device(self.rows), metadata.ending, context, processors)

    def _read_later(
        self,
        scheduler_output: SchedulerOutput,
        logits_rows: LogitsRows,
        metadata: StepSamplingMetadata,
        results: torch.Tensor,
        ratings: torch.Tensor | None,
        prompts: PromptLogprobsUpdate | None = None,
    ) -> _Wait:
        """Start copying results [L, 3] and ratings to the host."""
        num_logprobs = metadata.columns.get("num_logprobs", np.full(len(results), -1))
        vocab_size = self.rows.sampling.vocab_size
        sampled = SampledOnHost(scheduler_output, logits_rows, num_logprobs, results, ratings, self._queue, vocab_size)
        return partial(sampled.model_output, prompts or PromptLogprobsUpdate())
