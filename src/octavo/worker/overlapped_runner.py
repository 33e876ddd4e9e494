"""The runner of a device that works while the host goes on: a step is begun, and its answer is read when it is wanted.

Sampled ids stay on the device, where the next step finds them; the host reads them a step late. So nothing between two
steps waits, unless a row asks for something that only the host can do: log-probabilities, penalties, a grammar.

Legend: T = tokens of the step, R = requests in it, S = rows that sample, D = hidden size.
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.attention.metadata import LayerKVCache
from octavo.contracts.schedule import SchedulerOutput
from octavo.contracts.step import ModelRunnerOutput
from octavo.device.device_queue import DeviceQueue
from octavo.models.interfaces import CausalLM
from octavo.sampling.noise import NoiseKeys
from octavo.sampling.plain_draw import draw_plain
from octavo.sampling.sampler import why_not
from octavo.worker.decode_step import write_results
from octavo.worker.graph_key import Ending
from octavo.worker.graphed_decoding import KEY_COLUMNS, GraphedDecoding, draw_columns
from octavo.worker.input_batch import make_forward_batch
from octavo.worker.model_runner import ModelRunner, no_answer
from octavo.worker.prompt_logprobs import PromptNews
from octavo.worker.request_rows import RequestRows

Answer = Callable[[], ModelRunnerOutput]  # waits for it; to be called once
_WORD_BYTES = 8


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
        ending = self._ending(order)
        replay = None if self.graphs is None else self.graphs.find(order, ending)
        if replay is None:
            return self._op_by_op(order, ending)
        assert self.graphs is not None
        self.graphs.send(order)
        replay()
        if ending == "hidden":
            return _done(self._sample(order, self.graphs.step.hidden[: len(order.rows)], PromptNews()))
        return self._read_later(order, np.arange(len(order.rows)), self.graphs.step.results[: len(order.rows)])

    def _ending(self, order: SchedulerOutput) -> Ending:
        rows = order.rows[order.samples]
        if self.rows.prompt_logprobs or not self._sampler.takes_plain(rows, order.token_masks):
            return "hidden"
        return "drawn" if self.rows.sampling.records(rows)["temperature"].any() else "largest"

    def _op_by_op(self, order: SchedulerOutput, ending: Ending) -> Answer:
        self.rows.apply_tables(order)
        batch = make_forward_batch(order, self.rows)
        hidden = self._run_stage(batch).hidden  # [T, D]
        sampling = hidden[batch.logits_indices]  # [S, D]
        if ending == "hidden":
            return _done(self._sample(order, sampling, self._prompt_logprobs.of_step(order, batch, hidden)))
        indices = order.samples.nonzero()[0]  # [S], among R
        results = torch.empty(len(indices), 2, dtype=torch.int64, device=hidden.device)
        if len(indices):
            rows, ends = order.rows[indices], (order.num_computed_tokens + order.num_scheduled_tokens)[indices]
            largest, token_ids = self._largest_or_drawn(ending, order, sampling)
            self.rows.write_sampled(rows, ends, token_ids)
            write_results(results, largest, token_ids)
        return self._read_later(order, indices, results)

    def _largest_or_drawn(
        self, ending: Ending, order: SchedulerOutput, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if ending == "largest":
            return self.model.largest_logits(hidden)
        columns = draw_columns(order, self.rows, order.samples)
        temperatures, *keys = self.rows.send(*(columns[name] for name in ("temperatures", *KEY_COLUMNS)))
        return draw_plain(
            self.model.compute_logits(hidden), temperatures, NoiseKeys(**dict(zip(KEY_COLUMNS, keys, strict=True)))
        )

    def _read_later(self, order: SchedulerOutput, indices: NDArray[np.intp], results: torch.Tensor) -> Answer:
        """Begin to copy `results` [S, 2] of the requests `indices` [S] to the host."""
        host = self._queue.host_bytes(results.numel() * _WORD_BYTES).view(torch.int64).view_as(results)
        host.copy_(results, non_blocking=True)
        return partial(_read, order, indices, host, self._queue.mark())


def _done(answer: ModelRunnerOutput) -> Answer:
    return lambda: answer


def _read(
    order: SchedulerOutput, indices: NDArray[np.intp], host: torch.Tensor, wait: Callable[[], None]
) -> ModelRunnerOutput:
    wait()
    token_ids, bits = host.numpy().T  # [S] each
    largest = bits.view(np.float64) if len(bits) else np.zeros(0)
    sampled = np.zeros((len(order.req_ids), 1), dtype=np.int32)  # [R, 1]
    num_sampled = order.samples.astype(np.int32)  # [R]
    sampled[indices, 0] = token_ids
    errors: dict[str, str] = {}
    for at in (~np.isfinite(largest)).nonzero()[0].tolist():
        errors[order.req_ids[indices[at]]] = why_not(float(largest[at]))
        num_sampled[indices[at]] = 0
    return ModelRunnerOutput(req_ids=order.req_ids, sampled_token_ids=sampled, num_sampled=num_sampled, errors=errors)
