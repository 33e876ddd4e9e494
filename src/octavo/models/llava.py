"""LLaVA (Liu et al. 2023, arXiv:2310.03744): a CLIP or SigLIP tower, two linears, and a Llama, Mistral or Qwen2.

Legend: I = images, V = the tower's hidden size.
"""

from collections.abc import Sequence
from types import MappingProxyType

import torch
from torch.nn.functional import gelu

from octavo.config.vision import VisionConfig
from octavo.distributed.shares import Share
from octavo.layers.context import BuildContext
from octavo.layers.linear import Linear, MergedLinear
from octavo.models.common import OF_VISION_MODELS
from octavo.models.vision_language import VisionLanguageModel
from octavo.models.vision_transformer import VisionTransformer


class LlavaTower(VisionTransformer):
    """Each patch becomes a token, computed from its features after one or several blocks."""

    def __init__(self, config: VisionConfig, context: BuildContext) -> None:
        super().__init__(config, context)
        group, context, has_bias = self.context.groups.tensor, self.context.at("projector"), config.projector_has_bias
        size = config.hidden_size * len(config.feature_depths)
        inner = Share.of_features(config.out_hidden_size, group.rank, group.size)
        self.up = MergedLinear(Share.whole(size), {"": inner}, has_bias=has_bias, context=context.at("up"))
        self.down = Linear(inner, config.out_hidden_size, has_bias=has_bias, context=context.at("down"))

    @classmethod
    def weight_names(cls, config: VisionConfig) -> dict[str, str]:
        """See `VisionTower.weight_names`."""
        projector = {"multi_modal_projector.linear_1": "up", "multi_modal_projector.linear_2": "down"}
        return super().weight_names(config) | projector

    def project(self, features: Sequence[torch.Tensor]) -> torch.Tensor:
        """See `VisionTransformer.project`."""
        x = torch.cat(list(features), dim=-1)  # [I, L, V * features]
        if self.config.class_token == "internal":
            x = x[:, 1:]
        num_images, num_tokens, size = x.shape
        inner = self.up(x.reshape(-1, size)).view(num_images, num_tokens, -1)
        # torch's erf computes the tail of a range with other instructions: each image is a range of its own.
        activated = torch.stack([gelu(of_image) for of_image in inner.unbind()])
        down: torch.Tensor = self.down(activated.flatten(0, 1))
        return down.view(num_images, num_tokens, -1)


class LlavaForConditionalGeneration(VisionLanguageModel):
    """The decoder is the family's own; `text_config` says what differs: biases, windows."""

    tower = LlavaTower
    renamed_prefixes = MappingProxyType(
        {
            **OF_VISION_MODELS,
            "vision_tower.vision_model.": "vision_tower.",
            "model.vision_tower.vision_model.": "vision_tower.",
            "model.vision_tower.": "vision_tower.",
            "model.multi_modal_projector.": "multi_modal_projector.",
        }
    )
