"""Kernels for GPUs that give a row the same bits in any batch: all of Octavo's own, and none of cuBLAS's."""

import torch

from octavo.kernels.triton.kernels import TritonKernels
from octavo.kernels.triton.matmul import matmul
from octavo.kernels.types import PackedLinear


class DeterministicKernels(TritonKernels):
    """See `Kernels`. Experts' tiles are the same for any number of rows, and a token is routed by a program alone."""

    name = "triton-deterministic"
    is_batch_invariant = True

    def linear(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        return matmul(x, packed.weight, packed.bias)
