"""Reading a step's answer: which rows got a token, and are those rows still the same requests?"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self, TypeVar

import numpy as np

from octavo.contracts.engine import EngineCoreOutputs, FinishedRequest, TokenLogprobs
from octavo.contracts.schedule import BoolArray, Int32Array, SchedulerOutput
from octavo.contracts.stats import ExpertLoad, SchedulerStats
from octavo.contracts.step import ModelRunnerOutput
from octavo.scheduler.draft import StepInFlight
from octavo.scheduler.running import RowIndices, RunningRows

_ValueT = TypeVar("_ValueT")
_NOTHING: Int32Array = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepNews:
    """Rows that got a new token in a step, R' of them. Requests that ended or were preempted meanwhile are left out."""

    req_ids: tuple[str, ...]  # [R']
    rows: RowIndices  # [R']
    token_ids: Int32Array  # [R']
    positions: Int32Array  # [R'] at which the new tokens stand
    errors: dict[str, str] = field(default_factory=dict)  # requests that failed alone, and why
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprobs | None]] = field(default_factory=dict)
    expert_load: ExpertLoad | None = None

    @classmethod
    def of(cls, step: StepInFlight, answer: ModelRunnerOutput, running: RunningRows) -> Self:
        """Match the answer with the rows as they are now."""
        order = step.output
        assert answer.req_ids is order.req_ids or answer.req_ids == order.req_ids
        has_token = answer.num_sampled > 0
        _check_complete(order, answer, has_token)
        rows, req_ids, token_ids = step.rows, order.req_ids, answer.sampled_token_ids[:, 0]
        is_current = running.generation[rows] == step.generations
        is_news = has_token & is_current
        if np.count_nonzero(is_news) < len(rows):
            rows, token_ids = rows[is_news], token_ids[is_news]
            req_ids = tuple(order.req_ids[index] for index in is_news.nonzero()[0].tolist())
        return cls(
            req_ids=req_ids,
            rows=rows,
            token_ids=token_ids,
            positions=running.num_known[rows],
            errors={rid: why for rid, why in answer.errors.items() if is_current[answer.req_id_to_index[rid]]},
            logprobs=_of(req_ids, answer.logprobs),
            prompt_logprobs=_of(req_ids, answer.prompt_logprobs),
            expert_load=answer.expert_load,
        )

    @classmethod
    def nothing(cls) -> Self:
        return cls(req_ids=(), rows=np.zeros(0, dtype=np.intp), token_ids=_NOTHING, positions=_NOTHING)

    def append_tokens(self, running: RunningRows) -> None:
        """Turn each row's oldest token in flight into a known one."""
        running.tokens[self.rows, self.positions] = self.token_ids
        running.num_known[self.rows] = self.positions + 1
        running.num_in_flight[self.rows] -= 1

    def outputs(
        self,
        epoch: int,
        step: StepInFlight | None,
        reports: dict[str, FinishedRequest],
        running: RunningRows,
        stats: SchedulerStats,
    ) -> EngineCoreOutputs:
        """Say what is new to whoever asked for it; without a step, only `reports` of requests that ended."""
        return EngineCoreOutputs(
            epoch=epoch,
            req_ids=list(self.req_ids),
            num_new_tokens=[1] * len(self.req_ids),
            first_indices=(self.positions - running.num_prompt[self.rows]).tolist(),
            new_token_ids=self.token_ids.tolist(),
            num_scheduled_tokens=step.output.total_num_scheduled_tokens if step else 0,
            admitted=step.admitted if step else {},
            finished=reports,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            stats=stats,
            expert_load=self.expert_load,
        )


def _check_complete(order: SchedulerOutput, answer: ModelRunnerOutput, has_token: BoolArray) -> None:
    """Assert one token for each row that samples, and none for a request that failed, in whichever row."""
    expected = order.samples
    if answer.errors:
        expected = expected & [req_id not in answer.errors for req_id in order.req_ids]
    assert not np.count_nonzero(has_token != expected), "one token for each row that samples"


def _of(req_ids: tuple[str, ...], table: Mapping[str, _ValueT]) -> dict[str, _ValueT]:
    return {req_id: table[req_id] for req_id in req_ids if req_id in table} if table else {}
