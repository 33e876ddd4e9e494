"""Qwen3-VL, dense (Qwen Team 2025, arXiv:2511.21631): Qwen3 with three axes of rotary positions that take turns.

Its tower has learned positions besides rotary ones, and what some of its blocks see is added to the residual stream
after the first decoder layers (DeepStack, Meng et al. 2024, arXiv:2406.04334).

Legend: P = patches of all images, V = the tower's hidden size, S = side of the square of learned positions.
"""

from collections.abc import Sequence
from types import MappingProxyType

import torch
from torch import nn

from octavo.attention.metadata import AttentionMetadata, LayerKVCache
from octavo.config.vision import VisionConfig
from octavo.layers.context import BuildContext
from octavo.layers.kept_weight import KeptWeight
from octavo.models.common import DecoderLayer
from octavo.models.qwen3 import Qwen3ForCausalLM
from octavo.models.vision_grid import Grid, PatchLayout
from octavo.models.vision_language import VisionLanguageModel
from octavo.models.vision_tower import VisionStep, VisionTower


class LearnedPositions(KeptWeight):
    """A square of position embeddings, interpolated to the grid of an image with both corners aligned."""

    def __init__(self, side: int, size: int, *, context: BuildContext) -> None:
        super().__init__(side * side, size, context=context)  # weight [S * S, V]
        self._side = side

    def forward(self, layout: PatchLayout, grid: Grid) -> torch.Tensor:
        """Return the embeddings [P, V] of one image's patches."""
        (top, bottom, down), (left, right, across) = (
            self._neighbors(positions, length)
            for positions, length in ((layout.rows, grid[1]), (layout.columns, grid[2]))
        )
        corners = (
            (top, left, (1 - down) * (1 - across)),
            (top, right, (1 - down) * across),
            (bottom, left, down * (1 - across)),
            (bottom, right, down * across),
        )
        device = self.weight.device
        parts = [
            self.weight[(row * self._side + column).to(device)] * share[:, None].to(device)
            for row, column, share in corners
        ]
        return torch.stack(parts, dim=1).sum(1)

    def _neighbors(self, positions: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the learned positions on both sides of `positions` [P] of `length`, and the share of the second."""
        at = positions.float() * (self._side - 1) / max(length - 1, 1)
        first = at.floor().long()
        return first, (first + 1).clamp(max=self._side - 1), at - first


class Qwen3VisionTower(VisionTower):
    """Its outputs are that of the last block, and those of `VisionConfig.deepstack_layers`."""

    patch_embedding_has_bias = True
    block_names = MappingProxyType(
        {
            **{name: place for name, place in VisionTower.block_names.items() if not name.startswith("mlp")},
            "mlp.linear_fc1": "mlp.up",
            "mlp.linear_fc2": "mlp.down",
        }
    )
    merger_names = MappingProxyType({"norm": "norm", "linear_fc1": "up", "linear_fc2": "down"})

    def __init__(self, config: VisionConfig, context: BuildContext) -> None:
        super().__init__(config, context)
        assert config.position_grid is not None, "this family has learned positions"
        self.positions = LearnedPositions(config.position_grid, config.hidden_size, context=self.context)
        self.deepstack = nn.ModuleList(
            self.build_merger(f"deepstack.{index}", norms_merged=True) for index in range(len(config.deepstack_layers))
        )

    @classmethod
    def weight_names(cls, config: VisionConfig) -> dict[str, str]:
        """See `VisionTower.weight_names`."""
        names = super().weight_names(config) | {"pos_embed": "positions"}
        for index in range(len(config.deepstack_layers)):
            for name, place in cls.merger_names.items():
                names[f"deepstack_merger_list.{index}.{name}"] = f"deepstack.{index}.{place}"
        return names

    def embed(self, patches: torch.Tensor, layouts: Sequence[PatchLayout], grids: Sequence[Grid]) -> torch.Tensor:
        """Return x [P, V], the patches with their learned positions."""
        positions = [self.positions(layout, grid) for layout, grid in zip(layouts, grids, strict=True)]
        x = super().embed(patches, layouts, grids)
        return x + torch.cat(positions).to(x.dtype)

    def run_blocks(self, x: torch.Tensor, step: VisionStep, num_tokens: Sequence[int]) -> list[torch.Tensor]:
        """See `VisionTower.run_blocks`."""
        stacked, mergers = [], dict(zip(self.config.deepstack_layers, self.deepstack, strict=True))
        for number, block in enumerate(self.blocks):
            x = block(x, step)
            if number in mergers:
                stacked.append(mergers[number](x, num_tokens))
        return [self.merger(x, num_tokens), *stacked]


class DeepstackLayer(DecoderLayer):
    """A decoder layer that adds what the vision tower has for it to its output."""

    def __init__(self, number: int, parts: DecoderLayer) -> None:
        super().__init__(parts.attention_norm, parts.attention, parts.mlp_norm, parts.mlp)
        self._number = number

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, kv_cache: LayerKVCache, step: AttentionMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DecoderLayer.forward`."""
        x, total = super().forward(x, residual, kv_cache, step)
        embeds = step.batch.inputs_embeds
        return (x if embeds is None else embeds.add_after(self._number, x)), total


class Qwen3VLForConditionalGeneration(VisionLanguageModel, Qwen3ForCausalLM):
    """The decoder is Qwen3's."""

    tower = Qwen3VisionTower

    def build_layer(self, layer: int) -> nn.Module:
        """Build block number `layer`; the first ones also read what the tower has for them."""
        assert self.config.vision is not None
        built = super().build_layer(layer)
        assert isinstance(built, DecoderLayer)
        return DeepstackLayer(layer, built) if layer < len(self.config.vision.deepstack_layers) else built
