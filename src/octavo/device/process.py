"""Settings of this process: OpenMP's threads, Python's garbage collector, the C library's memory. Without torch."""

import ctypes
import gc
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Threads that are done with a parallel op keep spinning, by default for about 15 ms, and occupy cores that other
# processes could use; those then compete with the op's last thread instead. So after 1 ms they should sleep. Measured
# on two cores, four layers of Qwen3-0.6B in bfloat16, ms per step at batch 1 and 32:
#
#     spins before sleeping     300,000 (default)   20,000      0
#     quiet machine             7.4 and 23          - and 23    9.0 and 40
#     one busy neighbor         130 and 425         25 and -    12 and 75
_WAITING = {
    "GOMP_SPINCOUNT": "20000",  # spins of about 50 ns; GNU OpenMP, used by torch's Linux wheels
    "KMP_BLOCKTIME": "1",  # ms; LLVM's and Intel's OpenMP
}

# From glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

_MAX_KEPT = 512 << 20  # bytes at the top of the heap; more than that is returned to the system
_LARGEST_BLOCK = 32 << 20  # bytes; the maximum of glibc, which always maps larger blocks separately


def limit_spinning() -> bool:
    """Make waiting OpenMP threads sleep soon, unless the user's environment configures it.

    Changes `os.environ` for this process and its children. Returns whether it was in time: OpenMP reads the variables
    once, when torch is imported.
    """
    if not any(name in os.environ for name in ("OMP_WAIT_POLICY", *_WAITING)):
        os.environ.update(_WAITING)
    return "torch" not in sys.modules


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Disable garbage collection inside: loading creates objects that stay, so collecting meanwhile is wasted time.

    Saves a tenth of the time of `import torch`.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def freeze_loaded_objects() -> None:
    """Move all current objects to the permanent generation, so that no step is slowed by the collector walking them.

    Only for processes owned by the engine; in a user's program, garbage that appears later must still be found. There
    is no collection first: it takes a fifth of a second and never found anything.
    """
    gc.freeze()


def give_back_freed_memory() -> None:
    """Return freed memory to the system after loading: 230 MB of holes after Qwen3-0.6B, in 5 ms. glibc only."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def keep_freed_memory() -> bool:
    """Tell glibc to keep freed blocks, unless the user's environment configures it. Returns False if not possible.

    Steps allocate and free dozens of MB. By default glibc returns large blocks to the system at once and takes new,
    zeroed pages for the next tensor: about 35,000 page faults for a prompt of 1,024 tokens with Qwen3-0.6B, none with
    these settings. Changes the allocator of this process permanently.
    """
    if platform.libc_ver()[0] != "glibc" or "MALLOC_TRIM_THRESHOLD_" in os.environ:
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_BLOCK)) and bool(mallopt(_M_TRIM_THRESHOLD, _MAX_KEPT))
