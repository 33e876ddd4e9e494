"""The decoder family: pre-norm blocks of attention and a gated MLP around one residual stream.

Legend: T = tokens, W = tokens kept after the last layer's attention (see `ForwardBatch`), L = rows that get logits,
D = hidden size, H = query heads, G = kv heads, E = head size, V = vocabulary.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import nn

from octavo.attention.base import AttentionLayer
from octavo.attention.metadata import AttentionMetadata, ForwardBatch, LayerCache, LayerKVCache
from octavo.config.model import ModelConfig
from octavo.kernels.reference import hyperbolic_tangent
from octavo.kernels.types import SILU, Activation
from octavo.layers.attention import Attention, HeadNormWeights, SinkWeights
from octavo.layers.context import BuildContext
from octavo.layers.linear import GatedLinear, Linear, QKVLinear
from octavo.layers.moe import ExpertParallelMoE, MixtureOfExperts
from octavo.layers.norm import RMSNorm
from octavo.layers.rotary import RotaryEmbedding
from octavo.layers.vocabulary import Embedding, LogitsHead
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
WITHOUT_HEAD = MappingProxyType({f"{part}.": f"model.{part}." for part in ("embed_tokens", "layers", "norm")})


class DecoderAttention(nn.Module):
    """Project to queries, keys and values, attend, project back."""

    num_inputs: ClassVar[int] = 1  # vectors of the hidden size, side by side, that are projected

    def __init__(self, config: ModelConfig, layer: int, context: BuildContext) -> None:
        super().__init__()
        context = context.at(f"layers.{layer}.attention")
        in_size, heads = self.num_inputs * config.hidden_size, (config.num_heads, config.num_kv_heads, config.head_dim)
        self.qkv = QKVLinear(in_size, *heads, has_bias=config.attention_bias, context=context.at("qkv"))
        self.head_norms, self.sinks = self.build_head_norms(config, context), self.build_sinks(context)
        self._kernels, self.is_last = context.kernels, layer == config.num_layers - 1
        self.attention = Attention(self.describe(config, layer), context=context)
        has_bias = config.attention_out_bias
        self.out = Linear(self.qkv.parts["q"], config.hidden_size, has_bias=has_bias, context=context.at("out"))

    def build_head_norms(self, config: ModelConfig, context: BuildContext) -> HeadNormWeights | None:
        """Hook for architectures with QK norm: norms over each head of queries and keys before rotation; here none."""
        return None

    def build_sinks(self, context: BuildContext) -> SinkWeights | None:
        """Hook for families whose heads have sinks: `SinkWeights(self.qkv.heads.query, ...)`."""
        return None

    def forward(
        self,
        norm: RMSNorm,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        kv_cache: LayerKVCache,
        step: AttentionMetadata,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add x [T, D] to the residual stream [T, D]; return (attention of the sum, the sum); last layer: [W, D]."""
        qkv, residual = self.qkv.of_normed(norm, x, residual, step.adapter_ids)
        attended = self.attention(qkv, kv_cache, step)
        if self.is_last:
            kept = step.batch.kept_indices
            attended, residual = (self._kernels.kept_rows(rows, kept) for rows in (attended, residual))
        return self.out(attended, step.adapter_ids_after(is_last=self.is_last)), residual

    def describe(self, config: ModelConfig, layer: int) -> AttentionLayer:
        """Describe this layer's attention. Models whose layers differ override this: `replace(super()...)`."""
        return AttentionLayer(
            num_heads=self.qkv.heads.query.size,
            num_kv_heads=self.qkv.heads.kv.size,
            head_dim=config.head_dim,
            sliding_window=config.sliding_windows[layer],
            kv_group=config.kv_group_of(layer),
            norms=self.head_norms.values if self.head_norms is not None else None,
            sinks=self.sinks.values if self.sinks is not None else None,
            computes_kept_only=self.is_last,
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
        if self.gate_up.stands_alone(adapter_ids) or self.down.stands_alone(adapter_ids):
            normed, total = norm.add(x, residual)
            return self.down(self.gate_up(normed, adapter_ids), adapter_ids), total
        fused = norm.fused(residual, self._activation)
        out, total = self._kernels.mlp(x, fused, self.gate_up.packed, self.down.packed)
        return self.down.summed(out), total


class DecoderLayer(nn.Module):
    """One block. A branch's output and the residual stream are passed separately; the next branch adds them first.

    Some families have norms behind their branches, too.
    """

    def __init__(
        self,
        attention_norm: RMSNorm,
        attention: nn.Module,
        mlp_norm: RMSNorm,
        mlp: nn.Module,
        post_norms: tuple[RMSNorm, RMSNorm] | None = None,
    ) -> None:
        super().__init__()
        self.attention_norm, self.attention = attention_norm, attention
        self.mlp_norm, self.mlp = mlp_norm, mlp
        self.post_attention_norm: RMSNorm | None
        self.post_mlp_norm: RMSNorm | None
        self.post_attention_norm, self.post_mlp_norm = post_norms or (None, None)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, kv_cache: LayerKVCache, step: AttentionMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Given the previous block's output x [T, D] and the residual stream [T, D], return the same for this block.

        The last block returns [W, D].
        """
        x, residual = self.attention(self.attention_norm, x, residual, kv_cache, step)
        adapter_ids = step.adapter_ids_after(is_last=bool(self.attention.is_last))
        if self.post_attention_norm is None or self.post_mlp_norm is None:
            out: tuple[torch.Tensor, torch.Tensor] = self.mlp(self.mlp_norm, x, residual, adapter_ids)
            return out
        x, residual = self.mlp(self.mlp_norm, self.post_attention_norm(x), residual, adapter_ids)
        return self.post_mlp_norm(x), residual


class DecoderForCausalLM(CausalLM):
    """The whole family. A model overrides the table of names, or the method that builds the part where it differs.

    With pipeline parallelism, only the stage of `context` is built; layers keep the model's numbers.
    """

    attention_class: ClassVar[type[DecoderAttention]] = DecoderAttention
    weight_names = DECODER_WEIGHT_NAMES
    renamed_prefixes: ClassVar[Mapping[str, str]] = MappingProxyType({**WITHOUT_HEAD, **OF_VISION_MODELS})
    activation: ClassVar[Activation] = SILU  # of MLPs and experts
    norm_offset: ClassVar[float] = 0.0  # 1 if checkpoints store norm weights minus one
    embedding_scale: float | None = None
    logits_soft_cap: float | None = None  # logits l become cap * tanh(l / cap)
    takes_adapters = True
    adapted_layers = frozenset(
        {
            *(f"layers.{{layer}}.{part}" for part in ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")),
            *("embedding", "logits_head"),
        }
    )
    adapted_experts = frozenset(
        f"layers.{{layer}}.mlp.{expert}.{part}"
        for expert in ("experts.{expert}", "shared_expert")
        for part in ("gate_up", "down")
    )
    ignored_weights: ClassVar[tuple[str, ...]] = (
        "rotary_emb.inv_freq",
        "rotary_emb.cos_cached",
        "rotary_emb.sin_cached",
    )

    def __init__(self, config: ModelConfig, context: BuildContext) -> None:
        super().__init__(config, context)
        stage, context = self.stage, self.context
        self.rotary = nn.ModuleList(self.build_rotary_tables())
        if stage.is_first:
            has_tied_head = config.tie_word_embeddings and stage.is_last
            self.embedding = Embedding(
                config.vocab_size, config.hidden_size, context=context, has_tied_head=has_tied_head
            )
        self.layers = nn.ModuleDict({str(layer): self.build_layer(layer) for layer in stage.layers})
        if stage.is_last:
            self.norm = self.build_norm()
            tied_to = self.embedding if config.tie_word_embeddings and stage.is_first else None
            head = context.at("logits_head")
            self.logits_head = LogitsHead(config.hidden_size, config.vocab_size, tied_to=tied_to, context=head)

    @property
    def weight_targets(self) -> Mapping[str, str]:
        """A tied head on another stage than the embedding loads the table itself."""
        if not self.config.tie_word_embeddings:
            return self.weight_names
        others = {name: target for name, target in self.weight_names.items() if target != "logits_head"}
        return others if self.stage.is_first else {**others, "model.embed_tokens": "logits_head"}

    @property
    def parts_on_other_ranks(self) -> frozenset[str]:
        before = () if self.stage.is_first else ("embedding",)
        return frozenset(before if self.stage.is_last else (*before, "norm", "logits_head"))

    @property
    def bytes_in_file(self) -> int:
        return self.embedding.bytes_in_file if self.stage.is_first else 0

    def build_layer(self, layer: int) -> nn.Module:
        return DecoderLayer(self.build_norm(), self.build_attention(layer), self.build_norm(), self.build_mlp(layer))

    def build_rotary_tables(self) -> list[RotaryEmbedding]:
        """Make the tables by which layers rotate queries and keys; each names its own: `AttentionLayer.rotary`."""
        config = self.config
        return [RotaryEmbedding(config.rope, config.head_dim, config.max_model_len, device=self.context.device)]

    def build_norm(self) -> RMSNorm:
        size, eps = self.config.hidden_size, self.config.rms_norm_eps
        return RMSNorm(size, eps, context=self.context, offset=self.norm_offset)

    def build_attention(self, layer: int) -> nn.Module:
        return self.attention_class(self.config, layer, self.context)

    def build_mlp(self, layer: int) -> nn.Module:
        config, size = self.config, self.config.hidden_size
        if config.moe is not None and config.moe.is_sparse[layer]:
            mixture = ExpertParallelMoE if self.context.groups.experts.size > 1 else MixtureOfExperts
            return mixture(layer, size, config.moe, self.activation, context=self.context)
        context, has_bias = self.context.at(f"layers.{layer}.mlp"), config.mlp_bias
        return GatedMLP(size, config.intermediate_size, has_bias=has_bias, context=context, activation=self.activation)

    def embed(self, batch: ForwardBatch) -> torch.Tensor:
        x: torch.Tensor = self.embedding(batch.input_ids, batch.adapter_ids)
        if self.embedding_scale is not None:
            x = x * self.embedding_scale
        return x if batch.inputs_embeds is None else batch.inputs_embeds.put_into(x)

    def attention_step(self, batch: ForwardBatch) -> AttentionMetadata:
        plan = self.context.attention.plan
        plans = tuple(plan(seen) for seen in batch.groups if seen.state_slots is None)
        rotary = tuple(table(batch.rotary_positions) for table in self.rotary)
        adapters, kept_adapters = batch.adapter_ids, batch.kept_adapter_ids
        return AttentionMetadata(
            batch=batch, plans=plans, rotary=rotary, adapter_ids=adapters, kept_adapter_ids=kept_adapters
        )

    def run_layers(
        self, x: torch.Tensor, residual: torch.Tensor | None, kv_caches: Sequence[LayerCache], step: AttentionMetadata
    ) -> IntermediateTensors:
        aux: list[torch.Tensor] = []
        for number, layer, kv_cache in zip(self.stage.layers, self.layers.values(), kv_caches, strict=True):
            if number in self.context.aux_layers:
                aux.append(x if residual is None else self.norm.add(x, residual)[1])
            x, residual = layer(x, residual, kv_cache, step)
        assert residual is not None, "a stage has layers"
        if self.stage.is_last:
            x, residual = self.norm.add(x, residual)
        return IntermediateTensors(x, residual, tuple(aux))

    @property
    def twins(self) -> Mapping[str, str]:
        """Checkpoints contain the table of a tied model under either name, or under both."""
        return {"lm_head.weight": "model.embed_tokens.weight"} if self.config.tie_word_embeddings else {}

    def compute_logits(self, hidden: torch.Tensor, adapter_ids: torch.Tensor | None = None) -> torch.Tensor:
        return self.finish_logits(self.logits_head(hidden, adapter_ids))

    def finish_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Cap logits [L, V], if the model does."""
        cap = self.logits_soft_cap
        return logits if cap is None else hyperbolic_tangent(logits / cap) * cap

    def logits_argmax(
        self, hidden: torch.Tensor, adapter_ids: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `CausalLM.logits_argmax`. A cap can make distinct logits equal, so with one they are computed in full."""
        if self.logits_soft_cap is not None:
            return super().logits_argmax(hidden, adapter_ids)
        values, ids = self.logits_head.argmax(hidden, adapter_ids)
        return values, self.token_ids_of(ids)

    def token_ids_of(self, ids: torch.Tensor) -> torch.Tensor:
        """Hook for models whose logits head has a vocabulary of its own: the tokens [L] of its ids [L]."""
        return ids
