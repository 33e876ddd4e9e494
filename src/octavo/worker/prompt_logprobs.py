"""Log-probabilities of prompt tokens, gathered over the chunks of a prompt and sent when the prompt is complete.

Legend: T = tokens of the step, P = prompt positions computed at once, D = hidden size, V = vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from octavo.attention.metadata import ForwardBatch
from octavo.contracts.engine import TokenLogprobs
from octavo.contracts.schedule import SchedulerOutput
from octavo.errors import RequestError
from octavo.sampling.logprobs import prompt_logprobs
from octavo.worker.request_rows import PromptLogprobsJob, RequestRows

# Positions whose logits are materialized at once: 64 rows of 152k float32 are 39 MB.
_SLICE = 64

ComputeLogits = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]  # `CausalLM.compute_logits`


@dataclass(frozen=True, slots=True)
class PromptLogprobsUpdate:
    """By request id."""

    complete: dict[str, list[TokenLogprobs | None]] = field(default_factory=dict)  # one entry for each prompt token
    errors: dict[str, str] = field(default_factory=dict)


class PromptLogprobs:
    """Costs nothing in steps where no row requested them."""

    def __init__(self, rows: RequestRows, compute_logits: ComputeLogits) -> None:
        self._rows = rows
        self._compute_logits = compute_logits
        self._gathered: dict[int, list[TokenLogprobs | None]] = {}  # by row

    @property
    def are_due(self) -> bool:
        """Return whether any row of the step may need them."""
        return bool(self._rows.prompt_logprobs)

    def of_step(
        self, scheduler_output: SchedulerOutput, batch: ForwardBatch, hidden: torch.Tensor
    ) -> PromptLogprobsUpdate:
        """Compute those of this step's prompt tokens from `hidden` [T, D]; return those of completed prompts."""
        update = PromptLogprobsUpdate()
        if not self.are_due:
            return update
        for index, row in enumerate(scheduler_output.rows.tolist()):
            job = self._rows.prompt_logprobs.get(row)
            if job is None:
                continue
            start = int(scheduler_output.num_computed_tokens[index])
            if start == 0:
                self._gathered[row] = [None]  # nothing precedes the first token
            query = slice(batch.query_start_loc_list[index], batch.query_start_loc_list[index + 1])
            try:
                adapter_ids = None if batch.adapter_ids is None else batch.adapter_ids[query]
                self._gathered[row] += self._judge(job, row, start, hidden[query], adapter_ids)
            except RequestError as error:  # this prompt's logits are not finite; others' may be
                update.errors[scheduler_output.req_ids[index]] = str(error)
                continue
            if start + query.stop - query.start >= job.num_prompt_tokens:
                update.complete[scheduler_output.req_ids[index]] = self._gathered.pop(row)
                del self._rows.prompt_logprobs[row]
        return update

    def _judge(
        self,
        job: PromptLogprobsJob,
        row: int,
        start: int,
        hidden: torch.Tensor,
        adapter_ids: torch.Tensor | None,
    ) -> list[TokenLogprobs]:
        """Return the entries for prompt tokens from start + 1 on, for all of `hidden` [P, D], with adapters [P]."""
        end = min(start + len(hidden), job.num_prompt_tokens - 1)
        entries: list[TokenLogprobs] = []
        for first in range(start, end, _SLICE):
            last = min(first + _SLICE, end)
            rows = slice(first - start, last - start)
            logits = self._compute_logits(hidden[rows], None if adapter_ids is None else adapter_ids[rows])  # [P, V]
            targets = self._rows.token_ids[row, first + 1 : last + 1].to(torch.int64)
            entries += prompt_logprobs(logits, targets, job.num_logprobs)
        return entries
