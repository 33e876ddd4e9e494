"""Kernels for CPUs without the C++ ones: linear layers by oneDNN, with weights packed once.

`torch.ops.mkldnn` is where torch.compile finds these ops; their signatures have not changed since torch 2.0.

Legend: T = tokens, H = heads, I = intermediate size.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.kernels.quantization import Weight, WeightFormat
from octavo.kernels.reference import Kernels
from octavo.kernels.types import Activation, LinearRole, PackedLinear


def has_onednn(dtype: torch.dtype) -> bool:
    """Return whether this processor and this build of torch compute linear layers of `dtype` by oneDNN."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]  # torch has no type for it
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32


class OnednnKernels(Kernels):
    """Packed linear layers read weights at 14 to 16 GB/s per thread, plain ones at 10 (ceiling 15.4; AMX, bfloat16)."""

    packing_copies = True

    def pack_linear(
        self, weight: Weight, bias: Tensor | None, role: LinearRole = "plain", form: WeightFormat | None = None
    ) -> PackedLinear:
        """Copies the weight into oneDNN's blocked layout; the plain one can be freed afterwards."""
        plain = super().pack_linear(weight, bias, role, form)
        return replace(plain, weight=torch.ops.mkldnn._reorder_linear_weight(plain.weight.detach().contiguous()))

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        linear_pointwise = torch.ops.mkldnn._linear_pointwise
        result: Tensor = linear_pointwise(x.contiguous(), packed.weight, packed.bias, "none", [], "")
        return result


class HalfCpuKernels(OnednnKernels):
    """bfloat16 and float16, as fast as torch's ops allow. Not batch-invariant.

    The small ops work in place on one float32 copy: at 256 tokens that halves the norm's time and cuts a third off the
    rotary op's; at one token all variants cost the same, namely the overhead of their calls.
    """

    name = "onednn-half"

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        wide = x.to(torch.float32, copy=True)
        norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)  # [..., 1], sqrt(sum of squares)
        scale = norm.square_().mul_(1.0 / x.shape[-1]).add_(eps).rsqrt_()
        return wide.mul_(scale).mul_(weight.float() + offset if offset else weight).to(x.dtype)

    def activate(self, x: Tensor, activation: Activation) -> Tensor:
        if activation.kind != "silu":
            return super().activate(x, activation)
        gate, up = x.chunk(2, dim=-1)  # [T, I] each
        return F.silu(gate).mul_(up)

    def rotary(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        wide, num_pairs = x.to(torch.float32, copy=True), cos.shape[1]  # P
        first, second = wide[..., :num_pairs], wide[..., num_pairs : 2 * num_pairs]  # [T, H, P] each, views
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)  # [T, 1, P]
        turned_first = (first * cos).addcmul_(second, sin, value=-1)
        second.mul_(cos).addcmul_(first, sin)
        first.copy_(turned_first)
        return wide.to(x.dtype)


class Float32CpuKernels(OnednnKernels):
    """float32, batch-invariant; so are the ops of the reference that are not overridden here.

    Measured with torch 2.13 on 1 to 4 threads, with oneDNN's AVX-512, AVX2 and SSE4.1 code: packed linears are
    invariant from two rows on; a single row takes another path when K is large. (Plain F.linear differs below 16 rows,
    from 129 rows on with two threads, and nearly everywhere with three.) exp, rsqrt and sums over the last dimension
    are invariant too.
    """

    name = "onednn-float32"
    is_batch_invariant = True

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        return super().linear(x.expand(2, -1), packed)[:1] if len(x) == 1 else super().linear(x, packed)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        weight = weight + offset if offset else weight
        return F.rms_norm(x, weight.shape, weight, eps)
