"""How many cores there are for us. Without torch: who only starts ranks wants to know too."""

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")


def usable_cores(cgroup: Path = _CGROUP) -> int:
    """Return how many cores this process may keep busy: `taskset` or a container can allow fewer than there are."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota_path = cgroup / "cpu.max"  # "max 100000", or microseconds of CPU time per period of so many
    if quota_path.is_file():
        quota, period = quota_path.read_text().split()
        if quota != "max":
            cores = min(cores, max(1, round(int(quota) / int(period))))
    return cores
