"""Attention over one latent vector per token: DeepSeek V2 and V3, Kimi K2, GLM-4.7-Flash.

Legend: T = tokens, W = tokens kept after the last layer's attention, D = hidden size, H = heads of this rank.
"""

import torch
from torch import nn

from octavo.attention.base import AttentionLayer, LatentKV
from octavo.attention.metadata import AttentionMetadata, LayerKVCache
from octavo.config.model import ModelConfig
from octavo.distributed.groups import HeadShare, Share
from octavo.layers.context import BuildContext
from octavo.layers.latent import AbsorbedHeads, LatentNorm
from octavo.layers.linear import Linear, MergedLinear
from octavo.layers.norm import RMSNorm


class LatentAttention(nn.Module):
    """Project to queries and a latent vector, attend with absorbed weights, project back."""

    def __init__(self, config: ModelConfig, layer: int, context: BuildContext) -> None:
        super().__init__()
        context = context.at(f"layers.{layer}.attention")
        spec, size, group = config.attention(layer), config.hidden_size, context.groups.tensor
        latent = spec.latent
        assert latent is not None, "a layer of this kind has a latent vector"
        heads = HeadShare.of(spec.num_heads, 1, group.rank, group.size).query
        queries = heads.times(latent.key_size + latent.rotary_size)
        self._kernels, self.is_last, self.backend = context.kernels, layer == config.num_layers - 1, context.attention

        def linear(name: str, in_size: int, outputs: Share, *, has_bias: bool = False) -> MergedLinear:
            parts = {"": outputs}
            return MergedLinear(Share.whole(in_size), parts, has_bias=has_bias, context=context.at(name))

        self.query: MergedLinear | None = None
        self.query_down: MergedLinear | None = None
        self.query_norm: RMSNorm | None = None
        self.query_up: MergedLinear | None = None
        if latent.query_rank is None:
            self.query = linear("query", size, queries)
        else:
            self.query_down = linear("query_down", size, Share.whole(latent.query_rank), has_bias=spec.has_bias)
            self.query_norm = RMSNorm(latent.query_rank, latent.norm_eps, context=context)
            self.query_up = linear("query_up", latent.query_rank, queries)
        self.latent = linear("latent", size, Share.whole(latent.size), has_bias=spec.has_bias)
        self.latent_norm = LatentNorm(latent.rank, context=context)
        self.heads = AbsorbedHeads(heads, latent, context=context.at("heads"))
        out = context.at("out")
        self.out = Linear(heads.times(latent.value_size), size, has_bias=spec.has_out_bias, context=out)
        self.layer = AttentionLayer(
            num_heads=heads.size,
            num_kv_heads=1,
            head_dim=latent.size,
            sliding_window=spec.sliding_window,
            latent=LatentKV(value_size=latent.rank, norm=self.latent_norm.weight, eps=latent.norm_eps),
            rotary=spec.rotary,
            rotates_pairs=spec.rotates_pairs,
            scale=spec.scale,
            kv_group=config.kv_group_of(layer),
            computes_kept_only=self.is_last,
            index=layer,
        )
        self.backend.check(self.layer)

    def forward(
        self,
        norm: RMSNorm,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        kv_cache: LayerKVCache,
        step: AttentionMetadata,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add x [T, D] to the residual stream [T, D]; return (attention of the sum, the sum); last layer: [W, D]."""
        kernels = self._kernels
        normed, total = norm.add(x, residual)
        query = kernels.head_linears(self._queries(normed), self.heads.keys)
        mixed = self.backend.forward_latent(query, self.latent(normed), kv_cache, step, self.layer)
        mixed, total = step.rows_after(kernels, mixed, total, is_last=self.is_last)
        values = kernels.head_linears(mixed, self.heads.values)
        return self.out(values, step.adapter_ids_after(is_last=self.is_last)), total

    def _queries(self, normed: torch.Tensor) -> torch.Tensor:
        """Project normed [T, D] to queries, [T, H * (key size + rotary size)]."""
        if self.query_down is None or self.query_norm is None or self.query_up is None:
            assert self.query is not None, "queries are projected in one way or the other"
            queries: torch.Tensor = self.query(normed)
            return queries
        return self.query_up.of_normed(self.query_norm, self.query_down(normed), None)[0]
