"""Octavo's own bfloat16 kernels with weights in the blocks of GGUF files. The ops are those of `NativeKernels`.

`kernels/blocks.py` defines the product, `kernels/cpu/blocks.h` the layout of weights.

Legend: N = outputs, K = inputs.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from octavo.errors import UnsupportedModelError
from octavo.kernels.blocks import BlockFormat, BlockWeight
from octavo.kernels.large_pages import zeros_on_large_pages
from octavo.kernels.native import pack_bias
from octavo.kernels.native_integers import IntegerNativeKernels, LowBitLinear
from octavo.kernels.quantization import LowBitWeight, WeightFormat
from octavo.kernels.types import LinearRole, PackedLinear

if TYPE_CHECKING:
    from octavo.kernels.cpu import _cpu

_NO_ADDRESS = 0
_STRIP = 16  # outputs: a part that others follow consists of whole strips


class BlockNativeKernels(IntegerNativeKernels):
    """See `Kernels`. Activations are bfloat16; weights are dense, integers or blocks."""

    def computes(self, form: WeightFormat) -> bool:
        return isinstance(form, BlockFormat) or super().computes(form)

    def pack_quantized(
        self, weight: Tensor | LowBitWeight, bias: Tensor | None, form: WeightFormat, role: LinearRole
    ) -> PackedLinear:
        if not isinstance(weight, BlockWeight):
            return super().pack_quantized(weight, bias, form, role)
        weight = weight if role == "gated" else weight.joined()
        blocks = self._blocks(weight.format, weight.in_size, role)
        packed = zeros_on_large_pages((blocks.packed_size,), torch.uint8)
        parts = [rows.contiguous() for rows in weight.parts]
        self.native.pack_blocks(blocks, [rows.data_ptr() for rows in parts], packed.data_ptr())
        bias = pack_bias(bias, is_gated=role == "gated")
        return self._bind_blocks(blocks, packed, bias, sum(weight.format.sizes))

    def adopt_linear(
        self,
        tensors: Mapping[str, Tensor],
        num_outputs: int,
        in_size: int,
        role: LinearRole,
        form: WeightFormat | None = None,
    ) -> PackedLinear:
        if not isinstance(form, BlockFormat):
            return super().adopt_linear(tensors, num_outputs, in_size, role, form)
        blocks = self._blocks(form if role == "gated" else form.joined(), in_size, role)
        return self._bind_blocks(blocks, tensors["weight"], tensors.get("bias"), num_outputs)

    def _bind_blocks(
        self, blocks: "_cpu.Blocks", packed: Tensor, bias: Tensor | None, num_outputs: int
    ) -> LowBitLinear:
        bias_address = _NO_ADDRESS if bias is None else bias.data_ptr()
        handle = self._cpu.PackedWeight.of_blocks(blocks, packed.data_ptr(), bias_address)
        return LowBitLinear(weight=packed, bias=bias, num_outputs=num_outputs, handle=handle)

    def _blocks(self, form: BlockFormat, in_size: int, role: LinearRole) -> "_cpu.Blocks":
        is_gated = role == "gated"
        if not is_gated and any(size % _STRIP for size in form.sizes[:-1]):
            found = ", ".join(f"{name} [{size}]" for name, size in zip(form.types, form.sizes, strict=True))
            limit = f"with a multiple of {_STRIP} outputs each; quantization='dequantize' has no such limit"
            raise UnsupportedModelError(f"parts of a layer have different types ({found}); supported: {limit}")
        blocks: _cpu.Blocks = self._cpu.Blocks(
            types=form.numbers,
            sizes=list(form.sizes),
            is_gated=is_gated,
            row_inputs=form.row_inputs,
            first_input=form.first_input,
            in_size=in_size,
            span=form.span(in_size),
        )
        return blocks
