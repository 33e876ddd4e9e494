"""EAGLE-3 heads (Li et al. 2025, arXiv:2503.01840): one decoder layer that drafts from a model's hidden states.

The model's own states at a few layers, side by side, are reduced to the hidden state that `DraftHead` speaks of.
Attention reads the embedding next to it. The vocabulary of drafts may be a part of the model's.

Legend: T = tokens, W = tokens kept after attention, D = hidden size, F = size of the model's states side by side,
L = rows that get logits, V = vocabulary of drafts.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import nn

from octavo.attention.metadata import AttentionMetadata, LayerCache, LayerKVCache
from octavo.config.eagle3 import EagleConfig
from octavo.config.family import DECODER_NAMES, NameTable
from octavo.config.model import ModelConfig
from octavo.config.parallel import Stage
from octavo.distributed.groups import Share
from octavo.errors import CheckpointError
from octavo.kernels.reference import Kernels
from octavo.layers.context import BuildContext
from octavo.layers.linear import Linear
from octavo.layers.norm import RMSNorm
from octavo.layers.quant.base import TensorSpec
from octavo.layers.vocabulary import Embedding
from octavo.layers.weight_owner import PlainWeights
from octavo.models.common import DecoderAttention
from octavo.models.draft_head import DraftHead
from octavo.models.interfaces import CausalLM, IntermediateTensors

Lookup = Callable[[torch.Tensor], torch.Tensor]  # ids [T] to embeddings [T, D]


class EagleAttention(DecoderAttention):
    """Attention over the normalized embedding and hidden state, side by side."""

    num_inputs = 2


class EagleLayer(nn.Module):
    """The decoder layer. `forward` begins after its first norms, which `inputs` applies."""

    def __init__(
        self, norms: list[RMSNorm], attention: EagleAttention, mlp: nn.Module, kernels: Kernels, *, norms_residual: bool
    ) -> None:
        super().__init__()
        self.embedding_norm, self.hidden_norm, self.mlp_norm = norms
        self.attention, self.mlp = attention, mlp
        self._kernels, self._norms_residual = kernels, norms_residual

    def inputs(self, embeddings: torch.Tensor, hidden: torch.Tensor) -> IntermediateTensors:
        """Return what attention reads [T, 2 D], and the residual stream [T, D]."""
        normed = self.hidden_norm(hidden)
        both = torch.cat((self.embedding_norm(embeddings), normed), dim=1)
        return IntermediateTensors(both, normed if self._norms_residual else hidden)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor, kv_cache: LayerKVCache, step: AttentionMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Given x [T, 2 D] and the residual stream [T, D], return the last branch's output and the stream [W, D]."""
        attention, kept = self.attention, step.batch.kept_indices
        attended = attention.backend.forward(attention.qkv(x), kv_cache, step, attention.layer)
        attended, residual = (self._kernels.kept_rows(rows, kept) for rows in (attended, residual))
        out: tuple[torch.Tensor, torch.Tensor] = self.mlp(self.mlp_norm, attention.out(attended), residual, None)
        return out


class DraftVocabulary(PlainWeights):
    """The model's token for each token of a head: `d2t` has the differences. Without it, they are the same."""

    def __init__(self, size: int, num_tokens: int, *, has_map: bool, context: BuildContext) -> None:
        """`num_tokens` is the size of the model's vocabulary. Random weights have no map."""
        token_ids = torch.arange(size, device=context.device)  # [V] int64
        super().__init__({"ids": token_ids}, context=context)
        self.token_ids, self._num_tokens, self._has_map = token_ids, num_tokens, has_map

    @property
    def is_whole(self) -> bool:
        return len(self.token_ids) == self._num_tokens

    def checkpoint_tensors(self) -> dict[str, TensorSpec]:
        is_required = self._has_map and not self.is_whole
        return {"ids": TensorSpec((len(self.token_ids),), is_integer=True, is_required=is_required)}

    def load_weight(self, name: str, tensor: torch.Tensor) -> None:
        ids = torch.arange(len(tensor)) + tensor.to(torch.int64)
        if not 0 <= int(ids.min()) <= int(ids.max()) < self._num_tokens:
            what = f"tokens {int(ids.min())} to {int(ids.max())}, but the model has {self._num_tokens}"
            raise CheckpointError(f"tensor 'd2t' maps to {what}")
        if len(set(ids.tolist())) < len(ids):
            raise CheckpointError("tensor 'd2t' maps several tokens to one")
        super().load_weight(name, ids)

    @property
    def num_bytes(self) -> int:
        return self.token_ids.nbytes

    @property
    def num_weights(self) -> int:
        return 0


_NAMES = MappingProxyType(
    {
        **{name.removeprefix("model."): target for name, target in DECODER_NAMES.items()},
        "layers.{layer}.input_layernorm": "layers.{layer}.embedding_norm",
        "layers.{layer}.hidden_norm": "layers.{layer}.hidden_norm",
        "fc": "reduction",
        "d2t": "vocabulary",
    }
)


class Eagle3Head(DraftHead):
    """The head. Accepts the names of the original repository and those that converters use."""

    renamed_prefixes = MappingProxyType(
        {
            "model.midlayer.": "layers.0.",
            "midlayer.": "layers.0.",
            "model.d2t": "d2t.ids",
            "d2t": "d2t.ids",
            "model.": "",
        }
    )
    ignored_weights = (*CausalLM.ignored_weights, "t2d")  # the inverse of d2t

    @property
    def weight_names(self) -> NameTable:
        return _NAMES

    def __init__(
        self, config: ModelConfig, eagle: EagleConfig, context: BuildContext, *, has_embedding: bool, has_map: bool
    ) -> None:
        """If it has no embedding of its own, call `share`. `has_map`: see `DraftVocabulary`."""
        self._eagle = eagle
        stage = Stage(first_layer=0, end_layer=1, is_first=False, is_last=True)
        super().__init__(replace(config, vocab_size=eagle.draft_vocab_size), replace(context, stage=stage))
        context = self.context
        if has_embedding:
            self.embedding = Embedding(config.vocab_size, config.hidden_size, context=context)
        features, at = Share.whole(self.num_features), context.at("reduction")
        self.reduction = Linear(features, config.hidden_size, has_bias=False, context=at)
        self.vocabulary = DraftVocabulary(eagle.draft_vocab_size, config.vocab_size, has_map=has_map, context=context)
        self._num_tokens = config.vocab_size
        self._look_up: Lookup | None = self.embedding.forward if has_embedding else None

    @property
    def num_features(self) -> int:
        return self._eagle.target_hidden_size * len(self._eagle.aux_layers)

    def share(self, target: CausalLM) -> None:
        if self._look_up is None:
            self._look_up = target.embedding.forward

    def states(self, computed: IntermediateTensors) -> Sequence[torch.Tensor]:
        return computed.aux

    @property
    def parts_on_other_ranks(self) -> frozenset[str]:
        return frozenset() if hasattr(self, "embedding") else frozenset({"embedding"})

    @property
    def input_size(self) -> int:
        return 2 * self.config.hidden_size

    def build_layer(self, layer: int) -> nn.Module:
        norms, attention = [self.build_norm() for _ in range(3)], EagleAttention(self.config, layer, self.context)
        before, kernels = self._eagle.norm_before_residual, self.context.kernels
        return EagleLayer(norms, attention, self.build_feed_forward(layer), kernels, norms_residual=before)

    def reduce(self, states: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.reduction(states)
        return hidden

    def inputs(self, ids: torch.Tensor, hidden: torch.Tensor) -> IntermediateTensors:
        assert self._look_up is not None, "call share first"
        layer = self.layers["0"]
        assert isinstance(layer, EagleLayer)
        return layer.inputs(self._look_up(ids), hidden)

    def run_layers(
        self, x: torch.Tensor, residual: torch.Tensor | None, kv_caches: Sequence[LayerCache], step: AttentionMetadata
    ) -> IntermediateTensors:
        """Run x [T, 2 D]. The residual stream returned is the hidden state of the next entry."""
        x, residual = self.layers["0"](x, residual, kv_caches[0], step)
        return IntermediateTensors(*self.norm.add(x, residual))

    def finish_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits [L, all tokens] of the model's tokens; -inf for tokens that the head does not have."""
        if self.vocabulary.is_whole:
            return logits
        of_all = logits.new_full((len(logits), self._num_tokens), -torch.inf)
        return of_all.index_copy_(1, self.vocabulary.token_ids, logits)

    def token_ids_of(self, ids: torch.Tensor) -> torch.Tensor:
        return self.vocabulary.token_ids[ids]
