"""Edits of a decoding step in memory that stays where it is: written by the host before a replay, read by graphs.

Legend: C = capacity in rows, W = words of a mask, B = most biases of a step, M = masks of the step.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.device.device_queue import DeviceQueue
from octavo.sampling.device_logits_processors import Arrays, LogitsProcessorTensors

_MAX_BIASES = 4096


class LogitsProcessorRecord:
    """Room for a mask per row, and for biases. Bad words of several tokens have none: such steps take no graph."""

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
        """Say whether these edits of a step, or none, find room."""
        return not arrays or (len(arrays["biased"]) <= _MAX_BIASES and not len(arrays["banned"]))

    def send(self, queue: DeviceQueue, arrays: Arrays) -> None:
        """Begin to copy the edits of a step: masks [M, W], and biases with what is left set to 0."""
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
