"""Dividing one step's token budget among rows."""

import numpy as np

from octavo.contracts.schedule import Int32Array


def split_budget(wanted: Int32Array, budget: int) -> Int32Array:
    """Grant each row the tokens in `wanted` [R], most urgent first, as far as `budget` goes.

    Rows with a single token come first: they are decoding, and must not be held up by a long prompt ahead of them.
    The rest share what is left, in order; the last one served gets a chunk.
    """
    if int(wanted.sum()) <= budget:
        return wanted
    order = np.argsort(wanted > 1, kind="stable")
    before = np.cumsum(wanted[order]) - wanted[order]
    granted = np.empty_like(wanted)
    granted[order] = np.clip(budget - before, 0, wanted[order])
    return granted
