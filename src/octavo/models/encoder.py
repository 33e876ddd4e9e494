"""Encoders: transformers whose tokens see both sides, of one request, in one step. Nothing of a request is kept.

BERT (Devlin et al. 2018, arXiv:1810.04805) normalizes behind each branch, ModernBERT (Warner et al. 2024,
arXiv:2412.13663) before it, EmbeddingGemma (Schechter Vera et al. 2025, arXiv:2509.20354) on both sides.

Legend: T = tokens of the step, W = tokens whose states are read, D = hidden size, I = intermediate size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import nn

from octavo.attention.base import EncoderHeads, EncoderSegments
from octavo.attention.metadata import ForwardBatch, LayerCache
from octavo.config import families
from octavo.config.layers import DenseSpec
from octavo.config.model import EncoderConfig, ModelConfig
from octavo.config.parallel import Stage
from octavo.distributed.groups import Share
from octavo.errors import UnsupportedModelError
from octavo.kernels.types import Activation
from octavo.layers.attention import HeadNormWeights
from octavo.layers.context import BuildContext
from octavo.layers.linear import GatedLinear, Linear, MergedLinear, QKVLinear
from octavo.layers.norm import CenteredNorm, RMSNorm
from octavo.layers.quant.base import TensorSpec
from octavo.layers.vocabulary import Embedding
from octavo.layers.weight_owner import PlainWeight
from octavo.models.interfaces import CausalLM, IntermediateTensors

# Of what surrounds the encoder where it was trained: heads over the vocabulary, poolers that nothing reads.
_LEFT_OUT = ("cls.", "lm_head.", "decoder.", "head.", "pooler.", "embeddings.position_ids", "embeddings.token_type_ids")
_OLD_NAMES = {"gamma": "weight", "beta": "bias"}  # of norms
_PREFIXES = ("bert.", "roberta.", "nomic_bert.", "model.")


class PositionTable(PlainWeight):
    """Embeddings of positions; checkpoints may have rows in front that no token has."""

    def __init__(self, encoder: EncoderConfig, size: int, *, context: BuildContext) -> None:
        super().__init__(encoder.num_positions, size, context=context)
        self._all_rows = encoder.num_positions + encoder.position_offset, size

    def checkpoint_tensors(self) -> dict[str, TensorSpec]:
        return {"weight": TensorSpec(self._all_rows, other_shapes=(tuple(self.weight.shape),))}

    def load_weight(self, name: str, tensor: torch.Tensor) -> None:
        super().load_weight(name, tensor[-len(self.weight) :])


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderStep:
    """What all layers share: the requests' tokens, by the table that queries and keys are rotated by; None: by none."""

    segments: Mapping[int | None, EncoderSegments]


class EncoderAttention(nn.Module):
    """Project to queries, keys and values, attend to both sides, project back."""

    def __init__(self, config: ModelConfig, layer: int, context: BuildContext) -> None:
        super().__init__()
        context, spec, size = context.at(f"layers.{layer}.attention"), config.attention(layer), config.hidden_size
        heads = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.qkv = QKVLinear(size, *heads, has_bias=spec.has_bias, context=context.at("qkv"))
        self.out = Linear(self.qkv.parts["q"], size, has_bias=spec.has_out_bias, context=context.at("out"))
        self.head_norms = None
        if spec.head_norms is not None:
            self.head_norms = HeadNormWeights(spec, config.rms_norm_eps, context=context, offset=config.norm_offset)
        self._rotary = spec.rotary
        self._heads = EncoderHeads(
            count=self.qkv.heads.query.size,
            kv_count=self.qkv.heads.kv.size,
            size=spec.head_dim,
            window=spec.sliding_window,
            scale=spec.scale,
            norms=None if self.head_norms is None else self.head_norms.values,
        )

    def forward(self, x: torch.Tensor, step: EncoderStep) -> torch.Tensor:
        """Attend: x [T, D] to [T, D]."""
        out: torch.Tensor = self.out(step.segments[self._rotary].attend(self.qkv(x), self._heads))
        return out


class EncoderMLP(nn.Module):
    """down(activation(up(x))), or down(activation(gate(x)) * up(x))."""

    def __init__(self, config: ModelConfig, layer: int, context: BuildContext) -> None:
        super().__init__()
        spec, encoder, size = config.layers[layer].feed_forward, config.encoder, config.hidden_size
        assert isinstance(spec, DenseSpec), "no experts"
        assert encoder is not None, "an encoder"
        context, group = context.at(f"layers.{layer}.mlp"), context.groups.tensor
        self._kernels, self._activation = context.kernels, encoder.activation
        self._is_fused = encoder.is_gated and encoder.activation in ("silu", "gelu_tanh")
        self._is_gated = encoder.is_gated
        inner = Share.of_features(spec.intermediate_size, group.rank, group.size)
        self.up: MergedLinear | None = None
        if self._is_fused:
            kind = Activation("silu" if encoder.activation == "silu" else "gelu_tanh")
            place = context.at("gate_up")
            self.gate_up: MergedLinear = GatedLinear(
                size, spec.intermediate_size, has_bias=spec.has_bias, context=place, activation=kind
            )
        elif encoder.is_gated:
            parts = {"gate": inner, "up": inner}
            place = context.at("gate_up")
            self.gate_up = MergedLinear(Share.whole(size), parts, has_bias=spec.has_bias, context=place)
        else:
            self.up = MergedLinear(Share.whole(size), {"": inner}, has_bias=spec.has_bias, context=context.at("up"))
        self.down = Linear(inner, size, has_bias=spec.has_bias, context=context.at("down"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply to x [T, D]."""
        if self._is_fused:
            inner = self.gate_up(x)
        elif self._is_gated:
            assert self._activation in ("gelu", "gelu_tanh"), "others are fused, or not gated"
            inner = self._kernels.gated_gelu(self.gate_up(x), self._activation)
        else:
            assert self.up is not None, "one of both"
            inner = self._activated(self.up(x))
        down: torch.Tensor = self.down(inner)
        return down

    def _activated(self, x: torch.Tensor) -> torch.Tensor:
        if self._activation == "relu":
            return x.clamp(min=0.0)
        assert self._activation != "silu", "gated only"
        return self._kernels.gelu(x, self._activation)


class EncoderLayer(nn.Module):
    """Two branches around one residual stream, with norms where the family has them."""

    def __init__(self, model: "EncoderModel", layer: int) -> None:
        super().__init__()
        config, context = model.config, model.context
        assert config.encoder is not None, "an encoder"
        self._norms = config.norms
        self._has_first_norm = layer > 0 or config.encoder.has_first_norm
        self.attention, self.mlp = EncoderAttention(config, layer, context), EncoderMLP(config, layer, context)
        if self._has_first_norm:
            self.attention_norm = model.build_encoder_norm()
        self.mlp_norm = model.build_encoder_norm()
        if config.norms == "around":
            self.post_attention_norm, self.post_mlp_norm = (model.build_encoder_norm() for _ in range(2))

    def forward(self, x: torch.Tensor, step: EncoderStep) -> torch.Tensor:
        """Apply to x [T, D]."""
        if self._norms == "after":
            x, _ = self.attention_norm.add(self.attention(x, step), x)
            after, _ = self.mlp_norm.add(self.mlp(x), x)
            return after
        branch = self.attention(self.attention_norm(x) if self._has_first_norm else x, step)
        branch = self.post_attention_norm(branch) if self._norms == "around" else branch
        normed, x = self.mlp_norm.add(branch, x)
        branch = self.mlp(normed)
        total: torch.Tensor = x + (self.post_mlp_norm(branch) if self._norms == "around" else branch)
        return total


class EncoderModel(CausalLM):
    """Any of the encoders. It has no logits head: its answers are pooled."""

    def __init__(self, config: ModelConfig, context: BuildContext) -> None:
        nn.Module.__init__(self)  # parts of decoders are not built
        encoder, size = config.encoder, config.hidden_size
        assert encoder is not None, "an encoder"
        if context.stage is not None and not context.stage.is_whole:
            raise UnsupportedModelError(f"{config.model}: encoders have one pipeline stage: pipeline_parallel_size=1")
        self.config, self.family = config, families.FAMILIES[config.architecture]
        self.stage, self.mapped_bytes = Stage.whole(config.num_layers), 0
        self.activation, self.logits_soft_cap = Activation(), None
        self.embedding_scale = config.embedding_scale
        if self.embedding_scale is not None:
            self.embedding_scale = torch.tensor(self.embedding_scale, dtype=context.dtype).item()
        names = {target: name for name, target in self.weight_names.items()}
        self.context = context = replace(context, checkpoint_names=names)
        self.rotary = nn.ModuleList(self.build_rotary_tables())
        self.embedding = Embedding(config.vocab_size, size, context=context)
        if encoder.has_positions:
            self.positions = PositionTable(encoder, size, context=context)
        if encoder.num_token_types:
            self.token_types = PlainWeight(encoder.num_token_types, size, context=context)
        if encoder.has_embedding_norm:
            self.embedding_norm = self.build_encoder_norm()
        self.layers = nn.ModuleDict({str(layer): EncoderLayer(self, layer) for layer in range(config.num_layers)})
        if encoder.has_final_norm:
            self.last_norm = self.build_encoder_norm()
        self.dense_steps = nn.ModuleList(self.build_dense_steps())

    def build_encoder_norm(self) -> RMSNorm:
        """Make a norm over the hidden size."""
        encoder, size = self.config.encoder, self.config.hidden_size
        assert encoder is not None, "an encoder"
        if encoder.norm == "rms":
            return RMSNorm(size, encoder.norm_eps, context=self.context, offset=self.config.norm_offset)
        return CenteredNorm(size, encoder.norm_eps, context=self.context, has_bias=encoder.has_norm_bias)

    @property
    def recording_obstacle(self) -> str | None:
        return "an encoder computes each prompt in one step"

    def name_in_table(self, name: str) -> str:
        found = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
        stem, _, last = name.removeprefix(found).rpartition(".")
        if stem.startswith("layers."):  # as in GGUF files
            stem = self._layers_name + stem.removeprefix("layers.")
        return f"{stem}.{_OLD_NAMES.get(last, last)}"

    @property
    def _layers_name(self) -> str:
        """What the table's names of layers begin with."""
        return next(name for name in self.weight_names if "{layer}" in name).partition("{layer}")[0]

    def ignores_weight(self, name: str) -> bool:
        return name.startswith(_LEFT_OUT) or super().ignores_weight(name)

    @property
    def weight_targets(self) -> Mapping[str, str]:
        return {**self.weight_names, **self.dense_names}

    @property
    def twins(self) -> Mapping[str, str]:
        return {}

    def embed(self, batch: ForwardBatch) -> torch.Tensor:
        x: torch.Tensor = self.embedding(batch.input_ids)
        encoder = self.config.encoder
        assert encoder is not None, "an encoder"
        if self.embedding_scale is not None:
            x = x * self.embedding_scale
        if encoder.num_token_types:
            kinds = batch.token_types
            if kinds is None or encoder.num_token_types == 1:
                x = x + self.token_types.weight[0]
            else:
                x = x + self.token_types.weight.index_select(0, kinds)
        if encoder.has_positions:
            x = x + self.positions.weight.index_select(0, batch.positions)
        return self.embedding_norm(x) if encoder.has_embedding_norm else x

    def run_stage(
        self, batch: ForwardBatch, kv_caches: Sequence[LayerCache], incoming: IntermediateTensors | None
    ) -> IntermediateTensors:
        """Compute the step's hidden states [W, D]; every request's prompt is in it whole."""
        lengths = [end - start for start, end in pairwise(batch.query_start_loc_list)]
        of_segments = self.context.attention.of_segments
        segments: dict[int | None, EncoderSegments] = {
            number: of_segments(lengths, table(batch.positions)) for number, table in enumerate(self.rotary)
        }
        step = EncoderStep(segments=segments or {None: of_segments(lengths, None)})
        x = self.embed(batch)
        for layer in self.layers.values():
            x = layer(x, step)
        if batch.kept_indices is not None:
            x = x.index_select(0, batch.kept_indices)
        encoder = self.config.encoder
        assert encoder is not None, "an encoder"
        if encoder.has_final_norm:
            x = self.last_norm(x)
        return IntermediateTensors(x, x)
