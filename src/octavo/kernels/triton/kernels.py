"""Octavo's GPU kernels: Triton for small and fused ops, cuBLAS (torch's matmul) for linear layers.

Legend: T = tokens, K = input size, N = output size.
"""

from collections.abc import Sequence

from torch import Tensor

from octavo.kernels.reference import Kernels
from octavo.kernels.triton import combine, lora, rms_norm, route
from octavo.kernels.triton.activation import activate
from octavo.kernels.triton.experts import TritonExperts, expert_rows, pack_experts
from octavo.kernels.types import Activation, Fused, LoraAdapters, PackedExperts, PackedLinear, Routes, Routing


class TritonKernels(Kernels):
    """See `Kernels`. bfloat16, float16 and float32. Nothing here syncs with the device, so steps can be captured."""

    name = "triton"
    is_batch_invariant = False  # cuBLAS selects its algorithm by the number of rows
    captures_experts = True

    def logits_argmax(self, x: Tensor, packed: PackedLinear) -> tuple[Tensor, Tensor]:
        """Taken before the logits are widened to float32: half the bytes."""
        values, ids = self.linear(x, packed).max(-1)
        return values.float(), ids

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
        return rms_norm.rms_norm(x, weight, eps, offset)

    def add_rms_norm(self, x: Tensor, fused: Fused) -> tuple[Tensor, Tensor]:
        return rms_norm.add_rms_norm(x, fused)

    def activate(self, x: Tensor, activation: Activation) -> Tensor:
        return activate(x, activation)

    def pack_experts(self, gate_up: Sequence[PackedLinear], down: Sequence[PackedLinear]) -> PackedExperts:
        """Weights stay in place and are read by address."""
        return pack_experts(gate_up, down)

    def route(self, x: Tensor, router: PackedLinear, routing: Routing) -> Routes:
        return route.route(self.router_logits(x, router), routing)

    def expert_rows(
        self, x: Tensor, token_ids: Tensor, expert_ids: Tensor, experts: PackedExperts, activation: Activation
    ) -> Tensor:
        assert isinstance(experts, TritonExperts)
        return expert_rows(x, token_ids, expert_ids, experts, activation)

    def combine_experts(self, rows: Tensor, weights: Tensor) -> Tensor:
        return combine.combine_experts(rows, weights)

    def add_lora(self, base: Tensor, x: Tensor, adapters: LoraAdapters, adapter_ids: Tensor) -> Tensor:
        return lora.add_lora(base, x, adapters, adapter_ids)
