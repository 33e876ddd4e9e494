"""The CPU as a device: cores, instruction sets, and memory within the limits of system and container."""

import platform
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from octavo.device.base import DeviceMemory
from octavo.device.cores import usable_cores
from octavo.device.device_queue import DeviceQueue

_CGROUP = Path("/sys/fs/cgroup")
# Those that determine matmul speed, by their Linux names.
_TELLING_FLAGS = (
    "avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8", "asimd", "sve",
)  # fmt: skip


class CpuKind:
    """See `DeviceKind`."""

    name = "cpu"
    ranks_share_memory = True
    default_memory_utilization = 0.5  # other programs need memory, too

    def is_available(self) -> bool:
        return True

    def prepare(self, index: int) -> None:
        """Limit torch to the available cores: it ignores a container's CPU quota."""
        if torch.get_num_threads() > usable_cores():
            torch.set_num_threads(usable_cores())

    def memory(self) -> DeviceMemory:
        """Read RAM. In a container, its limit and its usage count if they leave less."""
        system = psutil.virtual_memory()
        total, free = system.total, system.available
        limit = cgroup_memory(_CGROUP)
        if limit is not None:
            total, free = min(total, limit.total_bytes), min(free, limit.free_bytes)
        return DeviceMemory(total_bytes=total, free_bytes=free)

    def synchronize(self) -> None:
        """No-op: nothing is ever queued."""

    def queue(self) -> DeviceQueue | None:
        """Return None: CPU steps are done when they return."""
        return None

    def peak_bytes(self, run: Callable[[], None]) -> int | None:
        """Return None: an estimate is used."""
        return None

    def supports(self, dtype: torch.dtype) -> bool:
        return dtype in (torch.float32, torch.bfloat16, torch.float16)

    def describe(self) -> dict[str, str]:
        flags = cpu_flags()
        return {
            "processor": cpu_name(),
            "cores": str(usable_cores()),
            "threads": str(torch.get_num_threads()),
            "instruction sets": ", ".join(flag for flag in _TELLING_FLAGS if flag in flags) or "baseline",
        }


def cgroup_memory(root: Path) -> DeviceMemory | None:
    """Return the memory of the container whose cgroup is mounted at `root`; None if there is no limit.

    Source: the kernel's Documentation/admin-guide/cgroup-v2.rst, and cgroup-v1/memory.rst.
    """
    for limit_path, usage_path, stat_path, cache_key in (
        ("memory.max", "memory.current", "memory.stat", "inactive_file"),
        (
            "memory/memory.limit_in_bytes",
            "memory/memory.usage_in_bytes",
            "memory/memory.stat",
            "total_inactive_file",
        ),
    ):
        limit = _read_number(root / limit_path)
        used = _read_number(root / usage_path)
        if limit is not None and used is not None:
            # Inactive file pages count as used, but the kernel reclaims them when memory is needed.
            used -= _read_stat(root / stat_path, cache_key)
            return DeviceMemory(total_bytes=limit, free_bytes=max(0, limit - used))
    return None


def cpu_flags() -> frozenset[str]:
    """Return the instruction sets that Linux reports; empty on other systems."""
    return frozenset(" ".join(_cpuinfo("flags") + _cpuinfo("Features")).split())


def cpu_name() -> str:
    """Return the processor's name."""
    return next(iter(_cpuinfo("model name")), platform.processor() or platform.machine())


def _cpuinfo(key: str) -> list[str]:
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return []
    lines = (line.partition(":") for line in path.read_text().splitlines())
    return [value.strip() for name, _, value in lines if name.strip() == key]


def _read_number(path: Path) -> int | None:
    """Return the number in a file; None if there is no such file or it says "max"."""
    if not path.is_file():
        return None
    text = path.read_text().strip()
    return int(text) if text.isdigit() else None


def _read_stat(path: Path, key: str) -> int:
    """Return the number after `key` in a file of "key number" lines; 0 if either is missing."""
    if not path.is_file():
        return 0
    return next((int(line.split()[1]) for line in path.read_text().splitlines() if line.split()[0] == key), 0)
