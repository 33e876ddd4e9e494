"""torch's threads beside those of the C++ kernels."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Keep torch's ops on the calling thread, for steps whose layers are native calls.

    What is left to torch is small, but from 32,768 elements on it is shared among OpenMP's threads, which then spin for
    a millisecond on cores that the kernels' own threads want. Setting and restoring takes 0.3 us. It is not set for
    good: a program around the engine may use torch itself, and prefers its own number.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
