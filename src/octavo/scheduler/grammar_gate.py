"""Requests with a constraint: they wait for their grammar to compile, and are sampled under it.

Legend: R = rows of the step, S = those that sample, M = masks, V = vocabulary size, W = words of one mask, ceil(V / 32)
or more, K = tokens that a row tries at once.
"""

from dataclasses import replace

import numpy as np

from octavo.contracts.schedule import Int32Array, SchedulerOutput, TokenMasks
from octavo.errors import OctavoError
from octavo.scheduler.gate import Gate
from octavo.scheduler.request import Request
from octavo.scheduler.running import RowIndices, RunningRows
from octavo.scheduler.step_update import StepUpdate
from octavo.structured.manager import GrammarManager


class GrammarGate(Gate):
    """Those requests, and the masks of their steps. `grammars` are owned by the scheduler's thread, as the gate is."""

    reason = "grammar"

    def __init__(self, grammars: GrammarManager, running: RunningRows) -> None:
        self._grammars, self._running = grammars, running
        self._num_requests = 0  # with a grammar, in any state: without any, a step costs nothing
        self._pending: dict[str, Request] = {}
        self._masks_of_row: dict[int, Int32Array] = {}  # of the step being scheduled: before and after each tried token

    def hold(self, request: Request) -> bool:
        if not request.is_constrained:
            return False
        self._num_requests += 1
        self._pending[request.request_id] = request
        self._grammars.begin(request.message)
        return True

    def take_ready(self, now_s: float) -> list[Request]:
        if not self._pending:
            return []
        done = [(self._pending.pop(request_id), error) for request_id, error in self._grammars.take_compiled().items()]
        self._failed = [*self._failed, *((request, error) for request, error in done if error is not None)]
        return [request for request, error in done if error is None]

    def forget(self, request: Request) -> None:
        if request.is_constrained:
            self._num_requests -= 1
            self._pending.pop(request.request_id, None)
            self._grammars.forget(request.request_id)

    def wait(self, timeout_s: float) -> None:
        self._grammars.wait(timeout_s)

    def add_to_step(self, output: SchedulerOutput, rows: RowIndices) -> SchedulerOutput:
        """Add the masks of those rows that sample in this step; after each token that they try, too."""
        if not self._num_requests:
            return output
        masks_of_row, self._masks_of_row = self._masks_of_row, {}  # also if no token is tried in the end
        sampling = rows[output.samples]  # [S]
        is_under = self._running.is_constrained[sampling]
        if not np.count_nonzero(is_under):
            return output
        request_ids, extra = self._running.req_ids_of(sampling[is_under]), output.scheduled_spec_decode_tokens
        at = is_under.nonzero()[0].astype(np.int32)
        if extra is None:
            return replace(output, token_masks=TokenMasks(logits_rows=at, words=self._grammars.masks(request_ids)))
        num_tried = extra.counts[output.samples]  # [S]
        first = np.cumsum(1 + num_tried) - (1 + num_tried)  # [S] each row's first row of logits
        logits_rows, words = list[Int32Array](), list[Int32Array]()
        for index, request_id in zip(at.tolist(), request_ids, strict=True):
            along = masks_of_row.get(int(sampling[index]))  # None: what it tries is not known here
            words.append(self._grammars.masks([request_id]) if along is None else along[: 1 + num_tried[index]])
            logits_rows.append(np.arange(first[index], first[index] + len(words[-1]), dtype=np.int32))
        masks = TokenMasks(logits_rows=np.concatenate(logits_rows), words=np.concatenate(words))
        return replace(output, token_masks=masks)

    def after_step(self, output: SchedulerOutput, update: StepUpdate) -> dict[str, OctavoError | None]:
        """Advance the grammars by the new tokens."""
        at = self._running.is_constrained[update.rows].nonzero()[0].tolist() if self._num_requests else []
        return self._grammars.advance({update.req_ids[index]: update.tokens_of(index) for index in at}) if at else {}

    def usable(self, row: int, token_ids: list[int]) -> list[int]:
        """Return the first of `token_ids` that a row may try in this step: its grammar accepts them."""
        masks = self._grammars.masks_along(self._running.request_at(row).request_id, token_ids)  # [1 + K', W]
        self._masks_of_row[row] = masks
        return token_ids[: len(masks) - 1]

    def forced(self, row: int) -> list[int]:
        """Return the next tokens of a row that its grammar leaves no choice about."""
        return self._grammars.forced(self._running.request_at(row).request_id)

    def num_allowed(self, request: Request, token_ids: list[int]) -> int:
        """Return how many of a request's next tokens its grammar allows, one after the other."""
        masks = self._grammars.masks_along(request.request_id, token_ids)  # [1 + K', W]; ends where nothing may follow
        pairs = zip(masks, token_ids, strict=False)
        is_allowed = [bool(mask[token_id // 32] >> (token_id % 32) & 1) for mask, token_id in pairs]
        return [*is_allowed, False].index(False)
