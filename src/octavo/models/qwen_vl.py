"""Qwen2-VL (Wang et al. 2024, arXiv:2409.12191), Qwen2.5-VL (arXiv:2502.13923) and Qwen3-VL, dense (arXiv:2511.21631).

Qwen2-VL is Qwen2 with rotary positions of three axes, and a vision tower with rotary positions of two. Qwen2.5-VL's
tower has windows, RMS norms and a gated MLP. Qwen3-VL's has learned positions besides, and what some of its blocks see
is added to the residual stream after the first decoder layers (DeepStack, Meng et al. 2024, arXiv:2406.04334).

Legend: P = patches of all images, C = values of a patch, V = the tower's hidden size, U = patches of a token, N =
tokens of an image, D = the language model's hidden size, E = head size of the tower, S = side of the square of learned
positions.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import nn
from torch.nn.functional import gelu

from octavo.attention.metadata import AttentionMetadata, LayerKVCache
from octavo.config.layers import RopeConfig
from octavo.config.model import VisionConfig
from octavo.distributed.groups import Share
from octavo.kernels.reference import Kernels
from octavo.layers.context import BuildContext
from octavo.layers.linear import Linear, MergedLinear
from octavo.layers.norm import LayerNorm, RMSNorm
from octavo.layers.rotary import RotaryEmbedding
from octavo.layers.weight_owner import PlainWeight
from octavo.models.common import OF_VISION_MODELS, DecoderLayer, GatedMLP
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

_MAX_SIDE = 1 << 14  # patches; the processor's limits are far below
_BLOCK_NAMES = MappingProxyType(  # in the checkpoint, and places in the block; MLPs differ
    {
        "norm1": "attention_norm",
        "attn.qkv.q": "attention.qkv:q",
        "attn.qkv.k": "attention.qkv:k",
        "attn.qkv.v": "attention.qkv:v",
        "attn.proj": "attention.out",
        "norm2": "mlp_norm",
    }
)


class PatchMerger(nn.Module):
    """Concatenates the U patches of each token and maps them to the language model's size."""

    def __init__(self, config: VisionConfig, norm: nn.Module, context: BuildContext, *, norms_merged: bool) -> None:
        super().__init__()
        self.norm, self._norms_merged = norm, norms_merged
        size, group = config.hidden_size * config.merge_unit, context.groups.tensor
        inner = Share.of_features(size, group.rank, group.size)
        self._size = size
        self.up = MergedLinear(Share.whole(size), {"": inner}, has_bias=True, context=context.at("up"))
        self.down = Linear(inner, config.out_hidden_size, has_bias=True, context=context.at("down"))

    def forward(self, x: torch.Tensor, num_tokens: Sequence[int]) -> torch.Tensor:
        """Map x [P, V] to [P / U, D]; `num_tokens` are those of each image."""
        merged = self.norm(x.view(-1, self._size)) if self._norms_merged else self.norm(x).view(-1, self._size)
        inner = self.up(merged)
        # torch's erf computes the tail of a range with other instructions: each image is a range of its own.
        parts = [gelu(of_image) for of_image in torch.split(inner, list(num_tokens))]
        down: torch.Tensor = self.down(torch.cat(parts))
        return down


class Qwen2VisionTower(VisionTower):
    """The tower of Qwen2-VL. Later families override the parts that differ."""

    block: ClassVar[type[VisionBlock]] = VisionBlock
    patch_embedding_has_bias: ClassVar[bool] = False
    # Names in the checkpoint and places in the tower, as in `CausalLM.weight_names`: of an MLP, and of a merger.
    mlp_names: ClassVar[Mapping[str, str]] = MappingProxyType({"mlp.fc1": "mlp.up", "mlp.fc2": "mlp.down"})
    merger_names: ClassVar[Mapping[str, str]] = MappingProxyType({"ln_q": "norm", "mlp.0": "up", "mlp.2": "down"})

    @classmethod
    def weight_names(cls, config: VisionConfig) -> dict[str, str]:
        names = {"visual.patch_embed.proj": "patch_embedding"}
        for block in range(config.num_layers):
            names |= names_under(f"visual.blocks.{block}", f"blocks.{block}", {**_BLOCK_NAMES, **cls.mlp_names})
        return names | names_under("visual.merger", "merger", cls.merger_names)

    def __init__(self, config: VisionConfig, context: BuildContext) -> None:
        super().__init__(config, context)
        rope = RopeConfig(theta=config.rope_theta)
        rotated_by_axis = config.hidden_size // config.num_heads // 2
        self.rotary = RotaryEmbedding(rope, rotated_by_axis, _MAX_SIDE, device=context.device)
        self.patch_embedding = PatchEmbedding(
            config, has_bias=self.patch_embedding_has_bias, context=self.context.at("patch_embedding")
        )
        self.blocks = nn.ModuleList(self.build_block(number) for number in range(config.num_layers))
        self.merger = self.build_merger("merger")

    def build_norm(self, size: int) -> nn.Module:
        return LayerNorm(size, self.config.norm_eps, context=self.context)

    def build_mlp(self, context: BuildContext) -> nn.Module:
        return PlainMLP(self.config, context)

    def build_block(self, number: int) -> VisionBlock:
        config, context = self.config, self.context.at(f"blocks.{number}")
        in_windows = config.window_size is not None and number not in config.full_layers
        attention = VisionAttention(config, context.at("attention"), in_windows=in_windows)
        norms = [self.build_norm(config.hidden_size) for _ in range(2)]
        return self.block(norms, attention, self.build_mlp(context.at("mlp")))

    def build_merger(self, name: str, *, norms_merged: bool = False) -> PatchMerger:
        """Build a merger; its norm is over single or over merged patches."""
        size = self.config.hidden_size * (self.config.merge_unit if norms_merged else 1)
        return PatchMerger(self.config, self.build_norm(size), self.context.at(name), norms_merged=norms_merged)

    def forward(self, patches: torch.Tensor, grids: Sequence[Grid]) -> list[torch.Tensor]:
        layouts = [PatchLayout.of(grid, self.config) for grid in grids]
        num_tokens = [len(layout.rows) // self.config.merge_unit for layout in layouts]
        x = self.embed(patches, layouts, grids)
        outputs = self.run_blocks(x, self.step_of(layouts), num_tokens)  # in the order of the layouts
        parts = torch.split(torch.cat(outputs, dim=-1), num_tokens)
        return [layout.arranged(part, back=True) for layout, part in zip(layouts, parts, strict=True)]

    def embed(self, patches: torch.Tensor, layouts: Sequence[PatchLayout], grids: Sequence[Grid]) -> torch.Tensor:
        """Return x [P, V], the patches in the order of the layouts."""
        if self.config.window_size is not None:
            parts = torch.split(patches, [len(layout.rows) for layout in layouts])
            squares = (part.view(-1, self.config.merge_unit, part.shape[-1]) for part in parts)
            arranged = (layout.arranged(part) for layout, part in zip(layouts, squares, strict=True))
            patches = torch.cat([part.flatten(0, 1) for part in arranged])
        x: torch.Tensor = self.patch_embedding(patches)
        return x

    def step_of(self, layouts: Sequence[PatchLayout]) -> VisionStep:
        """Derive what all layers share. Half of the frequencies turn by the row, the others by the column."""
        axes = torch.cat([each.rows for each in layouts]), torch.cat([each.columns for each in layouts])
        tables = [self.rotary(positions.to(self.context.device)) for positions in axes]  # cos and sin, [P, E / 4] each
        rotary = torch.cat([cos for cos, _ in tables], dim=-1), torch.cat([sin for _, sin in tables], dim=-1)
        attention = self.context.attention
        frames = attention.of_segments([length for layout in layouts for length in layout.frames], rotary)
        if self.config.window_size is None:
            return VisionStep(frames=frames, windows=frames)
        windows = attention.of_segments([length for layout in layouts for length in layout.windows], rotary)
        return VisionStep(frames=frames, windows=windows)

    def run_blocks(self, x: torch.Tensor, step: VisionStep, num_tokens: Sequence[int]) -> list[torch.Tensor]:
        """Return the outputs [P / U, D] for x [P, V]: that of the last block first."""
        for block in self.blocks:
            x = block(x, step)
        return [self.merger(x, num_tokens)]


class Qwen2VLForConditionalGeneration(VisionLanguageModel):
    """The decoder is Qwen2's, which is the family's own with biases."""

    tower = Qwen2VisionTower
    renamed_prefixes = MappingProxyType({**OF_VISION_MODELS, "model.visual.": "visual."})


class FusedVisionBlock(VisionBlock):
    """A block whose norms and inner sum are part of the linears after them."""

    def forward(self, x: torch.Tensor, step: VisionStep) -> torch.Tensor:
        """Apply to x [P, V], P being patches and V the tower's hidden size."""
        norm = self.attention_norm
        assert isinstance(norm, RMSNorm), "this family's are"
        qkv, x = self.attention.qkv.of_normed(norm, x, None)
        mlp: torch.Tensor
        mlp, x = self.mlp(self.mlp_norm, self.attention.attended(qkv, step), x, None)
        return x + mlp


class Qwen25VisionTower(Qwen2VisionTower):
    """Windows are a setting: `VisionConfig.window_size`."""

    block = FusedVisionBlock

    mlp_names = MappingProxyType(
        {"mlp.gate_proj": "mlp.gate_up:gate", "mlp.up_proj": "mlp.gate_up:up", "mlp.down_proj": "mlp.down"}
    )

    def build_norm(self, size: int) -> nn.Module:
        return RMSNorm(size, self.config.norm_eps, context=self.context)

    def build_mlp(self, context: BuildContext) -> nn.Module:
        return GatedMLP(self.config.hidden_size, self.config.intermediate_size, has_bias=True, context=context)


class Qwen2_5_VLForConditionalGeneration(Qwen2VLForConditionalGeneration):  # noqa: N801 - the name in `config.json`
    """The decoder is Qwen2-VL's."""

    tower = Qwen25VisionTower


class LearnedPositions(PlainWeight):
    """A square of position embeddings, interpolated to the grid of an image with both corners aligned."""

    def __init__(self, side: int, size: int, *, context: BuildContext) -> None:
        super().__init__(side * side, size, context=context)  # [S * S, V]
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


class Qwen3VisionTower(Qwen2VisionTower):
    """Its outputs are that of the last block, and those of `VisionConfig.deepstack_layers`."""

    patch_embedding_has_bias = True
    mlp_names = MappingProxyType({"mlp.linear_fc1": "mlp.up", "mlp.linear_fc2": "mlp.down"})
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
        names = super().weight_names(config) | {"visual.pos_embed": "positions"}
        for index in range(len(config.deepstack_layers)):
            names |= names_under(f"visual.deepstack_merger_list.{index}", f"deepstack.{index}", cls.merger_names)
        return names

    def embed(self, patches: torch.Tensor, layouts: Sequence[PatchLayout], grids: Sequence[Grid]) -> torch.Tensor:
        """Return x [P, V], the patches with their learned positions."""
        positions = [self.positions(layout, grid) for layout, grid in zip(layouts, grids, strict=True)]
        x = super().embed(patches, layouts, grids)
        return x + torch.cat(positions).to(x.dtype)

    def run_blocks(self, x: torch.Tensor, step: VisionStep, num_tokens: Sequence[int]) -> list[torch.Tensor]:
        stacked, mergers = [], dict(zip(self.config.deepstack_layers, self.deepstack, strict=True))
        for number, block in enumerate(self.blocks):
            x = block(x, step)
            if number in mergers:
                stacked.append(mergers[number](x, num_tokens))
        return [self.merger(x, num_tokens), *stacked]


class DeepstackLayer(DecoderLayer):
    """A decoder layer that adds what the vision tower has for it to its output."""

    def __init__(self, number: int, parts: DecoderLayer, kernels: Kernels) -> None:
        super().__init__(parts.attention_norm, parts.attention, parts.mlp_norm, parts.mlp, kernels=kernels)
        self._number = number

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, kv_cache: LayerKVCache, step: AttentionMetadata
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x, total = super().forward(x, residual, kv_cache, step)
        embeds = step.batch.inputs_embeds
        return (x if embeds is None else embeds.add_after(self._number, x)), total


class Qwen3VLForConditionalGeneration(VisionLanguageModel):
    """The decoder is Qwen3's."""

    tower = Qwen3VisionTower
    renamed_prefixes = Qwen2VLForConditionalGeneration.renamed_prefixes

    def build_layer(self, layer: int) -> nn.Module:
        """Build block number `layer`; the first ones also read what the tower has for them."""
        assert self.config.vision is not None
        built = super().build_layer(layer)
        assert isinstance(built, DecoderLayer)
        return (
            DeepstackLayer(layer, built, self.context.kernels)
            if layer < len(self.config.vision.deepstack_layers)
            else built
        )
