"""LLaVA (Liu et al. 2023, arXiv:2310.03744), and the plain vision transformers that it and others use as towers.

SigLIP (Zhai et al. 2023, arXiv:2303.15343) and CLIP (Radford et al. 2021, arXiv:2103.00020): images of one size,
learned positions, attention over the whole image. CLIP also has a class token and a norm before the first block, and no
bias of patches. The projection of their output to the language model's size differs from model to model.

Legend: I = images, P = patches of an image, C = values of a patch, V = the tower's hidden size, L = P, or P + 1 with a
class token, N = tokens of an image, D = the language model's hidden size.
"""

from abc import abstractmethod
from collections.abc import Sequence
from types import MappingProxyType

import torch
from torch import nn
from torch.nn.functional import gelu

from octavo.config.model import VisionConfig
from octavo.distributed.groups import Share
from octavo.layers.context import BuildContext
from octavo.layers.linear import Linear, MergedLinear
from octavo.layers.norm import LayerNorm
from octavo.layers.weight_owner import PlainWeight
from octavo.models.common import OF_VISION_MODELS
from octavo.models.vision import (
    Grid,
    PatchEmbedding,
    PatchLayout,
    PlainMLP,
    VisionAttention,
    VisionBlock,
    VisionLanguageModel,
    VisionStep,
    VisionTower,
    names_under,
)

_NAME = "vision_tower"  # in checkpoints
_BLOCK_NAMES = MappingProxyType(
    {
        "layer_norm1": "attention_norm",
        "self_attn.q_proj": "attention.qkv:q",
        "self_attn.k_proj": "attention.qkv:k",
        "self_attn.v_proj": "attention.qkv:v",
        "self_attn.out_proj": "attention.out",
        "layer_norm2": "mlp_norm",
        "mlp.fc1": "mlp.up",
        "mlp.fc2": "mlp.down",
    }
)


class VisionTransformer(VisionTower):
    """A tower without its projection, which subclasses define: `project`."""

    def __init__(self, config: VisionConfig, context: BuildContext) -> None:
        super().__init__(config, context)
        assert config.position_grid is not None, "these towers have learned positions"
        context, size, is_clip = self.context, config.hidden_size, _is_clip(config)
        self.patch_embedding = PatchEmbedding(config, has_bias=not is_clip, context=context.at("patch_embedding"))
        self.positions = PlainWeight(config.position_grid**2 + is_clip, size, context=context)  # [L, V]
        if is_clip:
            self.class_token = PlainWeight(size, context=context, name="class_embedding")
            self.first_norm = self.build_norm()
        self.blocks = nn.ModuleList()
        for number in range(_num_blocks(config)):
            at = self.context.at(f"blocks.{number}")
            attention = VisionAttention(config, at.at("attention"), in_windows=False)
            norms = [self.build_norm(), self.build_norm()]
            self.blocks.append(VisionBlock(norms, attention, PlainMLP(config, at.at("mlp"))))

    @classmethod
    def weight_names(cls, config: VisionConfig) -> dict[str, str]:
        embeddings = f"{_NAME}.embeddings"
        names = {f"{embeddings}.patch_embedding": "patch_embedding", f"{embeddings}.position_embedding": "positions"}
        if _is_clip(config):
            names |= {embeddings: "class_token", f"{_NAME}.pre_layrnorm": "first_norm"}
        for number in range(_num_blocks(config)):
            names |= names_under(f"{_NAME}.encoder.layers.{number}", f"blocks.{number}", _BLOCK_NAMES)
        return names

    @classmethod
    def ignored_weights(cls, config: VisionConfig) -> tuple[str, ...]:
        """Pooling layers, and blocks after the last one that is read."""
        behind = range(_num_blocks(config), config.num_layers)
        blocks = [f"{_NAME}.encoder.layers.{number}." for number in behind]
        return (f"{_NAME}.head.", f"{_NAME}.post_layernorm.", f"{_NAME}.embeddings.position_ids", *blocks)

    def build_norm(self) -> LayerNorm:
        return LayerNorm(self.config.hidden_size, self.config.norm_eps, context=self.context)

    def forward(self, patches: torch.Tensor, grids: Sequence[Grid]) -> list[torch.Tensor]:
        x = self._embed(patches, len(grids))  # [I, L, V]
        lengths, shape = [x.shape[1]] * len(grids), x.shape
        images, x = self.context.attention.of_segments(lengths, None), x.flatten(0, 1)
        step = VisionStep(frames=images, windows=images)
        wanted, found = self.config.feature_depths or (len(self.blocks),), {0: x}
        for depth, block in enumerate(self.blocks, start=1):
            x = block(x, step)
            if depth in wanted:
                found[depth] = x
        return list(self.project([found[depth].view(shape) for depth in wanted]).unbind())

    @abstractmethod
    def project(self, features: Sequence[torch.Tensor]) -> torch.Tensor:
        """Map features [I, L, V], read after each of `VisionConfig.feature_depths`, to embeddings [I, N, D]."""

    def _embed(self, patches: torch.Tensor, num_images: int) -> torch.Tensor:
        """Return [I, L, V] of patches [I * P, C] of whole images: patches, class tokens, positions."""
        config = self.config
        assert config.position_grid is not None
        layout = PatchLayout.of((1, config.position_grid, config.position_grid), config)
        places = (layout.rows * config.position_grid + layout.columns).to(patches.device)  # [P]
        x: torch.Tensor = self.patch_embedding(patches).view(num_images, len(places), -1)
        if not _is_clip(config):
            return x + self.positions.weight[places]
        x = x + self.positions.weight[places + 1]
        first = self.class_token.weight + self.positions.weight[0]  # [V]
        normed: torch.Tensor = self.first_norm(torch.cat([first.expand(num_images, 1, -1), x], dim=1))
        return normed


def _is_clip(config: VisionConfig) -> bool:
    return config.class_token != "none"


def _num_blocks(config: VisionConfig) -> int:
    """Return the number of blocks that the output depends on."""
    return max(config.feature_depths, default=config.num_layers)


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
        projector = {"multi_modal_projector.linear_1": "up", "multi_modal_projector.linear_2": "down"}
        return super().weight_names(config) | projector

    def project(self, features: Sequence[torch.Tensor]) -> torch.Tensor:
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
