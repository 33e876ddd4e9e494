"""A cheap pre-check of sampled tokens: which of them may end a request?"""

from collections.abc import Iterable

import numpy as np

from octavo.contracts.schedule import BoolArray, Int32Array


class StopIdTable:
    """The union of all stop ids seen, as a table. A hit is only a candidate: `check_stop` decides per request."""

    def __init__(self) -> None:
        self._may_stop: BoolArray = np.zeros(1024, dtype=np.bool_)  # the last entry is False, and covers all larger ids

    def add(self, token_ids: Iterable[int]) -> None:
        for token_id in token_ids:
            if token_id >= len(self._may_stop) - 1:
                self._grow(token_id + 2)
            self._may_stop[token_id] = True

    def candidates(self, token_ids: Int32Array) -> BoolArray:
        """Return which of `token_ids` [R] are in the table."""
        return self._may_stop.take(token_ids, mode="clip")

    def _grow(self, size: int) -> None:
        grown = np.zeros(max(size, 2 * len(self._may_stop)), dtype=np.bool_)
        grown[: len(self._may_stop)] = self._may_stop
        self._may_stop = grown
