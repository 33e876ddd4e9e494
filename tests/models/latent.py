"""A model for tests with latent attention: Qwen3's weights, of which each token keeps one vector for all heads.

Legend: T = tokens, H = query heads, G = kv heads, E = head size, C = context positions.
"""

import pytest
import torch
from tests.models.recurrent import RecurrentForCausalLM, load_as, with_recurrent_layers
from torch import nn

from octavo.attention.metadata import AttentionMetadata, ForwardBatch, LayerKVCache
from octavo.config.layers import LatentSpec
from octavo.config.model import ModelConfig
from octavo.layers.context import BuildContext
from octavo.layers.norm import RMSNorm
from octavo.models.common import DecoderAttention


class LatentAttention(DecoderAttention):
    """The vector is a head's value and, behind it, its key. Each token attends alone, so that its bits are its own."""

    is_recordable = False

    def __init__(self, config: ModelConfig, layer: int, context: BuildContext) -> None:
        super().__init__(config, layer, context)
        self._kv_group = config.kv_group_of(layer)
        self._sizes = self.qkv.heads.query.size, self.qkv.heads.kv.size, config.attention(layer).head_dim

    def forward(
        self,
        norm: RMSNorm,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        kv_cache: LayerKVCache,
        step: AttentionMetadata,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        qkv, residual = self.qkv.of_normed(norm, x, residual)
        num_heads, num_kv_heads, size = self._sizes
        heads = qkv.view(len(qkv), -1, size)  # [T, H + 2 * G, E]
        query, key, value = torch.split(heads, [num_heads, num_kv_heads, num_kv_heads], dim=1)
        batch = step.batch.of_group(self._kv_group)
        kv_cache.key[batch.slot_mapping, 0] = torch.cat((value[:, 0], key[:, 0]), dim=-1)
        attended = self._attend(query, kv_cache, batch)
        if self.is_last:
            attended, residual = (self._kernels.kept_rows(x, batch.kept_indices) for x in (attended, residual))
        return self.out(attended), residual

    def _attend(self, query: torch.Tensor, kv_cache: LayerKVCache, batch: ForwardBatch) -> torch.Tensor:
        out, size = torch.empty_like(query), query.shape[-1]
        starts = batch.query_start_loc_list
        for request, length in enumerate(batch.seq_lens_list):
            positions = torch.arange(length)
            blocks = batch.block_table[request, positions // batch.block_size].to(torch.int64)
            slots = blocks * batch.block_size + positions % batch.block_size  # [C]
            for token in range(starts[request], starts[request + 1]):
                seen = slots[: length - (starts[request + 1] - 1 - token)]
                keys, values = kv_cache.key[seen, 0, size:].double(), kv_cache.value[seen, 0].double()  # [C, E] each
                scores = (query[token].double()[:, None] * keys).sum(-1)  # [H, C]
                weights = torch.exp(scores - scores.amax(dim=-1, keepdim=True))
                mixed = (weights[:, :, None] * values).sum(1) / weights.sum(1)[:, None]
                out[token] = mixed.to(out.dtype)
        return out.flatten(1)


class LatentForCausalLM(RecurrentForCausalLM):
    """Qwen3 with `LatentAttention` in all layers that are not recurrent."""

    def build_attention(self, layer: int) -> nn.Module:
        """Compose what mixes the tokens of block number `layer`."""
        if layer in self.config.recurrent_layers:
            return super().build_attention(layer)
        return LatentAttention(self.config, layer, self.context)


def use_latent_layers(monkeypatch: pytest.MonkeyPatch, recurrent_layers: tuple[int, ...] = ()) -> None:
    """Load checkpoints of Qwen3 as this model from now on."""

    def change(config: ModelConfig) -> ModelConfig:
        size = config.attention(0).head_dim
        config = config.with_attention(latent=LatentSpec(2 * size, size))
        return with_recurrent_layers(config, recurrent_layers) if recurrent_layers else config

    load_as(monkeypatch, LatentForCausalLM, change)
