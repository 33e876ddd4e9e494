"""The model runner: the only owner of model, KV tensors and persistent rows on a rank. One step in, one output out.

On a device with a queue, a step is launched and its output is read when needed: sampled ids stay on the device, where
the next step reads them, and the host reads them one step late. So nothing waits between two steps, unless prompt
logprobs are requested. Elsewhere, the output is ready at once.

With pipeline parallelism, every stage runs every step; only the last one samples, and only its output counts.

Legend: T = tokens of the step, R = requests in it, L = rows of logits, P = prompt positions computed at once,
D = hidden size, V = vocabulary.
"""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from octavo.attention.metadata import ForwardBatch, LayerCache
from octavo.contracts.engine import TokenLogprobs
from octavo.contracts.schedule import ModelRunnerOutput, SchedulerOutput
from octavo.device.base import DeviceQueue
from octavo.errors import RequestError
from octavo.kernels.native import NativeKernels
from octavo.models.interfaces import CausalLM, IntermediateTensors
from octavo.sampling.logprobs import prompt_logprobs
from octavo.sampling.rows import ARGMAX, StepSampling
from octavo.sampling.sampler import Sampled, SampledTokens, Sampler, read_now, read_sampled
from octavo.worker.decode_step import ExpertLoads, GraphedDecoding
from octavo.worker.graph import StepGraph, torch_threads
from octavo.worker.pooling import pooled_vectors
from octavo.worker.rank_drafter import RankDrafter
from octavo.worker.request_rows import LogitsRows, PromptLogprobsUpdate, RequestRows
from octavo.worker.stages import StageLinks

logger = logging.getLogger(__name__)

# Positions of a prompt whose logits are materialized at once: 64 rows of 152k float32 are 39 MB.
_SLICE = 64


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


class _Prepared(NamedTuple):
    """A step whose rows are up to date."""

    step: SchedulerOutput  # with its drafts drawn
    logits_rows: LogitsRows
    sampling: StepSampling
    batch: ForwardBatch | None  # None: a graph has run
    replayed: tuple[torch.Tensor, torch.Tensor | None] | None


class PromptLogprobs:
    """Gathered over the chunks of a prompt, and sent when it is complete. Costs nothing if no row requested them."""

    def __init__(
        self, rows: RequestRows, compute_logits: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
    ) -> None:
        self._rows, self._compute_logits = rows, compute_logits  # `CausalLM.compute_logits`
        self._gathered: dict[int, list[TokenLogprobs | None]] = {}  # by row

    def of_step(self, step: SchedulerOutput, batch: ForwardBatch, hidden: torch.Tensor) -> PromptLogprobsUpdate:
        """Compute those of this step's prompt tokens from `hidden` [T, D]; return those of completed prompts."""
        update, wanted = PromptLogprobsUpdate(), self._rows.prompt_logprobs
        for index, row in enumerate(step.rows.tolist() if wanted else ()):
            if row not in wanted:
                continue
            num_prompt_tokens, num_logprobs = wanted[row]
            start = int(step.num_computed_tokens[index])
            if start == 0:
                self._gathered[row] = [None]  # nothing precedes the first token
            query = slice(batch.query_start_loc_list[index], batch.query_start_loc_list[index + 1])
            last = min(start + query.stop - query.start, num_prompt_tokens - 1)
            try:
                for first in range(start, last, _SLICE):
                    part = slice(first - start + query.start, min(first + _SLICE, last) - start + query.start)
                    logits = self._compute_logits(*batch.head_inputs(hidden, part))  # [P, V]
                    targets = self._rows.token_ids[row, first + 1 : min(first + _SLICE, last) + 1].to(torch.int64)
                    self._gathered[row] += prompt_logprobs(logits, targets, num_logprobs)
            except RequestError as error:  # this prompt's logits are not finite; others' may be
                update.errors[step.req_ids[index]] = str(error)
                continue
            if start + query.stop - query.start >= num_prompt_tokens:
                update.complete[step.req_ids[index]] = self._gathered.pop(row)
                del wanted[row]
        return update


def read_later(
    packed: torch.Tensor, ratings: torch.Tensor | None, sampling: StepSampling, queue: DeviceQueue
) -> Callable[[], SampledTokens]:
    """Start copying `Sampled.packed` [L, 3] and ratings [L, .]; return a function that waits and reads them."""

    def begin_copy(x: torch.Tensor) -> torch.Tensor:
        host = queue.host_bytes(x.nbytes).view(x.dtype).view_as(x)
        host.copy_(x, non_blocking=True)
        return host

    results, ratings_on_host = begin_copy(packed), None if ratings is None else begin_copy(ratings)
    wait = queue.mark()

    def read() -> SampledTokens:
        wait()
        token_ids, *bits = results.numpy().T  # [L] each
        max_logit, max_processed_logit = (np.ascontiguousarray(column).view(np.float64) for column in bits)
        rated = None if ratings_on_host is None else ratings_on_host.numpy()
        return read_sampled(sampling, token_ids, max_logit, max_processed_logit, rated)

    return read


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

        Get the result once, in step order. Raises StepError: an earlier stage failed. InvalidParameterError: a request
        has an input that the model does not read.
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
        return nullcontext() if self.graph is None else torch_threads(1)

    def _launch(self, scheduler_output: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        with self._torch_threads():
            if self._links is not None and not self.model.stage.is_last:
                self._hand_on(scheduler_output, self._links)
                return empty_output
            prepared = self._prepare(scheduler_output)
            if prepared is None:
                return empty_output
            step, logits_rows, sampling, batch, replayed = prepared
            if batch is None:
                assert replayed is not None and self._queue is not None  # noqa: PT018 - graphs come with a queue
                read = read_later(*replayed, sampling, self._queue)
                return partial(logits_rows.read_output, read, PromptLogprobsUpdate(), {})
            computed = self._run_stage(batch)  # hidden states [T, D], or the kept rows
            read = self._sample(batch, computed.hidden, logits_rows, sampling)
            pooled = self._pool(step, logits_rows, batch, computed.hidden) if self.rows.pooled else {}
        prompts = self._prompt_logprobs.of_step(step, batch, computed.hidden)  # uses all threads
        if self._queue is not None:
            return partial(logits_rows.read_output, read, prompts, pooled)
        output = logits_rows.read_output(read, prompts, pooled)
        if self.drafter is not None:
            with self._torch_threads():
                self.drafter.observe(step, output, computed)
        return lambda: output

    def _pool(
        self, step: SchedulerOutput, logits_rows: LogitsRows, batch: ForwardBatch, hidden: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        return pooled_vectors(self.rows.pooled, step, logits_rows.requests, batch, hidden, self.model)

    def _hand_on(self, scheduler_output: SchedulerOutput, links: StageLinks) -> None:
        """Run this stage of a step. The next stage waits for it, so failures are passed on, too."""
        try:
            prepared = self._prepare(scheduler_output)
            if prepared is not None and (batch := prepared.batch) is not None:
                links.send(self._run_stage(batch))
        except Exception as error:
            logger.exception("step %d failed on this stage", scheduler_output.step)
            links.send_failure(scheduler_output.total_num_scheduled_tokens, error)

    def _prepare(self, scheduler_output: SchedulerOutput) -> _Prepared | None:
        """Update the rows, draw drafts, and build the batch while an earlier stage may compute. None: no tokens."""
        try:
            self.rows.apply_requests(scheduler_output)
            step = scheduler_output if self.drafter is None else self.drafter.propose(scheduler_output)
            if not step.req_ids:
                self.rows.apply_tables(step)
                return None
            logits_rows = LogitsRows(step)
            sampling = self.rows.sampling.step(logits_rows.rows, logits_rows.ends, step.token_masks)
            replayed = None if self.graphs is None or self.rows.pooled else self.graphs.replay(step, sampling)
            batch = self.rows.step_batch(step) if replayed is None else None
        except Exception:
            if self._links is not None and scheduler_output.req_ids:
                # Or the next step would receive this one's tensors.
                self._links.receive(scheduler_output.total_num_scheduled_tokens)
            raise
        return _Prepared(step, logits_rows, sampling, batch, replayed)

    def _run_stage(self, batch: ForwardBatch) -> IntermediateTensors:
        incoming = self._links.receive(len(batch.input_ids)) if self._links else None
        if self.graph is not None and self.graph.serves(batch):
            return self.graph.run(batch, incoming)
        return self.model.run_stage(batch, self.kv_caches, incoming)

    def _sample(
        self, batch: ForwardBatch, hidden: torch.Tensor, logits_rows: LogitsRows, sampling: StepSampling
    ) -> Callable[[], SampledTokens]:
        """Sample from the rows of `hidden` [T, D] that get logits; return a function that reads the tokens."""
        if self.rows.pooled.keys() >= set(sampling.rows.tolist()):
            nothing = torch.zeros(len(sampling.rows), device=hidden.device)
            sampled = Sampled.of_argmax(nothing, nothing.to(torch.int64))
        elif sampling.ending == ARGMAX:
            sampled = Sampled.of_argmax(*self.model.logits_argmax(*batch.head_inputs(hidden)))
        else:
            sampled = self._sampler.sample(self.model.compute_logits(*batch.head_inputs(hidden)), sampling)
        # After a rejected draft, this writes tokens that are overwritten before they are read.
        self.rows.write_sampled(logits_rows.rows, logits_rows.ends, sampled.token_ids)
        if self._queue is None:
            return partial(read_now, sampled, sampling)
        return read_later(sampled.packed(), sampled.ratings, sampling, self._queue)


def empty_output() -> ModelRunnerOutput:
    """Return the output of a step without requests, or of a stage that does not sample."""
    return ModelRunnerOutput(
        req_ids=(), sampled_token_ids=np.zeros((0, 1), dtype=np.int32), num_sampled=np.zeros(0, dtype=np.int32)
    )
