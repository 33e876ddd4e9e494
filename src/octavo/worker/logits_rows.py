"""From rows of logits to a step's output: which tokens get logits, which sampled tokens count, and prompt logprobs.

Legend: T = tokens of the step, R = requests in it, S = those that sample, L = rows of logits: S, and one more for each
token to verify, K = most tokens that one request may get, P = prompt positions computed at once, D = hidden size,
V = vocabulary.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.attention.metadata import ForwardBatch
from octavo.contracts.engine import TokenLogprobs
from octavo.contracts.schedule import Int32Array, ModelRunnerOutput, SchedulerOutput
from octavo.device.base import DeviceQueue
from octavo.errors import RequestError
from octavo.sampling.logprobs import prompt_logprobs
from octavo.sampling.rows import StepSampling
from octavo.sampling.sampler import SampledTokens, read_sampled
from octavo.worker.request_rows import RequestRows

# Positions whose logits are materialized at once: 64 rows of 152k float32 are 39 MB.
_SLICE = 64


@dataclass(frozen=True, slots=True)
class PromptLogprobsUpdate:
    """By request id."""

    complete: dict[str, list[TokenLogprobs | None]] = field(default_factory=dict)  # one entry for each prompt token
    errors: dict[str, str] = field(default_factory=dict)


class LogitsRows:
    """The rows of logits of one step. Those of a request are adjacent, in order of position."""

    def __init__(self, step: SchedulerOutput) -> None:
        self._step = step
        self._requests = step.samples.nonzero()[0]  # [L] in R
        self.ends = (step.num_computed_tokens + step.num_scheduled_tokens)[self._requests]  # [L] see `StepSampling`
        self._columns: NDArray[np.int64] | None = None  # [L] tokens to verify before; None: the step has none
        if (unverified := step.scheduled_spec_decode_tokens) is not None:
            counts = unverified.counts[self._requests]  # [S]
            places = np.repeat(np.arange(len(counts)), 1 + counts)  # [L] in S
            self._columns = np.arange(len(places)) - (np.cumsum(1 + counts) - (1 + counts))[places]
            self._requests = self._requests[places]
            self.ends = (self.ends - counts)[places] + self._columns.astype(np.int32)
        self.rows = step.rows[self._requests]  # [L] of the worker

    def pool(self, wanted: set[int], hidden: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the hidden states [D] of rows that want no token but these, out of those that get logits [L, D]."""
        at = [index for index, row in enumerate(self.rows.tolist()) if row in wanted]
        return {self._step.req_ids[self._requests[index]]: hidden[index] for index in at}

    def model_output(
        self, sampled: SampledTokens, prompts: PromptLogprobsUpdate, hidden: Mapping[str, torch.Tensor]
    ) -> ModelRunnerOutput:
        """Return the output of the step whose rows of logits got these tokens; requests in `hidden` get that instead.

        A token sampled after others to verify is kept only if all of these equal the tokens sampled in their place. A
        request fails if its first row of logits has an error; if a later row has one, the tokens before it are kept and
        the error recurs in the next step.
        """
        req_ids = self._step.req_ids
        failed = {req_ids[self._requests[at]]: why for at, why in sampled.errors.items() if not self._column(at)}
        failed |= prompts.errors
        pooled = {request_id: vector.float().cpu().numpy() for request_id, vector in hidden.items()}
        failed |= {name: "its hidden state is not finite" for name in pooled if not np.isfinite(pooled[name]).all()}
        columns = np.zeros_like(self._requests) if self._columns is None else self._columns
        token_ids = np.zeros((len(req_ids), int(columns.max(initial=0)) + 1), dtype=np.int32)  # [R, K]
        token_ids[self._requests, columns] = sampled.token_ids
        num_sampled = self._step.samples.astype(np.int32)  # [R]
        if self._columns is not None:
            num_sampled *= self._num_kept(token_ids, sampled.errors)
        if failed or pooled:
            num_sampled[[request_id in failed or request_id in pooled for request_id in req_ids]] = 0
        by_request: dict[str, list[TokenLogprobs]] = {}
        for at, entry in sampled.logprobs.items():
            if self._column(at) < num_sampled[self._requests[at]]:
                by_request.setdefault(req_ids[self._requests[at]], []).append(entry)
        return ModelRunnerOutput(
            req_ids=req_ids,
            sampled_token_ids=token_ids,
            num_sampled=num_sampled,
            logprobs=by_request,
            prompt_logprobs=prompts.complete,
            pooled={name: vector.tobytes() for name, vector in pooled.items() if name not in failed},
            errors=failed,
        )

    def _column(self, at: int) -> int:
        return 0 if self._columns is None else int(self._columns[at])

    def _num_kept(self, sampled: Int32Array, errors: Mapping[int, str]) -> Int32Array:
        """Return how many of `sampled` [R, K] each sampling request keeps, [R]."""
        unverified = self._step.scheduled_spec_decode_tokens
        assert unverified is not None
        table = np.full(sampled.shape, -1, dtype=np.int32)  # [R, K] tokens to verify, -1 after the last
        table[np.arange(sampled.shape[1]) < unverified.counts[:, None]] = unverified.token_ids
        num_kept: NDArray[np.int64] = np.logical_and.accumulate(table == sampled, axis=1).sum(1) + 1
        for at in errors:
            if column := self._column(at):
                num_kept[self._requests[at]] = min(num_kept[self._requests[at]], column)
        return num_kept.astype(np.int32)


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
