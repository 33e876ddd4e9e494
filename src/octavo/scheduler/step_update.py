"""Processing a step's output: which rows got tokens, and do they still belong to the same requests?"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Self, TypeVar

import numpy as np

from octavo.contracts.engine import (
    EngineCoreOutputs,
    ExpertLoad,
    FinishedRequest,
    SchedulerStats,
    SpecDecodeStats,
    TokenLogprobs,
)
from octavo.contracts.schedule import BoolArray, Int32Array, ModelRunnerOutput, SchedulerOutput
from octavo.scheduler.running import RowIndices, RunningRows
from octavo.scheduler.step_builder import StepInFlight

_ValueT = TypeVar("_ValueT")
_NOTHING: Int32Array = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepUpdate:
    """Rows that got new tokens in a step, R' of them. Excludes requests that have ended or been preempted since."""

    req_ids: tuple[str, ...]  # [R']
    rows: RowIndices  # [R']
    last_token_ids: Int32Array  # [R'] the new token, or the last of several
    positions: Int32Array  # [R'] of each row's first new token
    several: "SeveralTokens | None" = None  # None: each row has one
    errors: dict[str, str] = field(default_factory=dict)  # requests that failed individually, and why
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprobs | None]] = field(default_factory=dict)
    expert_load: ExpertLoad | None = None

    @classmethod
    def of(cls, step: StepInFlight, model_output: ModelRunnerOutput, running: RunningRows) -> Self:
        """Match the output with the current rows."""
        scheduler_output = step.output
        assert model_output.req_ids is scheduler_output.req_ids or model_output.req_ids == scheduler_output.req_ids
        has_token = model_output.num_sampled > 0
        _check_complete(scheduler_output, model_output, has_token)
        rows, req_ids, token_ids = step.rows, scheduler_output.req_ids, model_output.sampled_token_ids[:, 0]
        drafts, several = scheduler_output.scheduled_spec_decode_tokens, None
        is_current = running.generation[rows] == step.generations
        is_new = has_token & is_current
        if np.count_nonzero(is_new) < len(rows):
            rows, token_ids = rows[is_new], token_ids[is_new]
            req_ids = tuple(scheduler_output.req_ids[index] for index in is_new.nonzero()[0].tolist())
        if drafts is not None:
            several = SeveralTokens(
                table=model_output.sampled_token_ids[is_new],
                counts=model_output.num_sampled[is_new],
                num_drafts=drafts.counts[is_new],
            )
            token_ids = several.last
        return cls(
            req_ids=req_ids,
            rows=rows,
            last_token_ids=token_ids,
            positions=running.num_known[rows],
            several=several,
            errors={
                rid: why for rid, why in model_output.errors.items() if is_current[model_output.req_id_to_index[rid]]
            },
            logprobs=_of(req_ids, model_output.logprobs),
            prompt_logprobs=_of(req_ids, model_output.prompt_logprobs),
            expert_load=model_output.expert_load,
        )

    @classmethod
    def nothing(cls) -> Self:
        return cls(req_ids=(), rows=np.zeros(0, dtype=np.intp), last_token_ids=_NOTHING, positions=_NOTHING)

    @property
    def num_known(self) -> Int32Array:
        """The number of known tokens of each row [R']."""
        known: Int32Array = self.positions + (1 if self.several is None else self.several.counts)
        return known

    def tokens_of(self, index: int) -> list[int]:
        """Return the new tokens of one row."""
        if self.several is None:
            return [int(self.last_token_ids[index])]
        token_ids: list[int] = self.several.table[index, : self.several.counts[index]].tolist()
        return token_ids

    def cut(self, num_kept: Callable[[str, int, list[int]], int]) -> Self:
        """Drop tokens past a request's end: `num_kept` returns how many of those from a position on to keep."""
        if self.several is None:
            return self
        counts, logprobs = self.several.counts.copy(), dict(self.logprobs)
        for index in (counts > 1).nonzero()[0].tolist():
            req_id = self.req_ids[index]
            counts[index] = num_kept(req_id, int(self.positions[index]), self.tokens_of(index))
            if req_id in logprobs:
                logprobs[req_id] = logprobs[req_id][: counts[index]]
        several = replace(self.several, counts=counts)
        return replace(self, several=several, last_token_ids=several.last, logprobs=logprobs)

    def append_tokens(self, running: RunningRows) -> None:
        """Turn each row's oldest token in flight into a known one, and roll back rejected drafts."""
        if self.several is not None:
            self.several.append(self.rows, self.positions, running)
            return
        running.tokens[self.rows, self.positions] = self.last_token_ids
        running.num_known[self.rows] = self.positions + 1
        running.num_in_flight[self.rows] -= 1

    def outputs(
        self,
        epoch: int,
        step: StepInFlight | None,
        reports: dict[str, FinishedRequest],
        running: RunningRows,
        stats: SchedulerStats,
        spec_decode: SpecDecodeStats | None,
    ) -> EngineCoreOutputs:
        """Build the message for the frontend; without a step, only `reports` of ended requests."""
        return EngineCoreOutputs(
            epoch=epoch,
            req_ids=list(self.req_ids),
            num_new_tokens=[1] * len(self.req_ids) if self.several is None else self.several.counts.tolist(),
            first_indices=(self.positions - running.num_prompt[self.rows]).tolist(),
            new_token_ids=(self.last_token_ids if self.several is None else self.several.flat).tolist(),
            num_scheduled_tokens=step.output.total_num_scheduled_tokens if step else 0,
            admitted=step.admitted if step else {},
            finished=reports,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            stats=stats,
            expert_load=self.expert_load,
            spec_decode=spec_decode,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SeveralTokens:
    """New tokens of a step with drafts, in which a row may get several. Legend: K = maximum per row."""

    table: Int32Array  # [R', K]
    counts: Int32Array  # [R'] valid entries of each table row, at least 1
    num_drafts: Int32Array  # [R'], of which `counts` - 1 are accepted

    @property
    def last(self) -> Int32Array:
        """The last token of each row [R']."""
        return self.table[np.arange(len(self.table)), self.counts - 1]

    @property
    def flat(self) -> Int32Array:
        """All tokens, row after row."""
        return self.table[self._is_new]

    @property
    def _is_new(self) -> BoolArray:
        return np.arange(self.table.shape[1]) < self.counts[:, None]

    def append(self, rows: RowIndices, positions: Int32Array, running: RunningRows) -> None:
        """See `StepUpdate.append_tokens`. Later steps overwrite the KV slots of rejected drafts."""
        at, offsets = self._is_new.nonzero()
        running.tokens[rows[at], positions[at] + offsets] = self.flat
        running.num_known[rows] = positions + self.counts
        running.num_in_flight[rows] -= 1 + self.num_drafts
        running.num_computed[rows] -= self.num_drafts - (self.counts - 1)


def _check_complete(scheduler_output: SchedulerOutput, model_output: ModelRunnerOutput, has_token: BoolArray) -> None:
    """Assert that each row that samples has tokens, and no failed request has any."""
    expected = scheduler_output.samples
    if model_output.errors:
        expected = expected & [req_id not in model_output.errors for req_id in scheduler_output.req_ids]
    assert not np.count_nonzero(has_token != expected), "at least one token for each row that samples"


def _of(req_ids: tuple[str, ...], table: Mapping[str, _ValueT]) -> dict[str, _ValueT]:
    return {req_id: table[req_id] for req_id in req_ids if req_id in table} if table else {}
