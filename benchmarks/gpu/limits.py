"""What the device can do at most, measured: the roofline that everything else is a fraction of."""

import platform
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.gpu.clock import seconds
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.report import Finding, Report

_BANDWIDTH, _RATE = "read bandwidth", "matmul rate, bf16"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Bytes read and operations done (a product and a sum are two) each second; None: nobody knows."""

    bytes_per_s: float | None
    operations_per_s: float | None

    def share(self, time_s: float, num_bytes: float, num_operations: float = 0.0) -> float | None:
        """Return the roofline's time for so much work as a fraction of the time that was taken."""
        if self.bytes_per_s is None or self.operations_per_s is None:
            return None
        return max(num_bytes / self.bytes_per_s, num_operations / self.operations_per_s) / time_s

    @classmethod
    def of(cls, findings: list[Finding]) -> "Limits":
        """Return what the section `machine` found."""
        found = {f.name: f.value for f in findings if f.section == "machine" and isinstance(f.value, float)}
        bandwidth, rate = found.get(_BANDWIDTH), found.get(_RATE)
        return cls(
            bytes_per_s=None if bandwidth is None else bandwidth * 1e9,
            operations_per_s=None if rate is None else rate * 1e12,
        )


def measure_machine(plan: Plan, report: Report, limits: Limits) -> None:
    """Name the device and probe it."""
    device = torch.device(plan.device)
    report.add("torch", torch.__version__)
    report.add("python", platform.python_version())
    report.add("device", torch.cuda.get_device_name() if device.type == "cuda" else platform.machine())
    if device.type == "cuda":
        report.add("triton", _triton_version())
        free, total = torch.cuda.mem_get_info()
        report.add("memory", total / 2**30, "GiB", note=f"{free / 2**30:.1f} GiB free")
    cold = torch.zeros(plan.probe_bytes // 4, dtype=torch.int32, device=device)
    read_s = min(seconds(cold.max, device), seconds(cold.sum, device))
    report.add(_BANDWIDTH, cold.nbytes / read_s / 1e9, "GB/s")
    target = torch.empty_like(cold)
    copy_s = seconds(partial(target.copy_, cold), device)
    report.add("copy bandwidth", 2 * cold.nbytes / copy_s / 1e9, "GB/s")
    del cold, target
    size = plan.probe_matrix
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    report.add(_RATE, 2 * size**3 / seconds(partial(torch.matmul, left, right), device) / 1e12, "T/s")


def _triton_version() -> str:
    import triton

    return str(triton.__version__)
