"""MTP heads: a layer like those of the model that drafts from a token's embedding and the state before it.

The state is the model's after its final norm, which is what the logits head reads, and then the head's own after its
norm: with those before the norm, drafts look as good, and fewer are accepted. Embedding and logits head are the
model's, unless the checkpoint has others.

Legend: T = tokens, D = hidden size, L = rows that get logits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.attention.metadata import AttentionMetadata, LayerCache
from octavo.config import families
from octavo.config.family import NameTable
from octavo.config.model import ModelConfig
from octavo.config.mtp import MtpConfig
from octavo.config.parallel import Stage
from octavo.distributed.groups import Share
from octavo.kernels.quantization import WeightFormat
from octavo.kernels.types import LinearRole
from octavo.layers.context import BuildContext
from octavo.layers.linear import Linear
from octavo.layers.quant.base import DENSE, Schemes, WeightScheme
from octavo.layers.vocabulary import Embedding
from octavo.models.draft_head import DraftHead
from octavo.models.interfaces import CausalLM, IntermediateTensors
from octavo.models.shortlist import Shortlist

_LAYER = "model.layers.{layer}."


@dataclass(frozen=True, slots=True)
class HeadSchemes:
    """The schemes of a model's checkpoint, for a head of which some layers are dense."""

    of_model: Schemes
    dense: frozenset[str]

    @property
    def name(self) -> str:
        return self.of_model.name

    @property
    def forms(self) -> frozenset[WeightFormat | None]:
        return self.of_model.forms

    def scheme_of(self, layer: str, role: LinearRole) -> WeightScheme:
        return DENSE if layer in self.dense else self.of_model.scheme_of(layer, role)


class MtpHead(DraftHead):
    """The head that came with a model; its layer attends as the model's layers do."""

    renamed_prefixes = MappingProxyType({"model.mtp.": "mtp.", **CausalLM.renamed_prefixes})

    def __init__(self, config: ModelConfig, mtp: MtpConfig, context: BuildContext) -> None:
        """Call `share` before it computes."""
        family, prefix = families.FAMILIES[config.architecture], f"{mtp.layer}."
        self._mtp = mtp
        self._names = {
            name.replace(_LAYER, prefix): target
            for name, target in family.weight_names.items()
            if name.startswith(_LAYER)
        } | mtp.names
        self._spellings = {
            name.replace(_LAYER, prefix): tuple(part.replace(_LAYER, prefix) for part in parts)
            for name, parts in family.other_spellings.items()
        }
        self._target: tuple[CausalLM, ...] = ()  # in a tuple, or its layers were the head's
        self._shortlist = Shortlist(config.vocab_size)
        stage = Stage(first_layer=0, end_layer=1, is_first=False, is_last=True)
        super().__init__(config, replace(context, stage=stage, schemes=HeadSchemes(context.schemes, mtp.dense)))
        size, context = config.hidden_size, self.context
        self.embedding_norm, self.hidden_norm = self.build_norm(), self.build_norm()
        self.projection = Linear(Share.whole(2 * size), size, has_bias=False, context=context.at("projection"))
        if mtp.has_embedding:
            self.embedding = Embedding(config.vocab_size, size, context=context)
        if not mtp.has_logits_head:
            del self.logits_head

    @property
    def weight_names(self) -> NameTable:
        return self._names

    @property
    def other_spellings(self) -> Mapping[str, tuple[str, ...]]:
        return self._spellings

    @property
    def parts_on_other_ranks(self) -> frozenset[str]:
        own = {"embedding": self._mtp.has_embedding, "logits_head": self._mtp.has_logits_head}
        return frozenset(part for part, is_own in own.items() if not is_own)

    def leaves_out(self, name: str) -> bool:
        """Those of the model are."""
        own = (self._mtp.layer, *self._mtp.names)
        return not self.name_in_table(name).startswith(tuple(f"{each}." for each in own))

    @property
    def num_features(self) -> int:
        return self.config.hidden_size

    def share(self, target: CausalLM) -> None:
        self._target = (target,)

    def states(self, computed: IntermediateTensors) -> Sequence[torch.Tensor]:
        return (computed.hidden,)

    def reduce(self, states: torch.Tensor) -> torch.Tensor:
        return states

    def inputs(self, ids: torch.Tensor, hidden: torch.Tensor) -> IntermediateTensors:
        [target] = self._target
        look_up = self.embedding if self._mtp.has_embedding else target.embedding
        embeddings = look_up(ids)
        if target.embedding_scale is not None:
            embeddings = embeddings * target.embedding_scale
        both = torch.cat((self.embedding_norm(embeddings), self.hidden_norm(hidden)), dim=1)
        x: torch.Tensor = self.projection(both)
        return IntermediateTensors(x, torch.zeros_like(x))

    def run_layers(
        self, x: torch.Tensor, residual: torch.Tensor | None, kv_caches: Sequence[LayerCache], step: AttentionMetadata
    ) -> IntermediateTensors:
        """Run x [T, D]."""
        x, residual = self.layers["0"](x, residual, kv_caches[0], step)
        normed, _ = self.norm.add(x, residual)
        return IntermediateTensors(normed, normed)

    def learn(self, token_ids: NDArray[np.int32]) -> None:
        self._shortlist.observe(token_ids)

    def compute_logits(self, hidden: torch.Tensor, adapter_ids: torch.Tensor | None = None) -> torch.Tensor:
        [target] = self._target
        if self._mtp.has_logits_head:
            return target.finish_logits(self.logits_head(hidden, adapter_ids))
        return target.compute_logits(hidden, adapter_ids)

    def logits_argmax(
        self, hidden: torch.Tensor, adapter_ids: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return those of the shortlist, if there is one."""
        [target] = self._target
        owner, size = self if self._mtp.has_logits_head else target, self._shortlist.size
        if size is not None and not owner.distorts_logits:
            return owner.logits_head.argmax(hidden, adapter_ids, size)
        if owner is self:
            return super().logits_argmax(hidden, adapter_ids)
        return target.logits_argmax(hidden, adapter_ids)
