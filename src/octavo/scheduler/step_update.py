"""A step in flight, and its output: which rows got tokens, and do they still belong to the same requests?

Legend: R = rows of the step, R' = those that got tokens, K = most tokens that one of them got.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from octavo.contracts.engine import AdmittedRequest, ExpertLoad, TokenLogprobs
from octavo.contracts.schedule import NOTHING, BoolArray, Int32Array, ModelRunnerOutput, SchedulerOutput
from octavo.scheduler.running import RowIndices, RunningRows

_ValueT = TypeVar("_ValueT")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepUpdate:
    """The rows that got new tokens in a step. Excludes requests that have ended or been preempted since."""

    req_ids: tuple[str, ...]  # [R']
    rows: RowIndices  # [R']
    positions: Int32Array  # [R'] of each row's first new token
    last_token_ids: Int32Array  # [R'] the new token, or the last of several
    table: Int32Array  # [R', K] each row's new tokens, of which `counts` [R'] are valid ...
    counts: Int32Array | None  # ... None: one of each row
    num_expected: Int32Array  # [R'] that the step had in flight for each row; only with `counts`
    pooled: dict[str, bytes]  # vectors of requests that end with them
    errors: dict[str, str]  # requests that failed individually, and why
    logprobs: dict[str, list[TokenLogprobs]]
    prompt_logprobs: dict[str, list[TokenLogprobs | None]]
    expert_load: ExpertLoad | None

    @property
    def num_known(self) -> Int32Array:
        """The number of known tokens of each row [R']."""
        known: Int32Array = self.positions + (1 if self.counts is None else self.counts)
        return known

    @property
    def new_token_ids(self) -> Int32Array:
        """All new tokens, row after row."""
        if self.counts is None:
            return self.last_token_ids
        return self.table[np.arange(self.table.shape[1]) < self.counts[:, None]]

    def tokens_of(self, index: int) -> list[int]:
        """Return the new tokens of one row."""
        token_ids: list[int] = self.table[index, : 1 if self.counts is None else self.counts[index]].tolist()
        return token_ids

    def cut(self, num_kept: Callable[[str, int, list[int]], int]) -> Self:
        """Drop tokens past a request's end: `num_kept` returns how many of those from a position on to keep."""
        if self.counts is None:
            return self
        counts, logprobs = self.counts.copy(), dict(self.logprobs)
        for index in (counts > 1).nonzero()[0].tolist():
            req_id = self.req_ids[index]
            counts[index] = num_kept(req_id, int(self.positions[index]), self.tokens_of(index))
            if req_id in logprobs:
                logprobs[req_id] = logprobs[req_id][: counts[index]]
        return replace(self, counts=counts, last_token_ids=_last(self.table, counts), logprobs=logprobs)

    def commit(self, running: RunningRows) -> None:
        """Turn tokens in flight into known ones, and roll back those that did not come."""
        if self.counts is None:
            running.commit(self.rows, self.positions, self.last_token_ids)
        else:
            running.commit_several(self.rows, self.table, self.counts, self.num_expected)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInFlight:
    """What is needed to process a step's output, even if rows have been reassigned since."""

    output: SchedulerOutput
    scheduled_s: float  # when it was built
    rows: RowIndices  # [R] `output.rows` as an index
    generations: NDArray[np.int64]  # [R] of each row when the step was built
    hashed_blocks: list[tuple[int, int]]  # (group, block): findable because this step, or an earlier one, fills them
    admitted: dict[str, AdmittedRequest]

    def prefilled(self, running: RunningRows) -> dict[str, int]:
        """Return how many tokens of its context are computed, of each request that needs more steps to compute it."""
        output = self.output
        if output.samples.all():
            return {}
        is_part = ~output.samples & (running.generation[self.rows] == self.generations)
        ends = output.num_computed_tokens + output.num_scheduled_tokens
        return {output.req_ids[index]: int(ends[index]) for index in is_part.nonzero()[0].tolist()}

    def match_output(self, model_output: ModelRunnerOutput, running: RunningRows) -> StepUpdate:
        """Match what the ranks computed with the requests that are still in the same rows."""
        output, rows = self.output, self.rows
        assert model_output.req_ids is output.req_ids or model_output.req_ids == output.req_ids
        has_token = model_output.num_sampled > 0
        expected = output.samples
        if without_token := model_output.errors.keys() | model_output.pooled.keys():
            expected = expected & [req_id not in without_token for req_id in output.req_ids]
        assert not np.count_nonzero(has_token != expected), "at least one token for each row that samples"
        is_current = running.generation[rows] == self.generations
        is_new = has_token & is_current
        req_ids, table = output.req_ids, model_output.sampled_token_ids
        if np.count_nonzero(is_new) < len(rows):
            rows, table = rows[is_new], table[is_new]
            req_ids = tuple(output.req_ids[index] for index in is_new.nonzero()[0].tolist())
        last, counts, num_expected, extra = table[:, 0], None, NOTHING, output.scheduled_spec_decode_tokens
        if extra is not None:
            counts, num_expected = model_output.num_sampled[is_new], 1 + extra.counts[is_new]
            last = _last(table, counts)

        def those_of(are_meant: BoolArray, values: Mapping[str, _ValueT]) -> dict[str, _ValueT]:
            index_of = model_output.req_id_to_index if values else {}
            return {req_id: value for req_id, value in values.items() if are_meant[index_of[req_id]]}

        return StepUpdate(
            req_ids=req_ids,
            rows=rows,
            positions=running.num_known[rows],
            last_token_ids=last,
            table=table,
            counts=counts,
            num_expected=num_expected,
            errors=those_of(is_current, model_output.errors),
            pooled=those_of(is_current, model_output.pooled),
            logprobs=those_of(is_new, model_output.logprobs),
            prompt_logprobs=those_of(is_new, model_output.prompt_logprobs),
            expert_load=model_output.expert_load,
        )


def _last(table: Int32Array, counts: Int32Array) -> Int32Array:
    """Return the last of the `counts` [R'] valid tokens in each row of `table` [R', K]."""
    return table[np.arange(len(table)), counts - 1]
