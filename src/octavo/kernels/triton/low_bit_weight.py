"""Layout of low-bit weights for the kernels: blocks of 64 inputs, contiguous over all outputs.

A program's load, some outputs by one block, is then one piece of memory. Two 4-bit inputs, 32 apart, share a byte: a
product takes 32 inputs, so each nibble of the bytes is one operand, and nothing has to be shuffled.

Legend: N = outputs, K = inputs, P = K padded to a multiple of 128, B = P / 64, G = groups of inputs, including padding.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.quantization import Float8Format, IntegerFormat, PlainFormat, QuantizedWeight
from octavo.kernels.rotation import Rotation
from octavo.kernels.types import PackedLinear

STEP = 128  # inputs per iteration: the largest group
_BLOCK, _HALF = 64, 32
# A float with 4 exponent bits, read as float16 with 5, is too small by this factor: the difference of the biases.
_E4M3_IN_FLOAT16 = 2.0**8


@dataclass(frozen=True, kw_only=True, slots=True)
class LowBitLinear(PackedLinear):
    """A low-bit linear. `weight` is [B, N, 64] int8, or [B, N, 32] with inputs k and k + 32 of a block in a byte."""

    form: PlainFormat
    in_size: int  # K
    scales: Tensor  # [G, N] float32
    offsets: Tensor | None  # [G, N] float32
    multipliers: Tensor | None  # [P / 32, N] int8, of two-level integers

    @property
    def padded_size(self) -> int:
        """Return P."""
        return len(self.weight) * _BLOCK

    @property
    def rotation(self) -> Rotation | None:
        """How activations must be rotated."""
        return self.form.rotation if isinstance(self.form, IntegerFormat) else None


def pack(weight: QuantizedWeight, bias: Tensor | None) -> LowBitLinear:
    """Convert a weight and bias [N] to this layout."""
    form, (num_outputs, in_size) = weight.format, weight.values.shape
    is_float = isinstance(form, Float8Format)
    padding = -in_size % STEP
    values = F.pad(weight.values.view(torch.int8), (0, padding))  # [N, P]
    blocks = values.view(num_outputs, -1, _BLOCK).transpose(0, 1)  # [B, N, 64]
    if form.bits == 4:
        low, high = (half + 8 for half in torch.split(blocks, _HALF, dim=-1))  # [B, N, 32]: -8 ... 7 become 0 ... 15
        blocks = low | high << 4
    num_blocks, multipliers = len(blocks), weight.multipliers
    num_groups = num_blocks * _BLOCK // form.group_size if form.group_size else 1
    return LowBitLinear(
        weight=blocks.contiguous(),
        bias=bias,
        num_outputs=num_outputs,
        form=form,
        in_size=in_size,
        scales=_by_groups(weight.scales * (_E4M3_IN_FLOAT16 if is_float else 1.0), num_groups),
        offsets=None if weight.offsets is None else _by_groups(weight.offsets, num_groups),
        multipliers=None if multipliers is None else _by_groups(multipliers, num_blocks * 2),
    )


def _by_groups(of_outputs: Tensor, num_groups: int) -> Tensor:
    """Return [N, G] as [G, N], padded with zeros."""
    return F.pad(of_outputs, (0, num_groups - of_outputs.shape[1])).T.contiguous()
