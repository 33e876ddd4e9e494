"""GPUs by the names that torch has for them: cuda (NVIDIA and AMD), xpu (Intel), mps (Apple)."""

import platform
from collections.abc import Callable
from typing import Any

import torch

from octavo.device.base import DeviceKind, DeviceMemory, DeviceQueue
from octavo.errors import DeviceUnavailableError, EngineDeadError


class _Gpu(DeviceKind):
    """GPUs with memory of their own."""

    backend: Any  # torch's module for them
    ranks_share_memory = False
    default_memory_utilization = 0.9

    def is_available(self) -> bool:
        return bool(self.backend.is_available())

    def memory(self) -> DeviceMemory:
        """Memory that torch has cached but not allocated counts as free."""
        free, total = self.backend.mem_get_info()
        cached = self.backend.memory_reserved() - self.backend.memory_allocated()
        return DeviceMemory(total_bytes=total, free_bytes=free + cached)

    def synchronize(self) -> None:
        self.backend.synchronize()

    def supports(self, dtype: torch.dtype) -> bool:
        return dtype != torch.bfloat16 or bool(self.backend.is_bf16_supported())


class CudaKind(_Gpu):
    """NVIDIA and AMD GPUs."""

    name = "cuda"
    backend = torch.cuda

    def prepare(self, index: int) -> None:
        """Select this rank's own GPU."""
        num_devices = torch.cuda.device_count()
        if index >= num_devices:
            raise DeviceUnavailableError(
                f"device='cuda': rank {index} of this host needs a GPU; there are {num_devices}"
            )
        torch.cuda.set_device(index)

    def queue(self) -> DeviceQueue | None:
        return CudaQueue()

    def peak_bytes(self, run: Callable[[], None]) -> int | None:
        """Count torch's allocations; those of libraries already lower free memory."""
        run()  # compile kernels and allocate workspaces, which stay
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    def describe(self) -> dict[str, str]:
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        return {
            "processor": properties.name,
            "compute capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": str(properties.multi_processor_count),
        }


class CudaQueue:
    """See `DeviceQueue`. Everything runs on the stream that is current at launch."""

    def __init__(self) -> None:
        self._capture_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # the default stream cannot be captured
        self._pool = torch.cuda.graph_pool_handle()

    def host_bytes(self, num_bytes: int) -> torch.Tensor:
        # torch's pool of pinned memory reuses a buffer only after the copies that use it are done.
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def mark(self) -> Callable[[], None]:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch has no type for it
        event.record()

        def wait() -> None:
            try:
                event.synchronize()
            except RuntimeError as error:
                raise EngineDeadError(f"the GPU failed and this process cannot use it any more: {error}") from error

        return wait

    def capture(self, step: Callable[[], None]) -> Callable[[], None]:
        current = torch.cuda.current_stream()
        self._capture_stream.wait_stream(current)
        with torch.cuda.stream(self._capture_stream):
            step()  # load libraries, compile kernels and allocate workspaces: none of that can be captured
        current.wait_stream(self._capture_stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads of this process may use the device meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._capture_stream, capture_error_mode="thread_local"):
            step()
        return graph.replay


class XpuKind(_Gpu):
    """Intel GPUs. Steps are synchronous."""

    name = "xpu"
    backend = torch.xpu

    def describe(self) -> dict[str, str]:
        return {"processor": torch.xpu.get_device_name()}


class MpsKind(DeviceKind):
    """Apple's GPUs, which share the machine's RAM. Steps are synchronous."""

    name = "mps"
    ranks_share_memory = True
    default_memory_utilization = 0.7

    def is_available(self) -> bool:
        return torch.backends.mps.is_available()

    def memory(self) -> DeviceMemory:
        """Read Metal's recommended maximum, and how much of it is free."""
        total = torch.mps.recommended_max_memory()
        return DeviceMemory(total_bytes=total, free_bytes=max(0, total - torch.mps.driver_allocated_memory()))

    def synchronize(self) -> None:
        torch.mps.synchronize()

    def supports(self, dtype: torch.dtype) -> bool:
        return dtype in (torch.float32, torch.float16) or (
            dtype == torch.bfloat16 and torch.backends.mps.is_macos_or_newer(14, 0)
        )

    def describe(self) -> dict[str, str]:
        return {"processor": f"{platform.processor() or platform.machine()} (Metal)"}
