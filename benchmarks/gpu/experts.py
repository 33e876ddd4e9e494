"""A mixture's maps, all experts in one call, in 16 and in few bits: right, beside experts one by one; fast.

Legend: T = rows, D = hidden size, X = experts, C = experts that a row chooses, R = T * C, pairs of a row and an expert.
"""

from functools import partial
from itertools import cycle
from typing import Any

import torch

from benchmarks.gpu.cases import Case, measure_all
from benchmarks.gpu.limits import Limits
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.report import Report
from octavo.errors import InvalidParameterError
from octavo.kernels.dispatch import select_kernels
from octavo.kernels.quantization import QUANTIZATIONS, Quantization, QuantizedWeight
from octavo.kernels.quantize import quantize, quantized_linear
from octavo.kernels.reference import Kernels
from octavo.kernels.types import SILU, PackedExperts
from octavo.layers.quant.base import QuantizedAtLoad
from octavo.layers.quant.registry import check_quantization_at_load

_TURNS = 16  # choices of experts: one row's are a few, which stay in the caches


def measure_experts(plan: Plan, report: Report, limits: Limits) -> None:
    """Compare and time, with weights as they are and in each form of few bits."""
    device, dtype = torch.device(plan.device), getattr(torch, plan.dtype)
    for name, geometry in plan.mixtures.items():
        for quantization in (None, *QUANTIZATIONS.values()):
            label = plan.dtype if quantization is None else quantization.name
            try:
                kernels = kernels_for(device, dtype, quantization)
            except InvalidParameterError as error:
                report.add(f"{name} {label}", "refused", note=str(error))
                continue
            mixture = _Mixture(geometry, kernels, quantization, device, dtype)
            for num_rows in (*plan.batches, plan.max_num_batched_tokens):
                case = mixture.case(f"experts, {label}", num_rows)
                measure_all(iter([case]), f"{name} T={num_rows}", report, limits, device, dtype)


def kernels_for(device: torch.device, dtype: torch.dtype, quantization: Quantization | None) -> Kernels:
    """Return the kernels of a model with weights made at load.

    Raises:
        InvalidParameterError: there are none here.
    """
    schemes = QuantizedAtLoad(quantization)
    kernels = select_kernels(device, dtype, schemes.forms)
    check_quantization_at_load(schemes, kernels, f"{device} with {dtype}")
    return kernels


class _Mixture:
    """The experts of one layer, packed and plain."""

    def __init__(
        self,
        geometry: dict[str, Any],
        kernels: Kernels,
        quantization: Quantization | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._kernels, self._device, self._dtype = kernels, device, dtype
        self._hidden, self._inner = int(geometry["hidden_size"]), int(geometry["moe_intermediate_size"])
        self._num_experts, self._num_choices = int(geometry["num_experts"]), int(geometry["num_experts_per_tok"])
        self._form = None if quantization is None else quantization.linear
        self._plain: list[tuple[torch.Tensor | QuantizedWeight, ...]] = []
        self._packed = self._pack()

    def case(self, name: str, num_rows: int) -> Case:
        """Return the maps of T rows, each of which chooses C experts evenly. They choose others in each turn."""
        x = self._random(num_rows, self._hidden)
        token_ids = torch.arange(num_rows, device=self._device).repeat_interleave(self._num_choices)
        choices = [self._choice(num_rows) for _ in range(_TURNS)]
        turns, touched = cycle(choices), sum(len(torch.unique(choice)) for choice in choices) / _TURNS
        return Case(
            name=name,
            run=lambda: self._kernels.expert_rows(x, token_ids, next(turns), self._packed, SILU),
            define=partial(self._define, x, token_ids, choices[0]),
            num_bytes=touched * self._bytes_of_expert() + x.nbytes * (1 + self._num_choices),
            num_operations=6.0 * len(token_ids) * self._hidden * self._inner,
        )

    def _define(self, x: torch.Tensor, token_ids: torch.Tensor, expert_ids: torch.Tensor) -> torch.Tensor:
        """Expert by expert. The gate is the kernels' own: another last bit would be another integer here and there."""
        rows = x.new_empty(len(expert_ids), self._hidden)  # [R, D]
        for number, (gate_up, down) in enumerate(self._plain):
            pairs = (expert_ids == number).nonzero().flatten()
            if len(pairs):
                middle = self._kernels.activate(_linear(x[token_ids[pairs]], gate_up), SILU)
                rows[pairs] = _linear(middle, down)
        return rows

    def _choice(self, num_rows: int) -> torch.Tensor:
        """Return [R] int64, different ones for each row."""
        ranked = torch.rand(num_rows, self._num_experts, device=self._device).argsort(-1)
        return ranked[:, : self._num_choices].flatten()

    def _pack(self) -> PackedExperts:
        gate_up, down = [], []
        for _number in range(self._num_experts):
            into, back = self._random(2 * self._inner, self._hidden), self._random(self._hidden, self._inner)
            gate_up.append(self._kernels.pack_linear(into, None, "gated", self._form))
            down.append(self._kernels.pack_linear(back, None, "plain", self._form))
            self._plain.append(tuple(self._as_kept(weight) for weight in (into, back)))
        return self._kernels.pack_experts(gate_up, down)

    def _as_kept(self, weight: torch.Tensor) -> torch.Tensor | QuantizedWeight:
        return weight if self._form is None else quantize(weight, self._form)

    def _bytes_of_expert(self) -> int:
        shapes = (2 * self._inner, self._hidden), (self._hidden, self._inner)
        if self._form is None:
            return sum(outputs * inputs for outputs, inputs in shapes) * self._dtype.itemsize
        return sum(self._form.num_bytes(*shape) for shape in shapes)

    def _random(self, num_rows: int, size: int) -> torch.Tensor:
        return torch.randn(num_rows, size, device=self._device).div(size**0.25).to(self._dtype)


def _linear(x: torch.Tensor, weight: torch.Tensor | QuantizedWeight) -> torch.Tensor:
    if isinstance(weight, QuantizedWeight):
        return quantized_linear(x, weight, None).to(x.dtype)
    reference = Kernels()
    return reference.linear(x, reference.pack_linear(weight, None))
