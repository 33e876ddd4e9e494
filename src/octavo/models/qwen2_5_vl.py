"""Qwen2.5-VL (Bai et al. 2025, arXiv:2502.13923): Qwen2-VL whose tower has windows, RMS norms and a gated MLP."""

from types import MappingProxyType

import torch
from torch import nn

from octavo.config.vision import VisionConfig
from octavo.layers.context import BuildContext
from octavo.layers.linear import GatedLinear, Linear
from octavo.layers.norm import RMSNorm
from octavo.models.qwen2_vl import Qwen2VisionTower, Qwen2VLForConditionalGeneration
from octavo.models.vision_blocks import VisionBlock, VisionStep


class GatedVisionMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: VisionConfig, context: BuildContext) -> None:
        super().__init__()
        self._kernels = context.kernels
        size, inner = config.hidden_size, config.intermediate_size
        self.gate_up = GatedLinear(size, inner, has_bias=True, context=context.at("gate_up"))
        self.down = Linear(self.gate_up.outputs, size, has_bias=True, context=context.at("down"))

    def forward(self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add x [P, V] to the residual stream [P, V]; return (the MLP of the sum, the sum)."""
        if self.gate_up.stands_alone(None) or self.down.stands_alone(None):
            normed, total = norm.add(x, residual)
            return self.down(self.gate_up(normed)), total
        out, total = self._kernels.mlp(x, norm.fused(residual), self.gate_up.packed, self.down.packed)
        return self.down.summed(out), total


class FusedVisionBlock(VisionBlock):
    """A block whose norms and inner sum are part of the linears after them."""

    def forward(self, x: torch.Tensor, step: VisionStep) -> torch.Tensor:
        """Apply to x [P, V], P being patches and V the tower's hidden size."""
        norm = self.attention_norm
        assert isinstance(norm, RMSNorm), "this family's are"
        qkv, x = self.attention.qkv.of_normed(norm, x, None)
        mlp: torch.Tensor
        mlp, x = self.mlp(self.mlp_norm, self.attention.attended(qkv, step), x)
        return x + mlp


class Qwen25VisionTower(Qwen2VisionTower):
    """Windows are a setting of the family: see `VisionConfig.window_size`."""

    block = FusedVisionBlock

    block_names = MappingProxyType(
        {
            **{name: place for name, place in Qwen2VisionTower.block_names.items() if not name.startswith("mlp")},
            "mlp.gate_proj": "mlp.gate_up:gate",
            "mlp.up_proj": "mlp.gate_up:up",
            "mlp.down_proj": "mlp.down",
        }
    )

    def build_norm(self, size: int) -> nn.Module:
        """Build a norm over `size` elements."""
        return RMSNorm(size, self.config.norm_eps, context=self.context)

    def build_mlp(self, context: BuildContext) -> nn.Module:
        """Build a block's MLP."""
        return GatedVisionMLP(self.config, context)


class Qwen2_5_VLForConditionalGeneration(Qwen2VLForConditionalGeneration):  # noqa: N801 - the name in `config.json`
    """The decoder is Qwen2-VL's."""

    tower = Qwen25VisionTower
