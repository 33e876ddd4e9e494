"""What the worker and the loader expect of a model.

Legend: T = tokens of the step, L = rows that get logits, D = hidden size, V = vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import nn

from octavo.attention.metadata import ForwardBatch, LayerKVCache
from octavo.config.model import ModelConfig
from octavo.distributed.shares import HeadShare
from octavo.layers.attention import AttentionStep
from octavo.layers.context import BuildContext


class CausalLM(nn.Module, ABC):
    """A decoder-only language model over paged key/value memory. It holds no state of any request.

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

    @property
    def num_layers(self) -> int:
        return self.config.num_layers

    @property
    def num_experts(self) -> int:
        return self.config.moe.num_experts if self.config.moe else 0

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

    def forward(self, batch: ForwardBatch, kv_caches: list[LayerKVCache]) -> torch.Tensor:
        """Compute the step's hidden states [T, D], writing its keys and values to the caches, one per layer."""
        return self.run_layers(self.embed(batch), kv_caches, self.attention_step(batch))

    @abstractmethod
    def embed(self, batch: ForwardBatch) -> torch.Tensor:
        """Look the step's tokens up: [T, D]."""

    @abstractmethod
    def attention_step(self, batch: ForwardBatch) -> AttentionStep:
        """Derive from the batch what all layers share."""

    @abstractmethod
    def run_layers(self, x: torch.Tensor, kv_caches: list[LayerKVCache], step: AttentionStep) -> torch.Tensor:
        """Map embedded tokens [T, D] to hidden states [T, D]. Only tensors of the step go in, so it can be recorded."""

    @abstractmethod
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map hidden states [L, D] to logits [L, V] float32; in slices when L is large."""
