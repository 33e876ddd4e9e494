"""Memory on large pages, for what steps read from front to back, or what is large and written bit by bit.

Processors fetch ahead by themselves no further than to the end of a page. On a Zen 4 one thread reads 23 to 26 GB/s of
small pages and 31 of large ones. Each small page is also a fault of 4 to 8 us when it is first written.
"""

import ctypes
import math
import mmap
import platform

import torch

LARGE_PAGE_BYTES = 1 << 21

_MADV_POPULATE_WRITE = 23  # since Linux 5.14; Python's mmap has no name for it


def zeros_on_large_pages(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of zeros on a CPU, on large pages where there is one to fill and the system has them.

    They are untouched pages from the system: what is never written costs no memory, and no time before its first use.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < LARGE_PAGE_BYTES:
        return torch.zeros(shape, dtype=dtype)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # Linux
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def prefault(tensor: torch.Tensor, start: int, num_bytes: int) -> bool:
    """Have the system find memory for some bytes of a tensor on a CPU, as a first write would; what they hold stays.

    False where the system cannot: it is no Linux, or one before 5.14, or it has no memory left.
    """
    if platform.system() != "Linux":
        return False
    first = (tensor.data_ptr() + start) // mmap.PAGESIZE * mmap.PAGESIZE
    end = tensor.data_ptr() + start + num_bytes
    madvise = ctypes.CDLL(None).madvise
    return not madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), _MADV_POPULATE_WRITE)
