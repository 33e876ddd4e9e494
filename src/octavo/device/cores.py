"""Available CPU cores. Does not import torch: processes that only start ranks need it too."""

import os
from pathlib import Path

from octavo.device.cgroups import ROOT, Cgroup, cgroups


def usable_cores(root: Path = ROOT) -> int:
    """Return how many cores this process may use: `taskset` or control groups can allow fewer than the machine has."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    shares = [share for share in map(_share, cgroups("cpu", root)) if share is not None]
    return min([cores, *(max(1, round(share)) for share in shares)])


def _share(group: Cgroup) -> float | None:
    """Return the CPU time per time that a group may use; None if it has no quota."""
    if group.version == 1:
        quota, period = group.number("cpu.cfs_quota_us"), group.number("cpu.cfs_period_us")  # quota -1: none
    else:  # "max 100000", or CPU time and period in microseconds
        numbers = [int(word) if word.isdigit() else None for word in group.text("cpu.max").split()]
        quota, period = numbers if len(numbers) == 2 else (None, None)
    return quota / period if quota and period and quota > 0 else None
