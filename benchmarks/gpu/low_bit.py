"""Maps and experts with weights in few bits, low-rank adapters: right, beside the reference; fast, beside the roofline.

Legend: T = rows, K = inputs, N = outputs, R = rank.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any

import torch

from benchmarks.gpu.cases import COLD_BYTES, Case, measure_all
from benchmarks.gpu.experts import kernels_for, measure_experts
from benchmarks.gpu.limits import Limits
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.report import Report
from octavo.errors import InvalidParameterError
from octavo.kernels.dispatch import select_kernels
from octavo.kernels.quantization import QUANTIZATIONS, Quantization
from octavo.kernels.quantize import quantize, quantized_linear
from octavo.kernels.reference import Kernels

_ADAPTERS, _RANK = 8, 16


def measure_low_bit(plan: Plan, report: Report, limits: Limits) -> None:
    """Compare and time. Shares are of the rate of bf16: products of integers could be twice as fast."""
    device, dtype = torch.device(plan.device), getattr(torch, plan.dtype)
    for name, geometry in plan.geometries.items():
        for quantization in QUANTIZATIONS.values():
            try:
                kernels = kernels_for(device, dtype, quantization)
            except InvalidParameterError as error:
                report.add(f"{name} {quantization.name}", "refused", note=str(error))
                continue
            for num_rows in (*plan.batches, plan.max_num_batched_tokens):
                cases = _linears(kernels, quantization, geometry, num_rows, device, dtype)
                measure_all(cases, f"{name} T={num_rows}", report, limits, device, dtype)
        for num_rows in plan.batches:
            case = _lora(select_kernels(device, dtype), int(geometry["hidden_size"]), num_rows, device, dtype)
            measure_all(iter([case]), f"{name} T={num_rows}", report, limits, device, dtype)
    measure_experts(plan, report, limits)


def _linears(
    kernels: Kernels,
    quantization: Quantization,
    geometry: dict[str, Any],
    num_rows: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Iterator[Case]:
    hidden, inner = int(geometry["hidden_size"]), int(geometry["intermediate_size"])
    for name, num_outputs, in_size in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
        weight = _random(num_outputs, in_size, device, dtype)
        packed = kernels.pack_linear(weight, None, "plain", quantization.linear)
        num_bytes = quantization.linear.num_bytes(num_outputs, in_size)
        num_copies = max(1, min(16, COLD_BYTES // num_bytes))
        turns = cycle([replace(packed, weight=packed.weight.clone()) for _ in range(num_copies)])
        x, plain = _random(num_rows, in_size, device, dtype), quantize(weight, quantization.linear)
        yield Case(
            name=f"linear {name}, {quantization.name}",
            run=lambda x=x, turns=turns: kernels.linear(x, next(turns)),  # type: ignore[misc]
            define=partial(quantized_linear, x, plain, None),
            num_bytes=num_bytes + x.nbytes + num_rows * num_outputs * dtype.itemsize,
            num_operations=2.0 * num_rows * num_outputs * in_size,
        )


def _lora(kernels: Kernels, size: int, num_rows: int, device: torch.device, dtype: torch.dtype) -> Case:
    """Rows of adapters by turns, of some that have none."""
    x, base = _random(num_rows, size, device, dtype), _random(num_rows, size, device, dtype)
    adapters = kernels.empty_lora(_ADAPTERS, _RANK, size, (size,), dtype=dtype, device=device)
    for part in (adapters.down, adapters.up):
        part.copy_(_random(_ADAPTERS * _RANK, size, device, dtype).view(_ADAPTERS, _RANK, size))
    adapters.ranks.fill_(_RANK)
    ids = torch.arange(num_rows, device=device) % (_ADAPTERS + 1) - 1
    return Case(
        name=f"adapters of rank {_RANK}",
        run=lambda: kernels.add_lora(base.clone(), x, adapters, ids),
        define=partial(Kernels().add_lora, base, x, adapters, ids),
        num_bytes=3 * x.nbytes + min(_ADAPTERS, num_rows) * 2 * _RANK * size * dtype.itemsize,
    )


def _random(num_rows: int, size: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(num_rows, size, device=device).div(size**0.25).to(dtype)
