"""What this machine can do at most, measured by the plainest code that comes near it."""

import time
from collections.abc import Callable
from itertools import cycle

import torch


def best_seconds(run: Callable[[], object], *, budget_s: float = 0.3) -> float:
    """Return the shortest of many runs of `run`, so that neighbors on the machine count least."""
    run()
    best, deadline = float("inf"), time.perf_counter() + budget_s
    while time.perf_counter() < deadline:
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def read_bandwidth() -> float:
    """Return bytes per second of reading 8 MiB, the next of 512 MiB each time, so that no cache has them."""
    parts = torch.ones(1 << 26, dtype=torch.int64).split(1 << 20)  # type: ignore[no-untyped-call]  # torch has no type for it
    turns = cycle(parts)
    return float(parts[0].nbytes / best_seconds(lambda: next(turns).sum(), budget_s=2.0))


def matmul_rate(dtype: torch.dtype) -> float:
    """Return operations per second of a large square matmul."""
    size = 1024
    left, right = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
    return 2 * size**3 / best_seconds(lambda: left @ right, budget_s=2.0)
