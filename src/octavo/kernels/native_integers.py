"""Octavo's own bfloat16 kernels with integer weights. The ops are those of `NativeKernels`; only packing differs.

Sums over the inputs of a group are exact, and groups are added in a fixed order: a row's bits depend on that row alone.

Legend: N = outputs, K = inputs, G = groups of inputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from octavo.kernels.blocks import BlockWeight
from octavo.kernels.large_pages import zeros_on_large_pages
from octavo.kernels.native import NativeKernels, NativeLinear, pack_bias
from octavo.kernels.quantization import IntegerFormat, LowBitWeight, QuantizedWeight, WeightFormat
from octavo.kernels.reference import Kernels
from octavo.kernels.types import Fused, LinearRole, PackedLinear

if TYPE_CHECKING:
    from octavo.kernels.cpu import _cpu

_NO_ADDRESS = 0
_GROUP_SIZES = (None, 32, 64, 128)


@dataclass(frozen=True, kw_only=True, slots=True)
class LowBitLinear(NativeLinear):
    """A packed low-bit linear; `weight` is bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IntegerLinear(LowBitLinear):
    """A packed integer linear, with its scales in a separate tensor."""

    scales: Tensor  # [1 or 2, ...] float32: scales, and offsets if there are any


class IntegerNativeKernels(NativeKernels):
    """See `Kernels`. Activations and dense weights are bfloat16; quantized weights are integers."""

    def computes(self, form: WeightFormat) -> bool:
        return isinstance(form, IntegerFormat) and form.group_size in _GROUP_SIZES

    def pack_quantized(
        self, weight: Tensor | LowBitWeight, bias: Tensor | None, form: WeightFormat, role: LinearRole
    ) -> PackedLinear:
        assert isinstance(form, IntegerFormat), f"{self.name} does not compute with weights of {form}"
        assert not isinstance(weight, BlockWeight), "blocks are never converted to another form"
        return self.pack(weight, bias, form, is_gated=role == "gated")

    def mlp(self, x: Tensor, fused: Fused, up: PackedLinear, down: PackedLinear) -> tuple[Tensor, Tensor]:
        if isinstance(up, LowBitLinear) == isinstance(down, LowBitLinear):
            return super().mlp(x, fused, up, down)
        return Kernels.mlp(self, x, fused, up, down)  # the fused op supports weights of one kind only

    def quantize(self, weight: Tensor, form: IntegerFormat) -> QuantizedWeight:
        """Quantize weight [N, K] bfloat16 to the integers that packing it would choose, in the plain layout."""
        weight = weight.contiguous()
        num_outputs, in_size = weight.shape
        values = torch.empty(num_outputs, in_size, dtype=torch.int8)
        scales = torch.empty(num_outputs, form.num_groups(in_size), dtype=torch.float32)
        integers = self._integers(form, weight.shape, is_gated=False)
        num_multipliers = form.num_multipliers(in_size)
        multipliers = torch.empty(num_outputs, num_multipliers, dtype=torch.int8) if num_multipliers else None
        addresses = values.data_ptr(), scales.data_ptr(), _address(multipliers)
        self.native.quantize(integers, weight.data_ptr(), *addresses)
        return QuantizedWeight(format=form, values=values, scales=scales, multipliers=multipliers)

    def pack(
        self, weight: Tensor | QuantizedWeight, bias: Tensor | None, form: IntegerFormat, *, is_gated: bool = False
    ) -> PackedLinear:
        """Convert weight [N, K], bfloat16 or quantized already, and bias [N] to the layout that all linear ops read."""
        plain = weight.values if isinstance(weight, QuantizedWeight) else weight
        integers = self._integers(form, plain.shape, is_gated=is_gated)
        packed = zeros_on_large_pages((integers.packed_size,), torch.uint8)
        has_offsets = isinstance(weight, QuantizedWeight) and weight.offsets is not None
        scales = torch.empty(1 + has_offsets, integers.scales_size)  # and offsets, in the order of the panels' outputs
        addresses = packed.data_ptr(), scales[0].data_ptr(), scales[1].data_ptr() if has_offsets else _NO_ADDRESS
        if isinstance(weight, QuantizedWeight):
            self._pack_integers(integers, weight, addresses)
        else:
            self.native.pack_weight(integers, weight.contiguous().data_ptr(), *addresses[:2])
        return self._bind_integers(integers, packed, scales, pack_bias(bias, is_gated=is_gated), plain.shape[0])

    def adopt_linear(
        self,
        tensors: Mapping[str, Tensor],
        num_outputs: int,
        in_size: int,
        role: LinearRole,
        form: WeightFormat | None = None,
    ) -> PackedLinear:
        if not isinstance(form, IntegerFormat):
            return super().adopt_linear(tensors, num_outputs, in_size, role)
        integers = self._integers(form, torch.Size((num_outputs, in_size)), is_gated=role == "gated")
        return self._bind_integers(integers, tensors["weight"], tensors["scales"], tensors.get("bias"), num_outputs)

    def _bind_integers(
        self,
        integers: "_cpu.Integers",
        packed: Tensor,
        scales: Tensor,  # [1 or 2, ...]
        bias: Tensor | None,
        num_outputs: int,
    ) -> IntegerLinear:
        offsets = scales[1].data_ptr() if len(scales) > 1 else _NO_ADDRESS
        bias_address = _NO_ADDRESS if bias is None else bias.data_ptr()
        addresses = packed.data_ptr(), scales[0].data_ptr(), offsets, bias_address
        return IntegerLinear(
            weight=packed,
            scales=scales,
            bias=bias,
            num_outputs=num_outputs,
            handle=self._cpu.PackedWeight.of_integers(integers, *addresses),
        )

    def _pack_integers(
        self, integers: "_cpu.Integers", weight: QuantizedWeight, addresses: tuple[int, int, int]
    ) -> None:
        values, scales = weight.values.contiguous(), weight.scales.contiguous()
        offsets = None if weight.offsets is None else weight.offsets.contiguous()
        multipliers = None if weight.multipliers is None else weight.multipliers.contiguous()
        plain = values.data_ptr(), scales.data_ptr(), _address(offsets), _address(multipliers)
        self.native.pack_integers(integers, *plain, *addresses)

    def _integers(self, form: IntegerFormat, shape: torch.Size, *, is_gated: bool) -> "_cpu.Integers":
        num_outputs, in_size = shape
        integers: _cpu.Integers = self._cpu.Integers(
            bits=form.bits,
            group_size=form.group_size or 0,
            is_two_level=form.is_two_level,
            is_rotated=form.rotation is not None,
            mixes_blocks=form.rotation == "row",
            in_size=in_size,
            out_size=num_outputs // 2 if is_gated else num_outputs,
            is_gated=is_gated,
        )
        return integers


def _address(tensor: Tensor | None) -> int:
    return _NO_ADDRESS if tensor is None else tensor.data_ptr()
