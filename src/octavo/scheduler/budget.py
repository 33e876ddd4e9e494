"""How one step's token budget is shared out."""

import numpy as np

from octavo.contracts.schedule import Int32Array


def split_budget(wanted: Int32Array, budget: int) -> Int32Array:
    """Grant each row what it wants, as far as `budget` goes. `wanted` [R] is in order of urgency.

    Rows that want a single token come first: they are streams that somebody watches, and one long prompt ahead of
    them must not hold them up. The rest share what is left in order; the last one served gets a chunk.
    """
    if int(wanted.sum()) <= budget:
        return wanted
    order = np.argsort(wanted > 1, kind="stable")
    before = np.cumsum(wanted[order]) - wanted[order]
    granted = np.empty_like(wanted)
    granted[order] = np.clip(budget - before, 0, wanted[order])
    return granted
