"""Apple's GPUs, which torch calls mps. They share the machine's RAM."""

import platform
from collections.abc import Callable

import torch

from octavo.device.base import DeviceMemory
from octavo.device.device_queue import DeviceQueue


class MpsKind:
    """See `DeviceKind`."""

    name = "mps"
    ranks_share_memory = True
    default_memory_utilization = 0.7

    def is_available(self) -> bool:
        return torch.backends.mps.is_available()

    def prepare(self, index: int) -> None:
        """No-op: nothing to initialize."""

    def memory(self) -> DeviceMemory:
        """Read Metal's recommended maximum, and how much of it is free."""
        total = torch.mps.recommended_max_memory()
        return DeviceMemory(total_bytes=total, free_bytes=max(0, total - torch.mps.driver_allocated_memory()))

    def synchronize(self) -> None:
        torch.mps.synchronize()

    def queue(self) -> DeviceQueue | None:
        """Return None: steps are synchronous."""
        return None

    def peak_bytes(self, run: Callable[[], None]) -> int | None:
        """Return None: an estimate is used."""
        return None

    def supports(self, dtype: torch.dtype) -> bool:
        return dtype in (torch.float32, torch.float16) or (
            dtype == torch.bfloat16 and torch.backends.mps.is_macos_or_newer(14, 0)
        )

    def describe(self) -> dict[str, str]:
        return {"processor": f"{platform.processor() or platform.machine()} (Metal)"}
