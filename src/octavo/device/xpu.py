"""Intel GPUs, which torch calls xpu."""

from collections.abc import Callable

import torch

from octavo.device.base import DeviceMemory
from octavo.device.device_queue import DeviceQueue


class XpuKind:
    """See `DeviceKind`."""

    name = "xpu"
    ranks_share_memory = False
    default_memory_utilization = 0.9

    def is_available(self) -> bool:
        return torch.xpu.is_available()

    def prepare(self, index: int) -> None:
        """No-op: nothing to initialize."""

    def memory(self) -> DeviceMemory:
        """Read the device's memory; memory that torch has cached but not allocated counts as free."""
        free, total = torch.xpu.mem_get_info()
        cached = torch.xpu.memory_reserved() - torch.xpu.memory_allocated()
        return DeviceMemory(total_bytes=total, free_bytes=free + cached)

    def synchronize(self) -> None:
        torch.xpu.synchronize()

    def queue(self) -> DeviceQueue | None:
        """Return None: steps are synchronous."""
        return None

    def peak_bytes(self, run: Callable[[], None]) -> int | None:
        """Return None: an estimate is used."""
        return None

    def supports(self, dtype: torch.dtype) -> bool:
        return dtype != torch.bfloat16 or torch.xpu.is_bf16_supported()

    def describe(self) -> dict[str, str]:
        return {"processor": torch.xpu.get_device_name()}
