"""SigLIP (Zhai et al. 2023, arXiv:2303.15343) and CLIP (Radford et al. 2021, arXiv:2103.00020) as vision towers.

Plain vision transformers: images of one size, learned positions, attention over the whole image. CLIP also has a class
token and a norm before the first block, and no bias of patches. The projection of their output to the language model's
size differs from model to model.

Legend: I = images, P = patches of an image, C = values of a patch, V = the tower's hidden size, S = patches of a side,
L = P, or P + 1 with a class token, N = tokens of an image, D = the language model's hidden size.
"""

from abc import abstractmethod
from collections.abc import Sequence
from types import MappingProxyType

import torch
from torch import nn

from octavo.config.vision import VisionConfig
from octavo.layers.context import BuildContext
from octavo.layers.layer_norm import LayerNorm
from octavo.layers.plain_weight import PlainWeight
from octavo.models.vision_blocks import PatchEmbedding, PlainMLP, VisionAttention, VisionBlock, VisionStep
from octavo.models.vision_grid import Grid, PatchLayout
from octavo.models.vision_tower import VisionTower, names_under

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
        self.blocks = nn.ModuleList(self._build_block(number) for number in range(_num_blocks(config)))

    @classmethod
    def weight_names(cls, config: VisionConfig) -> dict[str, str]:
        """See `VisionTower.weight_names`."""
        embeddings = f"{_NAME}.embeddings"
        names = {
            f"{embeddings}.patch_embedding": "patch_embedding",
            f"{embeddings}.position_embedding": "positions",
        }
        if _is_clip(config):
            names |= {embeddings: "class_token", f"{_NAME}.pre_layrnorm": "first_norm"}
        for number in range(_num_blocks(config)):
            names |= names_under(f"{_NAME}.encoder.layers.{number}", f"blocks.{number}", _BLOCK_NAMES)
        return names

    @classmethod
    def ignored_weights(cls, config: VisionConfig) -> tuple[str, ...]:
        """See `VisionTower.ignored_weights`: pooling layers, and blocks after the last one that is read."""
        behind = range(_num_blocks(config), config.num_layers)
        blocks = [f"{_NAME}.encoder.layers.{number}." for number in behind]
        return (f"{_NAME}.head.", f"{_NAME}.post_layernorm.", f"{_NAME}.embeddings.position_ids", *blocks)

    def build_norm(self) -> LayerNorm:
        """Build a norm over the tower's hidden size."""
        return LayerNorm(self.config.hidden_size, self.config.norm_eps, context=self.context)

    def _build_block(self, number: int) -> VisionBlock:
        config, context = self.config, self.context.at(f"blocks.{number}")
        attention = VisionAttention(config, context.at("attention"), in_windows=False)
        mlp = PlainMLP(config, context.at("mlp"))
        return VisionBlock([self.build_norm(), self.build_norm()], attention, mlp)

    def forward(self, patches: torch.Tensor, grids: Sequence[Grid]) -> list[torch.Tensor]:
        """See `VisionTower.forward`."""
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
