"""The model interface used by the worker and the loader.

Legend: T = tokens of the step, W = tokens kept after the last layer's attention (see `ForwardBatch`), L = rows that get
logits, D = hidden size, V = vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import nn

from octavo.attention.metadata import AttentionMetadata, ForwardBatch, LayerCache
from octavo.config.model import ModelConfig
from octavo.config.parallel import Stage
from octavo.distributed.groups import HeadShare
from octavo.layers.context import BuildContext

if TYPE_CHECKING:
    from octavo.models.vision import VisionTower


@dataclass(frozen=True, slots=True)
class IntermediateTensors:
    """A stage's output. After the final norm, `hidden` is the input of the logits head, and T is W."""

    hidden: torch.Tensor  # [T, D] the last branch's output, not added yet
    residual: torch.Tensor  # [T, D] the residual stream without it
    aux: tuple[torch.Tensor, ...] = ()  # [T, D] each: the residual stream before each of `BuildContext.aux_layers`


class CausalLM(nn.Module, ABC):
    """A decoder-only language model over a paged KV cache, or one stage of it. It holds no per-request state.

    `weight_names` maps names in a checkpoint to layers of the model, with "{layer}" for each layer's number, "{expert}"
    for each expert's, and ":q" for one part of a merged layer. Both sides omit the suffix (".weight", ".bias"). An
    entry applies to the layers that have such a part. `other_spellings` are alternative full names of checkpoint
    tensors: each maps to the full names in the table whose rows [N, K] it concatenates; if those contain "{expert}", it
    is a stack [experts, N, K]. `ignored_weights` are the suffixes of tensors that files may contain but that are
    computed here instead.
    """

    adapted_layers: ClassVar[frozenset[str]] = frozenset()  # paths as in `weight_names` of layers adapters can change
    adapted_experts: ClassVar[frozenset[str]] = frozenset()  # those of experts, which only get slots on request
    takes_adapters: ClassVar[bool] = False  # its layers read `ForwardBatch.adapter_ids`
    weight_names: ClassVar[Mapping[str, str]]
    other_spellings: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType({})
    ignored_weights: ClassVar[tuple[str, ...]] = ()
    renamed_prefixes: ClassVar[Mapping[str, str]] = MappingProxyType({})  # of checkpoint names: to those of the table

    def __init__(self, config: ModelConfig, context: BuildContext) -> None:
        super().__init__()
        names = {target: name for name, target in self.weight_names.items()}
        self.config, self.context = config, replace(context, checkpoint_names=names)
        self.mapped_bytes = 0  # of weights in a mapped file: the OS counts this memory as free, but it is in use
        self.stage = context.stage or Stage.whole(config.num_layers)

    @property
    def num_layers(self) -> int:
        """Of this stage."""
        return len(self.stage.layers)

    @property
    def input_size(self) -> int:
        """Elements of a token that enter the first layer."""
        return self.config.hidden_size

    @property
    def bytes_in_file(self) -> int:
        """Size of weights that are read from their file on lookup and take no memory."""
        return 0

    @property
    def weight_targets(self) -> Mapping[str, str]:
        """The table as it applies to this stage; it may include entries of other stages."""
        return self.weight_names

    @property
    def split_tensors(self) -> Mapping[str, tuple[str, ...]]:
        """Like `other_spellings`, but full names without placeholders, in addition to them."""
        return {}

    @property
    def twins(self) -> Mapping[str, str]:
        """Tensors that equal another one, by name: a checkpoint has either or both, and the first one is used."""
        return {}

    @property
    def encoder(self) -> "VisionTower | None":
        """The vision tower; None: the model has none, or not on this stage."""
        return None

    @property
    def parts_on_other_ranks(self) -> frozenset[str]:
        """Parts before and after the layers that are on another stage, by their names in the table."""
        return frozenset()

    @property
    def num_experts(self) -> int:
        return self.config.moe.num_experts if self.config.moe else 0

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
        """The attention heads of this rank."""
        group = self.context.groups.tensor
        return HeadShare.of(self.config.num_heads, self.config.num_kv_heads, group.rank, group.size)

    @property
    def head_dim(self) -> int:
        return self.config.head_dim

    def ignores_weight(self, name: str) -> bool:
        """Return whether a checkpoint may contain this tensor although the model does not use it."""
        return name.endswith(self.ignored_weights)

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

    @abstractmethod
    def embed(self, batch: ForwardBatch) -> torch.Tensor:
        """Embed the step's tokens: [T, D]. First stage only."""

    @abstractmethod
    def attention_step(self, batch: ForwardBatch) -> AttentionMetadata:
        """Derive from the batch what all layers share."""

    @abstractmethod
    def run_layers(
        self, x: torch.Tensor, residual: torch.Tensor | None, kv_caches: Sequence[LayerCache], step: AttentionMetadata
    ) -> IntermediateTensors:
        """Run x [T, D] and the residual stream [T, D] through this stage's layers, and the final norm on the last
        stage.

        It depends only on tensors of the step, so it can be recorded. On the first stage there is no residual yet.
        """

    @abstractmethod
    def compute_logits(self, hidden: torch.Tensor, adapter_ids: torch.Tensor | None = None) -> torch.Tensor:
        """Compute the logits [L, V] float32 of hidden states [L, D]; in slices if L is large. Last stage only.

        adapter_ids [L] int64 are the slots of the rows' adapters, -1: none; None: no row has one.
        """

    def logits_argmax(
        self, hidden: torch.Tensor, adapter_ids: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each row's largest logit [L] and the lowest id that has it [L], without writing out the logits."""
        values, ids = self.compute_logits(hidden, adapter_ids).max(-1)
        return values, ids
