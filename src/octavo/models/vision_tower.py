"""The vision tower: a vision transformer over patches (Dosovitskiy et al. 2020, arXiv:2010.11929) and a merger.

Images of a step are computed together where an op is batch-invariant (linears, norms) and one by one elsewhere
(attention, exact GELU), so that an image's embeddings have the same bits in any company.

Legend: P = patches of all images, C = values of a patch, V = the tower's hidden size, U = patches of a token, N =
tokens of an image, D = the language model's hidden size, H = heads of this rank, E = head size.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from octavo.config.model import RopeConfig
from octavo.config.vision import VisionActivation, VisionConfig
from octavo.distributed.shares import Share
from octavo.layers.context import BuildContext
from octavo.layers.layer_norm import LayerNorm
from octavo.layers.linear import Linear, MergedLinear, QKVLinear
from octavo.layers.quant.base import MadeAtLoad, TensorSpec
from octavo.layers.rotary import RotaryEmbedding
from octavo.models.vision_grid import Grid, PatchLayout

VISION_EPS = 1e-6  # of all norms, in every family
_MAX_SIDE = 1 << 14  # patches; the processor's limits are far below
_QUICK, _CUBIC = 1.702, 0.044715  # GELU by a sigmoid, and by tanh (Hendrycks and Gimpel 2016, arXiv:1606.08415)


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionStep:
    """What all layers share: the images' patches, one image after the other."""

    cos: torch.Tensor  # [P, E / 2] float32
    sin: torch.Tensor  # [P, E / 2] float32
    frames: list[int]  # lengths of the segments that attend to themselves: they add up to P
    windows: list[int]


class PatchEmbedding(MergedLinear):
    """A convolution whose stride is its kernel: a linear of flattened patches."""

    def __init__(self, config: VisionConfig, *, has_bias: bool, context: BuildContext) -> None:
        outputs = {"": Share.whole(config.hidden_size)}
        super().__init__(Share.whole(config.patch_values), outputs, has_bias=has_bias, context=context)
        self._kernel = (config.in_channels, config.temporal_patch_size, config.patch_size, config.patch_size)

    def checkpoint_tensors(self) -> dict[str, TensorSpec]:
        [outputs] = self.parts.values()
        return super().checkpoint_tensors() | {"weight": TensorSpec((outputs.total, *self._kernel))}

    def load_weight(self, name: str, tensor: torch.Tensor) -> None:
        super().load_weight(name, tensor.flatten(1) if name == "weight" else tensor)


class VisionAttention(nn.Module):
    """Attention in both directions within each segment."""

    def __init__(self, config: VisionConfig, context: BuildContext, *, in_windows: bool) -> None:
        super().__init__()
        size, heads = config.hidden_size, config.num_heads
        self.head_dim, self._in_windows = size // heads, in_windows
        self.qkv = QKVLinear(size, heads, heads, self.head_dim, has_bias=True, context=context.at("qkv"))
        self.out = Linear(self.qkv.parts["q"], size, has_bias=True, context=context.at("out"))

    def forward(self, x: torch.Tensor, step: VisionStep) -> torch.Tensor:
        """Attend: x [P, V] to [P, V]."""
        query, key, value = self.qkv(x).view(len(x), 3, -1, self.head_dim).unbind(1)  # [P, H, E] each
        query, key = _rotated(query, step), _rotated(key, step)
        segments = step.windows if self._in_windows else step.frames
        attended = torch.cat([*_attend(query, key, value, segments)])
        out: torch.Tensor = self.out(attended.reshape(len(x), -1))
        return out


class PlainMLP(nn.Module):
    """down(activation(up(x)))."""

    def __init__(self, config: VisionConfig, context: BuildContext) -> None:
        super().__init__()
        group = context.groups.tensor
        inner = Share.of_features(config.intermediate_size, group.rank, group.size)
        self._activation = config.activation
        whole = Share.whole(config.hidden_size)
        self.up = MergedLinear(whole, {"": inner}, has_bias=True, context=context.at("up"))
        self.down = Linear(inner, config.hidden_size, has_bias=True, context=context.at("down"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply to x [P, V]."""
        down: torch.Tensor = self.down(_activated(self.up(x), self._activation))
        return down


class VisionBlock(nn.Module):
    """Pre-norm attention and MLP around one residual stream."""

    def __init__(self, norms: Iterable[nn.Module], attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = norms
        self.attention, self.mlp = attention, mlp

    def forward(self, x: torch.Tensor, step: VisionStep) -> torch.Tensor:
        """Apply to x [P, V]."""
        x = x + self.attention(self.attention_norm(x), step)
        mlp: torch.Tensor = self.mlp(self.mlp_norm(x))
        return x + mlp


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


class VisionTower(nn.Module):
    """The tower of Qwen2-VL (Wang et al. 2024, arXiv:2409.12191). Later families override the parts that differ."""

    patch_embedding_has_bias: ClassVar[bool] = False
    # Names in the checkpoint and places in the tower, as in `CausalLM.weight_names`: of a block, and of a merger.
    block_names: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "norm1": "attention_norm",
            "attn.qkv.q": "attention.qkv:q",
            "attn.qkv.k": "attention.qkv:k",
            "attn.qkv.v": "attention.qkv:v",
            "attn.proj": "attention.out",
            "norm2": "mlp_norm",
            "mlp.fc1": "mlp.up",
            "mlp.fc2": "mlp.down",
        }
    )
    merger_names: ClassVar[Mapping[str, str]] = MappingProxyType({"ln_q": "norm", "mlp.0": "up", "mlp.2": "down"})

    @classmethod
    def weight_names(cls, config: VisionConfig) -> dict[str, str]:
        """Return the names of all weights in the checkpoint, and their places in the tower."""
        names = {"patch_embed.proj": "patch_embedding"}
        for block in range(config.num_layers):
            names |= _under(f"blocks.{block}", f"blocks.{block}", cls.block_names)
        return names | _under("merger", "merger", cls.merger_names)

    def __init__(self, config: VisionConfig, context: BuildContext) -> None:
        """Build without weights. They stay dense: quantized checkpoints leave towers as they are, too."""
        super().__init__()
        self.config = config
        self.context = replace(context, schemes=MadeAtLoad()).at("vision")
        rope = RopeConfig(theta=config.rope_theta)
        rotated_by_axis = config.hidden_size // config.num_heads // 2
        self.rotary = RotaryEmbedding(rope, rotated_by_axis, _MAX_SIDE, device=context.device)
        self.patch_embedding = PatchEmbedding(
            config, has_bias=self.patch_embedding_has_bias, context=self.context.at("patch_embedding")
        )
        self.blocks = nn.ModuleList(self.build_block(number) for number in range(config.num_layers))
        self.merger = self.build_merger("merger")

    def build_norm(self, size: int) -> nn.Module:
        """Build a norm over `size` elements."""
        return LayerNorm(size, VISION_EPS, context=self.context)

    def build_mlp(self, context: BuildContext) -> nn.Module:
        """Build a block's MLP."""
        return PlainMLP(self.config, context)

    def build_block(self, number: int) -> VisionBlock:
        """Build block `number`."""
        config, context = self.config, self.context.at(f"blocks.{number}")
        in_windows = config.window_size is not None and number not in config.full_layers
        attention = VisionAttention(config, context.at("attention"), in_windows=in_windows)
        norms = [self.build_norm(config.hidden_size) for _ in range(2)]
        return VisionBlock(norms, attention, self.build_mlp(context.at("mlp")))

    def build_merger(self, name: str, *, norms_merged: bool = False) -> PatchMerger:
        """Build a merger; its norm is over single or over merged patches."""
        size = self.config.hidden_size * (self.config.merge_unit if norms_merged else 1)
        return PatchMerger(self.config, self.build_norm(size), self.context.at(name), norms_merged=norms_merged)

    def forward(self, patches: torch.Tensor, grids: Sequence[Grid]) -> list[torch.Tensor]:
        """Return each image's embeddings [N, D * outputs], outputs being `VisionConfig.num_outputs`.

        `patches` [P, C] are those of all images in the order of the processor.
        """
        layouts = [PatchLayout.of(grid, self.config) for grid in grids]
        num_tokens = [len(layout.rows) // self.config.merge_unit for layout in layouts]
        x = self.embed(patches, layouts, grids)
        outputs = [self.in_order(output, layouts) for output in self.run_blocks(x, self.step_of(layouts), num_tokens)]
        return list(torch.split(torch.cat(outputs, dim=-1), num_tokens))

    def embed(self, patches: torch.Tensor, layouts: Sequence[PatchLayout], grids: Sequence[Grid]) -> torch.Tensor:
        """Return x [P, V], the patches in the order of the layouts."""
        x: torch.Tensor = self.patch_embedding(_reordered(patches, layouts, self.config.merge_unit))
        return x

    def step_of(self, layouts: Sequence[PatchLayout]) -> VisionStep:
        """Derive what all layers share. Half of the frequencies turn by the row, the others by the column."""
        axes = [
            torch.cat([getattr(of, axis) for of in layouts]).to(self.context.device) for axis in ("rows", "columns")
        ]
        tables = [self.rotary(positions) for positions in axes]  # cos and sin, [P, E / 4] each, by axis
        return VisionStep(
            cos=torch.cat([cos for cos, _ in tables], dim=-1),
            sin=torch.cat([sin for _, sin in tables], dim=-1),
            frames=[length for layout in layouts for length in layout.frames],
            windows=[length for layout in layouts for length in layout.windows],
        )

    def run_blocks(self, x: torch.Tensor, step: VisionStep, num_tokens: Sequence[int]) -> list[torch.Tensor]:
        """Return the outputs [P / U, D] for x [P, V]: that of the last block first."""
        for block in self.blocks:
            x = block(x, step)
        return [self.merger(x, num_tokens)]

    def in_order(self, merged: torch.Tensor, layouts: Sequence[PatchLayout]) -> torch.Tensor:
        """Return rows [P / U, D], computed in the order of the layouts, in that of the input."""
        if self.config.window_size is None:
            return merged
        parts = torch.split(merged, [len(layout.rows) // self.config.merge_unit for layout in layouts])
        inverse = (torch.argsort(_order(layout)).to(merged.device) for layout in layouts)
        return torch.cat([part[back] for part, back in zip(parts, inverse, strict=True)])


def _under(name: str, place: str, table: Mapping[str, str]) -> dict[str, str]:
    return {f"{name}.{inner}": f"{place}.{target}" for inner, target in table.items()}


def _order(layout: PatchLayout) -> torch.Tensor:
    assert layout.order is not None, "a tower with windows orders its patches"
    return layout.order


def _reordered(patches: torch.Tensor, layouts: Sequence[PatchLayout], unit: int) -> torch.Tensor:
    """Return `patches` [P, C] in the order of the layouts."""
    if all(layout.order is None for layout in layouts):
        return patches
    parts = torch.split(patches, [len(layout.rows) for layout in layouts])
    return torch.cat(
        [
            part.view(-1, unit, part.shape[-1])[_order(layout).to(part.device)].flatten(0, 1)
            for part, layout in zip(parts, layouts, strict=True)
        ]
    )


def _rotated(heads: torch.Tensor, step: VisionStep) -> torch.Tensor:
    """Rotate the halves of each head, [P, H, E], in float32."""
    first, second = heads.float().chunk(2, dim=-1)
    cos, sin = step.cos[:, None], step.sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(heads.dtype)


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: list[int]) -> Iterator[torch.Tensor]:
    """Yield the attention of each segment, or of neighbors of one length: [., H, E]."""
    start = 0
    for length, run in groupby(lengths):
        count = sum(1 for _ in run)
        end = start + count * length
        q, k, v = (of[start:end].view(count, length, *of.shape[1:]).transpose(1, 2) for of in (query, key, value))
        yield scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(0, 1)
        start = end


def _activated(x: torch.Tensor, activation: VisionActivation) -> torch.Tensor:
    """Apply to x. With exp alone, whose bits do not depend on an element's place: see `kernels/activation.py`.

    In place: fresh memory costs more than the arithmetic.
    """
    wide = x.float()
    if activation == "quick_gelu":
        powers = wide * -_QUICK
    else:
        powers = (wide * wide).mul_(_CUBIC).add_(1.0).mul_(wide).mul_(-2.0 * (2.0 / torch.pi) ** 0.5)
    activated: torch.Tensor = wide / powers.exp_().add_(1.0)
    return activated.to(x.dtype)
