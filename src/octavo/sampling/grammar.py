"""Masks out tokens that a grammar does not allow.

Legend: L = logits rows of the step, S = rows of one slice, S' = those of them under a grammar, M = masks of the
step, W = words of a mask, V = vocabulary size.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.contracts.schedule import BoolArray, TokenMasks

_NO_MASK = -1


class GrammarBans:
    """The masks of one step, matched to its rows of logits."""

    def __init__(self, masks: TokenMasks, num_rows: int) -> None:
        """Match `masks` with the step's L rows of logits."""
        self._mask_at = np.full(num_rows, _NO_MASK)  # [L] among M
        self._mask_at[masks.logits_rows] = np.arange(len(masks.logits_rows))
        self._words = masks.words  # [M, W]
        self.is_banning: BoolArray = self._mask_at != _NO_MASK  # [L]

    def apply(self, logits: Tensor, part: NDArray[np.int64]) -> None:
        """Mask in place the `logits` [S, V] of the step's rows `part` [S]."""
        at = self.is_banning[part].nonzero()[0]
        words = self._words[self._mask_at[part[at]]]  # [S', W]
        allowed = np.unpackbits(words.view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")  # [S', V]
        banned = torch.from_numpy(allowed == 0).to(logits.device)
        for row, is_banned in zip(at.tolist(), banned, strict=True):
            logits[row].masked_fill_(is_banned, -torch.inf)
