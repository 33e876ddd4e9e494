"""Octavo's GPU kernels: Triton for small and fused ops and low-bit weights, cuBLAS (torch's matmul) for dense ones.

Legend: T = tokens, K = input size, N = output size.
"""

from collections.abc import Collection, Sequence
from typing import TypeGuard

import torch
from torch import Tensor

from octavo.kernels.quantization import GROUP_SIZES, Float8Format, IntegerFormat, QuantizedWeight, Weight, WeightFormat
from octavo.kernels.quantize import quantize
from octavo.kernels.reference import Kernels
from octavo.kernels.triton import experts, lora, row_ops
from octavo.kernels.triton.dense import dense_linear
from octavo.kernels.triton.experts import TritonExperts, pack_experts, route
from octavo.kernels.triton.integer_rows import integer_rows
from octavo.kernels.triton.low_bit_experts import pack_low_bit_experts
from octavo.kernels.triton.low_bit_weight import LowBitLinear, pack_low_bit
from octavo.kernels.triton.matmul import integer_product, low_bit_linear
from octavo.kernels.triton.one_row import one_row_linear
from octavo.kernels.types import Activation, Fused, LinearRole, PackedExperts, PackedLinear, Routes, Routing

_FEW_ROWS = 16  # up to here ours are faster than cuBLAS with split-K, on an H200


class TritonKernels(Kernels):
    """bfloat16, float16 and float32. Nothing here syncs with the device, so steps can be captured.

    cuBLAS selects its algorithm by the number of rows. Integer sums are exact, so rows are batch-invariant; dense
    weights and 8-bit floats need one tiling for that, and Octavo's own matmul: with `deterministic`. Experts' tiles are
    the same for any number of rows, and a program routes one token.
    """

    captures_experts = True

    def __init__(self, forms: Collection[WeightFormat | None] = (None,), *, deterministic: bool = False) -> None:
        """`forms` are those of a model's weights; None: dense."""
        has_floats = not all(isinstance(form, IntegerFormat) for form in forms)
        self._deterministic, self._is_dense = deterministic, set(forms) == {None}
        self.is_batch_invariant = deterministic or not has_floats
        self.name = "triton" + "-deterministic" * (deterministic and has_floats)

    add_rms_norm = staticmethod(row_ops.add_rms_norm)
    activate = staticmethod(row_ops.activate)
    combine_experts = staticmethod(experts.combine_experts)
    add_lora = staticmethod(lora.add_lora)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        return self.add_rms_norm(x, Fused(residual=None, norm_weight=weight, eps=eps, norm_offset=offset))[0]

    def computes(self, form: WeightFormat) -> bool:
        return isinstance(form, IntegerFormat | Float8Format) and form.group_size in GROUP_SIZES

    def pack_linear(
        self, weight: Weight, bias: Tensor | None, role: LinearRole = "plain", form: WeightFormat | None = None
    ) -> PackedLinear:
        if isinstance(weight, QuantizedWeight):
            return pack_low_bit(weight, bias)
        if form is None:
            return super().pack_linear(weight, bias, role)
        assert isinstance(form, IntegerFormat | Float8Format), f"{self.name} does not compute with weights of {form}"
        assert isinstance(weight, Tensor), "blocks are never converted to another form"
        return pack_low_bit(quantize(weight, form, is_logits_head=role == "logits"), bias)

    def linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        if isinstance(packed, LowBitLinear):
            return low_bit_linear(x, packed, x.dtype, one_tiling=self._deterministic)
        if self._deterministic:
            return dense_linear(x, packed.weight, packed.bias)
        if self._is_one_row(x, packed):
            return one_row_linear(x, packed)[0]
        is_few = 0 < len(x) <= _FEW_ROWS and x.dtype != torch.float32
        return dense_linear(x, packed.weight, packed.bias) if is_few else super().linear(x, packed)

    def _is_one_row(self, x: Tensor, *of: PackedLinear) -> bool:
        """Whether these linears of x are dense ones of a single row, with what stands before them fused."""
        return len(x) == 1 and not self._deterministic and not any(isinstance(each, LowBitLinear) for each in of)

    def logits_linear(self, x: Tensor, packed: PackedLinear) -> Tensor:
        if isinstance(packed, LowBitLinear):  # not rounded to the dtype first
            return low_bit_linear(x, packed, torch.float32, one_tiling=self._deterministic)
        return super().logits_linear(x, packed)

    def logits_argmax(self, x: Tensor, packed: PackedLinear) -> tuple[Tensor, Tensor]:
        if isinstance(packed, LowBitLinear):
            return super().logits_argmax(x, packed)
        values, ids = self.linear(x, packed).max(-1)  # before they are widened to float32: half the bytes
        return values.float(), ids

    def normed_linear(self, x: Tensor, fused: Fused, packed: PackedLinear) -> tuple[Tensor, Tensor]:
        if fused.is_centered:  # layer norms are computed apart
            return super().normed_linear(x, fused, packed)
        if self._is_one_row(x, packed):
            return one_row_linear(x, packed, fused=fused)
        if not _is_of_integers(packed):
            return super().normed_linear(x, fused, packed)
        rows = integer_rows(x, packed.padded_size, packed.form.rotation, fused=fused)
        return integer_product(rows, packed, x.dtype), rows.total

    def mlp(self, x: Tensor, fused: Fused, up: PackedLinear, down: PackedLinear) -> tuple[Tensor, Tensor]:
        if fused.is_centered:
            return super().mlp(x, fused, up, down)
        if self._is_one_row(x, up, down):
            middle, total = one_row_linear(x, up, fused=fused)
            return one_row_linear(middle, down, activation=fused.activation)[0], total
        if not _is_of_integers(down):
            return super().mlp(x, fused, up, down)
        middle, total = self.normed_linear(x, fused, up)
        rows = integer_rows(middle, down.padded_size, down.form.rotation, activation=fused.activation)
        return integer_product(rows, down, x.dtype), total

    def router_logits(self, x: Tensor, router: PackedLinear) -> Tensor:
        if self._is_dense:
            return super().router_logits(x, router)
        return dense_linear(x.float(), router.weight, router.bias)

    def route(self, x: Tensor, router: PackedLinear, routing: Routing) -> Routes:
        return route(self.router_logits(x, router), routing)

    def pack_experts(self, gate_up: Sequence[PackedLinear], down: Sequence[PackedLinear]) -> PackedExperts:
        if isinstance(down[0], LowBitLinear):
            return pack_low_bit_experts(gate_up, down, one_tiling=self._deterministic)
        return pack_experts(gate_up, down)

    def expert_rows(
        self, x: Tensor, token_ids: Tensor, expert_ids: Tensor, experts: PackedExperts, activation: Activation
    ) -> Tensor:
        assert isinstance(experts, TritonExperts)
        return experts.compute_rows(x, token_ids, expert_ids, activation)


def _is_of_integers(packed: PackedLinear) -> TypeGuard[LowBitLinear]:
    return isinstance(packed, LowBitLinear) and isinstance(packed.form, IntegerFormat)
