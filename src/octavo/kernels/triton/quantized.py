"""Kernels for GPUs whose linear layers have weights in few bits: `quantization=` on a GPU."""

from collections.abc import Sequence
from typing import TypeGuard

import torch

from octavo.kernels.quantization import IntegerFormat, Quantization, WeightFormat
from octavo.kernels.quantize import quantize
from octavo.kernels.reference import Kernels
from octavo.kernels.triton.integer_rows import activated_integer_rows, normed_integer_rows
from octavo.kernels.triton.kernels import TritonKernels
from octavo.kernels.triton.low_bit_experts import LowBitExperts, expert_rows, pack_experts
from octavo.kernels.triton.low_bit_matmul import integer_linear, integer_product, weight_only_linear
from octavo.kernels.triton.low_bit_weight import LowBitLinear, pack
from octavo.kernels.triton.matmul import matmul
from octavo.kernels.types import Activation, Fused, PackedExperts, PackedLinear


class QuantizedKernels(TritonKernels):
    """See `Kernels`. Sums of integers are exact, so rows depend on no other; floats need one tiling for that."""

    packing_copies = True  # few bits are not what an embedding's rows were
    logits_argmax = Kernels.logits_argmax  # logits are not rounded to the dtype first

    def __init__(self, quantization: Quantization, *, deterministic: bool) -> None:
        self._linear_form, self._logits_form = quantization.linear, quantization.logits
        has_floats = not isinstance(quantization.linear, IntegerFormat)
        self._one_tiling = deterministic
        self.is_batch_invariant = deterministic or not has_floats
        self.name = f"triton-{quantization.name}" + "-deterministic" * (deterministic and has_floats)

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        return _packed(weight, bias, self._linear_form)

    def pack_logits_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        return _packed(weight, bias, self._logits_form)

    def linear(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        return self._linear(x, packed, x.dtype)

    def logits_linear(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        return self._linear(x, packed, torch.float32)

    def normed_linear(self, x: torch.Tensor, fused: Fused, packed: PackedLinear) -> tuple[torch.Tensor, torch.Tensor]:
        if not _is_of_integers(packed):
            return super().normed_linear(x, fused, packed)
        rows, total = normed_integer_rows(x, fused, packed.padded_size)
        return integer_product(rows, packed, x.dtype), total

    def mlp(
        self, x: torch.Tensor, fused: Fused, up: PackedLinear, down: PackedLinear
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not _is_of_integers(down):
            return super().mlp(x, fused, up, down)
        middle, total = self.normed_linear(x, fused, up)
        rows = activated_integer_rows(middle, fused.activation, down.padded_size)
        return integer_product(rows, down, x.dtype), total

    def pack_router(self, weight: torch.Tensor) -> PackedLinear:
        """As it is: a router decides, and is small."""
        return super().pack_linear(weight.float(), None)

    def router_logits(self, x: torch.Tensor, router: PackedLinear) -> torch.Tensor:
        return matmul(x.float(), router.weight, None)

    def pack_experts(self, gate_up: Sequence[PackedLinear], down: Sequence[PackedLinear]) -> PackedExperts:
        """Left where they are, and found by address."""
        return pack_experts(gate_up, down)

    def expert_rows(
        self,
        x: torch.Tensor,
        token_ids: torch.Tensor,
        expert_ids: torch.Tensor,
        experts: PackedExperts,
        activation: Activation,
    ) -> torch.Tensor:
        assert isinstance(experts, LowBitExperts)
        return expert_rows(x, token_ids, expert_ids, experts, activation, one_tiling=self._one_tiling)

    def _linear(self, x: torch.Tensor, packed: PackedLinear, dtype: torch.dtype) -> torch.Tensor:
        if _is_of_integers(packed):
            return integer_linear(x, packed, dtype)
        assert isinstance(packed, LowBitLinear)
        return weight_only_linear(x, packed, dtype, one_tiling=self._one_tiling)


def _is_of_integers(packed: PackedLinear) -> TypeGuard[LowBitLinear]:
    return isinstance(packed, LowBitLinear) and isinstance(packed.form, IntegerFormat)


def _packed(weight: torch.Tensor, bias: torch.Tensor | None, form: WeightFormat) -> LowBitLinear:
    return pack(quantize(weight, form), bias)
