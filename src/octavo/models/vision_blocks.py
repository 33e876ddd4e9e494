"""Building blocks of vision transformers over patches (Dosovitskiy et al. 2020, arXiv:2010.11929).

Legend: P = patches of all images, and class tokens if there are any; V = the tower's hidden size, H = heads of this
rank, E = head size.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from octavo.attention.encoder import EncoderHeads, EncoderSegments
from octavo.config.vision import VisionConfig
from octavo.distributed.shares import Share
from octavo.layers.context import BuildContext
from octavo.layers.linear import Linear, MergedLinear, QKVLinear
from octavo.layers.quant.base import TensorSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionStep:
    """What all layers share: the segments of patches that attend to themselves, one image after the other."""

    frames: EncoderSegments
    windows: EncoderSegments


class PatchEmbedding(MergedLinear):
    """A convolution whose stride is its kernel: a linear of flattened patches."""

    def __init__(self, config: VisionConfig, *, has_bias: bool, context: BuildContext) -> None:
        outputs = {"": Share.whole(config.hidden_size)}
        super().__init__(Share.whole(config.patch_values), outputs, has_bias=has_bias, context=context)
        times = (config.temporal_patch_size,) if config.temporal_patch_size > 1 else ()  # of a 3D convolution
        self._kernel = (config.in_channels, *times, config.patch_size, config.patch_size)

    def checkpoint_tensors(self) -> dict[str, TensorSpec]:
        [outputs] = self.parts.values()
        return super().checkpoint_tensors() | {"weight": TensorSpec((outputs.total, *self._kernel))}

    def load_weight(self, name: str, tensor: torch.Tensor) -> None:
        super().load_weight(name, tensor.flatten(1) if name == "weight" else tensor)

    def shard_of(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return super().shard_of({**tensors, "weight": tensors["weight"].flatten(1)})


class VisionAttention(nn.Module):
    """Bidirectional attention within each segment."""

    def __init__(self, config: VisionConfig, context: BuildContext, *, in_windows: bool) -> None:
        super().__init__()
        size, heads = config.hidden_size, config.num_heads
        self._in_windows = in_windows
        self.qkv = QKVLinear(size, heads, heads, size // heads, has_bias=True, context=context.at("qkv"))
        self.out = Linear(self.qkv.parts["q"], size, has_bias=True, context=context.at("out"))
        self._heads = EncoderHeads(count=self.qkv.heads.query.size, size=size // heads)

    def forward(self, x: torch.Tensor, step: VisionStep) -> torch.Tensor:
        """Attend: x [P, V] to [P, V]."""
        return self.attended(self.qkv(x), step)

    def attended(self, qkv: torch.Tensor, step: VisionStep) -> torch.Tensor:
        """Attend, given the projection [P, 3 * H * E]: [P, V]."""
        segments = step.windows if self._in_windows else step.frames
        out: torch.Tensor = self.out(segments.attend(qkv, self._heads))
        return out


class PlainMLP(nn.Module):
    """down(activation(up(x)))."""

    def __init__(self, config: VisionConfig, context: BuildContext) -> None:
        super().__init__()
        group = context.groups.tensor
        inner = Share.of_features(config.intermediate_size, group.rank, group.size)
        assert config.activation != "silu", "that is gated"
        self._kernels, self._gelu = context.kernels, config.activation
        whole = Share.whole(config.hidden_size)
        self.up = MergedLinear(whole, {"": inner}, has_bias=True, context=context.at("up"))
        self.down = Linear(inner, config.hidden_size, has_bias=True, context=context.at("down"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply to x [P, V]."""
        down: torch.Tensor = self.down(self._kernels.gelu(self.up(x), self._gelu))
        return down


class VisionBlock(nn.Module):
    """Pre-norm attention and MLP around one residual stream."""

    def __init__(self, norms: Iterable[nn.Module], attention: VisionAttention, mlp: nn.Module) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = norms
        self.attention, self.mlp = attention, mlp

    def forward(self, x: torch.Tensor, step: VisionStep) -> torch.Tensor:
        """Apply to x [P, V]."""
        x = x + self.attention(self.attention_norm(x), step)
        mlp: torch.Tensor = self.mlp(self.mlp_norm(x))
        return x + mlp
