"""One token for each of some rows that want the same kind of draw.

Legend: S = rows of one slice, V = vocabulary size.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.contracts.schedule import Int32Array
from octavo.sampling.filters import Filters, draw_filtered
from octavo.sampling.mass import relative_logits
from octavo.sampling.noise import NoiseKeys, gumbel_for_all


@dataclass(frozen=True, kw_only=True, slots=True)
class Wishes:
    """What S rows want, on the device: all greedy, or all sampled and filtered, or all sampled and not."""

    is_greedy: bool
    is_filtered: bool
    filters: Filters  # [S] each
    keys: NoiseKeys  # [S] each

    @classmethod
    def of(cls, records: NDArray[np.void], output_indices: Int32Array, device: torch.device) -> Self:
        """Gather from the rows' records [S], which choose output tokens `output_indices` [S]."""

        def column(values: NDArray[np.generic]) -> Tensor:
            return torch.from_numpy(values.copy()).to(device)  # torch does not read the strides of a record's field

        return cls(
            is_greedy=bool(records["temperature"][0] == 0.0),
            is_filtered=bool(records["is_filtered"][0]),
            filters=Filters(
                temperatures=column(records["temperature"]),
                top_k=column(records["top_k"]),
                top_p=column(records["top_p"]),
                min_p=column(records["min_p"]),
            ),
            keys=NoiseKeys(
                seed_low=column(records["seed_low"]),
                seed_high=column(records["seed_high"]),
                output_indices=column(output_indices.astype(np.int64)),
            ),
        )


def draw(logits: Tensor, wishes: Wishes) -> Tensor:
    """Return a token for each row of `logits` [S, V], whose largest is finite: int64 [S]. Ties go to the lowest id."""
    if wishes.is_greedy:
        return logits.max(-1).indices
    if wishes.is_filtered:
        return draw_filtered(logits, wishes.filters, wishes.keys)
    scores = relative_logits(logits, wishes.filters.temperatures)  # [S, V]
    scores += gumbel_for_all(wishes.keys, logits.shape[1])
    return scores.argmax(-1)
