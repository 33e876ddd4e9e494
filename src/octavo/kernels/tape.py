"""A tape: the native calls of a forward pass, recorded once and replayed in one call, without Python in between.

Python between two calls costs more than its instructions. Every call streams megabytes of weights through the caches,
so the interpreter always resumes with cold caches: 30 us per call, 5 ms per step of Qwen3-0.6B.

Legend: T = tokens.
"""

import math
import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from octavo.kernels.cpu import _cpu
    from octavo.kernels.native import NativeKernels


class TapeBuffers:
    """Memory for the results of a tape's calls. A result's memory is reused once its tensor is freed."""

    def __init__(self) -> None:
        self._all: list[Tensor] = []
        self._free: dict[int, list[Tensor]] = {}  # by size in bytes

    @property
    def num_bytes(self) -> int:
        return sum(buffer.numel() for buffer in self._all)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return an uninitialized tensor of this shape."""
        size = math.prod(shape) * dtype.itemsize
        free = self._free.setdefault(size, [])
        buffer = free.pop() if free else self._new(size)
        tensor = buffer.view(dtype).view(shape)
        weakref.finalize(tensor, free.append, buffer)
        return tensor

    def _new(self, size: int) -> Tensor:
        buffer = torch.empty(size, dtype=torch.uint8)
        self._all.append(buffer)
        return buffer


class Tape:
    """The calls and the memory they use. Can be replayed for any number of tokens up to that of the recording."""

    def __init__(self, kernels: "NativeKernels") -> None:
        from octavo.kernels.cpu import _cpu

        self._kernels = kernels
        self.calls = _cpu.Tape()
        self.buffers = TapeBuffers()

    def replay(self, num_tokens: int, steps: "list[_cpu.AttentionStep]") -> None:
        """Execute all calls for the first T rows of every tensor, with this step's attention for each KV group."""
        self._kernels.timed(self._kernels.native.replay, self.calls, num_tokens, steps)
