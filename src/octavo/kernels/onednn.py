"""Linear layers by oneDNN with weights packed once, for the CPU kernels.

Legend: T = tokens, K = input size, N = output size.

`torch.ops.mkldnn` is where torch.compile finds these ops; their signatures have not changed since torch 2.0.
"""

import torch
from torch import Tensor

from octavo.kernels.types import PackedLinear


def is_supported(dtype: torch.dtype) -> bool:
    """Return whether this processor and this build of torch compute linear layers of `dtype` by oneDNN."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]  # torch has no type for it
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32


def pack_linear(weight: Tensor, bias: Tensor | None) -> PackedLinear:
    """Copy weight [N, K] into oneDNN's blocked layout; the plain one can be freed afterwards."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous())
    return PackedLinear(weight=packed, bias=bias, num_outputs=weight.shape[0])


def linear(x: Tensor, packed: PackedLinear) -> Tensor:
    """Apply to x [T, K]: [T, N]."""
    linear_pointwise = torch.ops.mkldnn._linear_pointwise
    result: Tensor = linear_pointwise(x.contiguous(), packed.weight, packed.bias, "none", [], "")
    return result
