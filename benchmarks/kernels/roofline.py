"""What this machine can do at most, measured by the plainest code that comes near it."""

import time
from collections.abc import Callable

import torch


def best_seconds(run: Callable[[], object], *, budget_s: float = 0.3) -> float:
    """Return the shortest of many runs of `run`, so that neighbours on the machine count least."""
    run()
    best, deadline = float("inf"), time.perf_counter() + budget_s
    while time.perf_counter() < deadline:
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def read_bandwidth() -> float:
    """Return bytes per second of reading 256 MiB, which is more than a core's caches hold."""
    data = torch.ones(1 << 26)
    return data.numel() * data.itemsize / best_seconds(data.sum, budget_s=2.0)


def matmul_rate(dtype: torch.dtype) -> float:
    """Return operations per second of a large square matmul."""
    size = 2048
    left, right = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    return 2 * size**3 / best_seconds(lambda: left @ right, budget_s=2.0)
