"""Which running rows get drafts in a step, and how many: drafts use only budget and blocks that are left over.

A drafter runs on the scheduler's thread, or in the ranks: then drafts are placeholders that ranks fill in the same
step. Tokens that a grammar forces are free drafts, whatever the drafter.

Legend: R = running rows of the step.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from octavo.contracts.engine import FinishedRequest, SpecDecodeStats
from octavo.contracts.schedule import DRAWN_IN_RANKS, Int32Array, ModelRunnerOutput, SchedulerOutput, SpecDecodeTokens
from octavo.scheduler.draft_planner import DraftPlanner, GuessRates, StepCosts, VerifiedRates
from octavo.scheduler.grammar_gate import GrammarGate
from octavo.scheduler.request import Request
from octavo.scheduler.running import RowIndices, RunningRows
from octavo.scheduler.step_builder import StepBuilder
from octavo.scheduler.step_update import StepUpdate
from octavo.speculative.drafters import Drafter, RankDrafter


class Speculation:
    """Owned by a scheduler with a drafter. Drafts never cause a preemption and take no budget from prompts.

    With `is_adaptive`, a planner says how many each row gets; else rows get all that fit.
    """

    def __init__(self, drafter: Drafter, running: RunningRows, grammar_gate: GrammarGate, *, is_adaptive: bool) -> None:
        self._drafter, self._running, self._blocks, self._grammar_gate = drafter, running, running.blocks, grammar_gate
        self._draws_in_ranks = isinstance(drafter, RankDrafter)
        self._step_costs = StepCosts()
        self._pass_costs = StepCosts(falls_to_zero=True)  # of a draft model, which reads prompts first
        self._planner: DraftPlanner | None = None
        if is_adaptive and self._draws_in_ranks:
            self._planner = DraftPlanner(VerifiedRates(running), self._step_costs, self._pass_costs)
        elif is_adaptive:
            self._planner = DraftPlanner(GuessRates(running), self._step_costs)
        self._draft_s = 0.0  # that a draft model took, since the start
        self._num_proposed = [0] * drafter.max_num_drafts  # by position in a draft, since the start
        self._num_accepted = [0] * drafter.max_num_drafts
        self._of_request: dict[str, tuple[int, int]] = {}  # verified and accepted, of those that have any

    def speculate(self, step: StepBuilder, budget: int) -> None:
        """Add at most `budget` drafts to rows that compute only their last known token."""
        running = self._running
        rows, known_counts = step.rows, step.counts
        room = running.limit[rows] - 1 - running.num_known[rows]  # nothing is sampled past the limit
        for group in self._blocks.recurrent:
            # No draft ends a block, whose state would be a snapshot, and the state before drafts stays in their block.
            size = self._blocks.block_sizes[group]
            room = np.minimum(room, size - 2 - running.num_computed[rows] % size)
        takes_drafts = (known_counts == 1) & (running.num_computed[rows] + 1 == running.num_known[rows]) & (room > 0)
        at = (takes_drafts & running.is_speculative[rows]).nonzero()[0]
        if budget <= 0 or not len(at):
            return
        chosen = self._chosen(step, rows[at], np.minimum(room[at], self._drafter.max_num_drafts))
        counts, token_ids = np.zeros(len(rows), dtype=np.int32), list[int]()
        for index, row, proposal in zip(at.tolist(), rows[at].tolist(), chosen, strict=True):
            drafts = list(proposal[: budget - len(token_ids)])
            if drafts and running.is_constrained[row] and drafts[0] != DRAWN_IN_RANKS:
                drafts = self._grammar_gate.usable(row, drafts)
            drafts = drafts[: self._make_room(step, row, len(drafts))]
            counts[index] = len(drafts)
            token_ids += drafts
        if token_ids:
            step.add_spec_decode(SpecDecodeTokens(counts=counts, token_ids=np.array(token_ids, dtype=np.int32)))

    def _chosen(self, step: StepBuilder, rows: RowIndices, limits: Int32Array) -> list[Sequence[int]]:
        """Return the drafts to verify of each of `rows` [P], at most `limits` [P]."""
        running, asked = self._running, rows.tolist()
        forced = {
            row: tokens for row in asked if running.is_constrained[row] and (tokens := self._grammar_gate.forced(row))
        }
        proposals = self._drafter.propose(
            running.req_ids_of(rows), [running.tokens[row, : running.num_known[row]] for row in asked]
        )
        is_open = [row not in forced and self._verifies(row) for row in asked]
        proposals = [proposal if is_it else () for proposal, is_it in zip(proposals, is_open, strict=True)]
        lengths = np.minimum(np.array([len(proposal) for proposal in proposals], dtype=np.int32), limits)
        if self._planner is not None:
            self._planner.rates.observe(asked, proposals)
            if lengths.any():
                lengths = self._planner.plan(rows, lengths, step.num_tokens, len(step.rows))
        return [
            forced[row][:limit] if row in forced else proposal[:length]
            for row, proposal, length, limit in zip(asked, proposals, lengths.tolist(), limits.tolist(), strict=True)
        ]

    def _verifies(self, row: int) -> bool:
        """Return whether the drafter's tokens can be verified in this row.

        Tokens drawn in ranks are not known here, so only the first position has its grammar's mask. At later positions
        an unmasked argmax is still correct if the grammar turns out to allow it: then it is also the argmax of the
        allowed tokens. So is a sample, the argmax of logits over temperature plus noise, but not with top-k, top-p or
        min-p: what these keep depends on the mask.
        """
        if not (self._draws_in_ranks and self._running.is_constrained[row]):
            return True
        message = self._running.request_at(row).message
        params = message.params
        is_argmax = params.is_greedy or not params.is_filtered
        return is_argmax and not (params.changes_logits or message.bad_words_token_ids)

    def num_allowed(self, request: Request, token_ids: list[int]) -> int:
        """Return how many of a request's several new tokens its grammar allows; at least the first."""
        if not (self._draws_in_ranks and request.is_constrained):
            return len(token_ids)
        return self._grammar_gate.num_allowed(request, token_ids)

    def record_step(
        self, output: SchedulerOutput, model_output: ModelRunnerOutput, update: StepUpdate, took_s: float
    ) -> None:
        """Count the drafts that a step verified, and those accepted; learn what it cost.

        Of the seconds that it took, a draft model took those of its passes.
        """
        draft_s = sum(seconds for _, seconds in model_output.draft_passes)
        self._draft_s += draft_s
        self._step_costs.record(output.total_num_scheduled_tokens, took_s - draft_s)
        for num_tokens, seconds in model_output.draft_passes:
            self._pass_costs.record(num_tokens, seconds)
        if update.counts is None:
            return
        tried = (update.num_expected > 1).nonzero()[0]
        for row, num_drafts, num_accepted in zip(
            update.rows[tried].tolist(),
            (update.num_expected[tried] - 1).tolist(),
            (update.counts[tried] - 1).tolist(),
            strict=True,
        ):
            if self._planner is not None:
                self._planner.rates.learn(row, num_drafts, num_accepted)
            request_id = self._running.request_at(row).request_id
            before = self._of_request.get(request_id, (0, 0))
            self._of_request[request_id] = before[0] + num_drafts, before[1] + num_accepted
            for position in range(num_drafts):
                self._num_proposed[position] += 1
                self._num_accepted[position] += position < num_accepted

    def forget(self, request_id: str, report: FinishedRequest) -> FinishedRequest:
        """Drop the state of a request that has ended; return its report with the numbers of its drafts."""
        self._drafter.forget(request_id)
        num_drafts, num_accepted = self._of_request.pop(request_id, (0, 0))
        if not num_drafts:
            return report
        return msgspec.structs.replace(report, num_drafts=num_drafts, num_accepted_drafts=num_accepted)

    def stats(self) -> SpecDecodeStats:
        return SpecDecodeStats(
            proposed=list(self._num_proposed), accepted=list(self._num_accepted), draft_s=self._draft_s
        )

    def _make_room(self, step: StepBuilder, row: int, num_drafts: int) -> int:
        """Return for how many drafts every group has blocks, after allocating more to the row if enough are free."""
        running, blocks = self._running, self._blocks
        num_slots: list[int] = (running.num_slots[:, row] - running.num_known[row]).tolist()  # of each group
        missing = [blocks.blocks_for(max(0, num_drafts - slots), group) for group, slots in enumerate(num_slots)]
        num_spare = [num_free - len(running) for num_free in blocks.num_free]  # or this would cause the next preemption
        if any(count > spare for count, spare in zip(missing, num_spare, strict=True) if count):
            return min(num_drafts, *num_slots)
        for group, count in enumerate(missing):
            if count:
                step.add_blocks([row], [count], group)
        return num_drafts
