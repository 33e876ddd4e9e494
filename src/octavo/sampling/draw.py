"""One token for each of some rows: the largest logit's, or one drawn, filtered or not.

Legend: S = rows, V = vocabulary size.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.contracts.schedule import BoolArray, Int32Array
from octavo.sampling.filters import Filters, draw_filtered
from octavo.sampling.mass import relative_logits
from octavo.sampling.noise import NoiseKeys, gumbel_for_all

# Logits drawn at once. On a CPU, float64 intermediates of the whole vocabulary should stay in the cache; filtered rows
# need few. Elsewhere memory is the limit.
_CPU_SLICE, _CPU_FILTERED_SLICE = 2**18, 2**23
_DEVICE_SLICE = 2**26


@dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """What came of S rows. Where the largest logit is not finite, the token means nothing."""

    token_ids: Tensor  # [S] int64
    largest: Tensor  # [S] float32; NaN where any logit is


class Draws(Protocol):
    """Who draws. All give the same tokens, which are those of `TorchDraws`."""

    def draw(self, logits: Tensor, records: NDArray[np.void], output_indices: Int32Array) -> Drawn:
        """Draw from each row of `logits` [S, V] float32 what `records` [S] ask for, as output `output_indices` [S].

        Ties go to the lowest id. The records are those of `sampling/rows.py`.
        """
        ...


class TorchDraws:
    """See `Draws`. The definition, by torch's operations, on any device that has float64."""

    def draw(self, logits: Tensor, records: NDArray[np.void], output_indices: Int32Array) -> Drawn:
        largest, token_ids = logits.max(-1)  # of equals, max names the lowest id
        is_drawn = (records["temperature"] != 0.0) & largest.isfinite().cpu().numpy()
        on_cpu, is_filtered = logits.device.type == "cpu", records["is_filtered"]
        for is_alike, cpu_slice in (
            (is_drawn & is_filtered, _CPU_FILTERED_SLICE),
            (is_drawn & ~is_filtered, _CPU_SLICE),
        ):
            for part in slices_of(is_alike, (cpu_slice if on_cpu else _DEVICE_SLICE) // logits.shape[1]):
                wishes = _Wishes.of(records[part], output_indices[part], logits.device)
                token_ids[part] = _draw(take_rows(logits, part), wishes)
        return Drawn(token_ids=token_ids, largest=largest)


def slices_of(is_wanted: BoolArray, size: int) -> Iterator[NDArray[np.int64]]:
    """Cut the positions of what is wanted [S] into parts of `size`, or of one where that is less."""
    positions, size = is_wanted.nonzero()[0], max(1, size)
    for start in range(0, len(positions), size):
        yield positions[start : start + size]


def take_rows(logits: Tensor, part: NDArray[np.int64]) -> Tensor:
    """Return rows of `logits` [S, V] by number: a view where they are neighbours."""
    is_run = part[-1] - part[0] + 1 == len(part)
    return logits[part[0] : part[-1] + 1] if is_run else logits[part]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wishes:
    """What S rows want, on the device: all of them filtered, or none."""

    is_filtered: bool
    filters: Filters  # [S] each
    keys: NoiseKeys  # [S] each

    @classmethod
    def of(cls, records: NDArray[np.void], output_indices: Int32Array, device: torch.device) -> Self:
        """Gather from the rows' records [S], which choose output tokens `output_indices` [S]."""

        def column(values: NDArray[np.generic]) -> Tensor:
            return torch.from_numpy(values.copy()).to(device)  # torch does not read the strides of a record's field

        return cls(
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


def _draw(logits: Tensor, wishes: _Wishes) -> Tensor:
    """Return a token for each row of `logits` [S, V], whose largest is finite: int64 [S]."""
    if wishes.is_filtered:
        return draw_filtered(logits, wishes.filters, wishes.keys)
    scores = relative_logits(logits, wishes.filters.temperatures)  # [S, V]
    scores += gumbel_for_all(wishes.keys, logits.shape[1])
    return scores.argmax(-1)
