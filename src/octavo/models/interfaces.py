"""What the worker and the loader expect of a model.

Legend: T = tokens of the step, W = tokens kept behind the last layer's attention (see `ForwardBatch`), L = rows that
get logits, D = hidden size, V = vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import nn

from octavo.attention.metadata import ForwardBatch, LayerCache
from octavo.config.model import ModelConfig
from octavo.config.parallel import Stage
from octavo.distributed.shares import HeadShare
from octavo.layers.attention import AttentionMetadata
from octavo.layers.context import BuildContext


@dataclass(frozen=True, slots=True)
class IntermediateTensors:
    """What a stage hands to the next. Behind the last norm, `hidden` is what logits are made of, and T is W."""

    hidden: torch.Tensor  # [T, D] what the last branch adds to the stream
    residual: torch.Tensor  # [T, D] the stream without it


class CausalLM(nn.Module, ABC):
    """A decoder-only language model over paged key/value memory, or one stage of it. It holds no state of any request.

    `weight_names` is the table from names in a checkpoint to layers of the model, "{layer}" standing for each layer's
    number, "{expert}" for each expert's, and ":q" for one part of a merged layer. Both sides are without the ending
    (".weight", ".bias"). A row applies to those layers that have such a part.
    `other_spellings` are whole names under which a checkpoint may bring the same: each as the names in the table, with
    their endings, that its rows [N, K] belong to one after the other; where they have "{expert}", it is a stack
    [experts, N, K].
    `ignored_weights` are the endings of tensors that files may carry and that are computed here instead.
    """

    weight_names: ClassVar[Mapping[str, str]]
    other_spellings: ClassVar[Mapping[str, tuple[str, ...]]] = MappingProxyType({})
    ignored_weights: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: ModelConfig, context: BuildContext) -> None:
        super().__init__()
        self.config, self.context = config, context
        self.mapped_bytes = 0  # of weights in a mapped file: the system calls their memory free, and it is not
        self.stage = context.stage or Stage.whole(config.num_layers)

    @property
    def num_layers(self) -> int:
        """Of this stage."""
        return len(self.stage.layers)

    @property
    def bytes_in_file(self) -> int:
        """Of weights that are read when they are asked for, and take no memory."""
        return 0

    @property
    def weight_targets(self) -> Mapping[str, str]:
        """The table as it holds for this stage; rows of other stages may stand in it."""
        return self.weight_names

    @property
    def parts_on_other_ranks(self) -> frozenset[str]:
        """Parts before and behind the layers that are on another stage, as the table names them."""
        return frozenset()

    @property
    def num_experts(self) -> int:
        return self.config.moe.num_experts if self.config.moe else 0

    @property
    def recording_obstacle(self) -> str | None:
        """Say why `run_layers` cannot be recorded as native calls; None where it can.

        A layer says so of itself: `is_recordable = False`.
        """
        for part in (self.context.kernels, self.context.attention):
            if not part.records_calls:
                return f"{part.name} cannot be recorded"
        if not self.context.groups.tensor.is_recordable:
            return "sums over ranks are not native calls"
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
        """Say whether a checkpoint may carry this tensor although the model has no place for it."""
        return name.endswith(self.ignored_weights)

    def forward(self, batch: ForwardBatch, kv_caches: Sequence[LayerCache]) -> torch.Tensor:
        """Compute the step's hidden states [W, D], writing its keys and values to the caches, one per layer."""
        return self.run_stage(batch, kv_caches, None).hidden

    def run_stage(
        self, batch: ForwardBatch, kv_caches: Sequence[LayerCache], incoming: IntermediateTensors | None
    ) -> IntermediateTensors:
        """Do this stage's part of a step. The first stage looks its tokens up, every other one gets `incoming`."""
        step = self.attention_step(batch)
        if incoming is None:
            return self.run_layers(self.embed(batch), None, kv_caches, step)
        return self.run_layers(incoming.hidden, incoming.residual, kv_caches, step)

    @abstractmethod
    def embed(self, batch: ForwardBatch) -> torch.Tensor:
        """Look the step's tokens up: [T, D]. Only on the first stage."""

    @abstractmethod
    def attention_step(self, batch: ForwardBatch) -> AttentionMetadata:
        """Derive from the batch what all layers share."""

    @abstractmethod
    def run_layers(
        self, x: torch.Tensor, residual: torch.Tensor | None, kv_caches: Sequence[LayerCache], step: AttentionMetadata
    ) -> IntermediateTensors:
        """Run x [T, D], and the stream without it [T, D], through this stage's layers, and the last norm if it is here.

        Only tensors of the step go in, so it can be recorded. On the first stage there is no stream yet.
        """

    @abstractmethod
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map hidden states [L, D] to logits [L, V] float32; in slices when L is large. Only on the last stage."""

    def logits_argmax(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return each row's largest logit [L] and the lowest id that has it [L]: less work, where that is enough."""
        values, ids = self.compute_logits(hidden).max(-1)
        return values, ids
