"""bfloat16 and float16 on a CPU, as fast as torch's ops allow. Not batch-invariant.

Packed linear layers read weights at 14 to 16 GB/s per thread, plain ones at 10 (ceiling 15.4; AMX machine, bfloat16).
The small ops work in place on one float32 copy: at 256 tokens that halves the norm's time and cuts a third off the
rotary op's; at one token all variants cost the same, namely the overhead of their calls.

Legend: T = tokens, H = heads, D = hidden or head size, I = intermediate size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels import onednn
from octavo.kernels.reference import Kernels
from octavo.kernels.types import Activation, PackedLinear


class HalfCpuKernels(Kernels):
    """See `Kernels`."""

    name = "onednn-half"
    is_batch_invariant = False
    packing_copies = True

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        return onednn.pack_linear(weight, bias)

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        return onednn.linear(x, packed)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        wide = _float32_copy(x)
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)  # [..., 1], sqrt(sum of squares)
        scale = norm.square_().mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()
        return wide.mul_(scale).mul_(weight.float() + offset if offset else weight).to(x.dtype)

    def activate(self, x: Tensor, activation: Activation) -> Tensor:
        if activation.kind != "silu":
            return super().activate(x, activation)
        gate, up = x.chunk(2, dim=-1)  # [T, I] each
        return F.silu(gate).mul_(up)

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        wide, num_pairs = _float32_copy(x), cos.shape[1]  # P
        first, second = wide[..., :num_pairs], wide[..., num_pairs : 2 * num_pairs]  # [T, H, P] each, views
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # [T, 1, P]
        turned_first = (first * cos).addcmul_(second, sin, value=-1)
        second.mul_(cos).addcmul_(first, sin)
        first.copy_(turned_first)
        return wide.to(x.dtype)


def _float32_copy(x: Tensor) -> Tensor:
    """Return a float32 copy of x that may be written to."""
    return x.to(torch.float32, copy=True)
