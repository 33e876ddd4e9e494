"""The host's inputs of one decode step, at fixed addresses: written by the host, read by graphs.

Legend: C = capacity in rows, N = rows of a bucket, R = rows of the step, W = words of a mask, B = most biases of a
step, M = masks in the step.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.device.base import DeviceQueue
from octavo.sampling.device_draw import FLOAT_COLUMNS, INTEGER_COLUMNS, SamplingMetadata
from octavo.sampling.device_logits_processors import Arrays, LogitsProcessorTensors

_INTEGERS = (
    "rows",  # [N] in the worker's rows
    "positions",  # [N] of each row's one token
    "grown_rows",  # [N] rows whose block table changes in this step
    "grown_groups",  # [N] KV group of the table
    "grown_columns",  # [N] column in the table
    "grown_blocks",  # [N] the new block ids
    *INTEGER_COLUMNS,  # [N] each
)
_FLOATS = FLOAT_COLUMNS  # [N] each
_WORD_BYTES = 8


class DecodeRecord:
    """Columns of C words on the device, at the same addresses in every step.

    The rest of a bucket is padded with a scratch row at position 0, whose table points to a scratch block: padded rows
    compute like all others and write nowhere else.
    """

    def __init__(self, capacity: int, scratch_row: int, scratch_block: int, device: torch.device) -> None:
        self.capacity, self.scratch_row = capacity, scratch_row
        self._padding: dict[str, float] = {
            **dict.fromkeys((*_INTEGERS, *_FLOATS), 0),
            "rows": scratch_row,
            "grown_rows": scratch_row,
            "grown_blocks": scratch_block,
            "num_logprobs": -1,
            "repetition": 1,
            "mask_indices": -1,
        }
        self._words = torch.zeros(len(_INTEGERS) + len(_FLOATS), capacity, dtype=torch.int64, device=device)
        self._place = {name: index for index, name in enumerate((*_INTEGERS, *_FLOATS))}

    def integers(self, name: str, size: int) -> torch.Tensor:
        """Return a view of the first `size` entries of a column, int64."""
        return self._words[self._place[name], :size]

    def floats(self, name: str, size: int) -> torch.Tensor:
        """Return a view of the first `size` entries of a column, float64."""
        return self.integers(name, size).view(torch.float64)

    def metadata(self, size: int) -> SamplingMetadata:
        """Return the sampling metadata of the first `size` rows."""
        columns = {name: self.integers(name, size) for name in INTEGER_COLUMNS}
        return SamplingMetadata(**columns, **{name: self.floats(name, size) for name in FLOAT_COLUMNS})

    def send(self, queue: DeviceQueue, columns: Mapping[str, NDArray[Any]]) -> None:
        """Start copying a step: `columns` [R] each, padded. Missing columns are all padding."""
        host = queue.host_bytes(self._words.numel() * _WORD_BYTES).view(torch.int64).view_as(self._words)
        words = host.numpy()
        for name, place in self._place.items():
            column = words[place].view(np.float64) if name in _FLOATS else words[place]
            values = columns.get(name, ())
            column[: len(values)] = values
            column[len(values) :] = self._padding[name]
        self._words.copy_(host, non_blocking=True)

    def send_padding(self, queue: DeviceQueue) -> None:
        """Start copying a step without rows."""
        self.send(queue, {})


_MAX_BIASES = 4096


class LogitsProcessorRecord:
    """Space for a mask per row, and for biases. Bad words of several tokens do not fit: such steps use no graph."""

    def __init__(self, capacity: int, vocab_size: int, device: torch.device) -> None:
        nothing = torch.zeros(0, dtype=torch.int64, device=device)
        self.processors = LogitsProcessorTensors(
            masks=torch.zeros(capacity, -(-vocab_size // 32), dtype=torch.int32, device=device),  # [C, W]
            biased=torch.zeros(_MAX_BIASES, dtype=torch.int64, device=device),  # [B]
            biases=torch.zeros(_MAX_BIASES, device=device),  # [B]
            bad_rows=nothing,
            bad_lens=nothing,
            bad_tokens=nothing.view(0, 0),
            banned=nothing,
        )

    @staticmethod
    def fits(arrays: Arrays) -> bool:
        """Return whether a step's logits processors, if any, fit."""
        return not arrays or (len(arrays["biased"]) <= _MAX_BIASES and not len(arrays["banned"]))

    def send(self, queue: DeviceQueue, arrays: Arrays) -> None:
        """Start copying a step's logits processors: masks [M, W], and biases padded with 0."""
        num_masks = len(arrays["masks"])
        if num_masks:
            _copy(queue, self.processors.masks[:num_masks], arrays["masks"])
        for target, name in ((self.processors.biased, "biased"), (self.processors.biases, "biases")):
            padded = np.zeros(_MAX_BIASES, dtype=arrays[name].dtype)
            padded[: len(arrays[name])] = arrays[name]
            _copy(queue, target, padded)


def _copy(queue: DeviceQueue, target: torch.Tensor, values: NDArray[np.generic]) -> None:
    host = queue.host_bytes(values.nbytes).view(target.dtype).view_as(target)
    host.numpy()[...] = values
    target.copy_(host, non_blocking=True)
