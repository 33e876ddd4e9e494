"""Requests whose answers must have a form: they wait for their grammar, and are sampled one token at a time under it.

Legend: R = rows of the step, R' = rows that got a token, M = those under a grammar.
"""

import numpy as np

from octavo.contracts.grammar import GrammarNews, Grammars
from octavo.contracts.schedule import BoolArray, TokenMasks
from octavo.errors import OctavoError
from octavo.scheduler.progress import StepNews
from octavo.scheduler.request import Request, RequestStatus
from octavo.scheduler.running import RowIndices, RunningRows


class ConstrainedRequests:
    """Owned by the scheduler. Without `grammars` no request may ask for a form."""

    def __init__(self, grammars: Grammars | None, running: RunningRows) -> None:
        self._grammars = grammars
        self._running = running
        self._pending: dict[str, Request] = {}

    @property
    def num_pending(self) -> int:
        """How many wait for their grammar."""
        return len(self._pending)

    def hold_back(self, request: Request) -> None:
        """Have the request's grammar compiled; `take_compiled` gives the request back."""
        request.status = RequestStatus.WAITING_FOR_GRAMMAR
        self._pending[request.request_id] = request
        self._known.begin(request.message)

    def take_compiled(self) -> list[tuple[Request, OctavoError | None]]:
        """Return requests that may queue now, and those that will never."""
        if not self._pending:
            return []
        done = self._known.take_compiled()
        return [(self._pending.pop(request_id), error) for request_id, error in done.items()]

    def token_masks(self, rows: RowIndices, samples: BoolArray) -> TokenMasks | None:
        """Return what the rows [R] that sample in this step may sample; None when all are free."""
        constrained = rows[samples & self._running.is_constrained[rows]]  # [M]
        if not len(constrained):
            return None
        request_ids = self._running.req_ids_of(constrained)
        return TokenMasks(rows=constrained.astype(np.int32), words=self._known.masks(request_ids))

    def advance(self, news: StepNews) -> GrammarNews:
        """Take in the tokens [R'] of a step."""
        at = self._running.is_constrained[news.rows].nonzero()[0].tolist()
        if not at:
            return GrammarNews()
        return self._known.advance({news.req_ids[index]: int(news.token_ids[index]) for index in at})

    def forget(self, request: Request) -> None:
        """Let go of a request that has ended."""
        if request.is_constrained:
            self._pending.pop(request.request_id, None)
            self._known.forget(request.request_id)

    @property
    def _known(self) -> Grammars:
        assert self._grammars is not None, "this scheduler was made without grammars"
        return self._grammars
