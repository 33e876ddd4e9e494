"""The decoder family: pre-norm blocks of attention and a gated MLP around one residual stream.

Legend: T = tokens, W = tokens kept behind the last layer's attention (see `ForwardBatch`), L = rows that get logits,
D = hidden size, H = query heads, G = kv heads, E = head size, V = vocabulary.
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import nn

from octavo.attention.base import AttentionLayer
from octavo.attention.metadata import ForwardBatch, LayerKVCache
from octavo.config.model import ModelConfig
from octavo.layers.attention import Attention, AttentionStep, HeadNormWeights
from octavo.layers.context import BuildContext
from octavo.layers.dealt_experts import DealtExperts
from octavo.layers.embedding import Embedding
from octavo.layers.linear import GatedLinear, Linear, QKVLinear
from octavo.layers.logits import LogitsHead
from octavo.layers.moe import MixtureOfExperts
from octavo.layers.norm import RMSNorm
from octavo.layers.rotary import RotaryEmbedding
from octavo.models.interfaces import CausalLM, IntermediateTensors

DECODER_WEIGHT_NAMES = MappingProxyType(
    {
        "model.embed_tokens": "embedding",
        "model.layers.{layer}.input_layernorm": "layers.{layer}.attention_norm",
        "model.layers.{layer}.self_attn.q_proj": "layers.{layer}.attention.qkv:q",
        "model.layers.{layer}.self_attn.k_proj": "layers.{layer}.attention.qkv:k",
        "model.layers.{layer}.self_attn.v_proj": "layers.{layer}.attention.qkv:v",
        "model.layers.{layer}.self_attn.o_proj": "layers.{layer}.attention.out",
        "model.layers.{layer}.post_attention_layernorm": "layers.{layer}.mlp_norm",
        "model.layers.{layer}.mlp.gate_proj": "layers.{layer}.mlp.gate_up:gate",
        "model.layers.{layer}.mlp.up_proj": "layers.{layer}.mlp.gate_up:up",
        "model.layers.{layer}.mlp.down_proj": "layers.{layer}.mlp.down",
        "model.norm": "norm",
        "lm_head": "logits_head",
    }
)


class DecoderAttention(nn.Module):
    """Project to queries, keys and values, attend, project back."""

    def __init__(self, config: ModelConfig, layer: int, context: BuildContext) -> None:
        super().__init__()
        context = context.at(f"layers.{layer}.attention")
        self.qkv = QKVLinear(
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            has_bias=config.attention_bias,
            context=context.at("qkv"),
        )
        self.head_norms = self.build_head_norms(config, context)
        self._kernels, self._is_last = context.kernels, layer == config.num_layers - 1
        self.attention = Attention(self._describe(config, layer), context=context)
        heads, has_bias = self.qkv.parts["q"], config.attention_out_bias
        self.out = Linear(heads, config.hidden_size, has_bias=has_bias, context=context.at("out"))

    def build_head_norms(self, config: ModelConfig, context: BuildContext) -> HeadNormWeights | None:
        """Hook for families that normalise each head of queries and keys before rotation; here they pass."""
        return None

    def forward(
        self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor | None, kv_cache: LayerKVCache, step: AttentionStep
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add x [T, D] to the stream [T, D]; return (what it adds to the sum, the sum), [W, D] in the last layer."""
        qkv, residual = self.qkv.of_normed(norm, x, residual)
        attended = self.attention(qkv, kv_cache, step)
        if self._is_last:
            kept = step.batch.kept_indices
            attended, residual = (self._kernels.kept_rows(rows, kept) for rows in (attended, residual))
        return self.out(attended), residual

    def _describe(self, config: ModelConfig, layer: int) -> AttentionLayer:
        return AttentionLayer(
            num_heads=self.qkv.heads.query.size,
            num_kv_heads=self.qkv.heads.kv.size,
            head_dim=config.head_dim,
            sliding_window=config.sliding_windows[layer],
            norms=self.head_norms.values if self.head_norms is not None else None,
            answers_kept=self._is_last,
        )


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, context: BuildContext) -> None:
        super().__init__()
        self._kernels = context.kernels
        size, has_bias = config.intermediate_size, config.mlp_bias
        self.gate_up = GatedLinear(config.hidden_size, size, has_bias=has_bias, context=context.at("gate_up"))
        self.down = Linear(self.gate_up.outputs, config.hidden_size, has_bias=has_bias, context=context.at("down"))

    def forward(self, norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add x [T, D] to the stream [T, D]; return (what the MLP adds to the sum, the sum)."""
        gate_up, down = self.gate_up.packed, self.down.packed
        out, total = self._kernels.gated_mlp(x, residual, norm.weight, norm.eps, gate_up, down)
        return self.down.summed(out), total


class DecoderLayer(nn.Module):
    """One block. The residual stream travels beside what a branch adds to it; the next branch begins with their sum."""

    def __init__(self, config: ModelConfig, attention: nn.Module, mlp: nn.Module, context: BuildContext) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, context=context)
        self.attention = attention
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, context=context)
        self.mlp = mlp

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, kv_cache: LayerKVCache, step: AttentionStep
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take what the block before added, x [T, D], and the stream without it [T, D]; return the same of this one.

        The last one returns [W, D].
        """
        x, residual = self.attention(self.attention_norm, x, residual, kv_cache, step)
        out: tuple[torch.Tensor, torch.Tensor] = self.mlp(self.mlp_norm, x, residual)
        return out


class DecoderForCausalLM(CausalLM):
    """The whole family. A member overrides the table of names, or the method that builds the part where it differs.

    Of a model that is divided into stages, only the stage of `context` is built; layers keep the model's numbers.
    """

    weight_names = DECODER_WEIGHT_NAMES
    ignored_weights = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")

    def __init__(self, config: ModelConfig, context: BuildContext) -> None:
        super().__init__(config, context)
        stage, context = self.stage, self.context
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, config.max_model_len, device=context.device)
        if stage.is_first:
            has_tied_head = config.tie_word_embeddings and stage.is_last
            self.embedding = Embedding(
                config.vocab_size, config.hidden_size, context=context, has_tied_head=has_tied_head
            )
        self.layers = nn.ModuleDict({str(layer): self.build_layer(layer) for layer in stage.layers})
        if stage.is_last:
            self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, context=context)
            tied_to = self.embedding if config.tie_word_embeddings and stage.is_first else None
            head = context.at("logits_head")
            self.logits_head = LogitsHead(config.hidden_size, config.vocab_size, tied_to=tied_to, context=head)

    @property
    def weight_targets(self) -> Mapping[str, str]:
        """See `CausalLM.weight_targets`. A tied head that is apart from the embedding reads the table by itself."""
        if not self.config.tie_word_embeddings or self.stage.is_first:
            return self.weight_names
        others = {name: target for name, target in self.weight_names.items() if target != "logits_head"}
        return {**others, "model.embed_tokens": "logits_head"}

    @property
    def parts_elsewhere(self) -> frozenset[str]:
        """See `CausalLM.parts_elsewhere`."""
        before = () if self.stage.is_first else ("embedding",)
        behind = () if self.stage.is_last else ("norm", "logits_head")
        return frozenset((*before, *behind))

    @property
    def bytes_in_file(self) -> int:
        """See `CausalLM.bytes_in_file`."""
        return self.embedding.bytes_in_file if self.stage.is_first else 0

    def build_layer(self, layer: int) -> nn.Module:
        """Compose block number `layer`."""
        return DecoderLayer(self.config, self.build_attention(layer), self.build_mlp(layer), self.context)

    def build_attention(self, layer: int) -> nn.Module:
        """Compose the attention of block number `layer`."""
        return DecoderAttention(self.config, layer, self.context)

    def build_mlp(self, layer: int) -> nn.Module:
        """Compose the MLP of block number `layer`, or its experts."""
        if self.config.moe is not None and self.config.moe.is_sparse[layer]:
            mixture = DealtExperts if self.context.groups.experts.size > 1 else MixtureOfExperts
            return mixture(layer, self.config.hidden_size, self.config.moe, context=self.context)
        return GatedMLP(self.config, self.context.at(f"layers.{layer}.mlp"))

    def embed(self, batch: ForwardBatch) -> torch.Tensor:
        """See `CausalLM.embed`."""
        x: torch.Tensor = self.embedding(batch.input_ids)
        return x

    def attention_step(self, batch: ForwardBatch) -> AttentionStep:
        """See `CausalLM.attention_step`."""
        cos, sin = self.rotary(batch.positions)
        return AttentionStep(batch=batch, plan=self.context.attention.plan(batch), cos=cos, sin=sin)

    def run_layers(
        self, x: torch.Tensor, residual: torch.Tensor | None, kv_caches: list[LayerKVCache], step: AttentionStep
    ) -> IntermediateTensors:
        """See `CausalLM.run_layers`."""
        for layer, kv_cache in zip(self.layers.values(), kv_caches, strict=True):
            x, residual = layer(x, residual, kv_cache, step)
        assert residual is not None, "a stage has layers"
        return IntermediateTensors(*(self.norm.add(x, residual) if self.stage.is_last else (x, residual)))

    def ignores_weight(self, name: str) -> bool:
        """See `CausalLM.ignores_weight`. A tied head is often saved all the same; the embedding's table is read."""
        return super().ignores_weight(name) or (self.config.tie_word_embeddings and name == "lm_head.weight")

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `CausalLM.compute_logits`."""
        logits: torch.Tensor = self.logits_head(hidden)
        return logits

    def largest_logits(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `CausalLM.largest_logits`."""
        return self.logits_head.largest(hidden)
