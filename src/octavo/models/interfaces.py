"""`CausalLM`: a model as the worker and the loader see it, and how the decoder family computes.

Legend: T = tokens of the step, W = tokens kept after the last layer's attention (see `ForwardBatch`), L = rows that get
logits, D = hidden size, V = vocabulary.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from octavo.attention.metadata import AttentionMetadata, ForwardBatch, LayerCache
from octavo.config import families
from octavo.config.family import NameTable
from octavo.config.layers import AttentionSpec, DenseSpec, ExpertsSpec
from octavo.config.model import ModelConfig
from octavo.config.parallel import Stage
from octavo.distributed.groups import HeadShare
from octavo.kernels.reference import hyperbolic_tangent
from octavo.kernels.types import Activation
from octavo.layers.context import BuildContext
from octavo.layers.moe import ExpertParallelMoE, MixtureOfExperts
from octavo.layers.norm import CenteredNorm, NoNorm, RMSNorm
from octavo.layers.plain_mlp import PlainMLP
from octavo.layers.pooled import PooledStep
from octavo.layers.quant.base import QuantizedAtLoad
from octavo.layers.rotary import RotaryEmbedding
from octavo.layers.vocabulary import Embedding, LogitsHead
from octavo.models.common import (
    OF_VISION_MODELS,
    WITHOUT_HEAD,
    DecoderAttention,
    DecoderLayer,
    GatedMLP,
)
from octavo.models.mixers import build_mixer
from octavo.models.parts import ParallelLayer

if TYPE_CHECKING:
    from octavo.models.vision import VisionTower


@dataclass(frozen=True, slots=True)
class IntermediateTensors:
    """A stage's output. After the final norm, `hidden` is the input of the logits head, and T is W."""

    hidden: torch.Tensor  # [T, D] the last branch's output, not added yet
    residual: torch.Tensor  # [T, D] the residual stream without it
    aux: tuple[torch.Tensor, ...] = ()  # [T, D] each: the residual stream before each of `BuildContext.aux_layers`


class CausalLM(nn.Module):
    """A decoder-only language model over a paged KV cache, or one stage of it. It holds no per-request state.

    It computes whatever its layers' specs say; models override the method that builds a part where they differ. With
    pipeline parallelism, only the stage of `context` is built; layers keep the model's numbers.

    `weight_names`, from the family, maps names in a checkpoint to layers of the model, with "{layer}" for each layer's
    number, "{expert}" for each expert's, and ":q" for one part of a merged layer. Both sides omit suffixes (".weight",
    ".bias"). An entry applies to the layers that have such a part. `other_spellings` are alternative full names of
    checkpoint tensors: each maps to the full names in the table whose rows [N, K] it concatenates; if those contain
    "{expert}", it is a stack [experts, N, K]. `ignored_weights` are the suffixes of tensors that files may contain but
    that are computed here instead.
    """

    # Of checkpoint names: to those of the table.
    renamed_prefixes: ClassVar[Mapping[str, str]] = MappingProxyType({**WITHOUT_HEAD, **OF_VISION_MODELS})
    # Layers that adapters can change, by their paths in `weight_names`; those of experts only get slots on request.
    adapted_layers: ClassVar[frozenset[str]] = frozenset(
        {
            *(f"layers.{{layer}}.attention.{part}" for part in ("qkv", "out")),
            *(f"layers.{{layer}}.mlp.{part}" for part in ("gate_up", "up", "down")),
            *("embedding", "logits_head"),
        }
    )
    adapted_experts: ClassVar[frozenset[str]] = frozenset(
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
        super().__init__()
        self.config, self.family = config, families.FAMILIES[config.architecture]
        self.activation = Activation(config.activation)  # of MLPs and experts
        self.embedding_scale, self.logits_soft_cap = config.embedding_scale, config.logits_soft_cap
        if self.embedding_scale is not None and config.rounds_embedding_scale:
            self.embedding_scale = torch.tensor(self.embedding_scale, dtype=context.dtype).item()
        names = {target: name for name, target in self.weight_names.items()}
        self.context = replace(context, checkpoint_names=names)
        self.mapped_bytes = 0  # of weights in a mapped file: the OS counts this memory as free, but it is in use
        self.stage = context.stage or Stage.whole(config.num_layers)
        stage, context = self.stage, self.context
        self.rotary = nn.ModuleList(self.build_rotary_tables())
        if stage.is_first:
            has_tied_head = config.tie_word_embeddings and stage.is_last
            self.embedding = Embedding(
                config.vocab_size, config.hidden_size, context=context, has_tied_head=has_tied_head
            )
        self.layers = nn.ModuleDict({str(layer): self.build_layer(layer) for layer in stage.layers})
        if stage.is_last:
            self.norm = self.build_last_norm()
            tied_to = self.embedding if config.tie_word_embeddings and stage.is_first else None
            head = context.at("logits_head")
            has_bias = self.family.has_head_bias
            self.logits_head = LogitsHead(
                config.hidden_size, config.vocab_size, tied_to=tied_to, context=head, has_bias=has_bias
            )
        self.dense_steps = nn.ModuleList(self.build_dense_steps())

    @property
    def weight_names(self) -> NameTable:
        """The names in checkpoints, and the places of what they name."""
        return self.family.weight_names

    @property
    def other_spellings(self) -> Mapping[str, tuple[str, ...]]:
        return self.family.other_spellings

    @property
    def input_size(self) -> int:
        """Elements of a token that enter the first layer."""
        return self.config.hidden_size

    @property
    def split_tensors(self) -> Mapping[str, tuple[str, ...]]:
        """Like `other_spellings`, but full names without placeholders, in addition to them."""
        return {}

    @property
    def encoder(self) -> "VisionTower | None":
        """The vision tower; None: the model has none, or not on this stage."""
        return None

    @property
    def num_experts(self) -> int:
        return self.config.experts.num_experts if self.config.experts else 0

    @property
    def recording_obstacle(self) -> str | None:
        """Return why `run_layers` cannot be recorded as native calls; None if it can.

        A layer that cannot be recorded sets `is_recordable = False`.
        """
        for part in (self.context.kernels, self.context.attention):
            if not part.records_calls:
                return f"{part.name} cannot be recorded"
        if not self.context.groups.tensor.is_recordable:
            return "all-reduce is not a native call"
        for name, layer in self.named_modules():
            if not getattr(layer, "is_recordable", True):
                return f"{type(layer).__name__} ({name}) cannot be recorded"
        return None

    @property
    def heads(self) -> HeadShare:
        """The attention heads of this rank, in the first layer that attends."""
        return self._heads_of(self.config.attending[0])

    @property
    def group_sizes(self) -> tuple[int, ...]:
        """Query heads per kv head, for each KV group whose layers attend; the order is that of the groups."""
        by_group: dict[int, int] = {}
        for spec in self.config.attending:
            by_group.setdefault(self.config.kv_group_of_mixer(spec), self._heads_of(spec).group_size)
        return tuple(by_group[group] for group in sorted(by_group))

    def _heads_of(self, spec: AttentionSpec) -> HeadShare:
        group = self.context.groups.tensor
        return HeadShare.of(spec.num_heads, spec.num_kv_heads, group.rank, group.size)

    def name_in_table(self, name: str) -> str:
        """Return the name that the table has for a name in a checkpoint."""
        for prefix, known in self.renamed_prefixes.items():
            if name.startswith(prefix):
                return known + name.removeprefix(prefix)
        return name

    def ignores_weight(self, name: str) -> bool:
        """Return whether a checkpoint may contain this tensor although the model does not use it."""
        return name.endswith(self.ignored_weights) or self.leaves_out(name)

    def leaves_out(self, name: str) -> bool:
        """Return whether a checkpoint's tensor is of a tower that is not computed, or of a head that drafts."""
        name = self.name_in_table(name)
        number = name.removeprefix("model.layers.").partition(".")[0]
        is_behind = name.startswith("model.layers.") and number.isdigit() and int(number) >= self.config.num_layers
        has_further = self.family.mtp is not None or self.family.leaves_out_further_layers
        return name.startswith(self.family.left_out) or (has_further and is_behind)

    def forward(self, batch: ForwardBatch, kv_caches: Sequence[LayerCache]) -> torch.Tensor:
        """Compute the step's hidden states [W, D], writing its keys and values to the caches, one per layer."""
        return self.run_stage(batch, kv_caches, None).hidden

    def run_stage(
        self, batch: ForwardBatch, kv_caches: Sequence[LayerCache], incoming: IntermediateTensors | None
    ) -> IntermediateTensors:
        """Run this stage's part of a step. The first stage embeds its tokens, every other one gets `incoming`."""
        step = self.attention_step(batch)
        if incoming is None:
            return self.run_layers(self.embed(batch), None, kv_caches, step)
        return self.run_layers(incoming.hidden, incoming.residual, kv_caches, step)

    @property
    def weight_targets(self) -> Mapping[str, str]:
        """The table as it applies to this stage; it may include entries of other stages.

        A tied head on another stage than the embedding loads the table itself.
        """
        names = {**self.weight_names, **self.dense_names}
        if not self.config.tie_word_embeddings:
            return names
        others = {name: target for name, target in names.items() if target != "logits_head"}
        return others if self.stage.is_first else {**others, self._name_at("embedding"): "logits_head"}

    def _name_at(self, place: str) -> str:
        return next(name for name, target in self.weight_names.items() if target == place)

    @property
    def dense_names(self) -> NameTable:
        """The names of what pooled vectors go through, and its places."""
        names: dict[str, str] = {}
        for at, step in enumerate(self.config.pooling.dense):
            names[step.name] = f"dense_steps.{at}.linear"
            if step.norm_name:
                names[step.norm_name] = f"dense_steps.{at}.norm"
        return names

    @property
    def parts_on_other_ranks(self) -> frozenset[str]:
        """Parts before and after the layers that are on another stage, by their names in the table."""
        before = () if self.stage.is_first else ("embedding",)
        behind = ("norm", "logits_head", *self.dense_names.values())
        return frozenset(before if self.stage.is_last else (*before, *behind))

    @property
    def bytes_in_file(self) -> int:
        """Size of weights that are read from their file on lookup and take no memory."""
        return self.embedding.bytes_in_file if self.stage.is_first else 0

    def build_layer(self, layer: int) -> nn.Module:
        where = self.config.norms
        if where == "shared":
            attention, mlp = self.build_attention(layer), self.build_feed_forward(layer)
            assert isinstance(attention, DecoderAttention), "the mixer attends"
            assert isinstance(mlp, GatedMLP | PlainMLP), "an MLP is behind it"
            return ParallelLayer(self.build_norm(), attention, mlp, context=self.context)
        before = [self.build_norm() if where != "after" else NoNorm(context=self.context) for _ in range(2)]
        behind = None if where == "before" else (self.build_post_norm(), self.build_post_norm())
        return DecoderLayer(
            *(before[0], self.build_attention(layer), before[1], self.build_feed_forward(layer), behind),
            kernels=self.context.kernels,
            residual_scale=self.config.residual_scale,
        )

    def build_dense_steps(self) -> list[PooledStep]:
        """Make the linears that a pooled vector goes through."""
        context = replace(self.context, schemes=QuantizedAtLoad()).at("dense_steps")
        steps = self.config.pooling.dense if self.stage.is_last else ()
        return [PooledStep(step, context.at(str(at))) for at, step in enumerate(steps)]

    def build_rotary_tables(self) -> list[RotaryEmbedding]:
        """Make the tables by which layers rotate queries and keys; each names its own: `AttentionLayer.rotary`."""
        size, device = self.config.max_model_len, self.context.device
        return [RotaryEmbedding(table.rope, table.width, size, device=device) for table in self.config.rotary]

    def build_norm(self) -> RMSNorm:
        size, eps, kind = self.config.hidden_size, self.config.rms_norm_eps, self.config.norm_kind
        if kind != "rms":
            has_bias = kind == "centered_with_bias"
            return CenteredNorm(size, eps, context=self.context, offset=self.config.norm_offset, has_bias=has_bias)
        return RMSNorm(size, eps, context=self.context, offset=self.config.norm_offset)

    def build_post_norm(self) -> RMSNorm:
        """Make a norm behind a branch."""
        size, eps = self.config.hidden_size, self.config.post_norm_eps
        if eps is None:
            return self.build_norm()
        return RMSNorm(size, eps, context=self.context, offset=self.config.norm_offset)

    def build_last_norm(self) -> RMSNorm:
        """Make the norm behind the last layer."""
        return self.build_norm()

    def build_attention(self, layer: int) -> nn.Module:
        return build_mixer(self.config, layer, self.context)

    def build_feed_forward(self, layer: int) -> nn.Module:
        spec = self.config.layers[layer].feed_forward
        if isinstance(spec, DenseSpec):
            return self.build_mlp(layer, spec) if self.activation.is_gated else self.build_plain_mlp(layer, spec)
        assert isinstance(spec, ExpertsSpec), f"layer {layer} has nothing behind its mixer"
        mixture = ExpertParallelMoE if self.context.groups.experts.size > 1 else MixtureOfExperts
        limit, activation = spec.swiglu_limit, self.activation
        if limit is not None:
            activation = Activation("clamped_swiglu", limit=limit, alpha=spec.swiglu_alpha)
        return mixture(layer, self.config.hidden_size, spec, activation, context=self.context)

    def build_mlp(self, layer: int, spec: DenseSpec) -> GatedMLP:
        """Make the MLP of an activation with a gate."""
        context, size = self.context.at(f"layers.{layer}.mlp"), self.config.hidden_size
        inner, has_bias = spec.intermediate_size, spec.has_bias
        return GatedMLP(size, inner, has_bias=has_bias, context=context, activation=self.activation)

    def build_plain_mlp(self, layer: int, spec: DenseSpec) -> PlainMLP:
        """Make the MLP of an activation without one."""
        context, size = self.context.at(f"layers.{layer}.mlp"), self.config.hidden_size
        inner, has_bias = spec.intermediate_size, spec.has_bias
        return PlainMLP(size, inner, has_bias=has_bias, context=context, activation=self.activation)

    def embed(self, batch: ForwardBatch) -> torch.Tensor:
        """Embed the step's tokens: [T, D]. First stage only."""
        x: torch.Tensor = self.embedding(batch.input_ids, batch.adapter_ids)
        if self.embedding_scale is not None:
            x = x * self.embedding_scale
        return x if batch.inputs_embeds is None else batch.inputs_embeds.put_into(x)

    def attention_step(self, batch: ForwardBatch) -> AttentionMetadata:
        """Derive from the batch what all layers share."""
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
        """Run x [T, D] and the residual stream [T, D] through this stage's layers, and the last stage's final norm.

        It depends only on tensors of the step, so it can be recorded. On the first stage there is no residual yet.
        """
        aux: list[torch.Tensor] = []
        caches = self._caches_of_layers(kv_caches)
        for number, layer, kv_cache in zip(self.stage.layers, self.layers.values(), caches, strict=True):
            if number in self.context.aux_layers:
                aux.append(x if residual is None else self.norm.add(x, residual)[1])
            x, residual = layer(x, residual, kv_cache, step)
        assert residual is not None, "a stage has layers"
        if self.stage.is_last:
            x, residual = self.norm.add(x, residual)
        return IntermediateTensors(x, residual, tuple(aux))

    def _caches_of_layers(
        self, kv_caches: Sequence[LayerCache]
    ) -> Iterator[LayerCache | tuple[LayerCache, ...] | None]:
        """Yield the cache of each layer of this stage, or its caches; None: it keeps nothing."""
        left = iter(kv_caches)
        for layer in self.stage.layers:
            own = tuple(next(left) for _ in self.config.layers[layer].mixers)
            yield own[0] if len(own) == 1 else own or None

    def laid_out(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterable[tuple[str, torch.Tensor]]:
        """Hook for families whose checkpoints lay weights out in another way than [N, K]: those of the table."""
        return tensors

    @property
    def twins(self) -> Mapping[str, str]:
        """Tensors that equal another one, by name: a checkpoint has either or both, and the first one is used."""
        head, table = (f"{self._name_at(place)}.weight" for place in ("logits_head", "embedding"))
        return {head: table} if self.config.tie_word_embeddings else {}

    def compute_logits(self, hidden: torch.Tensor, adapter_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the logits [L, V] float32 of hidden states [L, D]; in slices if L is large. Last stage only.

        adapter_ids [L] int64 are the slots of the rows' adapters, -1: none; None: no row has one.
        """
        return self.finish_logits(self.logits_head(hidden, adapter_ids))

    def finish_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Scale and cap logits [L, V], if the model does."""
        cap = self.logits_soft_cap
        if self.config.logits_scale != 1.0:
            logits = logits * self.config.logits_scale
        return logits if cap is None else hyperbolic_tangent(logits / cap) * cap

    def finish_pooled(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return what the checkpoint makes of pooled hidden states [N, D] float32: [N, K] float32. Last stage only."""
        for layer in self.dense_steps:
            vectors = layer(vectors)
        return vectors

    @property
    def distorts_logits(self) -> bool:
        """Whether logits are scaled or capped, which can make distinct ones equal."""
        return self.logits_soft_cap is not None or self.config.logits_scale != 1.0

    def logits_argmax(
        self, hidden: torch.Tensor, adapter_ids: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each row's largest logit [L] and the lowest id that has it [L], without writing out the logits.

        A cap can make distinct logits equal, so with one they are computed in full.
        """
        if self.distorts_logits:
            largest, found = self.compute_logits(hidden, adapter_ids).max(-1)
            return largest, found
        values, ids = self.logits_head.argmax(hidden, adapter_ids)
        return values, self.token_ids_of(ids)

    def token_ids_of(self, ids: torch.Tensor) -> torch.Tensor:
        """Hook for models whose logits head has a vocabulary of its own: the tokens [L] of its ids [L]."""
        return ids
