"""The rows of logits that a step samples, and its output built from their tokens: drafts are verified here.

Legend: R = requests in the step, S = those that sample, L = rows of logits: S, and one more for each draft, K = most
tokens that one request may get, V = vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray

from octavo.contracts.engine import TokenLogprobs
from octavo.contracts.schedule import Int32Array, ModelRunnerOutput, SchedulerOutput
from octavo.worker.prompt_logprobs import PromptLogprobsUpdate


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitsRows:
    """The rows of logits of one step. Those of a request are adjacent, in order of position."""

    requests: NDArray[np.int64]  # [L] in R
    rows: Int32Array  # [L] of the worker
    ends: Int32Array  # [L] tokens before the sampled one, that is, its position
    columns: NDArray[np.int64] | None = None  # [L] drafts before the sampled one; None: the step has no drafts
    drafts_before: Mapping[int, Sequence[int]] = field(default_factory=dict)  # by index in L, for rows that have any

    @classmethod
    def of(cls, scheduler_output: SchedulerOutput) -> Self:
        requests = scheduler_output.samples.nonzero()[0]  # [S]
        ends = (scheduler_output.num_computed_tokens + scheduler_output.num_scheduled_tokens)[requests]
        drafts = scheduler_output.scheduled_spec_decode_tokens
        if drafts is None:
            return cls(requests=requests, rows=scheduler_output.rows[requests], ends=ends)
        counts = drafts.counts[requests]  # [S]
        places = np.repeat(np.arange(len(requests)), 1 + counts)  # [L] in S
        first = np.cumsum(1 + counts) - (1 + counts)  # [S] in L
        columns = np.arange(len(places)) - first[places]
        before: dict[int, list[int]] = {}
        starts = np.cumsum(counts) - counts  # [S] of each request's drafts
        for at in columns.nonzero()[0].tolist():
            start = int(starts[places[at]])
            before[at] = drafts.token_ids[start : start + int(columns[at])].tolist()
        return cls(
            requests=requests[places],
            rows=scheduler_output.rows[requests[places]],
            ends=(ends - counts)[places] + columns.astype(np.int32),
            columns=columns,
            drafts_before=before,
        )

    def model_output(
        self,
        scheduler_output: SchedulerOutput,
        token_ids: Int32Array,
        logprobs: Mapping[int, TokenLogprobs],
        errors: Mapping[int, str],
        prompts: PromptLogprobsUpdate,
    ) -> ModelRunnerOutput:
        """Return the output of a step whose rows of logits got `token_ids` [L].

        A token sampled after a draft is kept only if all drafts up to there equal the tokens sampled in their place. A
        request fails if its first row of logits has an error; if a later row has one, the tokens before it are kept and
        the error recurs in the next step.
        """
        failed = {
            scheduler_output.req_ids[self.requests[at]]: why for at, why in errors.items() if not self._column(at)
        }
        failed |= prompts.errors
        columns = np.zeros_like(self.requests) if self.columns is None else self.columns
        sampled = np.zeros((len(scheduler_output.req_ids), int(columns.max(initial=0)) + 1), dtype=np.int32)  # [R, K]
        sampled[self.requests, columns] = token_ids
        num_sampled = scheduler_output.samples.astype(np.int32)  # [R]
        if self.columns is not None:
            num_sampled *= self._num_kept(scheduler_output, sampled, errors)
        if failed:
            num_sampled[[request_id in failed for request_id in scheduler_output.req_ids]] = 0
        by_request: dict[str, list[TokenLogprobs]] = {}
        for at, entry in logprobs.items():
            if self._column(at) < num_sampled[self.requests[at]]:
                by_request.setdefault(scheduler_output.req_ids[self.requests[at]], []).append(entry)
        return ModelRunnerOutput(
            req_ids=scheduler_output.req_ids,
            sampled_token_ids=sampled,
            num_sampled=num_sampled,
            logprobs=by_request,
            prompt_logprobs=prompts.complete,
            errors=failed,
        )

    def kept(self, model_output: ModelRunnerOutput) -> NDArray[np.bool_]:
        """Return which of the sampled tokens [L] are accepted."""
        columns: NDArray[np.int64] | int = 0 if self.columns is None else self.columns
        is_kept: NDArray[np.bool_] = columns < model_output.num_sampled[self.requests]
        return is_kept

    def _column(self, at: int) -> int:
        return 0 if self.columns is None else int(self.columns[at])

    def _num_kept(
        self, scheduler_output: SchedulerOutput, sampled: Int32Array, errors: Mapping[int, str]
    ) -> Int32Array:
        """Return how many of `sampled` [R, K] each sampling request keeps, [R]."""
        drafts = scheduler_output.scheduled_spec_decode_tokens
        assert drafts is not None
        table = np.full((len(sampled), sampled.shape[1]), -1, dtype=np.int32)  # [R, K] drafts, -1 after the last
        table[np.arange(sampled.shape[1]) < drafts.counts[:, None]] = drafts.token_ids
        num_kept: NDArray[np.int64] = np.logical_and.accumulate(table == sampled, axis=1).sum(1) + 1
        for at in errors:
            if column := self._column(at):
                num_kept[self.requests[at]] = min(num_kept[self.requests[at]], column)
        return num_kept.astype(np.int32)
