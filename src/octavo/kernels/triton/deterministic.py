"""Batch-invariant GPU kernels: all of Octavo's own, and none of cuBLAS's."""

from torch import Tensor

from octavo.kernels.triton.kernels import TritonKernels
from octavo.kernels.triton.matmul import matmul
from octavo.kernels.types import PackedLinear


class DeterministicKernels(TritonKernels):
    """See `Kernels`. Experts' tiles are the same for any number of rows, and a program routes one token."""

    name = "triton-deterministic"
    is_batch_invariant = True

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        return matmul(x, packed.weight, packed.bias)
