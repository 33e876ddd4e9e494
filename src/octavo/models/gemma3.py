"""Gemma 3 (Gemma Team 2025, arXiv:2503.19786) with images: SigLIP, whose patches are averaged square by square.

Legend: I = images, U = patches of a token, V = the tower's hidden size, N = tokens of an image.
"""

from collections.abc import Mapping, Sequence

import torch

from octavo.config.model import VisionConfig
from octavo.distributed.groups import Share
from octavo.layers.context import BuildContext
from octavo.layers.linear import MergedLinear
from octavo.layers.norm import RMSNorm
from octavo.layers.quant.base import TensorSpec
from octavo.models.llava import LlavaForConditionalGeneration, VisionTransformer
from octavo.models.vision import VisionLanguageModel

_WEIGHT = "mm_input_projection_weight"


class TransposedLinear(MergedLinear):
    """A linear without bias whose weight checkpoints hold as [inputs, outputs]."""

    def __init__(self, in_size: int, out_size: int, *, context: BuildContext) -> None:
        super().__init__(Share.whole(in_size), {"": Share.whole(out_size)}, has_bias=False, context=context)

    def checkpoint_tensors(self) -> dict[str, TensorSpec]:
        [outputs] = self.parts.values()
        return {_WEIGHT: TensorSpec((self.inputs.total, outputs.total))}

    def load_weight(self, name: str, tensor: torch.Tensor) -> None:
        super().load_weight("weight", tensor.T)

    def shard_of(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return super().shard_of({"weight": tensors[_WEIGHT].T})


class Gemma3VisionTower(VisionTransformer):
    """A token is the mean of a square of patches, normalized."""

    def __init__(self, config: VisionConfig, context: BuildContext) -> None:
        super().__init__(config, context)
        size, context = config.hidden_size, self.context
        self.last_norm = self.build_norm()
        self.token_norm = RMSNorm(size, config.norm_eps, context=context, offset=1.0)
        self.projection = TransposedLinear(size, config.out_hidden_size, context=context.at("projection"))

    @classmethod
    def weight_names(cls, config: VisionConfig) -> dict[str, str]:
        return super().weight_names(config) | {
            "vision_tower.post_layernorm": "last_norm",
            "multi_modal_projector": "projection",
            "multi_modal_projector.mm_soft_emb_norm": "token_norm",
        }

    def project(self, features: Sequence[torch.Tensor]) -> torch.Tensor:
        [x] = features
        patches = self.last_norm(x).unflatten(1, (-1, self.config.merge_unit)).unbind(2)  # U of [I, N, V]
        # Added in order: the bits of torch's own mean may depend on the number of images.
        mean = sum(patches[1:], start=patches[0]) / self.config.merge_unit
        projected: torch.Tensor = self.projection(self.token_norm(mean).flatten(0, 1))
        return projected.view(*mean.shape[:2], -1)


class Gemma3ForConditionalGeneration(VisionLanguageModel):
    """The decoder is that of the text model; an image's tokens attend to each other."""

    tower = Gemma3VisionTower
    renamed_prefixes = LlavaForConditionalGeneration.renamed_prefixes
