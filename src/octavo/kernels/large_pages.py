"""Memory on large pages, for what steps read sequentially, or what is large and written piece by piece.

Hardware prefetchers stop at the end of a page. On a Zen 4, one thread reads 23 to 26 GB/s from small pages and 31 from
large ones. The first write to each small page also costs a page fault of 4 to 8 us.
"""

import ctypes
import math
import mmap
import platform

import torch
from torch import Tensor

LARGE_PAGE_BYTES = 1 << 21
_SHARED_BYTES = 32 * LARGE_PAGE_BYTES  # mapped at once; what is never written costs no memory
_LINE_BYTES = 64

_MADV_POPULATE_WRITE = 23  # since Linux 5.14; Python's mmap has no name for it


def zeros_on_large_pages(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor of zeros on a CPU, on large pages if it fills one and the system has them.

    Pages come untouched from the system: unwritten parts cost no memory, and nothing costs time before its first use.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < LARGE_PAGE_BYTES:
        return torch.zeros(shape, dtype=dtype)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


class SharedPages:
    """Memory for tensors that live as long as each other, such as a model's weights: neighbors share large pages.

    Alone, a tensor of a few MB has small pages before its first large one and after its last.
    """

    def __init__(self) -> None:
        self._pages, self._num_used = torch.empty(0, dtype=torch.uint8), 0

    def zeros(self, size: int, dtype: torch.dtype) -> Tensor:
        """Return a tensor of zeros, aligned to cache lines. It keeps its neighbors' memory."""
        num_bytes = size * dtype.itemsize
        if num_bytes > _SHARED_BYTES // 2:
            return zeros_on_large_pages((size,), dtype)
        if self._num_used + num_bytes > len(self._pages):
            self._pages, self._num_used = zeros_on_large_pages((_SHARED_BYTES,), torch.uint8), 0
        start, self._num_used = self._num_used, self._num_used + -(-num_bytes // _LINE_BYTES) * _LINE_BYTES
        return self._pages[start : start + num_bytes].view(dtype)


def prefault(tensor: Tensor, start: int, num_bytes: int) -> bool:
    """Have the system back some bytes of a CPU tensor with memory, as a first write would; contents stay.

    Returns False if the system cannot: not Linux, Linux before 5.14, or out of memory.
    """
    if platform.system() != "Linux":
        return False
    first = (tensor.data_ptr() + start) // mmap.PAGESIZE * mmap.PAGESIZE
    end = tensor.data_ptr() + start + num_bytes
    madvise = ctypes.CDLL(None).madvise
    return not madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), _MADV_POPULATE_WRITE)
