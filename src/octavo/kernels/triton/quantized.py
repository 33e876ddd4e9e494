"""GPU kernels for models some or all of whose linear layers have low-bit weights."""

from collections.abc import Collection, Sequence
from typing import TypeGuard

import torch
from torch import Tensor

from octavo.kernels.quantization import Float8Format, IntegerFormat, LowBitWeight, QuantizedWeight, WeightFormat
from octavo.kernels.quantize import quantize
from octavo.kernels.reference import Kernels
from octavo.kernels.triton.integer_rows import activated_integer_rows, normed_integer_rows
from octavo.kernels.triton.kernels import TritonKernels
from octavo.kernels.triton.low_bit_experts import LowBitExperts, expert_rows, pack_experts
from octavo.kernels.triton.low_bit_matmul import integer_linear, integer_product, weight_only_linear
from octavo.kernels.triton.low_bit_weight import LowBitLinear, pack
from octavo.kernels.triton.matmul import matmul
from octavo.kernels.types import Activation, Fused, LinearRole, PackedExperts, PackedLinear

_GROUP_SIZES = (None, 32, 64, 128)


class QuantizedKernels(TritonKernels):
    """See `Kernels`. Integer sums are exact, so rows are batch-invariant; floats need `one_tiling` for that."""

    logits_argmax = Kernels.logits_argmax  # logits are not rounded to the dtype first

    def __init__(self, forms: Collection[WeightFormat | None], *, deterministic: bool) -> None:
        """`forms` are those of a model's weights; None: dense."""
        has_floats = not all(isinstance(form, IntegerFormat) for form in forms)
        self._one_tiling = deterministic
        self.is_batch_invariant = deterministic or not has_floats
        self.name = "triton" + "-deterministic" * (deterministic and has_floats)

    def computes(self, form: WeightFormat) -> bool:
        return isinstance(form, IntegerFormat | Float8Format) and form.group_size in _GROUP_SIZES

    def pack_quantized(
        self, weight: Tensor | LowBitWeight, bias: Tensor | None, form: WeightFormat, role: LinearRole
    ) -> PackedLinear:
        if isinstance(weight, QuantizedWeight):
            return pack(weight, bias)
        assert isinstance(form, IntegerFormat | Float8Format), f"{self.name} does not compute with weights of {form}"
        assert isinstance(weight, Tensor), "blocks are never converted to another form"
        return pack(quantize(weight, form), bias)

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        if isinstance(packed, LowBitLinear):
            return self._linear(x, packed, x.dtype)
        return matmul(x, packed.weight, packed.bias) if self._one_tiling else super().linear(x, packed)

    def logits_linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        if isinstance(packed, LowBitLinear):
            return self._linear(x, packed, torch.float32)
        return self.linear(x, packed).float()

    def normed_linear(self, x: Tensor, fused: Fused, packed: PackedLinear) -> tuple[Tensor, Tensor]:
        if not _is_of_integers(packed):
            return super().normed_linear(x, fused, packed)
        rows, total = normed_integer_rows(x, fused, packed.padded_size, rotation=packed.rotation)
        return integer_product(rows, packed, x.dtype), total

    def mlp(self, x: Tensor, fused: Fused, up: PackedLinear, down: PackedLinear) -> tuple[Tensor, Tensor]:
        if not _is_of_integers(down):
            return super().mlp(x, fused, up, down)
        middle, total = self.normed_linear(x, fused, up)
        rows = activated_integer_rows(middle, fused.activation, down.padded_size, rotation=down.rotation)
        return integer_product(rows, down, x.dtype), total

    def router_logits(self, x: Tensor, router: PackedLinear) -> Tensor:
        return matmul(x.float(), router.weight, None)

    def pack_experts(self, gate_up: Sequence[PackedLinear], down: Sequence[PackedLinear]) -> PackedExperts:
        """Weights stay in place and are read by address."""
        return (pack_experts if isinstance(down[0], LowBitLinear) else super().pack_experts)(gate_up, down)

    def expert_rows(
        self, x: Tensor, token_ids: Tensor, expert_ids: Tensor, experts: PackedExperts, activation: Activation
    ) -> Tensor:
        if not isinstance(experts, LowBitExperts):
            return super().expert_rows(x, token_ids, expert_ids, experts, activation)
        return expert_rows(x, token_ids, expert_ids, experts, activation, one_tiling=self._one_tiling)

    def _linear(self, x: Tensor, packed: LowBitLinear, dtype: torch.dtype) -> Tensor:
        if _is_of_integers(packed):
            return integer_linear(x, packed, dtype)
        return weight_only_linear(x, packed, dtype, one_tiling=self._one_tiling)


def _is_of_integers(packed: PackedLinear) -> TypeGuard[LowBitLinear]:
    return isinstance(packed, LowBitLinear) and isinstance(packed.form, IntegerFormat)
