"""Available CPU cores. Does not import torch: processes that only start ranks need it too."""

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def usable_cores(cgroup: Path = _CGROUP) -> int:
    """Return how many cores this process may use: `taskset` or a container can allow fewer than the machine has."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota_path = cgroup / "cpu.max"  # "max 100000", or CPU time and period in microseconds
    if quota_path.is_file():
        quota, period = quota_path.read_text().split()
        if quota != "max":
            cores = min(cores, max(1, round(int(quota) / int(period))))
    return cores
