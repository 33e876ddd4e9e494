"""float32 on a CPU, batch-invariant: a row's result has the same bits whatever other rows are computed with it.

Measured with torch 2.13 on 1 to 4 threads, with oneDNN's AVX-512, AVX2 and SSE4.1 code: packed linears are invariant
from two rows on; a single row takes another path when K is large. (Plain F.linear differs below 16 rows, from 129 rows
on with two threads, and nearly everywhere with three.) exp, rsqrt and sums over the last dimension are invariant too.
"""

import torch.nn.functional as F
from torch import Tensor

from octavo.kernels import onednn
from octavo.kernels.reference import Kernels
from octavo.kernels.types import PackedLinear


class Float32CpuKernels(Kernels):
    """See `Kernels`. Ops not overridden here are batch-invariant in the reference already."""

    name = "onednn-float32"
    is_batch_invariant = True
    packing_copies = True

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> PackedLinear:
        return onednn.pack_linear(weight, bias)

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        if x.shape[0] == 1:
            return onednn.linear(x.expand(2, -1).contiguous(), packed)[:1]
        return onednn.linear(x, packed)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        weight = weight + offset if offset else weight
        return F.rms_norm(x, weight.shape, weight, eps)
