"""The model runner: the only owner of model, KV tensors and persistent rows on a rank. One order in, one answer out.

Legend: T = tokens of the step, R = requests in it, S = rows that sample, D = hidden size, V = vocabulary.
"""

import numpy as np
import torch

from octavo.attention.metadata import ForwardBatch, LayerKVCache
from octavo.contracts.engine import TokenLogprobs
from octavo.contracts.schedule import SchedulerOutput
from octavo.contracts.step import ModelRunnerOutput
from octavo.models.interfaces import CausalLM
from octavo.sampling.sampler import Sampler
from octavo.worker.graph import StepGraph
from octavo.worker.input_batch import make_forward_batch
from octavo.worker.prompt_logprobs import PromptLogprobs, PromptNews
from octavo.worker.request_rows import RequestRows


class ModelRunner:
    """Runs steps. Knows rows and tensors, never text, queues or blocks that it was not told of."""

    def __init__(
        self, model: CausalLM, kv_caches: list[LayerKVCache], rows: RequestRows, graph: StepGraph | None = None
    ) -> None:
        self.model = model
        self.graph = graph
        self.kv_caches = kv_caches
        self.rows = rows
        self._sampler = Sampler(rows.sampling)
        self._prompt_logprobs = PromptLogprobs(rows, model.compute_logits)

    @torch.inference_mode()
    def execute_model(self, order: SchedulerOutput) -> ModelRunnerOutput:
        """Compute one step: update the rows, run the model over T tokens, sample the S rows that are complete."""
        if order.scheduled_spec_decode_tokens or order.scheduled_encoder_inputs:
            raise ValueError("this worker has neither a draft model nor an encoder")
        self.rows.apply(order)
        if not order.req_ids:
            return _nothing()
        batch = make_forward_batch(order, self.rows)
        hidden = self.graph.run(batch) if self.graph else self.model(batch, self.kv_caches)  # [T, D]
        return self._sample(order, batch, hidden, self._prompt_logprobs.of_step(order, batch, hidden))

    def _sample(
        self,
        order: SchedulerOutput,
        batch: ForwardBatch,
        hidden: torch.Tensor,
        prompts: PromptNews,
    ) -> ModelRunnerOutput:
        indices = order.samples.nonzero()[0]  # [S], among R
        sampled = np.zeros((len(order.req_ids), 1), dtype=np.int32)  # [R, 1]
        num_sampled = np.zeros(len(order.req_ids), dtype=np.int32)  # [R]
        logprobs: dict[str, list[TokenLogprobs]] = {}
        errors = dict(prompts.errors)
        if len(indices):
            rows = order.rows[indices]
            ends = (order.num_computed_tokens + order.num_scheduled_tokens)[indices]
            logits = self.model.compute_logits(hidden[batch.logits_indices])  # [S, V]
            output_indices = ends - self.rows.num_prompt_tokens[rows]
            result = self._sampler.sample(logits, rows, output_indices, order.token_masks)
            self.rows.append_sampled(rows, ends, result.token_ids)
            sampled[indices, 0] = result.token_ids.cpu().numpy()
            num_sampled[indices] = 1
            logprobs = {order.req_ids[indices[at]]: [entry] for at, entry in result.logprobs.items()}
            errors |= {order.req_ids[indices[at]]: why for at, why in result.errors.items()}
        if errors:
            num_sampled[[request_id in errors for request_id in order.req_ids]] = 0
        return ModelRunnerOutput(
            req_ids=order.req_ids,
            sampled_token_ids=sampled,
            num_sampled=num_sampled,
            logprobs=logprobs,
            prompt_logprobs=prompts.complete,
            errors=errors,
        )


def _nothing() -> ModelRunnerOutput:
    return ModelRunnerOutput(
        req_ids=(), sampled_token_ids=np.zeros((0, 1), dtype=np.int32), num_sampled=np.zeros(0, dtype=np.int32)
    )
