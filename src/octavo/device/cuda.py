"""NVIDIA and AMD GPUs, which torch calls cuda."""

from collections.abc import Callable

import torch

from octavo.device.base import DeviceMemory
from octavo.device.device_queue import DeviceQueue
from octavo.errors import DeviceUnavailableError


class CudaKind:
    """See `DeviceKind`."""

    name = "cuda"
    ranks_share_memory = False
    default_memory_utilization = 0.9

    def is_available(self) -> bool:
        return torch.cuda.is_available()

    def prepare(self, index: int) -> None:
        """Select this rank's own GPU."""
        num_devices = torch.cuda.device_count()
        if index >= num_devices:
            raise DeviceUnavailableError(
                f"device='cuda': rank {index} of this host needs a GPU; there are {num_devices}"
            )
        torch.cuda.set_device(index)

    def memory(self) -> DeviceMemory:
        """Read the device's memory; memory that torch has cached but not allocated counts as free."""
        free, total = torch.cuda.mem_get_info()
        cached = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return DeviceMemory(total_bytes=total, free_bytes=free + cached)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def queue(self) -> DeviceQueue | None:
        from octavo.device.cuda_queue import CudaQueue

        return CudaQueue()

    def peak_bytes(self, run: Callable[[], None]) -> int | None:
        """See `DeviceKind.peak_bytes`. Counts torch's allocations; those of libraries already lower free memory."""
        run()  # compile kernels and allocate workspaces, which stay
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def supports(self, dtype: torch.dtype) -> bool:
        return dtype != torch.bfloat16 or torch.cuda.is_bf16_supported()

    def describe(self) -> dict[str, str]:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return {
            "processor": properties.name,
            "compute capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": str(properties.multi_processor_count),
        }
