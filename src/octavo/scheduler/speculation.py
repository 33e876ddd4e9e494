"""Which running rows get drafts in a step, and how many: drafts use only budget and blocks that are left over.

A drafter runs on the scheduler's thread, or inside the ranks, which return drafts with each step's output.

Legend: R = running rows of the step.
"""

from collections.abc import Sequence

import numpy as np

from octavo.contracts.drafter import Drafter
from octavo.contracts.schedule import Int32Array
from octavo.scheduler.block_manager import BlockManager
from octavo.scheduler.constrained import ConstrainedRequests
from octavo.scheduler.running import RunningRows
from octavo.scheduler.step_builder import StepBuilder
from octavo.scheduler.trials import Trials


class RankDrafter:
    """A `Drafter` for drafts proposed by ranks: keeps those of a step's output until the next step."""

    def __init__(self, max_num_drafts: int) -> None:
        self.max_num_drafts = max_num_drafts
        self._proposals: dict[str, Sequence[int]] = {}  # by request id

    def take(self, request_id: str, draft_ids: Sequence[int]) -> None:
        """Store the tokens that may follow all known tokens of the request."""
        self._proposals[request_id] = draft_ids

    def forget(self, request_id: str) -> None:
        """Drop a request that has ended."""
        self._proposals.pop(request_id, None)

    def propose(self, request_ids: Sequence[str], contexts: Sequence[Int32Array]) -> list[Sequence[int]]:
        return [self._proposals.pop(request_id, ()) for request_id in request_ids]


class Speculation:
    """Owned by a scheduler with a drafter. Drafts never cause a preemption and take no budget from prompts."""

    def __init__(
        self, drafter: Drafter, running: RunningRows, blocks: BlockManager, constrained: ConstrainedRequests
    ) -> None:
        self._drafter, self._running, self._blocks, self._constrained = drafter, running, blocks, constrained

    def add_drafts(self, step: StepBuilder, budget: int) -> None:
        """Add at most `budget` drafts to rows that compute only their last known token."""
        running = self._running
        rows, known_counts = step.running_part
        room = running.limit[rows] - 1 - running.num_known[rows]  # nothing is sampled past the limit
        at = ((known_counts == 1) & (running.num_computed[rows] + 1 == running.num_known[rows]) & (room > 0)).nonzero()[
            0
        ]
        if budget <= 0 or not len(at):
            return
        asked = rows[at].tolist()
        proposals = self._drafter.propose(
            running.req_ids_of(rows[at]), [running.tokens[row, : running.num_known[row]] for row in asked]
        )
        counts, token_ids, masks = np.zeros(len(rows), dtype=np.int32), list[int](), dict[int, Int32Array]()
        for index, row, proposal in zip(at.tolist(), asked, proposals, strict=True):
            most = min(self._drafter.max_num_drafts, int(room[index]), budget - len(token_ids))
            drafts = list(proposal[: max(0, most)])
            if drafts and running.is_constrained[row]:
                masks[row] = self._constrained.masks_along(row, drafts)
                drafts = drafts[: len(masks[row]) - 1]
            drafts = drafts[: self._make_room(step, row, len(drafts))]
            if row in masks:
                masks[row] = masks[row][: 1 + len(drafts)]
            counts[index] = len(drafts)
            token_ids += drafts
        if token_ids:
            step.add_trials(Trials(counts=counts, token_ids=np.array(token_ids, dtype=np.int32), masks=masks))

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
                step.add_blocks(row, count, group)
        return num_drafts
