"""The interface of vision towers: from the patches of images to embeddings for the language model.

Images of a step are computed together where an op is batch-invariant (linears, norms) and one by one elsewhere
(attention, exact GELU), so that an image's embeddings have the same bits in any batch.

Legend: P = patches of all images, C = values of a patch, N = tokens of an image, D = the language model's hidden size.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from octavo.config.vision import VisionConfig
from octavo.layers.context import BuildContext
from octavo.layers.quant.base import QuantizedAtLoad
from octavo.models.vision_grid import Grid


class VisionTower(nn.Module, ABC):
    """A tower, including the projection of its output to the language model's size."""

    def __init__(self, config: VisionConfig, context: BuildContext) -> None:
        """Build without weights. They stay dense: quantized checkpoints leave towers as they are, too."""
        super().__init__()
        self.config = config
        self.context = replace(context, schemes=QuantizedAtLoad()).at("vision")

    @classmethod
    @abstractmethod
    def weight_names(cls, config: VisionConfig) -> dict[str, str]:
        """Return the names of all weights in the checkpoint, and their places in the tower."""

    @classmethod
    def ignored_weights(cls, config: VisionConfig) -> tuple[str, ...]:
        """Return the prefixes of tensors in checkpoints that the tower does not use."""
        return ()

    @abstractmethod
    def forward(self, patches: torch.Tensor, grids: Sequence[Grid]) -> list[torch.Tensor]:
        """Return each image's embeddings [N, D * outputs], outputs being `VisionConfig.num_outputs`.

        `patches` [P, C] are those of all images in the order of the processor.
        """


def names_under(name: str, place: str, table: Mapping[str, str]) -> dict[str, str]:
    """Return a table of names and places with a prefix on either side."""
    return {f"{name}.{inner}": f"{place}.{target}" for inner, target in table.items()}
