"""Blocks of the decoder family: pre-norm attention and a gated MLP around one residual stream; names of weights.

Legend: T = tokens, W = tokens kept after the last layer's attention (see `ForwardBatch`), D = hidden size, H = query
heads, G = kv heads, E = head size.
"""

from dataclasses import replace
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import nn

from octavo.attention.base import AttentionLayer
from octavo.attention.metadata import AttentionMetadata, LayerKVCache
from octavo.config.model import ModelConfig
from octavo.distributed.groups import HeadShare, Share
from octavo.kernels.reference import Kernels
from octavo.kernels.types import SILU, Activation
from octavo.layers.attention import HeadByHeadNormWeights, HeadNormWeights, SinkWeights, WholeNormWeights
from octavo.layers.context import BuildContext
from octavo.layers.linear import GatedLinear, GatedQKVLinear, Linear, MergedLinear, QKVLinear
from octavo.layers.norm import NoNorm, RMSNorm

# Names of a language model that was taken out of one with a vision tower.
OF_VISION_MODELS = MappingProxyType(
    {
        "language_model.model.": "model.",
        "language_model.lm_head.": "lm_head.",
        "model.language_model.lm_head.": "lm_head.",
        "model.language_model.": "model.",
        "language_model.": "model.",
    }
)
# What transformers' class without the logits head leaves out of names.
WITHOUT_HEAD = MappingProxyType(
    {f"{part}.": f"model.{part}." for part in ("embed_tokens", "layers", "norm", "embedding_norm")}
)


class DecoderAttention(nn.Module):
    """Project to queries, keys and values, attend, project back."""

    num_inputs: ClassVar[int] = 1  # vectors of the hidden size, side by side, that are projected

    def __init__(self, config: ModelConfig, layer: int, context: BuildContext) -> None:
        super().__init__()
        context = context.at(f"layers.{layer}.attention")
        in_size, spec = self.num_inputs * config.hidden_size, config.attention(layer)
        heads = spec.num_heads, spec.num_kv_heads, spec.head_dim
        options: dict[str, Any] = {"has_bias": spec.has_bias, "context": context.at("qkv")}
        self.qkv: QKVLinear | GatedQKVLinear
        if spec.gate == "elements_by_query":
            self.qkv = GatedQKVLinear(in_size, *heads, **options)
        else:
            self.qkv = QKVLinear(in_size, *heads, **options, projects=spec.projects, has_gate=spec.gate == "elements")
        self._gate_size = self.qkv.parts["gate"].size if "gate" in self.qkv.parts else 0
        self.gates: MergedLinear | None = None  # of heads
        if spec.gate == "heads":
            parts, own = {"": self.qkv.heads.query}, context.at("gates")
            self.gates = MergedLinear(Share.whole(in_size), parts, has_bias=False, context=own)
        self._clip, self.is_recordable = spec.qkv_clip, spec.qkv_clip is None
        self.head_norms: HeadNormWeights | WholeNormWeights | HeadByHeadNormWeights | None = None
        if spec.head_norms in ("whole", "by_head"):
            kind = WholeNormWeights if spec.head_norms == "whole" else HeadByHeadNormWeights
            self.head_norms = kind(self.qkv.heads, spec.head_dim, config.rms_norm_eps, context=context)
        elif spec.head_norms is not None:
            offset = config.norm_offset if spec.has_norm_weights else 0.0
            self.head_norms = HeadNormWeights(spec, config.rms_norm_eps, context=context, offset=offset)
        self.sinks = SinkWeights(self.qkv.heads.query, context=context) if spec.has_sinks else None
        self._kernels, self.is_last = context.kernels, layer == config.num_layers - 1
        self.backend = context.attention
        self.layer = replace(
            described_attention(config, layer, self.qkv.heads),
            norms=self.head_norms.values if self.head_norms is not None else None,
            sinks=self.sinks.values if self.sinks is not None else None,
            computes_kept_only=self.is_last,
        )
        self.backend.check(self.layer)
        has_bias, size = spec.has_out_bias, config.hidden_size
        self.out = Linear(self.qkv.parts["q"], size, has_bias=has_bias, context=context.at("out"))

    def forward(
        self,
        norm: RMSNorm,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        kv_cache: LayerKVCache,
        step: AttentionMetadata,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add x [T, D] to the residual stream [T, D]; return (attention of the sum, the sum); last layer: [W, D]."""
        gates: torch.Tensor | None = None
        if self.gates is not None:
            normed, residual = norm.add(x, residual)
            qkv, gates = self.qkv(normed, step.adapter_ids), self.gates(normed)
        else:
            qkv, residual = self.qkv.of_normed(norm, x, residual, step.adapter_ids)
        if self.head_norms is not None:
            qkv = self.head_norms.of_projection(qkv)
        if self._clip is not None:
            qkv = qkv.clamp(-self._clip, self._clip)
        if self._gate_size:
            qkv, gates = qkv[:, : -self._gate_size], qkv[:, -self._gate_size :]
        attended = self.backend.forward(qkv, kv_cache, step, self.layer)
        if gates is not None:
            attended = self._kernels.gate(attended, gates)
        attended, residual = step.rows_after(self._kernels, attended, residual, is_last=self.is_last)
        return self.out(attended, step.adapter_ids_after(is_last=self.is_last)), residual


def described_attention(config: ModelConfig, layer: int, heads: HeadShare) -> AttentionLayer:
    """Return what a layer's spec says of attention with these heads; tensors and what only models know are not set."""
    spec = config.attention(layer)
    return AttentionLayer(
        num_heads=heads.query.size,
        num_kv_heads=heads.kv.size,
        head_dim=spec.head_dim,
        sliding_window=spec.sliding_window,
        chunk_size=spec.chunk_size if (spec.chunk_size or 0) < config.max_model_len else None,
        rotary=spec.rotary,
        query_rotary=spec.query_rotary,
        rotates_pairs=spec.rotates_pairs,
        norms_behind=spec.head_norms == "each_behind",
        scale=spec.scale,
        soft_cap=spec.soft_cap,
        kv_group=config.kv_group_of(layer),
        projects=spec.projects,
        normalizes_values=spec.has_value_norm,
        gate_heads=heads.query.size if spec.gate in ("elements", "elements_by_query") else 0,
        index=layer,
    )


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x))."""

    def __init__(
        self, size: int, inner_size: int, *, has_bias: bool, context: BuildContext, activation: Activation = SILU
    ) -> None:
        super().__init__()
        self._kernels, self._activation = context.kernels, activation
        self.gate_up = GatedLinear(
            size, inner_size, has_bias=has_bias, context=context.at("gate_up"), activation=activation
        )
        self.down = Linear(self.gate_up.outputs, size, has_bias=has_bias, context=context.at("down"))

    def forward(
        self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor, adapter_ids: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add x [T, D] to the residual stream [T, D]; return (the MLP of the sum, the sum)."""
        stands_alone = self.gate_up.stands_alone(adapter_ids) or self.down.stands_alone(adapter_ids)
        if isinstance(norm, NoNorm) or stands_alone:
            normed, total = norm.add(x, residual)
            return self.of_normed(normed, adapter_ids), total
        fused = norm.fused(residual, self._activation)
        out, total = self._kernels.mlp(x, fused, self.gate_up.packed, self.down.packed)
        return self.down.summed(out), total

    def of_normed(self, x: torch.Tensor, adapter_ids: torch.Tensor | None) -> torch.Tensor:
        """Apply to x [T, D], behind the norm: [T, D]."""
        out: torch.Tensor = self.down(self.gate_up(x, adapter_ids), adapter_ids)
        return out


class DecoderLayer(nn.Module):
    """One block. A branch's output and the residual stream are passed separately; the next branch adds them first.

    Some families have norms behind their branches, too, or only there; in some, a branch's output is scaled.
    """

    def __init__(
        self,
        attention_norm: RMSNorm,
        attention: nn.Module,
        mlp_norm: RMSNorm,
        mlp: nn.Module,
        post_norms: tuple[RMSNorm, RMSNorm] | None = None,
        *,
        kernels: Kernels,
        residual_scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.attention_norm, self.attention = attention_norm, attention
        self.mlp_norm, self.mlp = mlp_norm, mlp
        self.post_attention_norm: RMSNorm | None
        self.post_mlp_norm: RMSNorm | None
        self.post_attention_norm, self.post_mlp_norm = post_norms or (None, None)
        self._kernels, self._scale = kernels, residual_scale

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, kv_cache: LayerKVCache, step: AttentionMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Given the previous block's output x [T, D] and the residual stream [T, D], return the same for this block.

        The last block returns [W, D].
        """
        x, residual = self.attention(self.attention_norm, x, residual, kv_cache, step)
        adapter_ids = step.adapter_ids_after(is_last=bool(self.attention.is_last))
        x, residual = self.mlp(self.mlp_norm, self._finished(x, self.post_attention_norm), residual, adapter_ids)
        return self._finished(x, self.post_mlp_norm), residual

    def _finished(self, x: torch.Tensor, norm: RMSNorm | None) -> torch.Tensor:
        """Return what a branch with output x [T, D] adds to the stream."""
        if norm is not None:
            x = norm(x)
        if self._scale != 1.0:
            x = self._kernels.scaled_sum(x, None, self._scale)
        return x
