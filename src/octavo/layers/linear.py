"""Linear layers. Those that read the same input are merged: one matmul instead of two or three.

Legend: T = tokens, K = input size, N = output size.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch

from octavo.kernels.dispatch import KeepsPacked, LinearRole, PackedLinear
from octavo.layers.context import BuildContext
from octavo.layers.norm import RMSNorm
from octavo.layers.weight_owner import WeightOwner


class MergedLinear(WeightOwner):
    """Several linear maps of one input, stacked by output rows. `parts` gives each its name and size, in order.

    A part with the empty name is loaded from "weight" and "bias", a part "q" from "q.weight" and "q.bias".
    """

    role: ClassVar[LinearRole] = "plain"

    def __init__(self, in_size: int, parts: Mapping[str, int], *, has_bias: bool, context: BuildContext) -> None:
        super().__init__()
        self.in_size, self.part_sizes, self._has_bias = in_size, dict(parts), has_bias
        self._context = context
        self._loaded: dict[str, torch.Tensor] = {}  # until packed
        self._packed: PackedLinear | None = None

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for part, size in self.part_sizes.items():
            shapes[_join(part, "weight")] = (size, self.in_size)
            if self._has_bias:
                shapes[_join(part, "bias")] = (size,)
        return shapes

    @property
    def packed(self) -> PackedLinear:
        assert self._packed is not None, "process_weights_after_loading has not run"
        return self._packed

    def load_weight(self, name: str, tensor: torch.Tensor) -> None:
        # Kept as it came, usually a view of a mapped file, so that one layer at a time is copied and converted.
        self._loaded[name] = tensor

    def process_weights_after_loading(self) -> None:
        if self._packed is None:
            bias = self._gather("bias") if self._has_bias else None
            self._packed = self.pack(self._gather("weight", self.in_size), bias)
            self._loaded.clear()

    def packed_tensors(self) -> dict[str, torch.Tensor] | None:
        kernels = self._context.kernels
        return kernels.packed_tensors(self.packed) if isinstance(kernels, KeepsPacked) else None

    def adopt_packed(self, tensors: Mapping[str, torch.Tensor]) -> None:
        kernels = self._context.kernels
        assert isinstance(kernels, KeepsPacked), f"{kernels.name} has packed none of this"
        self._packed = kernels.adopt_linear(tensors, sum(self.part_sizes.values()), self.in_size, self.role)

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        """Hook for maps that are computed otherwise: bring weight [N, K] and bias [N] into their layout."""
        return self._context.kernels.pack_linear(weight, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [T, K] to [T, N]: the parts side by side, in order."""
        return self._context.kernels.linear(x, self.packed)

    def of_normed(
        self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add x [T, K] to the residual stream [T, K]; return (the map [T, N] of the normalised sum, the sum)."""
        return self._context.kernels.normed_linear(x, residual, norm.weight, norm.eps, self.packed)

    def _gather(self, parameter: str, *row_shape: int) -> torch.Tensor:
        """Stack the parts of the weight [N, K] or the bias [N], in memory of our own and the context's dtype."""
        sizes = list(self.part_sizes.values())
        stacked = torch.empty(sum(sizes), *row_shape, dtype=self._context.dtype, device=self._context.device)
        for part, rows in zip(self.part_sizes, torch.split(stacked, sizes), strict=True):
            rows.copy_(self._loaded[_join(part, parameter)])
        return stacked


class Linear(MergedLinear):
    """One linear map."""

    def __init__(self, in_size: int, out_size: int, *, has_bias: bool, context: BuildContext) -> None:
        super().__init__(in_size, {"": out_size}, has_bias=has_bias, context=context)


class GatedLinear(MergedLinear):
    """The first half of SwiGLU (Shazeer 2020, arXiv:2002.05202): silu(gate(x)) * up(x)."""

    role = "gated"

    def __init__(self, in_size: int, out_size: int, *, has_bias: bool, context: BuildContext) -> None:
        super().__init__(in_size, {"gate": out_size, "up": out_size}, has_bias=has_bias, context=context)

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        """See `MergedLinear.pack`."""
        return self._context.kernels.pack_gated_linear(weight, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [T, K] to [T, I], I being the size of each part."""
        return self._context.kernels.gated_linear(x, self.packed)


def _join(part: str, parameter: str) -> str:
    return f"{part}.{parameter}" if part else parameter
