"""The runner of a device that works while the host goes on: a step is begun, and its answer is read when it is wanted.

Sampled ids stay on the device, where the next step finds them; the host reads them a step late. So nothing between two
steps waits, unless a prompt's own log-probabilities are wanted.

Legend: T = tokens of the step, R = requests in it, L = rows of logits, D = hidden size.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from octavo.attention.metadata import LayerKVCache
from octavo.contracts.schedule import SchedulerOutput
from octavo.contracts.step import ModelRunnerOutput
from octavo.device.device_queue import DeviceQueue
from octavo.models.interfaces import CausalLM
from octavo.worker.device_sampling import Sampled, SampledOnHost, sample
from octavo.worker.graph_key import LARGEST
from octavo.worker.graphed_decoding import GraphedDecoding
from octavo.worker.input_batch import make_forward_batch
from octavo.worker.logits_rows import LogitsRows
from octavo.worker.model_runner import ModelRunner, no_answer
from octavo.worker.prompt_logprobs import PromptNews
from octavo.worker.request_rows import RequestRows
from octavo.worker.step_wishes import StepWishes, context_on_device

Answer = Callable[[], ModelRunnerOutput]  # waits for it; to be called once


class OverlappedRunner(ModelRunner):
    """See `ModelRunner`. Same orders, same answers; a whole model on one rank."""

    def __init__(
        self,
        model: CausalLM,
        kv_caches: list[LayerKVCache],
        rows: RequestRows,
        queue: DeviceQueue,
        graphs: GraphedDecoding | None = None,
    ) -> None:
        super().__init__(model, kv_caches, rows)
        self.graphs = graphs  # of pure decoding
        self._queue = queue

    def execute_model(self, order: SchedulerOutput) -> ModelRunnerOutput:
        """Begin a step and wait for it."""
        return self.begin(order)()

    @torch.inference_mode()
    def begin(self, order: SchedulerOutput) -> Answer:
        """Launch one step; return what waits for its answer."""
        self.check(order)
        self.rows.apply_requests(order)
        if not order.req_ids:
            self.rows.apply_tables(order)
            return no_answer
        logits_rows = LogitsRows.of(order)
        wishes = StepWishes.of(order, logits_rows, self.rows)
        replay = None if self.graphs is None else self.graphs.find(order, wishes)
        if replay is None:
            return self._op_by_op(order, logits_rows, wishes)
        assert self.graphs is not None
        self.graphs.send(order, wishes)
        replay()
        return self._read_later(order, logits_rows, wishes, *self.graphs.step.outcome(len(order.rows), wishes.ending))

    def _op_by_op(self, order: SchedulerOutput, logits_rows: LogitsRows, wishes: StepWishes) -> Answer:
        self.rows.apply_tables(order)
        batch = make_forward_batch(order, self.rows)
        hidden = self._run_stage(batch).hidden  # [T, D], or what is kept of it
        sampled = self._sample_on_device(logits_rows, wishes, batch.of_logits(hidden))
        # Behind a draft that is rejected this writes tokens that nobody reads before others are written over them.
        self.rows.write_sampled(logits_rows.rows, logits_rows.ends, sampled.token_ids)
        prompts = self._prompt_logprobs.of_step(order, batch, hidden)
        return self._read_later(order, logits_rows, wishes, sampled.results(), sampled.ratings, prompts)

    def _sample_on_device(self, logits_rows: LogitsRows, wishes: StepWishes, hidden: torch.Tensor) -> Sampled:
        """Sample from hidden [L, D]."""
        if not len(hidden):
            return Sampled.of_largest(hidden.new_zeros(0), torch.zeros(0, dtype=torch.int64, device=hidden.device))
        if wishes.ending == LARGEST:
            return Sampled.of_largest(*self.model.largest_logits(hidden))
        context, edits = context_on_device(logits_rows, self.rows), wishes.edits_on_device(self.rows)
        logits = self.model.compute_logits(hidden)
        return sample(logits, wishes.wishes_on_device(self.rows), wishes.ending, context, edits)

    def _read_later(
        self,
        order: SchedulerOutput,
        logits_rows: LogitsRows,
        wishes: StepWishes,
        results: torch.Tensor,
        ratings: torch.Tensor | None,
        prompts: PromptNews | None = None,
    ) -> Answer:
        """Begin to copy results [L, 3] and ratings to the host."""
        num_logprobs = wishes.columns.get("num_logprobs", np.full(len(results), -1))
        vocab_size = self.rows.sampling.vocab_size
        sampled = SampledOnHost(order, logits_rows, num_logprobs, results, ratings, self._queue, vocab_size)
        return partial(sampled.answer, prompts or PromptNews())
