"""Falcon-H1: attention and Mamba-2 read the same, and both results are added, each times a number.

Legend: T = tokens, W = tokens kept after the last layer's attention, D = hidden size.
"""

from typing import Any

import torch
from torch import nn

from octavo.attention.metadata import AttentionMetadata
from octavo.config.layers import DenseSpec, LayerSpec
from octavo.kernels.types import Activation
from octavo.layers.context import BuildContext
from octavo.layers.norm import NoNorm, RMSNorm
from octavo.models.common import GatedMLP
from octavo.models.interfaces import CausalLM
from octavo.models.mixers import build_state_mixer


class BesideLayer(nn.Module):
    """A block with another mixer beside its attention."""

    def __init__(
        self,
        spec: LayerSpec,
        norms: tuple[RMSNorm, RMSNorm],
        mixers: tuple[nn.Module, nn.Module],
        mlp: nn.Module,
        *,
        context: BuildContext,
    ) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = norms
        self.attention, self.beside = mixers
        self.mlp, self._kernels, self._mixer_scales = mlp, context.kernels, spec.mixer_scales
        self._nothing = NoNorm(context=context)
        self._mlp_scale = spec.feed_forward.out_scale if isinstance(spec.feed_forward, DenseSpec) else 1.0

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, kv_cache: Any, step: AttentionMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DecoderLayer.forward`; `kv_cache` are both mixers' caches."""
        attention_cache, states = kv_cache
        normed, total = self.attention_norm.add(x, residual)
        mixed, _ = self.beside(self._nothing, normed, None, states, step)
        attended, _ = self.attention(self._nothing, normed, None, attention_cache, step)
        # Not before attention: a recorded step computes kept rows alone from the first time on that it keeps some.
        mixed, total = step.rows_after(self._kernels, mixed, total, is_last=bool(self.attention.is_last))
        scales = self._mixer_scales
        both = self._kernels.scaled_sum(self._scaled(attended, scales[0]), self._scaled(mixed, scales[1]), 1.0)
        adapter_ids = step.adapter_ids_after(is_last=bool(self.attention.is_last))
        x, total = self.mlp(self.mlp_norm, both, total, adapter_ids)
        return self._scaled(x, self._mlp_scale), total

    def _scaled(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        return x if scale == 1.0 else self._kernels.scaled_sum(x, None, scale)


class FalconH1ForCausalLM(CausalLM):
    """A decoder with two mixers in each layer."""

    def build_layer(self, layer: int) -> nn.Module:
        spec = self.config.layers[layer]
        assert spec.beside is not None, "each layer has two"
        context = self.context.at(f"layers.{layer}.beside")
        beside = build_state_mixer(self.config, spec.beside, context, is_last=False)
        norms, mixers = (self.build_norm(), self.build_norm()), (self.build_attention(layer), beside)
        return BesideLayer(spec, norms, mixers, self.build_feed_forward(layer), context=self.context)

    def build_mlp(self, layer: int, spec: DenseSpec) -> GatedMLP:
        if spec.gate_scale == 1.0:
            return super().build_mlp(layer, spec)
        context, size = self.context.at(f"layers.{layer}.mlp"), self.config.hidden_size
        activation = Activation("scaled_silu", alpha=spec.gate_scale)
        return GatedMLP(size, spec.intermediate_size, has_bias=spec.has_bias, context=context, activation=activation)
