"""The CPU as a device: cores, instruction sets, and memory within the limits of system and container."""

import platform
from pathlib import Path

import psutil
import torch

from octavo.device.base import DeviceKind, DeviceMemory
from octavo.device.cgroups import ROOT, Cgroup, cgroups, usable_cores

# By version: limits (above `memory.high` the kernel slows a group down until it stands still), usage, pages to reclaim.
_MEMORY_FILES = {
    1: (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
    2: (("memory.max", "memory.high"), "memory.current", "inactive_file"),
}
_UNLIMITED = 2**62  # version 1 says so by a number of about 2^63
# Those that determine matmul speed, by their Linux names.
_TELLING_FLAGS = (
    "avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_bf16", "amx_int8", "asimd", "sve",
)  # fmt: skip


class CpuKind(DeviceKind):
    """The CPU. A step is done when the call returns; an estimate stands for its peak memory."""

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
        limit = cgroup_memory()
        if limit is not None:
            total, free = min(total, limit.total_bytes), min(free, limit.free_bytes)
        return DeviceMemory(total_bytes=total, free_bytes=free)

    def supports(self, dtype: torch.dtype) -> bool:
        return dtype in (torch.float32, torch.bfloat16, torch.float16)

    def describe(self) -> dict[str, str]:
        flags = set(" ".join(_cpuinfo("flags") + _cpuinfo("Features")).split())  # Linux says them
        return {
            "processor": cpu_name(),
            "cores": str(usable_cores()),
            "threads": str(torch.get_num_threads()),
            "instruction sets": ", ".join(flag for flag in _TELLING_FLAGS if flag in flags) or "baseline",
        }


def cgroup_memory(root: Path = ROOT) -> DeviceMemory | None:
    """Return the memory within the control groups of this process: the tightest limits; None if there is none."""
    found = [memory for memory in map(_memory_of, cgroups("memory", root)) if memory is not None]
    if not found:
        return None
    total = min(memory.total_bytes for memory in found)
    return DeviceMemory(total_bytes=total, free_bytes=min(memory.free_bytes for memory in found))


def _memory_of(group: Cgroup) -> DeviceMemory | None:
    names, usage_name, cache_key = _MEMORY_FILES[group.version]
    limits = [limit for limit in map(group.number, names) if limit is not None and limit < _UNLIMITED]
    used = group.number(usage_name)
    if not limits or used is None:
        return None
    # Inactive file pages count as used, but the kernel reclaims them when memory is needed.
    stats = (line.split() for line in group.text("memory.stat").splitlines())
    used -= next((int(words[1]) for words in stats if words[0] == cache_key), 0)
    return DeviceMemory(total_bytes=min(limits), free_bytes=max(0, min(limits) - used))


def cpu_name() -> str:
    """Return the processor's name."""
    return next(iter(_cpuinfo("model name")), platform.processor() or platform.machine())


def _cpuinfo(key: str) -> list[str]:
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return []
    lines = (line.partition(":") for line in path.read_text().splitlines())
    return [value.strip() for name, _, value in lines if name.strip() == key]
