"""Requests with a constraint: they wait for their grammar to compile, and are sampled under it.

Legend: R = rows of the step, S = those that sample, R' = rows that got tokens, M = masks, K = drafts, W = words.
"""

import numpy as np

from octavo.contracts.grammar import Grammars, GrammarUpdate
from octavo.contracts.schedule import BoolArray, Int32Array, TokenMasks
from octavo.errors import OctavoError
from octavo.scheduler.request import Request, RequestStatus
from octavo.scheduler.running import RowIndices, RunningRows
from octavo.scheduler.step_update import StepUpdate
from octavo.scheduler.trials import Trials


class ConstrainedRequests:
    """Owned by the scheduler. Without `grammars`, no request may have a constraint."""

    def __init__(self, grammars: Grammars | None, running: RunningRows) -> None:
        self._grammars = grammars
        self._running = running
        self._pending: dict[str, Request] = {}

    @property
    def num_pending(self) -> int:
        """The number of requests waiting for their grammar."""
        return len(self._pending)

    def hold_back(self, request: Request) -> None:
        """Start compiling the request's grammar; `take_compiled` returns the request when it is done."""
        request.status = RequestStatus.WAITING_FOR_GRAMMAR
        self._pending[request.request_id] = request
        self._known.begin(request.message)

    def take_compiled(self) -> list[tuple[Request, OctavoError | None]]:
        """Return requests whose grammar has compiled, or failed to, with the error."""
        if not self._pending:
            return []
        done = self._known.take_compiled()
        return [(self._pending.pop(request_id), error) for request_id, error in done.items()]

    def token_masks(self, rows: RowIndices, samples: BoolArray, trials: Trials | None) -> TokenMasks | None:
        """Return the masks for those of the rows [R] that sample in this step; None if all are unconstrained."""
        sampling = rows[samples]  # [S]
        at = self._running.is_constrained[sampling].nonzero()[0]
        if not len(at):
            return None
        request_ids = self._running.req_ids_of(sampling[at])
        if trials is not None:
            return self._masks_with_drafts(sampling, trials.of_rows(len(rows)).counts[samples], request_ids, trials)
        return TokenMasks(logits_rows=at.astype(np.int32), words=self._known.masks(request_ids))

    def _masks_with_drafts(
        self, sampling: RowIndices, num_drafts: Int32Array, request_ids: tuple[str, ...], trials: Trials
    ) -> TokenMasks:
        """Return masks for the rows `sampling` [S], and after each of their `num_drafts` [S] drafts that is known."""
        is_under = self._running.is_constrained[sampling]
        rows = sampling[is_under].tolist()
        num_masks = [len(trials.masks[row]) if row in trials.masks else 1 for row in rows]
        widths = 1 + num_drafts
        first = np.cumsum(widths) - widths  # [S] in L
        logits_rows = [np.arange(count) + at for at, count in zip(first[is_under].tolist(), num_masks, strict=True)]
        words = [
            trials.masks[row] if row in trials.masks else self._known.masks([request_id])
            for row, request_id in zip(rows, request_ids, strict=True)
        ]
        return TokenMasks(logits_rows=np.concatenate(logits_rows).astype(np.int32), words=np.concatenate(words))

    def masks_along(self, row: int, draft_ids: list[int]) -> Int32Array:
        """See `Grammars.masks_along`: [1 + K', W]."""
        return self._known.masks_along(self._running.request_at(row).request_id, draft_ids)

    def forced(self, row: int) -> list[int]:
        """See `Grammars.forced`."""
        return self._known.forced(self._running.request_at(row).request_id)

    def num_allowed(self, row: int, token_ids: list[int]) -> int:
        """Return how many of these next tokens of a row its grammar allows, one after the other."""
        masks = self.masks_along(row, token_ids)  # [1 + ., W]; ends where nothing may follow
        pairs = zip(masks, token_ids, strict=False)
        is_allowed = [bool(mask[token_id // 32] >> (token_id % 32) & 1) for mask, token_id in pairs]
        return [*is_allowed, False].index(False)

    def advance(self, update: StepUpdate) -> GrammarUpdate:
        """Advance the grammars by the new tokens [R'] of a step."""
        at = self._running.is_constrained[update.rows].nonzero()[0].tolist()
        if not at:
            return GrammarUpdate()
        return self._known.advance({update.req_ids[index]: update.tokens_of(index) for index in at})

    def forget(self, request: Request) -> None:
        """Drop a request that has ended."""
        if request.is_constrained:
            self._pending.pop(request.request_id, None)
            self._known.forget(request.request_id)

    @property
    def _known(self) -> Grammars:
        assert self._grammars is not None, "this scheduler has no grammars"
        return self._grammars
