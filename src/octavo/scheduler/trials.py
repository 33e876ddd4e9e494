"""Drafts of one step, row by row. Legend: R = rows of the step, K = drafts of all of them, W = words of a mask."""

from dataclasses import dataclass

import numpy as np

from octavo.contracts.schedule import Int32Array, SpecDecodeTokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Trials:
    """Drafts to verify after the last known tokens of the first rows of a step."""

    counts: Int32Array  # [R], or fewer: later rows have none
    token_ids: Int32Array  # [K] row after row
    masks: dict[
        int, Int32Array
    ]  # by row, of those under a grammar: tokens allowed at each draft and after the last [1 + ., W]

    def of_rows(self, num_rows: int) -> SpecDecodeTokens:
        """Return the message for the worker, for a step of R rows."""
        counts = np.zeros(num_rows, dtype=np.int32)
        counts[: len(self.counts)] = self.counts
        return SpecDecodeTokens(counts=counts, token_ids=self.token_ids)
