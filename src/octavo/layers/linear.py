"""Linear layers. Those that read the same input are merged: one matmul instead of two or three.

Ranks that share a layer hold a share of its outputs each, or of its inputs: then every rank has a part of each sum, and
the parts are added. A map by outputs and one by inputs behind it need no more talk than that.

Legend: T = tokens, K = inputs of this rank, N = outputs of this rank, D = all outputs.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch

from octavo.distributed.groups import Group, SingleRank
from octavo.distributed.shares import HeadShare, Share
from octavo.kernels.types import SILU, Activation, KeepsPacked, LinearRole, PackedLinear
from octavo.layers.context import BuildContext
from octavo.layers.norm import RMSNorm
from octavo.layers.weight_owner import WeightOwner


class MergedLinear(WeightOwner):
    """Several linear layers of one input, stacked by output rows. `parts` gives each its name and outputs, in order.

    A part with the empty name is loaded from "weight" and "bias", a part "q" from "q.weight" and "q.bias".
    """

    role: ClassVar[LinearRole] = "plain"

    def __init__(self, inputs: Share, parts: Mapping[str, Share], *, has_bias: bool, context: BuildContext) -> None:
        super().__init__()
        self.inputs, self.parts, self._has_bias = inputs, dict(parts), has_bias
        self._context = context
        self._loaded: dict[str, torch.Tensor] = {}  # until packed
        self._packed: PackedLinear | None = None

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {}
        for part, outputs in self.parts.items():
            shapes[_join(part, "weight")] = (outputs.total, self.inputs.total)
            if self._has_bias:
                shapes[_join(part, "bias")] = (outputs.total,)
        return shapes

    @property
    def _num_outputs(self) -> int:
        return sum(outputs.size for outputs in self.parts.values())

    @property
    def packed(self) -> PackedLinear:
        assert self._packed is not None, "process_weights_after_loading has not run"
        return self._packed

    def load_weight(self, name: str, tensor: torch.Tensor) -> None:
        # Kept as it came, usually a view of a mapped file, so that one layer at a time is copied and converted; and no
        # more of it is ever touched than this rank's share.
        outputs = self.parts[name.rpartition(".")[0]]
        rows = tensor[outputs.start : outputs.stop]
        self._loaded[name] = rows[:, self.inputs.start : self.inputs.stop] if rows.dim() == 2 else rows

    def process_weights_after_loading(self) -> None:
        if self._packed is None:
            adds_bias = self._has_bias and self.inputs.start == 0  # once, by the rank whose part of a sum comes first
            bias = self._gather("bias") if adds_bias else None
            self._packed = self.pack(self._gather("weight", self.inputs.size), bias)
            self._loaded.clear()

    def packed_tensors(self) -> dict[str, torch.Tensor] | None:
        kernels = self._context.kernels
        return kernels.packed_tensors(self.packed) if isinstance(kernels, KeepsPacked) else None

    def adopt_packed(self, tensors: Mapping[str, torch.Tensor]) -> None:
        kernels = self._context.kernels
        assert isinstance(kernels, KeepsPacked), f"{kernels.name} has packed none of this"
        self._packed = kernels.adopt_linear(tensors, self._num_outputs, self.inputs.size, self.role)

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        """Hook for maps that are computed otherwise: bring weight [N, K] and bias [N] into their layout."""
        return self._context.kernels.pack_linear(weight, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [T, K] to [T, N]: the parts side by side, in order."""
        return self._context.kernels.linear(x, self.packed)

    def of_normed(
        self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add x [T, K] to the residual stream [T, K]; return (the map [T, N] of the normalized sum, the sum)."""
        return self._context.kernels.normed_linear(x, norm.fused(residual), self.packed)

    def _gather(self, parameter: str, *row_shape: int) -> torch.Tensor:
        """Stack the parts of the weight [N, K] or the bias [N], in memory of our own and the context's dtype."""
        sizes = [outputs.size for outputs in self.parts.values()]
        stacked = torch.empty(self._num_outputs, *row_shape, dtype=self._context.dtype, device=self._context.device)
        for part, rows in zip(self.parts, torch.split(stacked, sizes), strict=True):
            rows.copy_(self._loaded[_join(part, parameter)])
        return stacked


class QKVLinear(MergedLinear):
    """The projections to queries, keys and values, of this rank's heads."""

    def __init__(
        self, in_size: int, num_heads: int, num_kv_heads: int, head_dim: int, *, has_bias: bool, context: BuildContext
    ) -> None:
        group = context.groups.tensor
        heads = HeadShare.of(num_heads, num_kv_heads, group.rank, group.size)
        kv = heads.kv.times(head_dim)
        parts = {"q": heads.query.times(head_dim), "k": kv, "v": kv}
        super().__init__(Share.whole(in_size), parts, has_bias=has_bias, context=context)
        self.heads = heads


class Linear(MergedLinear):
    """One linear layer, of a share of the inputs to all outputs: every rank returns the sum of all parts."""

    def __init__(self, inputs: Share, out_size: int, *, has_bias: bool, context: BuildContext) -> None:
        super().__init__(inputs, {"": Share.whole(out_size)}, has_bias=has_bias, context=context)
        self._group: Group = SingleRank() if inputs.is_whole else context.groups.tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [T, K] to [T, D]."""
        return self.summed(self._context.kernels.linear(x, self.packed))

    def summed(self, part: torch.Tensor) -> torch.Tensor:
        """Add up the ranks' parts [T, D] of what this map makes; for ops that compute it with others."""
        return self._group.all_reduce(part)


class GatedLinear(MergedLinear):
    """The first half of an MLP whose activation has gates: by default silu(gate(x)) * up(x)."""

    role = "gated"

    def __init__(
        self, in_size: int, out_size: int, *, has_bias: bool, context: BuildContext, activation: Activation = SILU
    ) -> None:
        group = context.groups.tensor
        outputs = Share.of_features(out_size, group.rank, group.size)
        parts = {"gate": outputs, "up": outputs}
        super().__init__(Share.whole(in_size), parts, has_bias=has_bias, context=context)
        self.outputs, self.activation = outputs, activation

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        """See `MergedLinear.pack`."""
        return self._context.kernels.pack_gated_linear(weight, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map x [T, K] to [T, I], I being the size of each part."""
        return self._context.kernels.activated_linear(x, self.packed, self.activation)


def _join(part: str, parameter: str) -> str:
    return f"{part}.{parameter}" if part else parameter
