"""Models whose layers have one branch each, a mixer or an MLP, behind one norm: Nemotron-H, Mamba-2.

Legend: T = tokens, W = tokens kept after the last mixer (see `ForwardBatch`), D = hidden size.
"""

from types import MappingProxyType
from typing import ClassVar

import torch
from torch import nn

from octavo.attention.metadata import AttentionMetadata, LayerCache
from octavo.config.family import NameTable
from octavo.config.layers import ExpertsSpec
from octavo.kernels.reference import Kernels
from octavo.layers.latent_moe import LatentMixture
from octavo.layers.norm import RMSNorm
from octavo.models.interfaces import CausalLM


class MixerLayer(nn.Module):
    """A layer that only mixes tokens."""

    def __init__(self, norm: RMSNorm, attention: nn.Module) -> None:
        super().__init__()
        self.norm, self.attention = norm, attention

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, kv_cache: LayerCache, step: AttentionMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Given the previous layer's output x [T, D] and the residual stream [T, D], return the same for this one.

        The last layer returns [W, D].
        """
        mixed: tuple[torch.Tensor, torch.Tensor] = self.attention(self.norm, x, residual, kv_cache, step)
        return mixed


class MLPLayer(nn.Module):
    """A layer that takes each token alone. It keeps nothing of a context."""

    def __init__(self, norm: RMSNorm, mlp: nn.Module, *, is_last: bool, kernels: Kernels) -> None:
        super().__init__()
        self.norm, self.mlp, self._is_last, self._kernels = norm, mlp, is_last, kernels

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, kv_cache: None, step: AttentionMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Do so; the last layer computes tokens that are kept only."""
        if residual is None:
            residual = self._kernels.scaled_sum(x, None, 0.0)
        x, residual = step.rows_after(self._kernels, x, residual, is_last=self._is_last)
        result: tuple[torch.Tensor, torch.Tensor] = self.mlp(
            self.norm, x, residual, step.adapter_ids_after(is_last=self._is_last)
        )
        return result


class BranchesForCausalLM(CausalLM):
    """A decoder with one branch a layer. MLPs are not gated, nor are experts."""

    renamed_prefixes: ClassVar = MappingProxyType(
        {"model.backbone.": "model.", "backbone.": "model.", "model.lm_head.": "lm_head.", **CausalLM.renamed_prefixes}
    )

    @property
    def weight_names(self) -> NameTable:
        names = super().weight_names
        if self.config.experts is None or self.config.experts.latent_size is None:
            return names
        return {name: place.replace(".mlp.shared_expert.", ".mlp.beside.") for name, place in names.items()}

    def build_layer(self, layer: int) -> nn.Module:
        if self.config.layers[layer].feed_forward is None:
            return MixerLayer(self.build_norm(), self.build_attention(layer))
        is_last, mlp = layer == self.config.num_layers - 1, self.build_feed_forward(layer)
        return MLPLayer(self.build_norm(), mlp, is_last=is_last, kernels=self.context.kernels)

    def build_feed_forward(self, layer: int) -> nn.Module:
        spec, size = self.config.layers[layer].feed_forward, self.config.hidden_size
        if isinstance(spec, ExpertsSpec) and spec.latent_size is not None:
            return LatentMixture(layer, size, spec, self.activation, context=self.context)
        return super().build_feed_forward(layer)
